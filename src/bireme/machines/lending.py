"""What a machine lends of itself: some of its devices, memory, a rate, hours of the day; and the unit of
systemd by which it lends them after every start.

The first three are variables of the environment, so that they hold for this process and all that it starts.
`cluster/machine.py` reads the memory, and `wire/listener.py` the rate.
"""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bireme.bounds import bytes_of, bytes_per_s_of, bytes_text
from bireme.cluster.machine import MEMORY_VARIABLE, available_bytes
from bireme.errors import BiremeError, tell
from bireme.machines.keys import HOME
from bireme.wire.listener import RATE_VARIABLE

NO_DEVICES = "none"
LEAST_MEMORY_BYTES = 1 << 30
"""With less, a machine takes no part."""
_KEPT = (
    HOME,
    MEMORY_VARIABLE,
    RATE_VARIABLE,
    "BIREME_ADDRESS",
    "BIREME_ENCRYPT",
    "BIREME_RUNS",
    "PYTHONPATH",
)
"""Variables that hold for the service if they are set here."""
_WAIT_S = 60
"""Between the end of a run, or a coordinator that does not answer, and the next call of the service."""
_DAY_MIN = 24 * 60
_HOURS = re.compile(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?")


@dataclass(frozen=True, slots=True)
class DailyHours:
    """Hours of every day in local time, from a minute after midnight to another, which may be on the next
    day.
    """

    begin_min: int
    end_min: int

    @classmethod
    def parse(cls, text: str) -> "DailyHours":
        """The hours in a text such as `20-8` or `20:30-8:00`."""
        found = _HOURS.fullmatch(text.strip())
        hours = [] if found is None else [(int(found[one]), int(found[one + 1] or 0)) for one in (1, 3)]
        if not hours or any(hour > 24 or minute > 59 or (hour == 24 and minute) for hour, minute in hours):
            raise BiremeError(f"--hours is {text!r}; write the hours of the day as 20-8 or 20:30-8:00.")
        begin_min, end_min = ((60 * hour + minute) % _DAY_MIN for hour, minute in hours)
        if begin_min == end_min:
            raise BiremeError(f"--hours is {text!r}: it begins when it ends. Leave it out for the whole day.")
        return cls(begin_min, end_min)

    def wait_s(self, now: datetime) -> float:
        """Seconds until the next of these hours begin; 0 within them."""
        since_midnight_s = 3600.0 * now.hour + 60.0 * now.minute + now.second
        since_begin_s = (since_midnight_s - 60.0 * self.begin_min) % (60.0 * _DAY_MIN)
        is_within = since_begin_s < 60.0 * ((self.end_min - self.begin_min) % _DAY_MIN)
        return 0.0 if is_within else 60.0 * _DAY_MIN - since_begin_s

    @property
    def begin(self) -> str:
        """When they begin, such as `20:00`."""
        return f"{self.begin_min // 60}:{self.begin_min % 60:02}"


def set_limits(memory: str, devices: str, rate: str) -> None:
    """Have this process, and those that it starts, use no more than that; an empty text is no limit. Call it
    before anything asks for the devices.
    """
    if memory:
        num_bytes = bytes_of(memory, "--memory")
        if num_bytes < LEAST_MEMORY_BYTES:
            raise BiremeError(f"--memory is {memory!r}: lend at least 1GiB; a number alone is in bytes.")
        if (free := available_bytes()) < num_bytes:
            tell(f"--memory is {memory}, and {bytes_text(free)} are free here: this machine offers these.")
        os.environ[MEMORY_VARIABLE] = str(num_bytes)
    if rate:
        os.environ[RATE_VARIABLE] = str(round(bytes_per_s_of(rate, "--rate")))
    if devices:
        _choose_devices(devices)


def _choose_devices(text: str) -> None:
    from bireme.devices import VISIBLE, num_accelerators

    words = [] if text == NO_DEVICES else text.split(",")
    if not all(word.isdecimal() for word in words) or len({*words}) < len(words):
        raise BiremeError(
            f"--devices is {text!r}; write the numbers of GPUs as 0 or 0,2, or {NO_DEVICES} to compute on "
            "the CPU."
        )
    before = os.environ.get(VISIBLE)
    names = words
    if before is not None:
        there = [name for name in before.split(",") if name]
        names = [there[int(word)] for word in words if int(word) < len(there)]
    os.environ[VISIBLE] = ",".join(names)
    num_found = num_accelerators() if words else 0
    if num_found < len(words):
        raise BiremeError(
            f"--devices is {text!r}, and this machine has {num_found or 'none'} of these GPUs. "
            f"`bireme doctor` lists its GPUs; --devices {NO_DEVICES} computes on the CPU."
        )


# The service: `bireme join … --service`.


def service_unit(where: str, words: Sequence[str]) -> str:
    """The unit for `bireme join WORDS…`, of this user, from this folder, with this Python and environment.
    Call it before `set_limits`, which changes the environment.
    """
    from bireme.devices import VISIBLE

    kept = [f"{name}={os.environ[name]}" for name in (VISIBLE, *_KEPT) if name in os.environ]
    command = (sys.executable, "-m", "bireme", "join", *words)
    lines = [
        "[Unit]",
        f"Description=Bireme: take part in the runs of {_literal(where)}",
        "Wants=network-online.target",
        "After=network-online.target",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        f"ExecStart={' '.join(map(_quoted, command)).replace('$', '$$')}",
        f"WorkingDirectory={_literal(str(Path.cwd()))}",
        *(f"Environment={_quoted(one)}" for one in kept),
        "Restart=always",
        f"RestartSec={_WAIT_S}",
        "# SIGTERM: the machine leaves, and the run goes on if it can.",
        "KillMode=mixed",
        "TimeoutStopSec=180",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    """A text in which systemd replaces nothing."""
    if not text.isprintable():
        raise BiremeError(f"{text!r} has a character that cannot be in a unit of systemd.")
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """A word of a command or of a variable."""
    plain = _literal(word)
    if shlex.quote(word) == word:
        return plain
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
