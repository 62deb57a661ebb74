"""All that a coordinator knows, and what happens to it."""

from dataclasses import dataclass, field

from bireme.sync.coordinator.dealing import Dealing
from bireme.sync.coordinator.groups import GroupState
from bireme.sync.coordinator.ledger_line import Began, Committed
from bireme.sync.coordinator.membership import Membership
from bireme.sync.coordinator.messages import (
    Commit,
    CoordinatorReply,
    End,
    Gone,
    GroupReply,
    Heal,
    Incarnation,
    RankId,
    Report,
)
from bireme.sync.coordinator.paces import Paces
from bireme.sync.coordinator.rounds import RoundSequence
from bireme.sync.coordinator.samples import Pool
from bireme.sync.coordinator.settings import CoordinatorSettings

__all__ = ["CoordinatorState", "CoordinatorStep", "Ended", "Event", "Tick"]


@dataclass(frozen=True, slots=True)
class Ended:
    """A start of a replica is over for certain: who started its processes has seen one of them end, and will
    end the others.
    """

    life: Incarnation


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Report | Ended | Tick


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """A coordinator. `number` is that of its last word, `heals` are of replicas that are no members yet.

    `dealt` is the first batch that has not been dealt, of all replicas in `quorum`, else of each. `trained`
    says of each replica and stage, or line, up to which batch its samples are in weights that others have.
    """

    settings: CoordinatorSettings
    membership: Membership
    lines: tuple[RoundSequence, ...]
    pool: Pool
    dealing: Dealing
    number: int = 0
    heals: tuple[Heal, ...] = ()
    gone: tuple[Gone, ...] = ()
    """The last life of each replica that ceased to be a member."""
    commits: tuple[Commit, ...] = ()
    dealt: int = 0
    dealt_to: dict[int, int] = field(default_factory=dict)
    trained: dict[tuple[int, int], int] = field(default_factory=dict)
    ends: tuple[End, ...] = ()
    groups: GroupState | None = None
    group_words: dict[tuple[int, int], GroupReply] = field(default_factory=dict)
    paces: Paces = field(default_factory=Paces)
    first_heard_s: float | None = None
    after: tuple[int, int] = (0, 0)
    """The word from which it took up."""
    settled_s: float = 0.0
    """When it was last seen to what follows from what is known."""
    still_s: float | None = None
    """Since when all ranks wait for each other, and nothing has happened."""
    standstill: str = ""
    """Why the run ends, once that has been so for too long."""

    @property
    def contributors(self) -> tuple[int, ...]:
        """The replicas that train the next batch that is dealt."""
        entering = [one.replica for one in self.heals if one.first is not None and one.first <= self.dealt]
        return tuple(sorted([*self.membership.replicas, *entering]))


@dataclass(frozen=True, slots=True)
class CoordinatorStep:
    """What an event leads to: words for ranks, and lines for the ledger, which come before the words. Lines
    that are `is_lasting` must be on the disk by then, with all before them, and not only written.
    """

    state: CoordinatorState
    words: tuple[tuple[RankId, CoordinatorReply], ...] = ()
    lines: tuple[Began | Committed, ...] = ()
    is_lasting: bool = True
