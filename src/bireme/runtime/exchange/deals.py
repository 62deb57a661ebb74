"""The batches of a replica as its ranks learn of them: what was assigned, and where its window ends."""

import threading
from collections.abc import Callable
from dataclasses import replace

from bireme.sync.coordinator.messages import (
    CoordinatorReply,
    Deal,
    End,
    Heal,
    Member,
    RankId,
    SamplePlaces,
    Window,
)
from bireme.sync.rounds.round_group import LineBroken

_LEAST_KEPT = 64
"""Assignments that are known of batches before the newest."""

_WaitFor = Callable[[Callable[[CoordinatorReply], bool], str], CoordinatorReply]


def heal_in(word: CoordinatorReply, own: RankId) -> Heal | None:
    """Where a rank's replica gets its state from, if it is no member yet."""
    return next((one for one in word.heals if one.replica == own.replica), None)


def member_in(word: CoordinatorReply, replica: int) -> Member:
    """A replica that lives. Raises `LineBroken` if it does not."""
    found = next((one for one in word.members if one.replica == replica), None)
    if found is None or not all(found.addresses):
        raise LineBroken(replica, "it is no member any more")
    return found


class Deals:
    """The batches of one replica. `wait_for` waits for a word of which something is so, which it is told in
    words; `say` reports what is here. Of batches that all replicas train together one may count without this
    replica, which then trains any samples: as many as before, or `spare` at first.
    """

    def __init__(self, own: RankId, wait_for: _WaitFor, say: Callable[[], None], spare: int | None) -> None:
        self.window: Window | None = None
        """The present one, where each replica trains batches of its own."""
        self.wants = self.asked_to_end = self.ended_at = 0
        """The first batch that is not wanted yet, how many windows were asked to end, and the place at which
        the present one ends, as far as that is known."""
        self._own, self._wait_for, self._say = own, wait_for, say
        self._spare = None if spare is None else Deal(own.replica, 0, (SamplePlaces(0, spare),))
        self._known: dict[int, Deal] = {}
        self._lock = threading.Lock()

    def enter(self, number: int, until: int) -> None:
        """The next batches are of that window, which has the places below `until`."""
        self.window = Window(number, until)
        self.ended_at = until

    def ask_end(self) -> None:
        """Ask for the present window to end."""
        assert self.window is not None, "the rank has begun in one"
        if self.asked_to_end <= self.window.number:
            self.asked_to_end = self.window.number + 1
            self._say()

    def want(self, batch: int) -> bool:
        """Want a batch from the next report on; False if it was wanted before."""
        with self._lock:  # whoever reads batches and whoever trains them want some
            is_new = batch >= self.wants
            self.wants = max(self.wants, batch + 1)
        return is_new

    def dealt(self, batch: int) -> Deal | None:
        """The samples of a batch; None if its window has none. Waits until that is known."""
        if self.want(batch):
            self._say()
        word = self._wait_for(
            lambda word: self._deal(word, batch) is not None or self._end(word, batch) is not None,
            "samples",
        )
        if (end := self._end(word, batch)) is not None:
            self.ended_at = end.until
            return None
        deal = self._deal(word, batch)
        assert deal is not None, "it was waited for"
        self._known[batch] = deal
        self._known.pop(batch - _LEAST_KEPT, None)
        if self._spare is not None:
            self._spare = deal
        return deal

    def of(self, batch: int) -> Deal:
        """What was assigned for a batch that is under way."""
        return self._known[batch]

    def _deal(self, word: CoordinatorReply, batch: int) -> Deal | None:
        own = self._own.replica, batch
        found = next((one for one in word.deals if (one.replica, one.batch) == own), None)
        if found is None and self._spare is not None and word.committed and word.committed[0] > batch:
            return replace(self._spare, batch=batch)  # what is made of it counts nowhere
        return found

    def _end(self, word: CoordinatorReply, batch: int) -> End | None:
        """Where the present window ends, if that is before a batch."""
        if self.window is None:
            return None
        own = self._own.replica, self.window.number
        ends = (one for one in word.ends if (one.replica, one.window) == own and batch >= one.batch)
        return next(ends, None)
