"""What a rank has for those of its stage in other replicas: sums that count, and snapshots to heal from."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from bireme.runtime.averaging.lines import RankRounds
from bireme.runtime.averaging.places import PLACES
from bireme.runtime.quorum.offers import HEAL_SHARE, OFFER_LOOK_S, has_hung_up
from bireme.runtime.quorum.parcels import send_named, send_tensors
from bireme.runtime.quorum.switchboard import SNAPSHOT, SUM
from bireme.runtime.snapshot import Snapshot
from bireme.sync.coordinator.messages import CoordinatorReply, Window

__all__ = ["ForOthers"]

Found = TypeVar("Found")


class ForOthers:
    """What one rank has; sums are those that its `lines` keep. All share the agent's `changed`."""

    def __init__(
        self, lines: Callable[[], Sequence[RankRounds]], changed: threading.Condition, timeout_s: float
    ) -> None:
        self._lines, self._changed, self._timeout_s = lines, changed, timeout_s
        self._snapshots: dict[int, tuple[Snapshot, dict[str, Any]]] = {}
        """With where the run was then: the rounds of each line that are in it, and the window."""
        self._is_closed = False

    def due(self, word: CoordinatorReply, replica: int, batch: int) -> int | None:
        """The name of a snapshot that is wanted of this replica, if one is due before a batch's update."""
        asked = {heal.batch for heal in word.heals if heal.donor == replica}
        with self._changed:
            self._snapshots = {name: one for name, one in self._snapshots.items() if name in asked}
            found = [name for name in asked - self._snapshots.keys() if name <= batch]
        return min(found, default=None)

    def provide(self, name: int, snapshot: Snapshot, window: Window) -> None:
        """Here is one that was due, from within a window."""
        with self._changed:
            used = tuple(line.at.committed for line in self._lines())
            where = {"used": used, "window": window.number, "until": window.until}
            self._snapshots[name] = snapshot, where
            self._changed.notify_all()

    def answer(self, made: socket.socket, what: int, name: int) -> None:
        """Give another replica what it asks for, once it is there; return where it will not be."""
        if what == SUM:
            kept, ends_s = self._lines()[name >> PLACES].kept, time.monotonic() + self._timeout_s
            result = self._found(
                lambda: kept.get(name & ((1 << PLACES) - 1)), lambda: time.monotonic() > ends_s
            )
            if result is not None and result.summed is not None:
                summed = result.summed
                words = {"weight": summed.weight, "numbers": summed.numbers, "parts": result.parts}
                send_tensors(made, words, result.flats)
        elif what == SNAPSHOT:
            # An evaluation may take longer than any timeout, and the next update follows it.
            found = self._found(lambda: self._snapshots.get(name), lambda: has_hung_up(made))
            if found is not None:
                snapshot, where = found
                said = {"num_trained": snapshot.num_trained, "clip_scale": snapshot.clip_scale}
                send_named(made, {**said, **where}, snapshot.tensors, share=HEAL_SHARE)

    def close(self) -> None:
        """There is nothing more to be had."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _found(self, find: Callable[[], Found | None], is_over: Callable[[], bool]) -> Found | None:
        with self._changed:
            while (found := find()) is None and not self._is_closed and not is_over():
                self._changed.wait(OFFER_LOOK_S)
            return found
