"""What a rank has for those of its stage in other replicas: sums that count, and snapshots to heal from."""

import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from bireme.runtime.exchange.peer_connections import SNAPSHOT, SUM, listed, send_tensors
from bireme.runtime.exchange.rounds import PLACES, RoundLine, RoundSum
from bireme.runtime.snapshot import Snapshot
from bireme.sync.coordinator.messages import CoordinatorReply, Window
from bireme.sync.rounds.contribution import Summed
from bireme.wire.listener import HEAL_SHARE

KEPT_BYTES = 1 << 30
"""Sums of batches that replicas which are late may still ask for take at most this, except for a few."""
LEAST_KEPT = 4
MOST_BEHIND = 8
"""A member that lags the others by more batches starts again: to heal, it need not compute."""
MOST_FOR_MEMBERS = MOST_BEHIND + 4
"""Sums of batches kept for members that are late. A member that lacks an older one starts again; a few more
are kept because it may have asked a moment ago.
"""
_MOST_ROUNDS = 8
"""That many batches after the one before which a snapshot was due, it will not come any more."""
_LOOK_S = 0.5

Found = TypeVar("Found")


@dataclass(eq=False)
class ForOthers:
    """What one rank of a replica has; sums are those that its `lines` keep. All share the agent's `changed`.

    Where rounds are `of_batches`, a snapshot is of exactly the batch that is asked for, and sums take at most
    `kept_bytes`, except for a few: then the others wait. Else it is of a batch of the donor's own, that one
    or the next that the donor begins, and says which rounds are in it.
    """

    _replica: int
    _lines: Callable[[], Sequence[RoundLine]]
    _changed: threading.Condition
    of_batches: bool
    kept_bytes: int = KEPT_BYTES
    peak_bytes: int = field(default=0, init=False)
    """The most that sums and snapshots for other replicas took at a time."""
    _snapshots: dict[int, tuple[Snapshot, dict[str, Any]]] = field(default_factory=dict, init=False)
    """With where the run was then: the rounds of each line that are in it, and the window."""
    _is_closed: bool = field(default=False, init=False)

    def note(self, word: CoordinatorReply) -> None:
        """Let go of what all others have."""
        asked = self._asked(word)
        with self._changed:
            self._snapshots = {name: one for name, one in self._snapshots.items() if name in asked}
        for line, kept in zip(self._lines(), word.kept, strict=False):
            if self.of_batches:
                kept = max(kept, min([line.next - MOST_FOR_MEMBERS, *asked]))  # noqa: PLW2901
            with self._changed:
                free = [line.kept.pop(number) for number in list(line.kept) if number < kept]
            for result in free:
                result.give_back()

    def note_bytes(self) -> None:
        """There is one more sum or snapshot."""
        sums = sum(one.num_bytes for line in self._lines() for one in line.kept.values())
        tensors = (one for snapshot, _ in self._snapshots.values() for one in snapshot.tensors.values())
        self.peak_bytes = max(self.peak_bytes, sums + sum(one.nbytes for one in tensors))

    def is_full(self, line: RoundLine) -> bool:
        """Whether others have to catch up first, as this rank keeps all that it can for them."""
        kept = line.kept.values()
        return len(kept) >= LEAST_KEPT and sum(one.num_bytes for one in kept) >= self.kept_bytes

    def due(self, word: CoordinatorReply, batch: int) -> int | None:
        """The name of a snapshot that another replica waits for, if one is due before a batch's update."""
        names = self._asked(word) - self._snapshots.keys()
        if self.of_batches:
            return batch if batch in names else None
        return min((name for name in names if name <= batch), default=None)

    def provide(self, name: int, snapshot: Snapshot, window: Window | None) -> None:
        """Here is one that was due, from within a window."""
        with self._changed:
            if window is None:
                where: dict[str, Any] = {"used": (snapshot.num_trained,)}
            else:
                used = tuple(line.at.committed for line in self._lines())
                where = {"used": used, "window": window.number, "until": window.until}
            self._snapshots[name] = snapshot, where
            self.note_bytes()
            self._changed.notify_all()

    def answer(self, made: socket.socket, what: int, name: int) -> None:
        """Give another rank what it asks for, once it is there; return where it will not be."""
        if what == SUM:
            line, number = self._lines()[name >> PLACES], name & ((1 << PLACES) - 1)
            result = self._found(made, lambda: line.kept.get(number), lambda: line.next > number)
            if result is not None:
                summed = result.summed
                words = {"holds": summed.holds.hex(), "weight": summed.weight, "means": summed.means}
                words |= {"numbers": summed.numbers, "parts": result.parts, "tensors": listed(summed.more)}
                send_tensors(made, words, [*result.flats, *summed.more.values()])
        elif what == SNAPSHOT:
            # An evaluation may take longer than any timeout, and the next update follows it.
            found = self._found(made, lambda: self._snapshots.get(name), lambda: self._is_past(name))
            if found is not None:
                snapshot, where = found
                words = {"num_trained": snapshot.num_trained, "clip_scale": snapshot.clip_scale, **where}
                words["tensors"] = listed(snapshot.tensors)
                send_tensors(made, words, snapshot.tensors.values(), share=HEAL_SHARE)

    def close(self) -> None:
        """There is nothing more to be had."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _asked(self, word: CoordinatorReply) -> set[int]:
        """The names of the snapshots that are wanted of this replica."""
        return {heal.batch for heal in word.heals if heal.donor == self._replica}

    def _is_past(self, name: int) -> bool:
        """Whether the rank has had its batch before which a snapshot was due."""
        return self.of_batches and self._lines()[0].next > name + _MOST_ROUNDS

    def _found(
        self, made: socket.socket, find: Callable[[], Found | None], is_over: Callable[[], bool]
    ) -> Found | None:
        """What was asked for, once it is there. None if it will not come, or if who asks has hung up."""
        with self._changed:
            while (found := find()) is None:
                if self._is_closed or is_over() or has_hung_up(made):
                    return None
                self._changed.wait(_LOOK_S)
            return found


def take_sum(result: RoundSum, words: Mapping[str, Any], more: Mapping[str, Tensor]) -> None:
    """Note what the text that announces a sum and its tensors say of it."""
    means, numbers = tuple(words["means"]), tuple(words["numbers"])
    result.summed = Summed(bytes.fromhex(words["holds"]), words["weight"], means, numbers, more)
    result.parts, result.is_made_here = tuple(words["parts"]), False


def has_hung_up(made: socket.socket) -> bool:
    """Whether the other end is gone, which says nothing once it has asked."""
    poller = select.poll()
    poller.register(made, select.POLLIN)
    try:
        return bool(poller.poll(0)) and not made.recv(1, socket.MSG_PEEK)
    except OSError:
        return True
