"""A machine that takes part in a run of `bireme coordinate`: `bireme join`, the end that calls.

It starts the processes of this machine as torchrun would, by its orders, and starts them again if they are
killed while the run goes on. If the coordinator is away they go on, and this end calls until it is there.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import torch

from bireme.cluster.machine import available_bytes, num_cores
from bireme.devices import num_accelerators
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.machines.findings import Finding, Verdict
from bireme.machines.gathering import ORDERS, PURPOSE, MachineOffer, MachineOrders
from bireme.machines.keys import MachineKey, key_path
from bireme.machines.line import Address, RequestLine, call_coordinator, check_between
from bireme.machines.own_machine import MachineFacts
from bireme.runtime.stores import KEY

_BEAT_S, _SOON_S, _AGAIN_S, _PARTING_S = 1.0, 0.1, 2.0, 5.0
_NUM_CALLS = 3
"""How often a machine calls whose line breaks, or is too slow, before it has offered itself."""
_UNSURE = ("line", "ports", "large messages")
"""Checks of a line that may fail because one end is busy, and come out well the next time."""
_ALONE_S = 60.0
"""How long a machine without running processes calls a coordinator that does not answer."""
_MOST_KILLS, _SHORT_S = 3, 60.0
"""So many launchers may be killed in a row that have lived for less than this."""
_MOST_KEPT, _MOST_LETTERS = 10_000, 100_000
"""Lines to keep for a coordinator that is away, and letters to send it at once."""
INTERRUPTED = 130
_LAUNCH = (
    "import sys; from bireme.runtime.board import die_with_parent; die_with_parent(int(sys.argv[1])); "
    "sys.argv[:2] = ['bireme']; from bireme.cli.main import main; main()"
)
"""`bireme WORDS…` in a process that ends when this one does."""
_FOREIGN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_MAX_RESTARTS")
_FOREIGN_TOO = ("TORCHELASTIC_RESTART_COUNT", "LOCAL_WORLD_SIZE")
"""Variables of another launcher, which do not hold for this run."""

Out = Callable[[str, str], None]
"""Prints a line of a stream, "out" or "err"."""


# Coordinators that this machine has joined, so that its key suffices the next time.


def known_coordinator(address: Address) -> str:
    """The public key of the coordinator there, if this machine has joined it before. Raises a `BiremeError`
    if not.
    """
    found = _coordinators().get(_place(address))
    if not isinstance(found, str):
        raise BiremeError(
            f"This machine has not joined a coordinator at {_place(address)} before. Give the token that "
            "`bireme coordinate` prints there: --token TOKEN"
        )
    return found


def note_coordinator(address: Address, public: str) -> None:
    """Keep the public key of a coordinator that has admitted this machine."""
    known = {**_coordinators(), _place(address): public}
    write_text_atomically(_known_path(), json.dumps(known, indent=1) + "\n")


def _coordinators() -> dict[str, Any]:
    try:
        found = json.loads(_known_path().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _known_path() -> Path:
    return key_path().with_name("coordinators.json")


def _place(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


class JoinedProcesses:
    """The processes of `bireme train` on this machine; `show` gets each line that they print."""

    def __init__(self, orders: MachineOrders, show: Out) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="bireme-join-")
        path = Path(self._scratch.name, "run.toml")
        path.write_text(orders.run.text)
        words = ["train", str(path), *(["--json"] if orders.run.as_json else [])]
        command = [sys.executable, "-c", _LAUNCH, str(os.getpid()), *words]
        self.since_s = time.monotonic()
        self._readers = list[threading.Thread]()
        self._processes = list[subprocess.Popen[str]]()
        for place in range(orders.num_ranks):
            process = subprocess.Popen(
                command,
                env=_variables(orders, place),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # a signal of the terminal comes once, passed on
            )
            self._processes.append(process)
            for stream, name in ((process.stdout, "out"), (process.stderr, "err")):
                reader = threading.Thread(target=_read_lines, args=(stream, name, show), daemon=True)
                reader.start()
                self._readers.append(reader)

    def statuses(self) -> list[int] | None:
        """How they ended, negative for a signal; None while one of them lives."""
        found = [one.poll() for one in self._processes]
        if None in found:
            return None
        for reader in self._readers:
            reader.join(1.0)
        return [status for status in found if status is not None]

    def send_signal(self, number: signal.Signals) -> None:
        """Send all of them a signal."""
        for one in self._processes:
            one.send_signal(number)

    def close(self) -> None:
        """Kill those that are left."""
        self.send_signal(signal.SIGKILL)
        for one in self._processes:
            one.wait()
        self._scratch.cleanup()


def _variables(orders: MachineOrders, place: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in (*_FOREIGN, *_FOREIGN_TOO)}
    return kept | {
        "RANK": str(orders.first + place),
        "WORLD_SIZE": str(orders.size),
        "LOCAL_RANK": str(place),
        "GROUP_RANK": str(orders.number),
        "MASTER_ADDR": orders.master,
        "MASTER_PORT": str(orders.port),
        KEY: orders.key,
        "PYTHONUNBUFFERED": "1",
    }


def _read_lines(stream: Any, name: str, show: Out) -> None:
    with stream, suppress(ValueError):
        for line in stream:
            show(name, line.rstrip("\n"))


class Attendance:
    """This machine in a run, from its call to the run's end."""

    def __init__(
        self,
        address: Address,
        key: MachineKey,
        coordinator: str,
        facts: MachineFacts,
        name: str,
        tell: Callable[[str], None],
        out: Out,
    ) -> None:
        """`coordinator` is the public key of the coordinator. `out` prints what the processes here print."""
        self._address, self._key, self._coordinator = address, key, coordinator
        self._facts, self._name, self._tell, self._out = facts, name, tell, out
        self._line: RequestLine | None = None
        self._next_call_s = 0.0
        self._reserved = socket.socket()
        self._reserved.bind(("", 0))  # for the store of the run, until it is started
        names = [torch.cuda.get_device_name(number) for number in range(num_accelerators())]
        self.offer = MachineOffer(
            secrets.token_hex(8),
            num_cores(),
            available_bytes(),
            tuple(names),
            self._reserved.getsockname()[1],
        )
        self._lines = list[tuple[str, str]]()
        """That the coordinator has not got yet."""
        self._wake = threading.Event()
        self._num_interrupts = 0
        self.orders: MachineOrders | None = None
        self._processes: JoinedProcesses | None = None
        self._is_stopping = False

    def interrupt(self, *, is_urgent: bool) -> None:
        """Stop in order, or at once if it is the second urgent call."""
        self._num_interrupts += 1 if is_urgent or not self._num_interrupts else 0
        self._wake.set()

    def call(self, secret: str = "") -> list[Finding]:
        """Call the coordinator for the first time, be admitted, and check the line; returns the findings. The
        last one is the failure, if it fails. Raises a `BiremeError` if the coordinator refuses this machine.
        """
        for calls_left in reversed(range(_NUM_CALLS)):
            try:
                found = self._call_and_check(secret)
            except (OSError, ValueError, KeyError) as error:
                if not calls_left:
                    raise self._broken(error) from None
                found, sentence = [], f"broke: {error}"
            else:
                failing = [one for one in found if one.verdict == Verdict.FAILS]
                if not calls_left or not failing or any(one.check not in _UNSURE for one in failing):
                    break
                sentence = f"fails a check: {failing[0].text}"
            self._hang_up()
            self._tell(f"The line to the coordinator {sentence.rstrip('.')}. This machine calls again.")
            self._wake.wait(_AGAIN_S)
            if self._num_interrupts:
                return []
        told = {one.check: one.text for one in found}
        measured = [told[check] for check in ("latency", "bandwidth") if check in told]
        self.offer = replace(self.offer, line=", ".join(measured)[:400])
        return found

    def _call_and_check(self, secret: str) -> list[Finding]:
        found, self._line = self._called()
        if self._line is not None:
            self._ask("admit", secret=secret, name=self._name)
            found += check_between(self._line, self._facts)
        return found

    def run(self) -> int:
        """Offer, wait, run the processes of this machine to the run's end; returns the exit status. Raises a
        `BiremeError` if the coordinator refuses this machine.
        """
        try:
            if self._line is not None:
                try:
                    self._ask("offer", offer=asdict(self.offer))
                except (OSError, ValueError, KeyError):
                    self._hang_up()  # it is called again
            return self._run()
        finally:
            self._reserved.close()
            if self._processes is not None:
                self._processes.close()
            if self._line is not None:
                with suppress(OSError, ValueError):
                    self._line.ask("leave")
                self._line.socket.close()

    def _broken(self, error: Exception) -> BiremeError:
        where = _place(self._address)
        return BiremeError(f"The line to the coordinator at {where} broke: {error}. Check it: bireme doctor")

    def _run(self) -> int:
        heard_s, num_kills = time.monotonic(), 0
        while True:
            if (status := self._interrupted()) is not None:
                return status
            statuses = None if self._processes is None else self._processes.statuses()
            is_killed = statuses is not None and min(statuses) < 0 and self._may_return
            answer = self._beat(None if is_killed else statuses)
            heard_s = heard_s if answer is None else time.monotonic()
            orders = None if answer is None else answer["orders"]
            if answer is not None and answer["stops"]:
                self._stop()
            if statuses is not None and not is_killed:
                is_told = answer is not None and not self._lines
                if is_told or time.monotonic() - heard_s > _PARTING_S:
                    return max(abs(status) for status in statuses)
                self._wake.wait(_SOON_S)
                continue
            if answer is not None and answer["is_over"] and (self._processes is None or is_killed):
                before = " before the run began" if self.orders is None else ""
                self._tell(f"The coordinator has ended{before}.")
                return 1
            if is_killed and orders is not None:
                assert self._processes is not None, "they were killed"
                assert statuses is not None, "they were killed"
                lived_s = time.monotonic() - self._processes.since_s
                num_kills = num_kills + 1 if lived_s < _SHORT_S else 1
                if num_kills >= _MOST_KILLS:
                    self._tell(
                        f"The launcher was killed {num_kills} times in a row: it is not started again."
                    )
                    self._beat(statuses)
                    return 1
                self._tell(f"The launcher was killed by signal {-min(statuses)}. It is started again.")
                self._start(orders)
            elif self._processes is None and orders is not None:
                self._start(orders)
            is_idle = self._processes is None or is_killed
            if is_idle and time.monotonic() - heard_s > _ALONE_S:
                self._tell(f"The coordinator at {_place(self._address)} has not answered for {_ALONE_S:g} s.")
                return 1
            self._wake.wait(_BEAT_S)
            self._wake.clear()

    @property
    def _may_return(self) -> bool:
        return not self._is_stopping and self.orders is not None and self.orders.run.can_return

    def _interrupted(self) -> int | None:
        """Act on interrupts; the exit status if nothing is left to do."""
        if not self._num_interrupts:
            return None
        if self._processes is None or self._num_interrupts > 1:
            return INTERRUPTED
        self._stop()
        return None

    def _stop(self) -> None:
        if self._processes is not None and not self._is_stopping:
            self._is_stopping = True
            self._processes.send_signal(signal.SIGTERM)

    def _start(self, words: object) -> None:
        self.orders = orders = ORDERS.validate_python(words)
        self._reserved.close()
        if self._processes is not None:
            self._processes.close()
        self._processes = JoinedProcesses(orders, self._show)

    def _show(self, stream: str, text: str) -> None:
        self._out(stream, text)
        if len(self._lines) < _MOST_KEPT:
            self._lines.append((stream, text[:_MOST_LETTERS]))

    def _beat(self, statuses: list[int] | None) -> dict[str, Any] | None:
        """Tell the coordinator how things are; what it says, or None if it does not answer."""
        num_letters = accumulate(len(text) for _, text in self._lines)
        num_lines = sum(1 for _ in takewhile(_MOST_LETTERS.__ge__, num_letters))
        lines = self._lines[:num_lines]
        try:
            if self._line is None:
                self._call_again()
            if self._line is None:
                return None
            ended = None if statuses is None else [abs(status) for status in statuses]
            answer = self._ask("beat", statuses=ended, lines=lines)
            if not answer["is_known"]:
                self._tell("This machine was silent for too long. It offers itself again.")
                self._ask("offer", offer=asdict(self.offer))
                return None
        except (OSError, ValueError, KeyError):
            self._hang_up()
            return None
        except BiremeError:
            if self._processes is not None:
                self._tell("The coordinator does not let this machine take part any more.")
            raise
        del self._lines[: len(lines)]
        return answer

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.socket.close()
        self._line = None

    def _call_again(self) -> None:
        if time.monotonic() < self._next_call_s:
            return
        self._next_call_s = time.monotonic() + _AGAIN_S
        self._line = self._called()[1]
        if self._line is not None:
            self._ask("admit", secret="", name=self._name)
            self._ask("offer", offer=asdict(self.offer))

    def _called(self) -> tuple[list[Finding], RequestLine | None]:
        purpose = bytes.fromhex(self._key.public) + PURPOSE
        calling = call_coordinator(self._address, self._key.shared_with(self._coordinator), purpose)
        found = list[Finding]()
        while True:
            try:
                found.append(next(calling))
            except StopIteration as end:
                return found, end.value

    def _ask(self, what: str, **words: Any) -> dict[str, Any]:
        """Ask the coordinator. Raises a `BiremeError` with its sentence if it refuses."""
        assert self._line is not None, "there is a line"
        answer = self._line.ask(what, **words)
        if answer["error"]:
            raise BiremeError(str(answer["error"]))
        return answer


def failures(findings: Sequence[Finding]) -> list[str]:
    """The sentences of what will fail."""
    failing = [one for one in findings if one.verdict == Verdict.FAILS]
    return [f"{one.check}: {one.text}{f' {one.remedy}' if one.remedy else ''}" for one in failing]
