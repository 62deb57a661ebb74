"""What a rank has for those of its stage in other replicas: committed sums, and snapshots to heal from."""

import select
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from bireme.runtime.quorum.parcels import send_named, send_parcel
from bireme.runtime.quorum.results import Buffers, Result
from bireme.runtime.quorum.switchboard import SNAPSHOT, SUM
from bireme.runtime.snapshot import Snapshot
from bireme.sync.coordinator.messages import Word
from bireme.sync.quorum.ring import Summed

__all__ = ["HEAL_SHARE", "LOOK_S", "Offers", "has_hung_up", "summed_in"]

KEPT_BYTES = 1 << 30
"""Committed sums that replicas which are late may still ask for take so much at most, but for a few."""
LEAST_KEPT = 4
HEAL_SHARE = 0.25
"""The share of a link's time that a snapshot for another replica may take."""
MOST_ROUNDS = 8
"""So many rounds after the one before which a snapshot was due, it will not come any more."""
LOOK_S = 0.5

Found = TypeVar("Found")


class Offers:
    """The offers of one rank of a replica. Sums lie in `buffers`, and go back there."""

    def __init__(self, replica: int, buffers: Buffers) -> None:
        self._replica, self._buffers = replica, buffers
        self._changed = threading.Condition()
        self._kept: dict[int, Result] = {}
        self._next = 0
        """The first batch whose sum has not been had."""
        self._snapshots: dict[int, Snapshot] = {}
        self._due: set[int] = set()
        self._is_closed = False

    def begin(self, first: int) -> None:
        """Of the rounds below `first` this rank will have no sums."""
        with self._changed:
            self._next = first

    def note(self, word: Word) -> None:
        """Take notice of what others need, before any sum is given away that an update is made from."""
        asked = {heal.batch for heal in word.heals if heal.donor == self._replica}
        with self._changed:
            self._due |= asked - self._snapshots.keys()
            self._due &= asked
            self._snapshots = {batch: one for batch, one in self._snapshots.items() if batch in asked}
            kept = word.kept[0] if word.kept else 0
            free = [self._kept.pop(batch) for batch in list(self._kept) if batch < kept]
        for result in free:
            self._buffers.give_back(result)

    def keep(self, batch: int, result: Result) -> None:
        """A committed sum, for whoever comes late."""
        with self._changed:
            self._kept[batch], self._next = result, batch + 1
            self._changed.notify_all()

    @property
    def is_full(self) -> bool:
        """Whether others have to catch up first, as this rank keeps all that it can for them."""
        num = len(self._kept)
        if num < LEAST_KEPT:
            return False
        size = sum(flat.nbytes for flat in next(iter(self._kept.values())).flats)
        return num * size >= KEPT_BYTES

    def is_due(self, batch: int) -> bool:
        """Whether a snapshot after so many updates is wanted for another replica."""
        return batch in self._due

    def provide(self, snapshot: Snapshot) -> None:
        """Here is one that was due."""
        with self._changed:
            self._due.discard(snapshot.num_trained)
            self._snapshots[snapshot.num_trained] = snapshot
            self._changed.notify_all()

    def answer(self, made: socket.socket, what: int, batch: int) -> None:
        """Give another rank what it asks for, once it is there; return where it will not be."""
        if what == SUM:
            result = self._found(made, lambda: self._kept.get(batch), last=batch)
            if result is None or result.summed is None:
                return
            one = result.summed
            words = {"holds": one.holds.hex(), "weight": one.weight, "means": one.means}
            send_parcel(made, {**words, "numbers": one.numbers}, result.flats)
        elif what == SNAPSHOT:
            snapshot = self._found(made, lambda: self._snapshots.get(batch), last=batch + MOST_ROUNDS)
            if snapshot is not None:
                words = {"num_trained": snapshot.num_trained, "clip_scale": snapshot.clip_scale}
                send_named(made, words, snapshot.tensors, share=HEAL_SHARE)

    def close(self) -> None:
        """There is nothing more to be had."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _found(self, made: socket.socket, find: Callable[[], Found | None], *, last: int) -> Found | None:
        """What was asked for, once it is there. None where all rounds up to the last one have been without
        it, and where who asks has hung up.
        """
        with self._changed:
            while (found := find()) is None:
                if self._is_closed or self._next > last or has_hung_up(made):
                    return None
                self._changed.wait(LOOK_S)
            return found


def summed_in(words: Mapping[str, Any]) -> Summed:
    """What the text of a parcel with a committed sum says of it."""
    means, numbers = tuple(words["means"]), tuple(words["numbers"])
    return Summed(bytes.fromhex(words["holds"]), words["weight"], means, numbers)


def has_hung_up(made: socket.socket) -> bool:
    """Whether the other end is gone, which says nothing once it has asked."""
    poller = select.poll()
    poller.register(made, select.POLLIN)
    try:
        return bool(poller.poll(0)) and not made.recv(1, socket.MSG_PEEK)
    except OSError:
        return True
