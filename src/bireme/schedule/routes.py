"""Routes: which rank takes which micro-batch through which stage.

Usually a stage is on one rank, which takes all micro-batches. In a plan of unequal widths a stage is on
several neighboring ranks, its replicas, and each takes a share of every batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from bireme.balance import split
from bireme.errors import BiremeError


def microbatch_owner(share: Sequence[int]) -> tuple[int, ...]:
    """The replica of a stage that takes each micro-batch of a batch, from the number that each takes.

    The micro-batches of a replica are spread evenly: equal shares go round, and (2, 1) gives 0, 1, 0.
    """
    middles = [(Fraction(2 * k + 1, num), replica) for replica, num in enumerate(share) for k in range(num)]
    return tuple(replica for _, replica in sorted(middles))


def shares_of_stages(
    widths: Sequence[int], shares: Sequence[Sequence[int]], num_microbatches: int
) -> tuple[tuple[int, ...], ...]:
    """The share of each replica of each stage, from a plan's widths and shares; empty shares are even."""
    if not widths and shares:
        raise BiremeError("The plan has stage_shares, but no stage_widths. Give the width of each stage.")
    if shares and [len(share) for share in shares] != list(widths):
        raise BiremeError(
            f"The plan has shares for {', '.join(str(len(share)) for share in shares)} replicas of its "
            f"stages, but stage_widths are {', '.join(map(str, widths))}. Give each replica of each stage a "
            "share."
        )
    for stage, width in enumerate(widths):
        if width < 1:
            raise BiremeError(f"Stage {stage} has {width} replicas. Give each stage one or more.")
        if width > num_microbatches:
            raise BiremeError(
                f"Stage {stage} has {width} replicas for {num_microbatches} micro-batches of a batch, and "
                f"each replica needs one. Use at least {width} micro-batches, or fewer replicas."
            )
    for stage, share in enumerate(shares):
        if sum(share) != num_microbatches or min(share, default=0) < 1:
            raise BiremeError(
                f"The replicas of stage {stage} take {' + '.join(map(str, share))} micro-batches of a batch "
                f"of {num_microbatches}. Give each at least one, {num_microbatches} in all."
            )
    return tuple(map(tuple, shares)) or tuple(tuple(split(num_microbatches, width)) for width in widths)


@dataclass(frozen=True, slots=True)
class Routes:
    """The rank of each stage, and how the ranks of a stage share its micro-batches.

    `rank_of_stage` is the only rank of each stage, or the first of its ranks, which follow each other.
    `shares` are, for each stage, the micro-batches of a batch that each of its ranks takes; empty if every
    stage is on one rank.
    """

    rank_of_stage: tuple[int, ...]
    shares: tuple[tuple[int, ...], ...] = ()
    _owners: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    """For each stage the rank of each micro-batch."""

    def __post_init__(self) -> None:
        owners = (
            tuple(first + replica for replica in microbatch_owner(share))
            for first, share in zip(self.rank_of_stage, self.shares, strict=bool(self.shares))
        )
        object.__setattr__(self, "_owners", tuple(owners))

    @classmethod
    def wide(cls, shares: Sequence[Sequence[int]]) -> "Routes":
        """One stage after the other, each with a rank for each of its shares."""
        widths = [len(share) for share in shares]
        firsts = tuple(sum(widths[:stage]) for stage in range(len(widths)))
        return cls(firsts, tuple(map(tuple, shares)))

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return max(self.rank_of_stage) + (len(self.shares[-1]) if self.shares else 1)

    def places(self) -> Iterator[tuple[int, int]]:
        """Each stage with each of its ranks."""
        return ((stage, rank) for stage in range(self.num_stages) for rank in self.ranks_of(stage))

    @property
    def num_places(self) -> int:
        """How many stages there are, each counted once for each of its ranks."""
        return sum(map(len, self.shares)) if self.shares else self.num_stages

    def rank_of(self, stage: int, microbatch: int | None) -> int:
        """The rank that takes a micro-batch through a stage."""
        if not self._owners or microbatch is None:
            return self.rank_of_stage[stage]
        return self._owners[stage][microbatch]

    def ranks_of(self, stage: int) -> range:
        """The ranks of a stage."""
        first = self.rank_of_stage[stage]
        return range(first, first + (len(self.shares[stage]) if self.shares else 1))

    def alike(self, width: int) -> tuple[tuple[int, ...], ...]:
        """The ranks of `width` replicas of the pipeline, in groups with the same stages."""
        return tuple(
            tuple(replica * self.num_ranks + rank for replica in range(width) for rank in ranks)
            for ranks in dict.fromkeys(self.ranks_of(stage) for stage in range(self.num_stages))
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on a rank, in the model's order."""
        return tuple(stage for stage in range(self.num_stages) if rank in self.ranks_of(stage))

    def hops(self) -> list[tuple[int, int, int]]:
        """Each stage but the first with each pair of ranks over which messages come into it."""
        found = set[tuple[int, int, int]]()
        for stage in range(1, self.num_stages):
            if self._owners:
                pairs = set(zip(self._owners[stage - 1], self._owners[stage], strict=True))
            else:
                pairs = {(self.rank_of_stage[stage - 1], self.rank_of_stage[stage])}
            found |= {(stage, source, target) for source, target in pairs if source != target}
        return sorted(found)

    def microbatches_of(self, rank: int, num_microbatches: int) -> tuple[int, ...]:
        """The micro-batches of a batch that a rank takes through its stages, of `num_microbatches` in all."""
        if not self._owners:
            return tuple(range(num_microbatches))
        (stage,) = self.stages_of(rank)
        return tuple(k for k, owner in enumerate(self._owners[stage]) if owner == rank)
