"""Shares: the samples of a batch that each replica trains, and the shares that take the least time.

With p_r the seconds that replica r takes for a sample, its pace, a batch takes max s_r · p_r. The sum of all
shares is the batch, which stays what it is; each share keeps within its limits. Nothing here measures: paces
are given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from bireme.errors import BiremeError

__all__ = ["ShareLimits", "Shares", "batch_seconds", "fair_shares", "in_proportion", "limits_of", "split"]

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
    shares = _in_time(_latest(batch_size, paces, limits), paces, limits)
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


def _in_time(time_s: float, paces: Sequence[float], limits: ShareLimits) -> list[int]:
    """The whole samples that each replica does in some time; a last bit of rounding gives none away."""
    both = zip(limits.least, limits.most, paces, strict=True)
    return [min(max(int(time_s / pace * (1 - 1e-12)), least), most) for least, most, pace in both]
