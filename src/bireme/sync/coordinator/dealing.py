"""How many samples of a batch each replica gets: by its speed, as long as the same replicas share a batch.

While they do, `bireme.balance.policy` says when shares change. When others share the next batch, they begin
with the shares that fit the paces known so far.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from bireme.balance.policy import Balance, Policy, begun, rebalance
from bireme.balance.shares import ShareLimits, fair_shares

__all__ = ["Dealing"]

POLICY = Policy()

SILENT_TIMES = 1e6
"""As how many times slower a silent replica counts: it gets as few samples as it may have."""
RECOVERY = 0.95
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
    """Batches below were dealt before it was known that a replica is late."""

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
            pace * (SILENT_TIMES if one in silent else 1.0) for one, pace in zip(replicas, paces, strict=True)
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
        """After a batch in which each of these replicas trained so many samples, and was busy for so long."""
        if min(seconds.values(), default=0.0) <= 0:
            return self._recovered(counts)
        paces = self.paces | {one: seconds[one] / count for one, count in counts.items() if count}
        late = {one: slowness for one, slowness in self.late.items() if one not in counts}
        if self.balance is None or seconds.keys() != set(self.replicas) or counts != self.counts(batch):
            return replace(self, paces=paces, late=late)
        busy = [seconds[one] for one in self.replicas]
        balance = rebalance(
            self.balance,
            batch,
            busy,
            limits=self._own_limits(self.replicas),
            policy=POLICY,
            takes_effect=takes_effect,
        )
        return replace(self, balance=balance, paces=paces, late=late)

    def with_late(self, batch: int, replicas: Collection[int], *, takes_effect: int) -> "Dealing":
        """After a round that had to go on without these: each is taken to be twice as slow as was known, from
        the batch `takes_effect` on.

        Speeds are known from rounds, and it was in none: with the share it has it would be left out for ever.
        That it is late in those rounds too that were dealt before is no news.
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
        eased = {one: slow * RECOVERY if one in replicas else slow for one, slow in self.late.items()}
        return replace(self, late={one: slow for one, slow in eased.items() if slow > 1.0}, replicas=())

    def _own_limits(self, replicas: tuple[int, ...]) -> ShareLimits:
        limits = self.limits
        return ShareLimits(
            tuple(limits.least[one] for one in replicas), tuple(limits.most[one] for one in replicas)
        )
