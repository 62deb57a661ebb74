"""Paging: the same program for ranks whose memory is too small, with FETCH and EVICT in it.

The program says which items every instruction uses, so what leaves the device when, and what comes back, is
planned before anything runs: `eviction.py` chooses, tier by tier. The copies that the device's plan makes are
the accesses of the tier below, which is planned in the same way over a disk.

An EVICT stands right after the last instruction that uses the chunk, a FETCH as far before the next one as
there is room. Where everything fits, the program stays what it is. A loop stays a loop: what becomes of a
chunk is decided once for all batches of the steady state.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bireme.errors import BiremeError
from bireme.schedule.chunks import best_chunk_bytes, num_chunks
from bireme.schedule.eviction import Access, Choice, Gap, OverfullError, decide, gaps_of, settle
from bireme.schedule.folding import WRITTEN_OUT, fold
from bireme.schedule.holding import Holding
from bireme.schedule.instruction import Instruction, Item, Kind, Page
from bireme.schedule.program import Program, Track
from bireme.schedule.residency import Sizes, item_bytes, resident, unpaged
from bireme.schedule.rule import Rule
from bireme.schedule.tiers import Chunk, RankTiers, Tier
from bireme.schedule.uses import Mode, chunks_of, uses

__all__ = ["Budgets", "page"]

STEADY = 4
"""Batches of the steady state in which what becomes of chunks is decided for all."""

Choices = Mapping[Hashable, Choice]


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
            raise BiremeError("There is neither host memory nor a disk to page to. Give one of them.")

    def tiers(self) -> tuple[tuple[str, int | None], ...]:
        """The tiers that there are, the device's first, by name and budget."""
        tiers: list[tuple[str, int | None]] = [("device", self.device_bytes)]
        if self.host_bytes != 0:
            tiers.append(("host", self.host_bytes))
        if self.disk_bytes:
            tiers.append(("disk", self.disk_bytes))
        return tuple(tiers)


def page(
    program: Program,
    sizes: Sizes,
    budgets: Budgets,
    *,
    ahead: int = 1,
    chunk_bytes: int | None = None,
    is_summed: bool = False,
) -> Program:
    """The program within the budgets, or itself where every rank fits.

    Fetched chunks are to be there `ahead` instructions before they are used, where that leaves room.
    `chunk_bytes` is searched for each rank unless given. `is_summed` where gradients are summed over replicas
    between REDUCE and UPDATE, and must stay. Raises where a budget is below the largest working set.
    """
    cut = [_cut(program, rank, sizes, budgets, chunk_bytes) for rank in range(program.num_ranks)]
    if not any(cut):
        return program
    repeats = {track.repeats for track in program.tracks}
    is_loop = len(repeats) == 1 and 0 not in repeats and program.num_batches > WRITTEN_OUT
    least = program.num_batches - (min(repeats) if is_loop else 0)
    model = _of_length(program, least + STEADY) if is_loop else program
    plans = [
        None if tiers is None else _Planner(model, rank, tiers, ahead, is_summed).decided()
        for rank, tiers in enumerate(cut)
    ]

    def make(num_batches: int) -> Program:
        shown = _of_length(program, num_batches) if is_loop else program
        made = [
            (Track(tuple(track), versions_per_batch=track.versions_per_batch), tiers)
            if tiers is None or plan is None
            else _Planner(shown, rank, tiers, ahead, is_summed).written(plan)
            for rank, (track, tiers, plan) in enumerate(zip(shown.tracks, cut, plans, strict=True))
        ]
        paged = replace(
            shown, tracks=tuple(track for track, _ in made), tiers=tuple(tiers for _, tiers in made)
        )
        _check_lowest(paged)
        return paged

    return fold(make, program.num_batches, shortest=least + 1) if is_loop else make(program.num_batches)


def _of_length(program: Program, num_batches: int) -> Program:
    more = num_batches - program.num_batches
    tracks = tuple(track.repeated(track.repeats + more) for track in program.tracks)
    return replace(program, tracks=tracks, num_batches=num_batches)


def _cut(
    program: Program, rank: int, sizes: Sizes, budgets: Budgets, chunk_bytes: int | None
) -> RankTiers | None:
    """How a rank's memory is cut; None where it all fits on its device."""
    whole = resident(program, rank, sizes)
    if whole.peak_bytes <= budgets.device_bytes:
        return None
    found = {(item, stage): item_bytes(program, sizes, item, stage) for stage in program.stages_of(rank) for item in Item}
    if chunk_bytes is None:
        at_once: Counter[float] = Counter()
        for (item, stage), num_bytes in found.items():
            stashes = max(whole.peak_stashed_microbatches // len(program.stages_of(rank)), 1)
            at_once[num_bytes] += {Item.WEIGHTS: program.banks[stage], Item.STASH: stashes}.get(item, 1)
        chunk_bytes = best_chunk_bytes(at_once)
    kept_bytes = resident(program, rank, unpaged(program, rank, sizes)).peak_bytes
    tiers = tuple(
        Tier(
            name,
            budget,
            None if budget is None else int(budget - (kept_bytes if number == 0 else 0)) // chunk_bytes,
        )
        for number, (name, budget) in enumerate(budgets.tiers())
    )
    chunks = {what: num_chunks(num_bytes, chunk_bytes) for what, num_bytes in found.items() if num_bytes > 0}
    return RankTiers(chunk_bytes, tiers, chunks, {}, sizes.master)


def _check_lowest(program: Program) -> None:
    """Refuse what the lowest tier cannot hold: nothing can be moved away from there."""
    for rank, tiers in enumerate(program.tiers):
        if tiers is None or tiers.tiers[-1].capacity is None:
            continue
        holding = Holding(program, tiers)
        for step in program.tracks[rank]:
            for _ in holding.start(step):
                pass
            holding.end(step)
        lowest = tiers.tiers[-1]
        if holding.peak[-1] > (lowest.capacity or 0):
            advice = "a larger one" if lowest.name == "disk" else "more, or a disk"
            raise _too_small(rank, lowest, holding.peak[-1] * tiers.chunk_bytes, advice)


def _too_small(rank: int, tier: Tier, needed_bytes: float, advice: str) -> BiremeError:
    what = "disk" if tier.name == "disk" else f"{tier.name} memory"
    return BiremeError(
        f"Rank {rank} needs at least {needed_bytes:.0f} bytes of {what} "
        f"({needed_bytes / 1e9:.3g} GB) and is given {tier.budget_bytes}. Give it {advice}."
    )


@dataclass(slots=True)
class _Places:
    """The instructions that go in before each using step, and after the last: of the lower tiers first."""

    evicts: defaultdict[int, list[Instruction]] = field(default_factory=lambda: defaultdict(list))
    fetches: defaultdict[int, list[Instruction]] = field(default_factory=lambda: defaultdict(list))

    def at(self, place: int) -> Iterator[Instruction]:
        yield from self.evicts.get(place, ())
        yield from self.fetches.get(place, ())


class _Planner:
    """One rank of a program that is written out."""

    def __init__(self, program: Program, rank: int, tiers: RankTiers, ahead: int, is_summed: bool) -> None:
        self.program = program
        self.rank = rank
        self.tiers = tiers
        self.ahead = ahead
        self.track = program.tracks[rank]
        self.steps: list[tuple[int, Instruction]] = []
        """The instructions that use chunks, with their place in the track."""
        self.accesses: list[Access] = []
        self._find_accesses(is_summed)

    def decided(self) -> list[Choices]:
        """For each tier but the lowest which gaps to evict. Raises where a budget is too small."""
        gaps = gaps_of(self.accesses)
        device = self._decide(0, self.accesses, gaps, len(self.steps))
        if len(self.tiers.tiers) < 3 or self.tiers.tiers[1].capacity is None:
            return [device]
        settle(gaps, device, len(self.steps))
        below = self._accesses_below(gaps)
        return [device, self._decide(1, below, gaps_of(below), len(self.steps) + 1)]

    def written(self, plan: Sequence[Choices]) -> tuple[Track, RankTiers]:
        """The track with its copies, and where the chunks begin."""
        gaps = gaps_of(self.accesses)
        settle(gaps, plan[0], len(self.steps))
        begin = {gap.chunk: int(gap.is_evicted) for gap in gaps if gap.before is None}
        places = [self._places(gaps, 0, len(self.steps))]
        if len(plan) > 1:
            lower = gaps_of(self._accesses_below(gaps))
            settle(lower, plan[1], len(self.steps) + 1)
            begin |= {gap.chunk: 2 for gap in lower if gap.before is None and gap.is_evicted}
            places.insert(0, self._places(lower, 1, len(self.steps) + 1))
        track: list[Instruction] = []
        after = {index: place + 1 for place, (index, _) in enumerate(self.steps)}
        for one in places:
            track.extend(one.at(0))
        for index, step in enumerate(self.track):
            track.append(step)
            if index in after:
                for one in places:
                    track.extend(one.at(after[index]))
        begin_in_order = dict(sorted(begin.items()))
        return (
            Track(tuple(track), versions_per_batch=self.track.versions_per_batch),
            replace(self.tiers, begin=begin_in_order),
        )

    def _find_accesses(self, is_summed: bool) -> None:
        made: set[Chunk] = set()
        summed: set[Chunk] = set()
        for index, step in enumerate(self.track):
            found = list(uses(self.program, step, master=self.tiers.master))
            used = [(use, chunk) for use in found for chunk in chunks_of(self.tiers, use)]
            if not used:
                continue
            at = len(self.steps)
            self.steps.append((index, step))
            label = (step.kind, step.microbatch, step.half)
            held = summed - {chunk for _, chunk in used}
            for chunk in sorted(held):
                self.accesses.append(Access(at, chunk, label, step.batch, step, reads=True, writes=False))
            for use, chunk in used:
                is_new = use.mode is Mode.MAKE or (use.mode is Mode.ADD and chunk not in made)
                made.add(chunk)
                if use.ends:
                    made.discard(chunk)
                    summed.discard(chunk)
                elif is_summed and step.kind is Kind.REDUCE:
                    summed.add(chunk)
                self.accesses.append(
                    Access(
                        at,
                        chunk,
                        label,
                        step.batch,
                        step,
                        reads=not is_new,
                        writes=use.mode is not Mode.READ,
                        ends=use.ends,
                    )
                )

    def _accesses_below(self, gaps: Sequence[Gap]) -> list[Access]:
        """What the device's plan reads and writes in the tier below, in the order of time."""
        num_steps = len(self.steps)
        found: list[tuple[int, int, Access]] = []
        for access in self.accesses:
            if access.writes or access.ends:
                # What is written above is worthless below.
                at, label = access.at + 1, ("stale", access.label)
                stale = replace(access, at=at, label=label, reads=False, writes=True, takes=False, ends=True)
                found.append((at, 0, stale))
        for gap in gaps:
            if not gap.is_evicted:
                continue
            if gap.is_copied and gap.before is not None:
                at, label = gap.start + 1, (Kind.EVICT, gap.group)
                out = replace(gap.before, at=at, label=label, reads=False, writes=True, ends=False)
                found.append((at, 1, out))
            if gap.is_fetched and gap.after is not None:
                at, label = gap.end(num_steps) - gap.lead, (Kind.FETCH, gap.group)
                back = replace(gap.after, at=at, label=label, reads=True, writes=False, ends=False)
                found.append((at, 2, back))
        found.sort(key=lambda one: (one[0], one[1], one[2].chunk))
        begun = {gap.chunk for gap in gaps if gap.before is None and gap.is_evicted}
        kept: list[Access] = []
        for _, _, access in found:
            if not access.ends:
                begun.add(access.chunk)
            elif access.chunk not in begun:
                continue
            else:
                begun.discard(access.chunk)
            kept.append(access)
        return kept

    def _decide(
        self, number: int, accesses: Sequence[Access], gaps: Sequence[Gap], num_steps: int
    ) -> Choices:
        tier = self.tiers.tiers[number]
        assert tier.capacity is not None, "a tier without a limit needs no plan"
        needed = Counter(at for at, _ in {(one.at, one.chunk) for one in accesses if one.takes})
        least = max(needed.values(), default=0)
        if tier.capacity < least:
            chunk_bytes = self.tiers.chunk_bytes
            kept_bytes = (tier.budget_bytes or 0) - tier.capacity * chunk_bytes
            needed_bytes = least * chunk_bytes + (kept_bytes if number == 0 else 0)
            raise _too_small(
                self.rank, tier, needed_bytes, "more, cut its stage into more parts, or use smaller micro-batches"
            )
        for ahead in range(self.ahead, 0, -1):
            try:
                return decide(accesses, gaps, num_steps, tier.capacity, ahead)
            except OverfullError:
                continue
        return decide(accesses, gaps, num_steps, tier.capacity, 0)

    def _places(self, gaps: Sequence[Gap], tier: int, num_steps: int) -> _Places:
        """The copies of a tier's plan: out of it right after a gap begins, into it before it ends."""
        places = _Places()
        fetches: list[tuple[int, Chunk, int, Instruction]] = []
        for gap in gaps:
            if not gap.is_evicted:
                continue
            if gap.before is not None:
                out = self._instruction(Kind.EVICT, gap.before, tier, is_copied=gap.is_copied)
                places.evicts[gap.start + 1].append(out)
            if gap.is_fetched and gap.after is not None:
                end = gap.end(num_steps)
                back = self._instruction(Kind.FETCH, gap.after, tier, is_copied=True)
                fetches.append((end, gap.chunk, end - gap.lead, back))
        for _, _, place, back in sorted(fetches, key=lambda one: one[:3]):
            places.fetches[place].append(back)
        return places

    def _instruction(self, kind: Kind, access: Access, tier: int, *, is_copied: bool) -> Instruction:
        chunk, step = access.chunk, access.step
        batch, microbatch, version = step.batch, None, None
        if chunk.item is Item.WEIGHTS:
            version = step.version
            if version is not None and version % self.program.banks[chunk.stage] != chunk.number:
                version -= 1  # an UPDATE reads the version before the one that it makes
        elif chunk.item is Item.STASH or (
            chunk.item is Item.GRADIENT and self.program.rule is Rule.STASHED
        ):
            batch, microbatch = divmod(chunk.number, self.program.num_microbatches)
        elif chunk.item is Item.GRADIENT:
            batch = chunk.number
        page = Page(chunk.item, chunk.chunk, tier, is_copied)
        return Instruction(kind, chunk.stage, batch, microbatch, version, page=page)
