"""The samples of a run: which are assigned to whom, which wait to be assigned again, and which are fresh.

A sample is a place in the run's order. Each place is assigned, and then either committed, which ends it, or
returned, so that it waits and is assigned again before any fresh one. So every place is committed once at
most, and all places below `fresh` are committed, assigned or waiting.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from operator import attrgetter
from statistics import fmean
from typing import Any

from bireme.balance import Balance, Policy, ShareLimits, begun, fair_shares, rebalance
from bireme.sync.coordinator.messages import TERM, Deal, SamplePlaces, replace

# What a coordinator is told before it begins: the same on all machines, so that any of them can take up.

SILENT_LEASES = 0.4
"""Leases without a report after which a replica is silent: it has missed two of the five in a lease."""


class SyncMode(StrEnum):
    """How replicas agree, where that may change while they train."""

    QUORUM = "quorum"
    """Gradients of the living, in every batch."""
    GROUPS = "groups"
    """Weights within the group that is ready."""
    DILOCO = "diloco"
    """The drift since the last round, a fragment at a time."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How groups form: they connect all replicas at least every `connect_every` batches of each.

    With more than `pairs_above` replicas a group that is not forced is cut into pairs. Groups are of ranks,
    each rank of a replica with others of its stage, or `of_replicas`, with all their ranks: where ranks share
    weights these are averaged over the same replicas everywhere.
    """

    connect_every: int = 10
    pairs_above: int = 8
    of_replicas: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """A run of `num_replicas` pipelines of `num_stages` ranks.

    A batch has `batch_size` samples whatever the members are; `limits` are the fewest and the most that each
    replica can train of it. A replica that was not heard of for `lease_s` is dropped. A round may go on
    without some replicas once more than half of the members are ready and no other has come for `grace_s`.
    The run begins at the batch `first`, with the samples `waiting` and those
    from the place `fresh` on. A pass over the data has `num_samples`, 0 if it has no end. A run in which all
    replicas wait for each other ends after `timeout_s`, and not before `lease_s`, if `timeout_s` is not 0.
    Where replicas train batches of their own, shares of a window that are `is_equal` do not follow speeds.
    """

    mode: SyncMode
    num_replicas: int
    num_stages: int
    batch_size: int
    limits: ShareLimits
    lease_s: float = 10.0
    grace_s: float = 1.0
    num_lines: int = 1
    first: int = 0
    fresh: int = 0
    waiting: tuple[SamplePlaces, ...] = ()
    num_samples: int = 0
    timeout_s: float = 0.0
    is_equal: bool = False
    groups: GroupSettings = GroupSettings()

    @property
    def num_formers(self) -> int:
        """How many places a replica comes to with each batch where groups form."""
        return 1 if self.groups.of_replicas else self.num_stages

    def former_of(self, stage: int) -> int:
        """The place where a rank's groups form."""
        return 0 if self.groups.of_replicas else stage

    @property
    def averages(self) -> bool:
        """Whether replicas train batches of their own, and average weights."""
        return self.mode is not SyncMode.QUORUM

    @property
    def silent_s(self) -> float:
        """How long a replica that still is a member may say nothing before rounds go on without it."""
        return SILENT_LEASES * self.lease_s


# What is written down of each committed round, and what a coordinator writes when it begins.

LEDGER = "ledger.jsonl"
"""Its name in the folder of a run."""


@dataclass(frozen=True, slots=True)
class Began:
    """A coordinator begins, or takes up, before the batch `batch`: the places below `fresh` are committed,
    but for those in `open`. The `mode` is named where each line is of one replica's batch.
    """

    epoch: int
    batch: int
    num_samples: int
    fresh: int
    open: tuple[SamplePlaces, ...]
    mode: str = ""


@dataclass(frozen=True, slots=True)
class Committed:
    """A batch counts: `samples` of each of its `members`; `fresh` and `open` as they are after it."""

    epoch: int
    batch: int
    attempt: int
    members: tuple[int, ...]
    samples: tuple[tuple[SamplePlaces, ...], ...]
    fresh: int
    open: tuple[SamplePlaces, ...]
    returned: int = 0
    """Samples that came back so far because they did not count where they were assigned first."""

    @property
    def num_samples(self) -> int:
        """How many samples it has."""
        return sum(one.count for own in self.samples for one in own)


def ledger_document(line: Began | Committed) -> dict[str, Any]:
    """A line of the ledger: its kind, and the fields that do not hold their default."""
    kept = {one.name: getattr(line, one.name) for one in fields(line)}
    own = {one.name: _plain(kept[one.name]) for one in fields(line) if kept[one.name] != one.default}
    return {"kind": "start" if isinstance(line, Began) else "round", **own}


def _plain(value: Any) -> Any:
    """A value for JSON; a range of places is a pair."""
    if isinstance(value, SamplePlaces):
        return [value.begin, value.end]
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def in_force(records: Mapping[int, dict[str, Any]], last_term: int = -1) -> dict[int, dict[str, Any]]:
    """The lines that count, by their numbers, after lines of that term at the latest.

    A coordinator that was stopped, and wakes up after another one has taken up, may still write: nobody hears
    of it. Its lines are of an earlier term than some before them.
    """
    found = {}
    for number, record in records.items():
        epoch = record.get("epoch")
        term = epoch // TERM if isinstance(epoch, int) else last_term
        if term >= last_term:
            found[number], last_term = record, term
    return found


# How many samples of a batch each replica gets: by its speed, as long as the same replicas share a batch.
#
# While they do, `bireme.balance` says when shares change. When others share the next batch, they begin
# with the shares that fit the paces known so far.

_POLICY = Policy()

_SILENT_TIMES = 1e6
"""As how many times slower a silent replica counts: it gets as few samples as it may have."""
_RECOVERY = 0.95
"""What is left of a lateness after each round that its replica had a part in."""


@dataclass(frozen=True, slots=True)
class Dealing:
    """What is known of the speeds: `paces` are the last known seconds per sample of each replica, where they
    are measured. Who came too late since is taken to be `late` times as slow, and who is `silent` may never
    come.
    """

    batch_size: int
    limits: ShareLimits
    replicas: tuple[int, ...] = ()
    silent: frozenset[int] = frozenset()
    balance: Balance | None = None
    paces: dict[int, float] = field(default_factory=dict)
    late: dict[int, float] = field(default_factory=dict)
    known_until: dict[int, int] = field(default_factory=dict)
    """Batches below were assigned before it was known that a replica is late."""

    def among(self, replicas: tuple[int, ...], batch: int, silent: frozenset[int] = frozenset()) -> "Dealing":
        """For a batch that these replicas share, some of which are silent."""
        if (replicas, silent) == (self.replicas, self.silent):
            return self
        known = [self.paces[one] for one in replicas if one in self.paces]
        usual = fmean(known) if known else 1.0
        limits = self._own_limits(replicas)
        # What memory cannot hold is left for the next batches.
        batch_size = min(max(self.batch_size, sum(limits.least)), sum(limits.most))
        paces = [self.paces.get(one, usual) * self.late.get(one, 1.0) for one in replicas]
        paces = [
            pace * (_SILENT_TIMES if one in silent else 1.0)
            for one, pace in zip(replicas, paces, strict=True)
        ]
        shares = fair_shares(batch_size, paces, limits)
        return replace(self, replicas=replicas, silent=silent, balance=begun(shares, batch))

    def counts(self, batch: int) -> dict[int, int]:
        """The samples of each replica in a batch."""
        assert self.balance is not None, "among() comes first"
        return dict(zip(self.replicas, self.balance.at(batch), strict=True))

    def with_batch(
        self, batch: int, counts: Mapping[int, int], seconds: Mapping[int, float], *, takes_effect: int
    ) -> "Dealing":
        """After a batch: the samples that each replica trained, and the seconds that it was busy."""
        if min(seconds.values(), default=0.0) <= 0:
            return self._recovered(counts)
        paces = self.paces
        if len(counts) > 1:  # a replica alone has larger micro-batches: its pace compares with no other one
            paces = paces | {one: seconds[one] / count for one, count in counts.items() if count}
        late = {one: slowness for one, slowness in self.late.items() if one not in counts}
        if self.balance is None or seconds.keys() != set(self.replicas) or counts != self.counts(batch):
            return replace(self, paces=paces, late=late)
        busy = [seconds[one] for one in self.replicas]
        balance = rebalance(
            self.balance,
            batch,
            busy,
            limits=self._own_limits(self.replicas),
            policy=_POLICY,
            takes_effect=takes_effect,
        )
        return replace(self, balance=balance, paces=paces, late=late)

    def with_late(self, batch: int, replicas: Collection[int], *, takes_effect: int) -> "Dealing":
        """After a round that had to go on without these: each is taken to be twice as slow as was known, from
        the batch `takes_effect` on.

        Speeds are known from rounds, and it was in none: with the share it has it would be left out for ever.
        That it is late in those rounds too that were assigned before is no news.
        """
        found = [one for one in replicas if batch >= self.known_until.get(one, 0)]
        if not found:
            return self
        slower = {one: 2 * self.late.get(one, 1.0) for one in found}
        until = dict.fromkeys(found, takes_effect)
        return replace(self, late=self.late | slower, known_until=self.known_until | until, replicas=())

    def _recovered(self, replicas: Collection[int]) -> "Dealing":
        """After a round that nobody measured: who came in time is given more again, little by little."""
        if not self.late.keys() & set(replicas):
            return self
        eased = {one: slow * _RECOVERY if one in replicas else slow for one, slow in self.late.items()}
        return replace(self, late={one: slow for one, slow in eased.items() if slow > 1.0}, replicas=())

    def _own_limits(self, replicas: tuple[int, ...]) -> ShareLimits:
        limits = self.limits
        return ShareLimits(
            tuple(limits.least[one] for one in replicas), tuple(limits.most[one] for one in replicas)
        )


@dataclass(frozen=True, slots=True)
class Pool:
    """`deals` by replica and batch; `waiting` in rising order, without overlaps. That many samples were
    `returned` so far.
    """

    fresh: int = 0
    waiting: tuple[SamplePlaces, ...] = ()
    deals: dict[tuple[int, int], tuple[SamplePlaces, ...]] = field(default_factory=dict)
    returned: int = 0

    def with_deal(self, batch: int, counts: Mapping[int, int]) -> "Pool":
        """After that many samples of a batch have been assigned to each of these replicas."""
        pool, deals = self, dict(self.deals)
        for replica, count in counts.items():
            taken, pool = pool._taken(count)
            deals[replica, batch] = taken
        return replace(pool, deals=deals)

    def without_deals(self, replicas: Iterable[int], batch: int) -> "Pool":
        """After the assignments of these replicas in a batch have been committed."""
        deals = dict(self.deals)
        for replica in replicas:
            deals.pop((replica, batch), None)
        return replace(self, deals=deals)

    def with_returned(self, replica: int, *, below: int | None = None) -> "Pool":
        """After what a replica has of the batches `below` has come back; without a limit all of it."""
        back = [key for key in self.deals if key[0] == replica and (below is None or key[1] < below)]
        if not back:
            return self
        waiting = united((*self.waiting, *(one for key in back for one in self.deals[key])))
        return replace(
            self,
            waiting=waiting,
            deals={key: own for key, own in self.deals.items() if key not in back},
            returned=self.returned + sum(one.count for key in back for one in self.deals[key]),
        )

    def count(self, replica: int, batch: int) -> int:
        """How many samples a replica has in a batch."""
        return sum(one.count for one in self.deals.get((replica, batch), ()))

    def listed(self) -> tuple[Deal, ...]:
        """All assignments."""
        return tuple(Deal(replica, batch, own) for (replica, batch), own in self.deals.items())

    def num_left(self, until: int) -> int:
        """How many samples can still be assigned: those that wait, and the fresh ones below a place."""
        return sum(one.count for one in self.waiting) + max(until - self.fresh, 0)

    @property
    def open(self) -> tuple[SamplePlaces, ...]:
        """The places below `fresh` that are not committed."""
        return united((*self.waiting, *(one for own in self.deals.values() for one in own)))

    def _taken(self, count: int) -> tuple[tuple[SamplePlaces, ...], "Pool"]:
        """That many samples, those that wait first, and the pool without them."""
        taken, left = [], list(self.waiting)
        while count and left:
            first = left.pop(0)
            end = min(first.end, first.begin + count)
            taken.append(SamplePlaces(first.begin, end))
            count -= end - first.begin
            if end < first.end:
                left.insert(0, SamplePlaces(end, first.end))
        if count:
            taken.append(SamplePlaces(self.fresh, self.fresh + count))
        return united(taken), replace(self, fresh=self.fresh + count, waiting=tuple(left))


def united(samples: Iterable[SamplePlaces]) -> tuple[SamplePlaces, ...]:
    """The same places in rising order, neighbors joined. They must not overlap."""
    found: list[SamplePlaces] = []
    for one in sorted(samples, key=attrgetter("begin", "end")):
        if found and found[-1].end == one.begin:
            found[-1] = SamplePlaces(found[-1].begin, one.end)
        else:
            found.append(one)
    return tuple(found)
