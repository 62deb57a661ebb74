"""What a rank has for those of its stage in other replicas: committed sums, and snapshots to heal from."""

import select
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from bireme.runtime.quorum.parcels import send_named, send_tensors
from bireme.runtime.quorum.results import Buffers, RoundSum
from bireme.runtime.quorum.switchboard import SNAPSHOT, SUM
from bireme.runtime.snapshot import Snapshot
from bireme.sync.coordinator.messages import CoordinatorReply
from bireme.sync.quorum.ring import Summed

__all__ = ["HEAL_SHARE", "KEPT_BYTES", "MOST_BEHIND", "OFFER_LOOK_S", "Offers", "has_hung_up", "summed_in"]

KEPT_BYTES = 1 << 30
"""Committed sums that replicas which are late may still ask for take at most this, except for a few."""
LEAST_KEPT = 4
MOST_BEHIND = 8
"""A member that lags the others by more batches starts again: to heal, it need not compute."""
MOST_FOR_MEMBERS = MOST_BEHIND + 4
"""Sums kept for members that are late. A member that lacks an older one starts again; a few more are kept
because it may have asked a moment ago.
"""
HEAL_SHARE = 0.25
"""The share of a link's time that a snapshot for another replica may take."""
MOST_ROUNDS = 8
"""So many rounds after the one before which a snapshot was due, it will not come any more."""
OFFER_LOOK_S = 0.5

Found = TypeVar("Found")


class Offers:
    """The offers of one rank of a replica. Sums lie in `buffers`, and go back there. Those for replicas that
    heal take at most `kept_bytes`, except for a few: then the others wait.
    """

    def __init__(self, replica: int, buffers: Buffers, kept_bytes: int = KEPT_BYTES) -> None:
        self._replica, self._buffers, self._kept_bytes = replica, buffers, kept_bytes
        self.peak_bytes = 0
        """The most that sums and snapshots for other replicas took at a time."""
        self._changed = threading.Condition()
        self._kept: dict[int, RoundSum] = {}
        self._next = 0
        """The first batch whose sum has not been had."""
        self._snapshots: dict[int, Snapshot] = {}
        self._due: set[int] = set()
        self._is_closed = False

    def begin(self, first: int) -> None:
        """Of the rounds below `first` this rank will have no sums."""
        with self._changed:
            self._next = first

    def note(self, word: CoordinatorReply) -> None:
        """Take notice of what others need, before any sum is given away that an update is made from."""
        asked = {heal.batch for heal in word.heals if heal.donor == self._replica}
        with self._changed:
            self._due |= asked - self._snapshots.keys()
            self._due &= asked
            self._snapshots = {batch: one for batch, one in self._snapshots.items() if batch in asked}
            kept = max(word.kept[0] if word.kept else 0, min([self._next - MOST_FOR_MEMBERS, *asked]))
            free = [self._kept.pop(batch) for batch in list(self._kept) if batch < kept]
        for result in free:
            self._buffers.give_back(result)

    def keep(self, batch: int, result: RoundSum) -> None:
        """A committed sum, for whoever comes late."""
        with self._changed:
            self._kept[batch], self._next = result, batch + 1
            self._note_bytes()
            self._changed.notify_all()

    @property
    def is_full(self) -> bool:
        """Whether others have to catch up first, as this rank keeps all that it can for them."""
        num = len(self._kept)
        if num < LEAST_KEPT:
            return False
        return num * _num_bytes(next(iter(self._kept.values())).flats) >= self._kept_bytes

    def is_due(self, batch: int) -> bool:
        """Whether a snapshot after so many updates is wanted for another replica."""
        return batch in self._due

    def provide(self, snapshot: Snapshot) -> None:
        """Here is one that was due."""
        with self._changed:
            self._due.discard(snapshot.num_trained)
            self._snapshots[snapshot.num_trained] = snapshot
            self._note_bytes()
            self._changed.notify_all()

    def answer(self, made: socket.socket, what: int, batch: int) -> None:
        """Give another rank what it asks for, once it is there; return where it will not be."""
        if what == SUM:
            result = self._found(made, lambda: self._kept.get(batch), last=batch)
            if result is None or result.summed is None:
                return
            one = result.summed
            words = {"holds": one.holds.hex(), "weight": one.weight, "means": one.means}
            send_tensors(made, {**words, "numbers": one.numbers}, result.flats)
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

    def _note_bytes(self) -> None:
        sums = len(self._kept) * _num_bytes(next(iter(self._kept.values())).flats) if self._kept else 0
        snapshots = sum(_num_bytes(one.tensors.values()) for one in self._snapshots.values())
        self.peak_bytes = max(self.peak_bytes, sums + snapshots)

    def _found(self, made: socket.socket, find: Callable[[], Found | None], *, last: int) -> Found | None:
        """What was asked for, once it is there. None where all rounds up to the last one have been without
        it, and where who asks has hung up.
        """
        with self._changed:
            while (found := find()) is None:
                if self._is_closed or self._next > last or has_hung_up(made):
                    return None
                self._changed.wait(OFFER_LOOK_S)
            return found


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(one.nbytes for one in tensors)


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
