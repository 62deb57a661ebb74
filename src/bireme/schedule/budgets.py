"""Budgets of tiers, and how a rank's memory is cut into chunks within them.

Whether a rank pages at all, how large its chunks are and how many each tier holds follows from the sizes of
its items and what it keeps at its peak. What is not paged has its place on the device besides.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

from bireme.bounds import bytes_text
from bireme.errors import BiremeError
from bireme.schedule.accesses import ChunkUses, Sizes, accesses_of, item_bytes
from bireme.schedule.instruction import PAGING, Item
from bireme.schedule.program import Program, Rule
from bireme.schedule.residency import resident
from bireme.schedule.tiers import MOST_CHUNKS, RankTiers, Tier, best_chunk_bytes, is_paged, num_chunks

Cut = tuple[RankTiers | None, ...]
"""How the memory of each rank is cut; None where all of it stays on the device."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """What each rank may use of each tier.

    The host's None is no limit, 0 no host memory at all; the disk's 0 is no disk.
    """

    device_bytes: int
    host_bytes: int | None = None
    disk_bytes: int = 0

    def __post_init__(self) -> None:
        given = {"device memory": self.device_bytes, "host memory": self.host_bytes, "disk": self.disk_bytes}
        for name, budget in given.items():
            if budget is not None and budget < 0:
                raise BiremeError(f"The {name} is {budget} bytes; it must be 0 or more.")
        if self.host_bytes == 0 and self.disk_bytes == 0:
            raise BiremeError("There is neither host memory nor a disk to offload to. Give one of them.")

    def tiers(self) -> tuple[tuple[str, int | None], ...]:
        """The tiers that there are, the device's first, by name and budget."""
        lower = ("host", self.host_bytes), ("disk", self.disk_bytes)
        return ("device", self.device_bytes), *(tier for tier in lower if tier[1] != 0)


class TierTooSmallError(BiremeError):
    """A rank's tier has not the bytes that it needs at least."""

    def __init__(self, rank: int, tier: Tier, needed_bytes: float, advice: str) -> None:
        what = "disk" if tier.name == "disk" else f"{tier.name} memory"
        super().__init__(
            f"Rank {rank} needs at least {bytes_text(needed_bytes)} of {what} ({needed_bytes:.0f} bytes) and "
            f"is given {bytes_text(tier.budget_bytes or 0)}. Give it {advice}."
        )
        self.tier = tier.name
        self.needed_bytes = needed_bytes


def cut_memory(
    program: Program,
    sizes: Sizes,
    budgets: Sequence[Budgets],
    *,
    chunk_bytes: int | Sequence[int] | None = None,
    stashes: bool = True,
    most_chunks: int = MOST_CHUNKS,
    page_bytes: int = 0,
    host_updates: bool = False,
) -> Cut:
    """How each rank's memory is cut into chunks and tiers.

    `chunk_bytes`, of all ranks or of each, is searched where it is not given or 0, for `most_chunks` of a
    rank, in whole pages of `page_bytes` where those are known. Without `stashes` activations stay on the
    device. With `host_updates` all stages that can are updated on the host. Then no gradients may be summed
    with others between REDUCE and UPDATE, because they leave the device there.
    """
    given = (chunk_bytes or 0,) * program.num_ranks if isinstance(chunk_bytes, int | None) else chunk_bytes
    items = tuple(item for item in Item if stashes or item is not Item.STASH)

    def cut(rank: int, own: Budgets, size: int) -> RankTiers | None:
        """How a rank's memory is cut; None where it all fits on its device."""
        whole, stages = resident(program, rank, sizes), program.stages_of(rank)
        if whole.peak_bytes <= own.device_bytes:
            return None
        found = {(item, stage): item_bytes(program, sizes, item, stage) for stage in stages for item in items}
        if not size:
            at_once: Counter[float] = Counter()
            for (item, stage), num_bytes in found.items():
                num_stashes = max(whole.peak_stashed_microbatches // len(stages), 1)
                at_once[num_bytes] += {Item.WEIGHTS: program.banks[stage], Item.STASH: num_stashes}.get(
                    item, 1
                )
            size = best_chunk_bytes(at_once, most_chunks, page_bytes)
        chunks = {
            what: num_chunks(num_bytes, size)
            for what, num_bytes in found.items()
            if is_paged(num_bytes, size)
        }
        kept_bytes = resident(program, rank, sizes, paged=chunks).peak_bytes
        tiers = tuple(
            Tier(
                name, budget, None if budget is None else int(budget - (0 if number else kept_bytes)) // size
            )
            for number, (name, budget) in enumerate(own.tiers())
        )
        on_host = _host_updates(program, rank, chunks) if host_updates and tiers[1].name == "host" else ()
        return RankTiers(size, tiers, chunks, {}, sizes.master, kept_bytes, frozenset(on_host))

    return tuple(cut(*own) for own in zip(range(program.num_ranks), budgets, given, strict=True))


def _host_updates(program: Program, rank: int, chunks: Collection[tuple[Item, int]]) -> list[int]:
    """The stages of a rank that can be updated on the host: all that an update uses is paged. Trial steps
    need what the optimizer remembers on the device, and averages the weights.
    """
    if program.rule is Rule.FRESH or program.average_lag is not None:
        return []
    used = (Item.WEIGHTS, Item.GRADIENT, Item.OPTIMIZER)
    return [stage for stage in program.stages_of(rank) if all((item, stage) in chunks for item in used)]


# Working sets: what one instruction needs on the device at once, which no plan can do without.


def least_device_bytes(program: Program, cut: Cut, *, is_summed: bool = False) -> float:
    """What the device of every rank must have at the least for a program to be paged."""
    return max(
        (
            most_at_once(program, rank, tiers, is_summed=is_summed) * tiers.chunk_bytes + tiers.unpaged_bytes
            for rank, tiers in enumerate(cut)
            if tiers is not None
        ),
        default=0.0,
    )


def check_working_sets(program: Program, cut: Cut) -> None:
    """Refuse a device that is too small for an instruction, where no gradients are summed over replicas."""
    for rank, tiers in enumerate(cut):
        if tiers is not None:
            check_capacity(rank, tiers, 0, most_at_once(program, rank, tiers))


def check_capacity(rank: int, tiers: RankTiers, number: int, least: int) -> None:
    """Refuse a tier that has no room for so many chunks."""
    tier = tiers.tiers[number]
    if tier.capacity is not None and tier.capacity < least:
        kept_bytes = tiers.unpaged_bytes if number == 0 else 0
        advice = "more, cut its stage into more parts, or use smaller micro-batches"
        raise TierTooSmallError(rank, tier, least * tiers.chunk_bytes + kept_bytes, advice)


def most_at_once(program: Program, rank: int, tiers: RankTiers, *, is_summed: bool = False) -> int:
    """The most chunks that an instruction of a rank needs on the device. If replicas sum gradients, that
    depends on what is under way; else instructions of a kind and stage need equally many.
    """
    if is_summed or program.num_sharers > 1:
        accesses = accesses_of(program, rank, tiers, is_summed=is_summed).on_device
        return max((sum(one.takes for one in own) for own in accesses.values()), default=0)
    track, used = program.tracks[rank], ChunkUses(program, tiers)
    unlike = {
        (step.kind, step.stage, step.seen): step
        for step in chain(track.head, track.body, track.tail)
        if step.kind not in PAGING
    }
    return max(
        sum(
            len(chunks)
            for chunks in {use[:3]: chunks for use, chunks in used.of(step) if not use.tier}.values()
        )
        for step in unlike.values()
    )
