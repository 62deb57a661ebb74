"""Working sets: what one instruction needs on the device at once, which no plan can do without."""

from bireme.schedule.budgets import Cut, TierTooSmallError
from bireme.schedule.instruction import Item, Kind
from bireme.schedule.program import Program
from bireme.schedule.tiers import RankTiers
from bireme.schedule.uses import ChunkUses

__all__ = ["check_capacity", "check_working_sets", "least_device_bytes"]


def least_device_bytes(program: Program, cut: Cut, *, is_summed: bool = False) -> float:
    """What the device of every rank must have at the least for a program to be paged."""
    return max(
        (
            _working_set(program, rank, tiers, is_summed=is_summed) * tiers.chunk_bytes + tiers.unpaged_bytes
            for rank, tiers in enumerate(cut)
            if tiers is not None
        ),
        default=0.0,
    )


def check_working_sets(program: Program, cut: Cut, *, is_summed: bool) -> None:
    """Refuse devices that are smaller than what one instruction needs there."""
    for rank, tiers in enumerate(cut):
        if tiers is not None:
            least = _working_set(program, rank, tiers, is_summed=is_summed)
            check_capacity(rank, tiers, 0, least)


def check_capacity(rank: int, tiers: RankTiers, number: int, least: int) -> None:
    """Refuse a tier that has no room for so many chunks."""
    tier = tiers.tiers[number]
    if tier.capacity is not None and tier.capacity < least:
        kept_bytes = tiers.unpaged_bytes if number == 0 else 0
        advice = "more, cut its stage into more parts, or use smaller micro-batches"
        raise TierTooSmallError(rank, tier, least * tiers.chunk_bytes + kept_bytes, advice)


def _working_set(program: Program, rank: int, tiers: RankTiers, *, is_summed: bool) -> int:
    """The most chunks that an instruction of a rank needs on the device."""
    uses = ChunkUses(program, tiers)
    summed: dict[tuple[int, int], int] = {}
    """The chunks of gradients that are being summed, by stage and batch."""
    most = 0
    for step in program.tracks[rank]:
        used = {(use.item, use.stage, use.number): (use, len(own)) for use, own in uses.of(step)}
        if not used:
            continue
        here = sum(count for use, count in used.values() if not use.tier)
        most = max(most, here + sum(n for key, n in summed.items() if (Item.GRADIENT, *key) not in used))
        for (item, *key), (use, count) in used.items():
            if item is Item.GRADIENT and use.ends:
                summed.pop((key[0], key[1]), None)
            elif item is Item.GRADIENT and is_summed and step.kind is Kind.REDUCE:
                summed[key[0], key[1]] = count
    return most
