"""The policy of shares: when the replicas' speeds say that a batch should be shared out otherwise.

For every batch each replica's busy seconds are known, the same on all ranks, and so all ranks come to the
same shares without a word. Two things can lead to a change:

* A jump: the last few batches of a replica all took much longer, or all much shorter, than those before. What
  was known of it is forgotten, and new shares may follow at once.
* A drift: the mean over many batches says so. That may change shares only so often.

Either must save more of a batch's time than the margin, and more than the scatter of the measurements could
feign. Batches under older shares say nothing: the pace of a device depends on the size of its micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev

from bireme.balance.shares import ShareLimits, Shares, batch_seconds, fair_shares
from bireme.bounds import Count, Place, Share

__all__ = ["Balance", "Policy", "begun", "rebalance"]

FEW = 3
"""Batches that show a jump, and without which nothing is decided."""

JUMP = 0.25
"""By which part the pace of all of them must differ from the pace before."""

CERTAINTY = 2.0
"""Standard errors of the paces that a change must save on top of the margin."""


@dataclass(frozen=True, slots=True)
class Policy:
    """`margin` is the part of a batch's time that a change must save; between two changes that no jump has
    caused are at least `every` batches.
    """

    margin: Share = 0.05
    every: Count = 20


@dataclass(frozen=True, slots=True)
class Balance:
    """The shares of a run and what the policy remembers: `shares` hold from the batch `first` on, and those
    of `before` until then.

    `paces` are each replica's seconds per sample in the most recent batches under `shares`. `is_new` says
    that speeds are other ones than the shares were made for.
    """

    before: tuple[Count, ...]
    shares: tuple[Count, ...]
    first: Place
    paces: tuple[tuple[float, ...], ...]
    is_new: bool = True

    def at(self, batch: int) -> Shares:
        """The shares of a batch."""
        return self.shares if batch >= self.first else self.before


def begun(shares: Shares, batch: int = 0) -> Balance:
    """Shares of which nothing is known yet, from a batch on."""
    return Balance(shares, shares, batch, ((),) * len(shares))


def rebalance(
    balance: Balance,
    batch: int,
    seconds: Sequence[float],
    *,
    limits: ShareLimits,
    policy: Policy,
    takes_effect: int,
) -> Balance:
    """What follows from the busy seconds of each replica in a batch.

    New shares hold from the batch `takes_effect` on, which nobody has read yet. Batches come one by one, in
    their order.
    """
    if batch < balance.first or min(seconds) <= 0:
        return balance
    balance = _noted(balance, seconds, policy)
    if min(map(len, balance.paces)) < FEW:
        return balance
    if not balance.is_new and takes_effect < balance.first + policy.every:
        return balance
    paces = [fmean(own) for own in balance.paces]
    now_s, batch_size = batch_seconds(balance.shares, paces), sum(balance.shares)
    needed = policy.margin + CERTAINTY * max(map(_uncertainty, balance.paces))
    if 1 - batch_size / sum(1 / pace for pace in paces) / now_s <= needed:
        return balance  # even fractions of samples would not save enough
    found = fair_shares(batch_size, paces, limits)
    if 1 - batch_seconds(found, paces) / now_s <= needed:
        return balance
    return replace(begun(found, takes_effect), before=balance.shares, is_new=False)


def _noted(balance: Balance, seconds: Sequence[float], policy: Policy) -> Balance:
    """The balance with the paces of one more batch."""
    found, has_jumped = [], False
    for own, share, busy_s in zip(balance.paces, balance.shares, seconds, strict=True):
        paces = (*own, busy_s / share)[-max(policy.every, FEW + 1) :]
        if _jumps(paces):
            paces, has_jumped = paces[-FEW:], True
        found.append(paces)
    return replace(balance, paces=tuple(found), is_new=balance.is_new or has_jumped)


def _jumps(paces: Sequence[float]) -> bool:
    """Whether the last few are all much longer, or all much shorter, than those before in the mean."""
    before, last = paces[:-FEW], paces[-FEW:]
    if not before:
        return False
    usual = fmean(before)
    return min(last) > usual * (1 + JUMP) or max(last) < usual / (1 + JUMP)


def _uncertainty(paces: Sequence[float]) -> float:
    """The standard error of the mean pace, as a part of it."""
    return stdev(paces) / sqrt(len(paces)) / fmean(paces)
