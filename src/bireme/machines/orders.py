"""What a machine offers to a run, what it is to start, and the record by which a coordinator that was killed
takes its run up.

The record holds the key of the run. It lies beside the key of the machine, is for its user alone, and is gone
once the run has ended. It is believed only if all machines in it have orders of one run.
"""

import hashlib
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from json import dumps
from math import log
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le, Len
from pydantic import AllowInfNan, StringConstraints, TypeAdapter

from bireme.documents import read_dataclass
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.machines.keys import HEX_KEY, key_path
from bireme.machines.measured_lines import LineBetween, MeasuredLine
from bireme.machines.phases import PhaseForecast, PhaseProgress

PHASE = "BIREME_PHASE"
"""Variable of a process: the phase that it is of."""
SPEED = "BIREME_SPEED"
"""Variable of a process: the speed of its machine, relative to that of rank 0."""

_SLOWEST, _FASTEST = 0.01, 100.0
"""How slow and how fast a machine may call itself, relative to the first one."""
_ALIKE, _STEP = 1.25, 1.1
"""Machines that differ by less count as equally fast, and the speeds of others have steps."""

_FORMAT = 1
_Text = Annotated[str, Len(0, 400)]
ControlTime = Annotated[float, Ge(0), Le(1000), AllowInfNan(False)] | None


@dataclass(frozen=True, slots=True)
class MachineOffer:
    """What a machine has: `instance` is of one start of `bireme join`, `port` is free there for the store of
    the run, `line` the latency and bandwidth to the coordinator in words, `measured` in numbers. Other
    machines check their lines to it at `line_port`, if that is not 0. `control_s` is the time of the control
    there, 0 if it could not be timed, None before.
    """

    instance: Annotated[str, Len(1, 64)]
    num_cores: Annotated[int, Ge(1)]
    memory_bytes: Annotated[int, Ge(0)]
    devices: Annotated[tuple[_Text, ...], Len(0, 64)]
    port: Annotated[int, Ge(1), Le(65535)]
    line: _Text = ""
    measured: MeasuredLine | None = None
    line_port: Annotated[int, Ge(0), Le(65535)] = 0
    control_s: ControlTime = None

    @property
    def sentence(self) -> str:
        """The offer in words."""
        gpus = f"GPUs: {', '.join(self.devices)}" if self.devices else "no GPU"
        known = f"{self.num_cores} cores, {self.memory_bytes / 2**30:.1f} GiB of memory, {gpus}"
        return f"{known}; {self.line}" if self.line else known


@dataclass(frozen=True, slots=True)
class RunOffer:
    """The run: its file as a text, and what decides how machines take part. `workers` are the processes of
    each machine if the run file gives them, `can_return` is whether a machine may go and come back without a
    new phase. It has `steps` batches. A machine that has come or gone counts after `patience_s`, and if the
    run `replans`, a slow stage too. With a `verb` it is no training but that command with these `words`, and
    the text is empty but for a name. Plans use the speeds of the machines if it goes `by_speed`.
    """

    text: str
    workers: int | None
    uses_gpus: bool
    can_return: bool
    steps: int
    patience_s: float
    as_json: bool = False
    replans: bool = False
    verb: Literal["train", "evaluate", "generate"] = "train"
    words: tuple[str, ...] = ()
    by_speed: bool = False


def relative_speed(own_s: float | None, first_s: float | None) -> float:
    """The speed of a machine relative to the first one, by the time of the control on both. It is 1 if either
    is unknown, or if they differ by no more than measurements scatter; else it has steps, so that plans stay
    comparable.
    """
    if not own_s or not first_s:
        return 1.0
    speed = min(max(_SLOWEST, first_s / own_s), _FASTEST)
    if 1 / _ALIKE <= speed <= _ALIKE:
        return 1.0
    return float(f"{_STEP ** round(log(speed, _STEP)):.2g}")


def phase_of(variables: Mapping[str, str]) -> int:
    """The number of the phase that a process with these variables is of; 0 outside of `bireme join`."""
    return int(variables.get(PHASE, "0"))


def run_name(run: RunOffer) -> str:
    """The name of a run, which its coordinator has put into the run file."""
    return str(tomllib.loads(run.text)["log"]["name"])


def folder_for_runs(run: RunOffer) -> str:
    """The folder for runs that the run file names."""
    return str(tomllib.loads(run.text)["log"]["folder"])


@dataclass(frozen=True, slots=True)
class MachineOrders:
    """What a machine is to start: `num_ranks` processes from rank `first` on, of `size` in the phase. The
    first machine, which plans, gets the `lines` between all. `speed` is relative to that machine.
    """

    phase: int
    number: int
    first: int
    num_ranks: int
    size: int
    master: str
    port: int
    key: str = field(repr=False)
    run: RunOffer
    lines: tuple[LineBetween, ...] = ()
    speed: Annotated[float, Ge(_SLOWEST), Le(_FASTEST)] = 1.0


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """How the processes of a phase are at a machine: how they have ended, None while one lives, negative for
    a signal; what the phase predicts once it is ready.
    """

    number: int
    statuses: tuple[int, ...] | None
    forecast: PhaseForecast | None
    progress: PhaseProgress | None


@dataclass(frozen=True, slots=True)
class RecordedMachine:
    """A machine of the phase that trains, as a coordinator keeps it on its disk."""

    public: Annotated[str, StringConstraints(pattern=HEX_KEY)]
    name: Annotated[str, Len(1, 255)]
    address: Annotated[str, Len(1, 255)]
    offer: MachineOffer
    orders: MachineOrders


ORDERS = TypeAdapter(MachineOrders)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Who takes part in the phase that trains, with which orders, in the order of their numbers. The
    coordinator has listened at `port`, and `newest` is the newest phase that has had orders. It `switches`
    if the phase that trains is to stop for another one.
    """

    newest: Annotated[int, Ge(1)]
    port: Annotated[int, Ge(1), Le(65535)]
    machines: Annotated[tuple[RecordedMachine, ...], Len(1, 10_000)]
    switches: bool = False

    def __post_init__(self) -> None:
        if wrong := next(self._contradictions(), None):
            raise BiremeError(f"The machines of the run contradict each other: {wrong}.")

    def _contradictions(self) -> Iterator[str]:
        orders = [one.orders for one in self.machines]
        firsts = accumulate((one.num_ranks for one in orders), initial=0)
        if len({one.public for one in self.machines}) < len(orders):
            yield "one of them is listed twice"
        if [one.number for one in orders] != [*range(len(orders))]:
            yield "their numbers do not count from 0"
        if [*firsts] != [*(one.first for one in orders), orders[0].size]:
            yield "their ranks do not follow each other"
        if len({(one.phase, one.size, one.master, one.port, one.key, one.run) for one in orders}) > 1:
            yield "they have orders of more than one run"
        if not 1 <= orders[0].phase <= self.newest:
            yield f"they train in phase {orders[0].phase}, and the newest one is {self.newest}"

    @property
    def run(self) -> RunOffer:
        """The run that they have a part in."""
        return self.machines[0].orders.run


def record_path(folder: Path) -> Path:
    """Where this machine keeps the record of the run in that folder."""
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    return key_path().with_name("runs") / f"{folder.name}-{digest}.json"


def write_record(path: Path, record: RunRecord) -> None:
    """Keep the record for this user alone."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_text_atomically(
        path, dumps({"format": _FORMAT, **asdict(record)}, indent=1) + "\n", is_private=True
    )


def read_record(path: Path, run: RunOffer) -> RunRecord | None:
    """The record of a run that is to be taken up; None if there is none. Raises a `BiremeError` if the file
    is not to be believed, or if another run is asked for than it holds.
    """
    if not path.exists():
        return None
    found = read_record_at(path)
    if found.run != run:
        raise BiremeError(
            "This coordinator has left a run of that name which goes on with other settings. Type the same "
            f"command as then, and it takes the run up. {_anew(path)}"
        )
    return found


def read_record_at(path: Path) -> RunRecord:
    """The record in a file. Raises a `BiremeError` if the file is not to be believed."""
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BiremeError(f"Others can read {path}, which holds the key of a run. Run: chmod 600 {path}")
    try:
        return read_dataclass(path, RunRecord, number=_FORMAT)
    except BiremeError as error:
        raise BiremeError(f"{error} {_anew(path)}") from None


def _anew(path: Path) -> str:
    return f"To begin the run anew, end `bireme join` on all its machines and remove {path}."
