"""Shares: the samples of a batch that each replica trains, and the shares that take the least time.

With p_r the seconds that replica r takes for a sample, its pace, a batch takes max s_r · p_r. The sum of all
shares is the batch, which stays what it is; each share keeps within its limits. Nothing here measures: paces
are given.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from math import isfinite, sqrt
from statistics import fmean, median, stdev

from bireme.bounds import Count, Place, Share
from bireme.errors import BiremeError

Shares = tuple[int, ...]
"""Samples of a batch, replica by replica."""


@dataclass(frozen=True, slots=True)
class ShareLimits:
    """The fewest and the most samples of a batch that each replica can take."""

    least: Shares
    most: Shares

    def check(self, batch_size: int) -> None:
        """Refuse a batch that cannot be shared out within the limits."""
        if sum(self.least) > batch_size:
            raise BiremeError(
                f"A batch of {batch_size} samples is too small for {len(self.least)} replicas, whose "
                f"micro-batches need {sum(self.least)}: one sample each at the least. Make "
                "training.batch_size larger, or plan for fewer micro-batches."
            )
        if sum(self.most) < batch_size:
            raise BiremeError(
                f"The memory of the {len(self.most)} replicas holds {sum(self.most)} samples of a batch "
                f"({', '.join(map(str, self.most))}), but training.batch_size is {batch_size}. Make the "
                "batch smaller, or plan for more micro-batches."
            )

    def of_sites(self, width: int) -> "ShareLimits":
        """The limits of sites of so many replicas each, which follow one another and take equal shares."""
        firsts = range(0, len(self.least), width)
        return ShareLimits(
            tuple(width * max(self.least[one : one + width]) for one in firsts),
            tuple(width * min(self.most[one : one + width]) for one in firsts),
        )

    def hold(self, shares: Sequence[int]) -> bool:
        """Whether shares keep within the limits."""
        both = zip(self.least, shares, self.most, strict=True)
        return all(least <= share <= most for least, share, most in both)


def limits_of(
    num_microbatches: int, most_per_microbatch: Sequence[int], *, least_per_microbatch: int = 1
) -> ShareLimits:
    """The limits of replicas whose micro-batches have at most so many samples each."""
    return ShareLimits(
        tuple(num_microbatches * least_per_microbatch for _ in most_per_microbatch),
        tuple(num_microbatches * most for most in most_per_microbatch),
    )


def batch_seconds(shares: Sequence[int], paces: Sequence[float]) -> float:
    """For how long a batch keeps the busiest replica busy."""
    return max(share * pace for share, pace in zip(shares, paces, strict=True))


def fair_shares(batch_size: int, paces: Sequence[float], limits: ShareLimits) -> Shares:
    """The shares within the limits whose batch takes the least time.

    A sample goes to the replica that would be done first with it, so a faster replica never gets fewer than
    it had, and equal paces differ by a sample at most. The limits must hold the batch.
    """
    time_s = _latest(batch_size, paces, limits)
    both = zip(limits.least, limits.most, paces, strict=True)
    # A last bit of rounding gives no sample away.
    shares = [min(max(int(time_s / pace * (1 - 1e-12)), least), most) for least, most, pace in both]
    waiting = [
        ((share + 1) * pace, replica)
        for replica, (share, pace) in enumerate(zip(shares, paces, strict=True))
        if share < limits.most[replica]
    ]
    heapify(waiting)
    for _ in range(batch_size - sum(shares)):
        _, replica = waiting[0]
        shares[replica] += 1
        is_full = shares[replica] == limits.most[replica]
        heapreplace(waiting, (float("inf") if is_full else (shares[replica] + 1) * paces[replica], replica))
    return tuple(shares)


def in_proportion(batch_size: int, sizes: Sequence[float], limits: ShareLimits) -> Shares:
    """Shares in proportion to some sizes, as nearly as the limits allow."""
    return fair_shares(batch_size, [1.0 / size for size in sizes], limits)


def split(share: int, num_microbatches: int) -> list[int]:
    """The micro-batches of a share, as equal as they can be, the larger ones first."""
    size, larger = divmod(share, num_microbatches)
    return [size + (place < larger) for place in range(num_microbatches)]


def _latest(batch_size: int, paces: Sequence[float], limits: ShareLimits) -> float:
    """A time in which no more than the whole batch is done, by replicas that only take whole samples.

    It is the time in which fractions of samples would add up to the batch. Between two times at which a
    replica reaches a limit the sum grows evenly.
    """
    turns = sorted(
        {
            bound * pace
            for bounds in (limits.least, limits.most)
            for bound, pace in zip(bounds, paces, strict=True)
        }
    )

    def done(time_s: float) -> float:
        both = zip(limits.least, limits.most, paces, strict=True)
        return sum(min(max(time_s / pace, least), most) for least, most, pace in both)

    begin = 0.0
    for end in turns:
        if done(end) >= batch_size:
            below, above = done(begin), done(end)
            part = (batch_size - below) / (above - below) if above > below else 0.0
            return begin + part * (end - begin)
        begin = end
    return begin


# Shares from measured times: what each replica takes for micro-batches of several sizes, and what follows.
#
# The knee of a replica is the smallest micro-batch with which it is about as fast as with any. With times
# that are known at some sizes, a size between two takes what lies on the line between them; sizes past the
# last go on at its pace.

_NEAR_BEST = 0.95
"""Of the most samples per second."""

_MOST_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class Times:
    """What a replica takes for micro-batches of these rising sizes; infinite where memory holds none."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def known(self) -> "Times":
        """Of the sizes that were measured; a larger micro-batch takes no less than a smaller one."""
        pairs = [pair for pair in zip(self.sizes, self.seconds, strict=True) if isfinite(pair[1])]
        most, seconds = 0.0, []
        for _, one_s in pairs:
            most = max(most, one_s)
            seconds.append(most)
        return Times(tuple(size for size, _ in pairs), tuple(seconds))

    def at(self, size: float) -> float:
        """The seconds of a micro-batch of any size."""
        place = bisect_left(self.sizes, size)
        if place == len(self.sizes):
            return self.seconds[-1] * size / self.sizes[-1]
        if place == 0:
            return self.seconds[0]
        low, high = self.sizes[place - 1], self.sizes[place]
        part = (size - low) / (high - low)
        return (1 - part) * self.seconds[place - 1] + part * self.seconds[place]


def knee(times: Times) -> int:
    """The smallest size that was measured with nearly the most samples per second."""
    rates = [size / one_s for size, one_s in zip(times.sizes, times.seconds, strict=True)]
    return next(
        size for size, rate in zip(times.sizes, rates, strict=True) if rate >= _NEAR_BEST * max(rates)
    )


def shares_by_times(
    first: Shares, num_microbatches: int, times: Sequence[Times], limits: ShareLimits, *, margin: float = 0.0
) -> Shares:
    """The shares of the same batch with which all replicas take about the same time, or the `first` ones
    where others would not save more than the part `margin` of its time.

    The pace of a replica depends on its share, so they are found step by step, as long as a step helps.
    """
    known, batch_size = [one.known() for one in times], sum(first)

    def paces(shares: Shares) -> list[float]:
        sizes = [share / num_microbatches for share in shares]
        return [one.at(size) / size for one, size in zip(known, sizes, strict=True)]

    best = first
    for _ in range(_MOST_ROUNDS):
        found = fair_shares(batch_size, paces(best), limits)
        if batch_seconds(found, paces(found)) >= batch_seconds(best, paces(best)):
            break
        best = found
    saved = 1 - batch_seconds(best, paces(best)) / batch_seconds(first, paces(first))
    return best if saved > margin else first


def grown_shares(num_microbatches: int, times: Sequence[Times], limits: ShareLimits) -> Shares:
    """What every replica does, micro-batch by micro-batch, while the slowest one does its knee."""
    known = [one.known() for one in times]
    slowest = min(known, key=lambda one: max(s / t for s, t in zip(one.sizes, one.seconds, strict=True)))
    common_s = slowest.at(knee(slowest))
    found = []
    for one, least, most in zip(known, limits.least, limits.most, strict=True):
        sizes = range(least // num_microbatches, most // num_microbatches + 1)
        place = bisect_right(sizes, common_s, key=one.at)
        found.append(num_microbatches * sizes[max(place - 1, 0)])
    return tuple(found)


# The policy of shares: when the replicas' speeds say that a batch should be shared out otherwise.
#
# For every batch each replica's busy seconds are known, the same on all ranks, and so all ranks come to the
# same shares without a word. Two things can lead to a change:
#
# * A jump: the last few batches of a replica all took much longer, or all much shorter, than those before.
# What   was known of it is forgotten, and new shares may follow at once. * A drift: the mean over many
# batches says so. That may change shares only so often.
#
# Either must save more of a batch's time than the margin, and more than the scatter of the measurements could
# feign. Batches under older shares say nothing: the pace of a device depends on the size of its micro-
# batches.

_FEW = 3
"""Batches that show a jump, and without which nothing is decided."""

_JUMP = 0.25
"""By which part the pace of all of them must differ from the pace before."""

_CERTAINTY = 2.0
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
    if min(map(len, balance.paces)) < _FEW:
        return balance
    if not balance.is_new and takes_effect < balance.first + policy.every:
        return balance
    paces = [fmean(own) for own in balance.paces]
    now_s, batch_size = batch_seconds(balance.shares, paces), sum(balance.shares)
    needed = policy.margin + _CERTAINTY * max(
        stdev(own) / sqrt(len(own)) / fmean(own) for own in balance.paces
    )
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
        paces = (*own, busy_s / share)[-max(policy.every, _FEW + 1) :]
        if _jumps(paces):
            paces, has_jumped = paces[-_FEW:], True
        found.append(paces)
    return replace(balance, paces=tuple(found), is_new=balance.is_new or has_jumped)


def _jumps(paces: Sequence[float]) -> bool:
    """Whether the last few are all much longer, or all much shorter, than those before in the mean."""
    before, last = paces[:-_FEW], paces[-_FEW:]
    if not before:
        return False
    usual = fmean(before)
    return min(last) > usual * (1 + _JUMP) or max(last) < usual / (1 + _JUMP)


# Which stage of a replica has become slow, compared with the others of the same replica.
#
# Shares help where a whole replica is slow. Where one of its stages is, the others only wait for it, and what
# helps is another cut. How long each rank ought to take for a sample is given; that all take longer, or all
# shorter, says nothing about a stage.

LONG = 20
"""Batches over which a rank must have been slow."""

SLOW = 1.5
"""How many times as long it must take as the others lead to expect."""


@dataclass(frozen=True, slots=True)
class SlowStage:
    """A rank that takes `times` as long for its stages as it should, compared with the others of its replica.

    A new cut could save up to the part `saves` of a batch's time: what all the replica's devices could do if
    each were busy all the time. `device` is the name of its device, if that is known.
    """

    rank: int
    replica: int
    pipeline_rank: int
    times: float
    saves: float
    device: str = ""


class StageWatch:
    """Watches the ranks of all replicas. `expected_s[rank]` are the seconds that a rank should take for a
    sample, in any unit that all ranks of a replica share. `devices` are their names.
    """

    def __init__(
        self, expected_s: Sequence[float], num_pipeline_ranks: int, devices: Sequence[str] = ()
    ) -> None:
        self._expected_s, self._devices = expected_s, devices
        self._per_replica = num_pipeline_ranks
        self._recent: list[deque[float]] = [deque(maxlen=LONG) for _ in expected_s]
        self.slow: dict[int, SlowStage] = {}
        """The ranks that are slow, as they were when that was found."""

    def note(self, shares: Shares, rank_seconds: Sequence[float]) -> SlowStage | None:
        """Learn the busy seconds of all ranks in a batch; a stage that has become slow is told once."""
        if self._per_replica == 1:
            return None
        for rank, busy_s in enumerate(rank_seconds):
            pace = busy_s / shares[rank // self._per_replica]
            self._recent[rank].append(pace / self._expected_s[rank])
        if len(self._recent[0]) < LONG:
            return None
        usual = [sorted(own)[LONG // 4] for own in self._recent]  # what three of four batches take at least
        found = None
        for rank, own in enumerate(usual):
            first = rank - rank % self._per_replica
            others = [usual[other] for other in range(first, first + self._per_replica) if other != rank]
            times = own / median(others) if median(others) > 0 else 1.0
            if times < SLOW:
                self.slow.pop(rank, None)
            elif rank not in self.slow and found is None:
                found = self.slow[rank] = self._slow_stage(rank, times, usual)
        return found

    def _slow_stage(self, rank: int, times: float, usual: Sequence[float]) -> SlowStage:
        replica, pipeline_rank = divmod(rank, self._per_replica)
        ranks = range(replica * self._per_replica, (replica + 1) * self._per_replica)
        expected_s = [self._expected_s[one] for one in ranks]
        slowest_s = max(usual[one] * self._expected_s[one] for one in ranks)
        even_s = sum(expected_s) / sum(1 / usual[one] for one in ranks)
        device = self._devices[rank] if self._devices else ""
        return SlowStage(rank, replica, pipeline_rank, times, max(0.0, 1 - even_s / slowest_s), device)
