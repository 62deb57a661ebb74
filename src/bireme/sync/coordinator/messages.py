"""A rank sends a `Report`, a launcher a `Notice`, and the coordinator a `CoordinatorReply`, here a *word*.

Each message has everything that holds now, not what has changed. So the next one makes a lost one good, and
one that comes twice or late changes nothing. A rank reports every change, and often enough for its lease; the
coordinator answers every report, and sends a new word to all ranks whose word has changed.

    rank                                  coordinator
     │  Report: I am replica 1, stage 0        │
     │ ──────────────────────────────────────▶ │
     │  Word: epoch 3, your samples of batch 7 │
     │ ◀────────────────────────────────────── │
     │  Report: my contribution 7 is ready     │
     │ ──────────────────────────────────────▶ │
     │  Word: grant (batch 7, attempt 0, …)    │
     │ ◀────────────────────────────────────── │
     │  Report: 7 is summed in attempt 0       │
     │ ──────────────────────────────────────▶ │
     │  Word: 7 is committed                   │
     │ ◀────────────────────────────────────── │

**Epochs.** The high part of a membership epoch is the *term* of its coordinator: one that takes up after
another begins at a later multiple of `TERM`. A message with an older epoch changes nothing.

**Rounds.** In `quorum` there is one line of rounds: the sums of gradients, batch by batch. In `diloco` each
fragment has a line: the means of its drift. Rounds of a line are numbered from 0 without gaps; `committed` of
them count, so that is the number of the next.

**Windows.** In `groups` and `diloco` replicas train batches of their own until the places of a window are
assigned. Then they drain and make one mean, a round of the last line with the number of the window.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from bireme.errors import BiremeError

if TYPE_CHECKING:
    from dataclasses import replace as replace  # with its check of names
else:

    def replace(one, **values):
        """A copy of a frozen dataclass with slots, with other values in these fields. It calls no `__init__`:
        for the state of a coordinator it takes half the time of `dataclasses.replace`.
        """
        kind = type(one)
        setters, read = _fields_of(kind)
        copy = object.__new__(kind)
        for setter, value in zip(setters.values(), read(one), strict=True):
            setter(copy, value)
        return put(copy, **values)


_Copy = TypeVar("_Copy")


def put(copy: _Copy, **values: Any) -> _Copy:
    """Set these fields of a copy that `replace` has made and that nothing else refers to yet; returns it."""
    kind: Any = type(copy)
    setters, _ = _fields_of(kind)
    for name, value in values.items():
        setters[name](copy, value)
    return copy


@cache
def _fields_of(kind: Any) -> tuple[dict[str, Callable[[Any, Any], None]], Callable[[Any], tuple[Any, ...]]]:
    """How to set each field of a dataclass with slots, and how to read all of several."""
    names = [one.name for one in fields(kind)]
    return {name: vars(kind)[name].__set__ for name in names}, attrgetter(*names)


TERM = 1_000_000
"""Epochs of one term; the epoch e is of the term e // TERM."""
MANY = 16
"""With more members than this, news that no rank waits for goes with the next answer to each rank."""


@dataclass(frozen=True, slots=True, order=True)
class Incarnation:
    """One start of a replica, counted from 0. What an earlier one says changes nothing."""

    replica: int
    life: int


class _OfIncarnation:
    """What is of one start of a replica."""

    __slots__ = ()
    replica: int
    life: int

    @property
    def own_life(self) -> Incarnation:
        """The start of the replica."""
        return Incarnation(self.replica, self.life)


@dataclass(frozen=True, slots=True, order=True)
class RankId(_OfIncarnation):
    """A rank: its replica, which start of that replica it is of, and its place in it."""

    replica: int
    life: int
    stage: int


@dataclass(frozen=True, slots=True, order=True)
class SamplePlaces:
    """Samples by their places in the order of the run (`bireme.train.data.placing`), without `end` itself."""

    begin: int
    end: int

    @property
    def count(self) -> int:
        """How many they are."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class RoundPart:
    """What a replica contributes to a round: that many samples. The sum is weighted by them."""

    replica: int
    num_samples: int


# What a rank says.


@dataclass(frozen=True, slots=True)
class RoundAt:
    """Where a rank is in a line of rounds: it has the results of `committed` rounds.

    It has kept its contribution to the round `ready`, and holds the sum of the round `summed` as of
    `attempt`. `lost` are replicas that it could not reach in that attempt, or as the source of a committed
    sum. `last` is the committed round that it took last, without sources. Its device was busy with the
    contribution for `busy_s`. In `diloco` the contribution is of `num_samples`, and the first `trained`
    batches are in it or in earlier ones. It `is_due` if the rank waits for the round even if no replica has
    samples in it.
    """

    committed: int = 0
    ready: int | None = None
    summed: int | None = None
    attempt: int = 0
    lost: tuple[int, ...] = ()
    busy_s: float = 0.0
    num_samples: int = 0
    trained: int = 0
    is_due: bool = False
    last: "Commit | None" = None


@dataclass(frozen=True, slots=True)
class GroupAt:
    """Where a rank is in `groups`: it waits to average its weights after the batch `arrived`, as opener for
    `wait_s`. It holds the mean of the group `summed` as of `attempt`, in which it could not reach a member if
    it `is_broken`. If it `is_drained`, it has no batch left in its window. It took the settled group `last`.
    """

    arrived: int | None = None
    wait_s: float = 0.0
    summed: int | None = None
    attempt: int = 0
    is_broken: bool = False
    is_drained: bool = False
    last: "GroupReply | None" = None


def joint(places: Sequence[GroupAt | None]) -> GroupAt | None:
    """Where a replica is whose ranks are there: at the earliest of their batches, and it holds a mean, or has
    drained, once all of them do. None if a rank is nowhere yet.
    """
    found = [one for one in places if one is not None]
    if not found or len(found) < len(places):
        return None
    arrived = [one.arrived for one in found if one.arrived is not None]
    sums = {(one.summed, one.attempt) for one in found}
    broken = [one.attempt for one in found if one.is_broken]
    summed, attempt = sums.pop() if len(sums) == 1 else (None, max(broken, default=0))
    return GroupAt(
        min(arrived) if len(arrived) == len(found) else None,
        max(one.wait_s for one in found),
        summed,
        attempt,
        is_broken=bool(broken),
        is_drained=all(one.is_drained for one in found),
    )


@dataclass(frozen=True, slots=True)
class Window:
    """The batches between two means over all replicas, in which the places below `until` are assigned."""

    number: int
    until: int


@dataclass(frozen=True, slots=True)
class Report:
    """All that a rank has to say. `number` grows with each report of this rank.

    It knows the `epoch` (0: none), and other ranks of its stage reach it at `address`. It wants the samples
    of all batches below `wants`. `rounds` has one entry for each line. A rank that heals has loaded the
    snapshot after `healed` batches. In `groups` and `diloco` it is in a `window`, and has asked for the first
    `means` windows to end. `waits` names what it waits for, once nothing has come for a while. A rank that
    `is_leaving` will say no more; one that `is_empty` was started after rounds counted, and can only heal. A
    coordinator that takes up needs `known` of a majority; it is sent until the coordinator has answered.
    """

    rank: RankId
    number: int
    epoch: int
    address: str
    wants: int = 0
    rounds: tuple[RoundAt, ...] = ()
    group: GroupAt | None = None
    healed: int | None = None
    window: Window | None = None
    means: int = 0
    waits: str = ""
    is_leaving: bool = False
    is_empty: bool = False
    known: "Known | None" = None

    def at(self, line: int) -> RoundAt:
        """Where the rank is in a line of rounds."""
        return self.rounds[line] if line < len(self.rounds) else RoundAt()


@dataclass(frozen=True, slots=True)
class HostStart:
    """The incarnation of a replica over several hosts that a host can start, or has started its ranks of. No
    rank of an earlier one runs there. `store` is the address of the host's store for such ranks.
    """

    host: int
    incarnation: Incarnation
    store: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """What the launcher of a host says: these starts of its replicas are over for certain, and it `starts`
    its ranks of replicas over several hosts. The answer, also of a host that does not coordinate, has the
    newest starts of all hosts that were heard there.
    """

    ended: tuple[Incarnation, ...]
    starts: tuple[HostStart, ...] = ()


# What the coordinator answers.


@dataclass(frozen=True, slots=True)
class Member(_OfIncarnation):
    """A replica that lives: `addresses` are those of its ranks, stage by stage. It trains the batches from
    `first` on.
    """

    replica: int
    life: int
    addresses: tuple[str, ...]
    first: int = 0


class Absence(StrEnum):
    """Why a replica is no member any more, as the coordinator has seen it."""

    SILENT = "silent"
    """It was not heard of for the lease: its host may be cut off, stopped or dead."""
    ENDED = "ended"
    """Its processes have ended."""
    LEFT = "left"
    """It has done all its batches."""


@dataclass(frozen=True, slots=True)
class Gone(_OfIncarnation):
    """An incarnation of a replica that is no member any more, after `step` steps of the run: committed in
    `quorum`, else assigned. The first rank of the replica was at `address`.
    """

    replica: int
    life: int
    step: int
    why: Absence
    address: str = ""


@dataclass(frozen=True, slots=True)
class Grant:
    """A round that runs now: every stage makes the sum over `parts`, which is used once it is committed. A
    later attempt replaces an earlier one; in a later term attempts go on from that term's multiple of `TERM`.
    """

    line: int
    round: int
    attempt: int
    parts: tuple[RoundPart, ...]


@dataclass(frozen=True, slots=True)
class SumSource:
    """A replica that has no part in a committed round gets its sum from another one, stage by stage."""

    target: int
    source: int


@dataclass(frozen=True, slots=True)
class Commit:
    """A round that counts. Those in `parts` use the sum they hold; the others get it from their source."""

    line: int
    round: int
    attempt: int
    parts: tuple[RoundPart, ...]
    sources: tuple[SumSource, ...] = ()


@dataclass(frozen=True, slots=True)
class Deal:
    """The samples that a replica trains in a batch. They never change once they are assigned."""

    replica: int
    batch: int
    samples: tuple[SamplePlaces, ...]

    @property
    def num_samples(self) -> int:
        """How many they are."""
        return sum(one.count for one in self.samples)


@dataclass(frozen=True, slots=True)
class End:
    """In that window a replica has no batch from `batch` on; the window ends at the place `until`, which is
    the end of a batch of the run.
    """

    replica: int
    window: int
    batch: int
    until: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a replica is that trains batches of its own: those below `dealt` were assigned to it. Of each
    stage, or line of rounds, the samples of its first `trained` batches are in weights that others have too.
    """

    replica: int
    dealt: int
    trained: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Heal:
    """`replica` gets a snapshot of every stage from `donor`, after `batch` updates, and the sums of all
    rounds from `batch` on. Once it has nearly caught up, it trains the batches from `first` on, and is a
    member in the epoch that begins there. With another donor it starts again. `addresses` are those of its
    ranks.
    """

    replica: int
    donor: int
    batch: int
    addresses: tuple[str, ...] = ()
    first: int | None = None


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A replica in a group, after its own batch."""

    replica: int
    batch: int


@dataclass(frozen=True, slots=True)
class GroupReply:
    """The group of a rank's last arrival. Each of the `members`, in the same order for all, makes the plain
    mean of the kept weights, and uses it once it `is_settled`.
    """

    number: int
    attempt: int
    members: tuple[GroupMember, ...]
    is_settled: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorReply:
    """All that holds, told to a rank. `number` grows with everything that changes in a term.

    `committed` rounds of each line count; `commits` are the first of them that the rank has not said it has.
    No rank needs to keep the sums of rounds below `kept`: all members have them. `deals` are the samples in
    batches that are not committed, of all replicas; `waiting` were assigned and lost, and are assigned again
    first; from the place `fresh` on none have been assigned. `ends` are those of the last windows of
    replicas, `progress` is where these are. Of each set of `voters` enough must know the epoch before it
    `is_installed`, and nothing is granted or committed before. A coordinator took up from the word at the
    place `after`. `gone` has the last incarnation of each replica that ceased to be a member.

    `group` is of the rank's own last arrival. If all members wait for each other for ever, they end for the
    reason in `standstill`. A rank that `is_dropped` ends, for its replica to begin its next incarnation. The
    run `is_lost` if rounds count and no replica is left that has their weights.
    """

    epoch: int
    number: int
    committed: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    members: tuple[Member, ...] = ()
    gone: tuple[Gone, ...] = ()
    voters: tuple[tuple[Incarnation, ...], ...] = ()
    is_installed: bool = False
    after: tuple[int, int] = (0, 0)
    grants: tuple[Grant, ...] = ()
    commits: tuple[Commit, ...] = ()
    deals: tuple[Deal, ...] = ()
    ends: tuple[End, ...] = ()
    progress: tuple[Progress, ...] = ()
    waiting: tuple[SamplePlaces, ...] = ()
    fresh: int = 0
    heals: tuple[Heal, ...] = ()
    group: GroupReply | None = None
    standstill: str = ""
    is_dropped: bool = False
    is_lost: bool = False

    def is_confirmed_at_once(self, places: Sequence[RoundAt]) -> bool:
        """Whether a rank at these places in the rounds reports at once that it knows the epoch. With many
        members a rank that still computes confirms it with its next report.
        """
        return len(self.members) <= MANY or any(one.ready is not None for one in places)

    @property
    def place(self) -> tuple[int, int]:
        """What orders words: of two the later is greater."""
        return self.epoch, self.number


@dataclass(frozen=True, slots=True)
class Known:
    """What a rank was told last: the last word of an epoch that was installed, and the last one if its epoch
    was not installed yet.
    """

    held: CoordinatorReply | None = None
    offered: CoordinatorReply | None = None

    @property
    def last(self) -> CoordinatorReply | None:
        """The last word."""
        return self.offered or self.held

    def with_word(self, word: CoordinatorReply) -> "Known | None":
        """With one more word; None if the rank must not take it: it is late, or of a coordinator that others
        have replaced, or of one that took up without knowing what this rank was told.
        """
        if self.last is not None and word.place <= self.last.place:
            return None
        held = self.held
        if held is not None and word.epoch // TERM != held.epoch // TERM and word.after < held.place:
            return None
        return Known(word) if word.is_installed else Known(held, word)


# Messages between ranks and the coordinator as lines of JSON.

Message = TypeVar("Message", Report, Notice, CoordinatorReply)


def encode(message: Report | Notice | CoordinatorReply) -> bytes:
    """A message as one line of JSON, without its end. Fields that hold their default are left out."""
    return _adapter(cast("Hashable", type(message))).dump_json(message, exclude_defaults=True)


def decode(kind: type[Message], line: bytes) -> Message:
    """The message in a line that `encode` wrote."""
    try:
        return cast("Message", _adapter(cast("Hashable", kind)).validate_json(line))
    except ValidationError as error:
        raise BiremeError(
            f"A line between a rank and the coordinator is no {kind.__name__}: "
            f"{error.errors()[0]['msg']}. Use one version of Bireme on all machines."
        ) from None


def is_notice(line: bytes) -> bool:
    """Whether a line is a `Notice`, which both sides send besides what they mostly send."""
    return line.startswith(b'{"ended"')


@cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast("type[Any]", kind))
