"""What an agent works with: the coordinator it talks to, a batch whose sum is wanted, what words say."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from bireme.runtime.quorum.results import RoundSum
from bireme.sync.coordinator.messages import CoordinatorReply, Deal, Grant, Heal, Member, RankId
from bireme.sync.quorum.line import LineBroken
from bireme.sync.quorum.ring import Contribution

__all__ = ["Coordinator", "DroppedError", "SumJob", "deal_in", "heal_in", "is_in", "member_in"]


class DroppedError(Exception):
    """This replica is no member any more: its life is over, and the launcher begins its next one."""


class Coordinator(Protocol):
    """A rank's way to the coordinator. It reports by itself as often as its lease wants it."""

    @property
    def word(self) -> CoordinatorReply:
        """The last word."""

    def say(self, *, address: str, **fields: Any) -> None:
        """Report these fields from now on. Does not wait."""

    def on_word(self, act: Callable[[], None]) -> None:
        """Have something called whenever there is a new word, from any thread that holds no lock."""

    def close(self, *, is_leaving: bool) -> None:
        """Say no more; where it is leaving, say so."""


@dataclass(slots=True, eq=False)
class SumJob:
    """A batch that this rank wants the committed sum of, in flats `like` these.

    `prepare`, which is called in the agent's thread, fills in the contribution and the seconds that it kept
    the rank busy; without it this replica has no part in the batch. `after` is called there with the result.
    """

    batch: int
    like: Sequence[Tensor]
    prepare: Callable[["SumJob"], None] | None = None
    after: Callable[[RoundSum], None] | None = None
    busy_s: float = 0.0
    contribution: Contribution | None = None
    result: RoundSum | None = None
    parts: tuple[int, ...] = ()
    """The replicas whose samples the committed sum is of."""
    error: BaseException | None = None
    is_done: threading.Event = field(default_factory=threading.Event)


def deal_in(word: CoordinatorReply, own: RankId, batch: int) -> Deal | None:
    """What a rank's replica trains in a batch, if that is dealt."""
    return next((one for one in word.deals if (one.replica, one.batch) == (own.replica, batch)), None)


def heal_in(word: CoordinatorReply, own: RankId) -> Heal | None:
    """Where a rank's replica gets its state from, if it is no member yet."""
    return next((one for one in word.heals if one.replica == own.replica), None)


def is_in(own: RankId, grant: Grant) -> bool:
    """Whether a rank's replica has a part in a round."""
    return any(part.replica == own.replica for part in grant.parts)


def member_in(word: CoordinatorReply, replica: int) -> Member:
    """A replica that lives. Raises `LineBroken` if it does not."""
    found = next((one for one in word.members if one.replica == replica), None)
    if found is None or not all(found.addresses):
        raise LineBroken(replica, "it is no member any more")
    return found
