"""The run that a coordinator has begun, in a file of its machine: if it is killed, it takes the run up by it.

The file holds the key of the run. It lies beside the key of the machine, is for its user alone, and is gone
once the run has ended. Only a file in which all machines have orders of one run is believed.
"""

import hashlib
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from json import dumps
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le, Len

from bireme.documents import read_dataclass
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.machines.gathering import RecordedMachine, RunOffer
from bireme.machines.keys import key_path

FORMAT = 1


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Who takes part in the phase that trains, with which orders, in the order of their numbers. The
    coordinator has listened at `port`, and `newest` is the newest phase that has had orders.
    """

    newest: Annotated[int, Ge(1)]
    port: Annotated[int, Ge(1), Le(65535)]
    machines: Annotated[tuple[RecordedMachine, ...], Len(1, 10_000)]

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
    write_text_atomically(path, dumps({"format": FORMAT, **asdict(record)}, indent=1) + "\n", is_private=True)


def read_record(path: Path, run: RunOffer) -> RunRecord | None:
    """The record of a run that is to be taken up; None if there is none. Raises a `BiremeError` if the file
    is not to be believed, or if another run is asked for than it holds.
    """
    if not path.exists():
        return None
    anew = f"To begin the run anew, end `bireme join` on all its machines and remove {path}."
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BiremeError(f"Others can read {path}, which holds the key of a run. Run: chmod 600 {path}")
    try:
        found = read_dataclass(path, RunRecord, number=FORMAT)
    except BiremeError as error:
        raise BiremeError(f"{error} {anew}") from None
    if found.run != run:
        raise BiremeError(
            "This coordinator has left a run of that name which goes on with other settings. Type the same "
            f"command as then, and it takes the run up. {anew}"
        )
    return found
