"""The board: what the ranks of a run, and who started them, tell each other through a store.

Signs of life, one per rank, and the root cause, of which the first that is written stays. Every call may
block for as long as the store's server is stopped, so no thread that must go on may make one.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bireme.runtime.failures import Failure

if TYPE_CHECKING:
    from bireme.runtime.stores import Store

__all__ = ["Board", "Heartbeat"]

CAUSE = "board/cause"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A rank's sign of life. Only that `count` grows means something: clocks of machines differ."""

    count: int
    finished: bool
    doing: str | None
    knows: bool = False
    """Whether the rank has learned of a root cause, and ends by it."""


class Board:
    """The board of `size` ranks, in the store of one run."""

    def __init__(self, store: "Store", size: int) -> None:
        self._store = store
        self._keys = [f"board/pulse/{rank}" for rank in range(size)]

    def reconnect(self) -> None:
        """Ask over a new connection from now on. Raises where the store cannot be reached."""
        from bireme.runtime.stores import new_connection  # it imports torch, which `launch` must not do yet

        self._store = new_connection(self._store)

    def beat(self, rank: int, pulse: Heartbeat) -> None:
        """Give a sign of life."""
        self._store.set(self._keys[rank], json.dumps(asdict(pulse)))

    def pulses(self, ranks: Sequence[int]) -> list[Heartbeat | None]:
        """The last sign of life of these ranks; None of one that never gave any."""
        keys = [self._keys[rank] for rank in ranks]
        if self._store.check(keys):
            return [Heartbeat(**json.loads(text)) for text in self._store.multi_get(keys)]
        # Some are not there, and to get such a one is to wait for it.
        return [Heartbeat(**json.loads(self._store.get(k))) if self._store.check([k]) else None for k in keys]

    def record(self, failure: Failure) -> Failure:
        """Write down a root cause. What comes back is the one that counts: it may be another's."""
        return Failure.decode(self._store.compare_set(CAUSE, "", failure.encode()))

    def cause(self) -> Failure | None:
        """The root cause, once there is one."""
        return Failure.decode(self._store.get(CAUSE)) if self._store.check([CAUSE]) else None
