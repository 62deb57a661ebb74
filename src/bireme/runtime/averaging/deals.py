"""The batches of a replica as one of its ranks learns of them: what was dealt, and where its window ends."""

import threading
from collections.abc import Callable
from dataclasses import replace

from bireme.runtime.quorum.job import deal_in
from bireme.sync.coordinator.messages import CoordinatorReply, Deal, End, RankId, Window

__all__ = ["Deals"]

LEAST_KEPT = 64
"""Deals that are known of batches before the newest."""

WaitFor = Callable[[Callable[[CoordinatorReply], bool], str], CoordinatorReply]


class Deals:
    """`wait_for` waits for a word of which something is so, which it is told in words; `say` reports what is
    here.
    """

    def __init__(self, own: RankId, wait_for: WaitFor, say: Callable[[], None]) -> None:
        self.window = Window(0, 0)
        self.wants = self.asked_to_end = self.ended_at = 0
        """The first batch that is not wanted yet, how many windows were asked to end, and the place at which
        the present one ends, as far as that is known."""
        self._own, self._wait_for, self._say = own, wait_for, say
        self._known: dict[int, Deal] = {}
        self._lock = threading.Lock()

    def enter(self, number: int, until: int) -> None:
        """The next batches are of that window, which has the places below `until`."""
        self.window = replace(self.window, number=number, until=until)
        self.ended_at = until

    def ask_end(self) -> None:
        """Ask for the present window to end."""
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

        def end_in(word: CoordinatorReply) -> End | None:
            own = self._own.replica, self.window.number
            ends = (one for one in word.ends if (one.replica, one.window) == own and batch >= one.batch)
            return next(ends, None)

        word = self._wait_for(
            lambda word: end_in(word) is not None or deal_in(word, self._own, batch) is not None,
            "samples",
        )
        if (end := end_in(word)) is not None:
            self.ended_at = end.until
            return None
        deal = deal_in(word, self._own, batch)
        assert deal is not None, "it was waited for"
        self._known[batch] = deal
        self._known.pop(batch - LEAST_KEPT, None)
        return deal

    def of(self, batch: int) -> Deal:
        """What was dealt for a batch that is under way."""
        return self._known[batch]
