"""How many samples of a batch each replica gets: by its speed, as long as the same replicas share a batch.

While they do, `bireme.balance.policy` says when shares change. When others share the next batch, they begin
with the shares that fit the paces known so far.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from bireme.balance.policy import Balance, Policy, begun, rebalance
from bireme.balance.shares import Limits, fair_shares

__all__ = ["Dealing"]

POLICY = Policy()


@dataclass(frozen=True, slots=True)
class Dealing:
    """What is known of the speeds: `paces` are the last known seconds per sample of each replica."""

    batch_size: int
    limits: Limits
    replicas: tuple[int, ...] = ()
    balance: Balance | None = None
    paces: dict[int, float] = field(default_factory=dict)

    def among(self, replicas: tuple[int, ...], batch: int) -> "Dealing":
        """For a batch that these replicas share."""
        if replicas == self.replicas:
            return self
        known = [self.paces[one] for one in replicas if one in self.paces]
        usual = fmean(known) if known else 1.0
        limits = self._own_limits(replicas)
        # What memory cannot hold is left for the next batches.
        batch_size = min(max(self.batch_size, sum(limits.least)), sum(limits.most))
        shares = fair_shares(batch_size, [self.paces.get(one, usual) for one in replicas], limits)
        return replace(self, replicas=replicas, balance=begun(shares, batch))

    def counts(self, batch: int) -> dict[int, int]:
        """The samples of each replica in a batch."""
        assert self.balance is not None, "among() comes first"
        return dict(zip(self.replicas, self.balance.at(batch), strict=True))

    def with_batch(
        self, batch: int, counts: Mapping[int, int], seconds: Mapping[int, float], *, takes_effect: int
    ) -> "Dealing":
        """After a batch in which each of these replicas trained so many samples, and was busy for so long."""
        if min(seconds.values(), default=0.0) <= 0:
            return self
        paces = self.paces | {one: seconds[one] / count for one, count in counts.items() if count}
        if self.balance is None or seconds.keys() != set(self.replicas) or counts != self.counts(batch):
            return replace(self, paces=paces)
        busy = [seconds[one] for one in self.replicas]
        balance = rebalance(
            self.balance,
            batch,
            busy,
            limits=self._own_limits(self.replicas),
            policy=POLICY,
            takes_effect=takes_effect,
        )
        return replace(self, balance=balance, paces=paces)

    def with_late(self, replicas: Collection[int]) -> "Dealing":
        """After a round that had to go on without these: each is taken to be twice as slow as was known.

        What was never in a round was never measured, and would be too slow for ever with the share it has.
        """
        if not replicas:
            return self
        usual = fmean(self.paces.values()) if self.paces else 1.0
        slower = {one: 2 * self.paces.get(one, usual) for one in replicas}
        return replace(self, paces=self.paces | slower, replicas=())

    def _own_limits(self, replicas: tuple[int, ...]) -> Limits:
        limits = self.limits
        return Limits(
            tuple(limits.least[one] for one in replicas), tuple(limits.most[one] for one in replicas)
        )
