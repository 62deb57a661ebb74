"""Where a rank's chunks are while its track goes by: one account for the proof, the peaks and the bytes.

A FETCH takes a slot when it is posted. An EVICT gives its slot back; the copies that need it wait until it is
free, so what is counted here in the order of the track bounds what any clock would show. Copies of one chunk
run one after the other. What an instruction writes makes copies in lower tiers worthless: their slots are
free at once.
"""

from collections import Counter
from collections.abc import Iterator

from bireme.schedule.instruction import PAGING, Instruction, Item, Kind
from bireme.schedule.program import Program
from bireme.schedule.rule import Rule
from bireme.schedule.tiers import Chunk, RankTiers
from bireme.schedule.uses import ChunkUses, Mode, Use

__all__ = ["Holding", "chunk_of"]


def chunk_of(program: Program, step: Instruction) -> Chunk:
    """The chunk that a FETCH or EVICT moves."""
    assert step.page is not None, "FETCH and EVICT have a page"
    match step.page.item:
        case Item.WEIGHTS:
            number = (step.version or 0) % program.banks[step.stage]
        case Item.OPTIMIZER | Item.FROZEN:
            number = 0
        case Item.GRADIENT if program.rule is not Rule.STASHED:
            number = step.batch
        case _:
            number = step.batch * program.num_microbatches + (step.microbatch or 0)
    return Chunk(step.page.item, step.stage, number, step.page.chunk)


class Holding:
    """One rank's chunks: on which tiers each has a valid copy, and how many each tier holds and has held."""

    def __init__(self, program: Program, tiers: RankTiers) -> None:
        self.program = program
        self.tiers = tiers
        self.uses = ChunkUses(program, tiers)
        self.where: dict[Chunk, set[int]] = {chunk: {tier} for chunk, tier in tiers.begin.items()}
        self.held = [0] * len(tiers.tiers)
        for tier in tiers.begin.values():
            self.held[tier] += 1
        self.peak = list(self.held)
        self.num_copied_in = [0] * len(tiers.tiers)
        """For each tier the chunks that were copied into it."""
        self.on_device: Counter[Item] = Counter(
            chunk.item for chunk, tier in tiers.begin.items() if tier == 0
        )
        self.fetched: set[Chunk] = set()
        """Chunks on the device, or on their way there, that nobody has used since."""
        self.lost: set[Chunk] = set()

    def start(self, step: Instruction) -> Iterator[str]:
        """A step starts; yields what is wrong with it."""
        if step.kind in PAGING:
            yield from self._move(step)
        for use, chunks in self.uses.of(step):
            for chunk in chunks:
                tiers = self.where.get(chunk)
                if use.tier:
                    yield from self._use_below(step, use, chunk)
                elif use.mode is Mode.READ and tiers is not None and 0 in tiers:
                    self.fetched.discard(chunk)
                else:
                    yield from self._use(step, use, chunk)

    def end(self, step: Instruction) -> None:
        """A step ends, and with it what nobody needs any more."""
        for use, chunks in self.uses.of(step):
            if use.ends:
                for chunk in chunks:
                    for tier in sorted(self.where.pop(chunk, ())):
                        self._give(chunk, tier)

    def finish(self) -> Iterator[str]:
        """What must be there after the window for training to go on."""
        for chunk in sorted(self.lost):
            if chunk.item in (Item.OPTIMIZER, Item.FROZEN):
                yield f"Chunk {chunk.chunk} of {_told(chunk)} is lost: no tier has it."

    def _use(self, step: Instruction, use: Use, chunk: Chunk) -> Iterator[str]:
        tiers = self.where.get(chunk)
        is_made = use.mode is Mode.MAKE or (use.mode is Mode.ADD and tiers is None and chunk not in self.lost)
        self.fetched.discard(chunk)
        if not is_made and (tiers is None or 0 not in tiers):
            where = "no tier has it" if tiers is None else f"it is on {self.tiers.tiers[min(tiers)].name}"
            yield f"{step} needs chunk {chunk.chunk} of {_told(chunk)} on the device, but {where}."
        if tiers is None:
            tiers = self.where[chunk] = set()
            self.lost.discard(chunk)
        if use.mode is not Mode.READ:
            for tier in sorted(tiers - {0}):
                tiers.discard(tier)
                self._give(chunk, tier)
        if 0 not in tiers:
            tiers.add(0)
            yield from self._take(step, chunk, 0)

    def _use_below(self, step: Instruction, use: Use, chunk: Chunk) -> Iterator[str]:
        """The same of what is used on the host: what is written there is worthless on the device."""
        host = self.tiers.tiers[use.tier].name
        tiers = self.where.setdefault(chunk, set())
        if use.mode is not Mode.MAKE and use.tier not in tiers:
            yield f"{step} needs chunk {chunk.chunk} of {_told(chunk)} on {host}, which has no copy of it."
        if use.mode is Mode.READ:
            return
        self.lost.discard(chunk)
        self.fetched.discard(chunk)
        for tier in sorted(tiers - {use.tier}):
            tiers.discard(tier)
            self._give(chunk, tier)
        if use.tier not in tiers:
            tiers.add(use.tier)
            yield from self._take(step, chunk, use.tier)

    def _move(self, step: Instruction) -> Iterator[str]:
        assert step.page is not None, "FETCH and EVICT have a page"
        chunk, tier = chunk_of(self.program, step), step.page.tier
        tiers = self.where.get(chunk, set())
        lowest = tier + 1 if step.kind is Kind.FETCH or step.page.is_copied else tier
        if not 0 <= tier <= lowest < len(self.tiers.tiers):
            yield f"{step} names tier {lowest}; the tiers are 0 to {len(self.tiers.tiers) - 1}."
            return
        if step.kind is Kind.FETCH:
            if tier in tiers:
                yield f"{step} runs, but the chunk is there already."
                return
            if tier + 1 not in tiers:
                yield f"{step} finds no copy of the chunk in tier {tier + 1}."
                return
            tiers.add(tier)
            if tier == 0:
                self.fetched.add(chunk)
            self.num_copied_in[tier] += 1
            yield from self._take(step, chunk, tier)
            return
        if tier not in tiers:
            yield f"{step} finds no copy of the chunk there."
            return
        if tier == 0 and chunk in self.fetched:
            yield f"{step} takes away what is still being copied: nobody has used it since its FETCH."
        tiers.discard(tier)
        self._give(chunk, tier)
        if step.page.is_copied:
            if tier + 1 in tiers:
                yield f"{step} copies the chunk to where it is already."
                return
            tiers.add(tier + 1)
            self.num_copied_in[tier + 1] += 1
            yield from self._take(step, chunk, tier + 1)
        elif not tiers:
            del self.where[chunk]
            self.lost.add(chunk)

    def _take(self, step: Instruction, chunk: Chunk, tier: int) -> Iterator[str]:
        self.held[tier] += 1
        self.peak[tier] = max(self.peak[tier], self.held[tier])
        if tier == 0:
            self.on_device[chunk.item] += 1
        capacity = self.tiers.tiers[tier].capacity
        if capacity is not None and self.held[tier] > capacity:
            yield (
                f"{step} puts {self.held[tier]} chunks on {self.tiers.tiers[tier].name}, which has room for "
                f"{capacity}."
            )

    def _give(self, chunk: Chunk, tier: int) -> None:
        self.held[tier] -= 1
        if tier == 0:
            self.on_device[chunk.item] -= 1


def _told(chunk: Chunk) -> str:
    match chunk.item:
        case Item.WEIGHTS:
            return f"bank {chunk.number} of the weights of stage {chunk.stage}"
        case Item.OPTIMIZER:
            return f"the optimiser of stage {chunk.stage}"
        case Item.FROZEN:
            return f"the frozen weights of stage {chunk.stage}"
    return f"{chunk.item} {chunk.number} of stage {chunk.stage}"
