"""Where the race takes place: four emulated hosts with the links and speeds of a setting."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import bireme
from benchmarks.common.command import log
from benchmarks.common.hosts import CARD, Host, NoHosts, slow_hosts
from benchmarks.common.paced import SPEED
from benchmarks.killing.mortal_run import Program
from benchmarks.killing.session import living
from bireme.errors import BiremeError

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(bireme.__file__).parents[1])])}
"""So that processes in other folders find the task of the race, and this Bireme."""
HOSTS = 4
ADDRESS = "BIREME_RACE_ADDRESS"
"""Names the variable with the address of a process's host."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Setting:
    """A network between four hosts, and the speed of each host's device; 0 does not sleep."""

    name: str
    megabits_per_s: float | None
    delay_s: float = 0.0
    speeds: tuple[float, ...] = (1.0,) * HOSTS

    @property
    def cluster(self) -> str:
        """The cluster file that describes it to Bireme."""
        megabits = self.megabits_per_s or 25_000.0
        text = f"format = 1\n\n[switch]\nlatency_s = {self.delay_s + 1e-4}\n"
        for number, speed in enumerate(self.speeds):
            text += (
                f'\n[[server]]\nname = "host-{number}"\n\n[[server.device]]\nkind = "cpu"\n'
                f"speed = {speed or 1.0}\nmemory_bytes = 4_000_000_000\n\n[[server.card]]\n"
                f"bytes_per_s = {megabits * 1e6 / 8}\nlatency_s = 1e-5\n"
            )
        return text


SETTINGS = {
    one.name: one
    for one in (
        Setting("unshaped", None),
        Setting("1gbit", 1000.0),
        Setting("100mbit-20ms", 100.0, 0.02),
        Setting("100mbit-slow-host", 100.0, 0.0, (1.0, 1.0, 1.0, 1 / 3)),
    )
}
LEARNING = Setting("loopback", None, 0.0, (0.0,) * HOSTS)
"""Where learning rates are searched: no device sleeps, and steps are counted instead of seconds."""


class Field:
    """The hosts of a setting; without `hosts` they share the loopback, whose links are not slow."""

    def __init__(self, setting: Setting, hosts: Sequence[Host], folder: Path) -> None:
        self.setting, self.folder = setting, folder
        self._hosts = hosts

    @property
    def about(self) -> str:
        """How hosts, links and devices are made, for rows."""
        links = "loopback"
        if self._hosts:
            links = "namespaces, relay" if self.setting.delay_s else "namespaces, tc"
        return f"{links}; devices sleep" if any(self.setting.speeds) else f"{links}; no sleep"

    def card_bytes(self, read: Callable[[int], int | None]) -> int | None:
        """The most that a card has carried, by the counters of a process on each host."""
        found = [read(pids[0]) for host in self._hosts if (pids := host.processes())]
        return max((one for one in found if one is not None), default=None)

    @contextmanager
    def running(
        self, words: Sequence[str], variables: Mapping[str, str], *, python: str = sys.executable
    ) -> Iterator[list[Program]]:
        """`PYTHON WORDS` on every host while the block runs; nothing of it is left afterwards."""
        programs: list[Program] = []
        address = self._hosts[0].address if self._hosts else "127.0.0.1"
        common = {
            "WORLD_SIZE": str(HOSTS),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(_free_port()),
            "GLOO_SOCKET_IFNAME": CARD if self._hosts else "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **IMPORTS,
            **variables,
        }
        try:
            for number, speed in enumerate(self.setting.speeds):
                prefix = self._hosts[number].prefix_as(f"host-{number}") if self._hosts else ()
                here = self._hosts[number].address if self._hosts else "127.0.0.1"
                own = {"RANK": str(number), "GROUP_RANK": str(number), SPEED: str(speed), ADDRESS: here}
                out, err = (self.folder / f"{name}-{number}" for name in ("out", "err"))
                line = [*prefix, python, *words]
                programs.append(Program(line, self.folder, out, err, common | own))
            yield programs
        finally:
            self._end(programs)

    def _end(self, programs: Sequence[Program]) -> None:
        """Kill all that was started, and what that has started."""
        for _ in range(100):
            pids = [pid for host in self._hosts for pid in host.processes()]
            pids += [pid for program in programs for pid in living(program.pid)]
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                break
            time.sleep(_POLL_S)
        for program in programs:
            program.close()


@contextmanager
def field(setting: Setting, folder: Path) -> Iterator[Field]:
    """The hosts of a setting. Raises a `BiremeError` if its links cannot be made here."""
    with ExitStack() as stack:
        hosts: Sequence[Host] = ()
        if setting is not LEARNING:
            try:
                hosts = stack.enter_context(slow_hosts(HOSTS, setting.megabits_per_s, setting.delay_s))
            except NoHosts as reason:
                if setting.megabits_per_s is not None:
                    raise BiremeError(
                        f"The links of the setting {setting.name} cannot be made here: {reason}. Run as root "
                        "on Linux, or run --setting unshaped."
                    ) from None
                log(f"The hosts share the loopback: {reason}.")
        yield Field(setting, hosts, folder)


def wait_for(programs: Sequence[Program], is_over: Callable[[], bool], seconds: float) -> None:
    """Until it is over or all programs have ended. Raises a `BiremeError` if one fails, or time is up."""
    end_s = time.monotonic() + seconds
    while not is_over():
        statuses = [program.poll() for program in programs]
        failed = [place for place, status in enumerate(statuses) if status]
        if failed or time.monotonic() > end_s:
            why = f"host {failed[0]} ended with {statuses[failed[0]]}" if failed else "it takes too long"
            said = "\n".join(program.err.read_text()[-1500:] for program in programs)
            raise BiremeError(f"A contender fails: {why}. Its hosts said:\n{said}")
        if None not in statuses:
            return
        time.sleep(_POLL_S)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        port: int = made.getsockname()[1]
    return port
