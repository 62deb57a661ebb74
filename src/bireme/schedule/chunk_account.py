"""Where a rank's chunks are while its track goes by: one account for the proof, the clock and the engine.

A FETCH takes a slot when it is posted. An EVICT gives its slot back; the copies that need it wait until it is
free, so what is counted in the order of the track bounds what any clock would show. Copies of one chunk run
one after the other. What an instruction writes makes copies in lower tiers worthless: their slots are free at
once.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

from bireme.schedule.accesses import ChunkUses, Mode, Use, number_of
from bireme.schedule.instruction import COMPUTE, PAGING, SHARING, Instruction, Item, Kind
from bireme.schedule.program import Program
from bireme.schedule.tiers import Chunk, RankTiers, Tier


def chunk_of(program: Program, step: Instruction) -> Chunk:
    """The chunk that a FETCH or EVICT moves."""
    assert step.page is not None, "FETCH and EVICT have a page"
    item = step.page.item
    return Chunk(item, step.stage, number_of(program, step, item), step.page.chunk)


_ALL_ON_DEVICE = RankTiers(1, (Tier("device", None, None),), {}, {}, master=False)
"""The tiers of a rank that offloads nothing."""

When = TypeVar("When")
"""What stands for the end of a copy: a time of a clock, or a job that makes it."""


class ChunkAccount(ABC, Generic[When]):
    """Which tiers have a valid copy of each chunk of a rank, and in which slots. Who keeps the account adds
    what a slot and a copy are.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self.program = program
        self.tiers = program.tiers_of(rank) or _ALL_ON_DEVICE
        self.uses = ChunkUses(program, self.tiers)
        self.where: dict[Chunk, dict[int, int]] = {
            chunk: {tier: 0} for chunk, tier in self.tiers.begin.items()
        }
        """By chunk the tiers that have a copy, each with its slot, if slots have numbers."""
        self.arriving: dict[Chunk, When] = {}
        """The chunks that were fetched to the device and that no instruction has used since, each with the
        end of that copy."""
        self.last: dict[Chunk, When] = {}
        """By chunk the end of its last copy, if copies have one."""

    @abstractmethod
    def take(self, chunk: Chunk, tier: int) -> int:
        """Take a slot whose content is to be made, and wait until it is free."""

    @abstractmethod
    def give(self, chunk: Chunk, tier: int, slot: int, *, is_copied: bool = False) -> None:
        """Give a slot back, from which the chunk may have been copied to the tier below."""

    @abstractmethod
    def copy(self, chunk: Chunk, tier: int, *, is_fetch: bool) -> int:
        """Copy a chunk from the tier below, or to it; gives the slot that was taken for it."""

    def wait(self, end: When | None) -> None:
        """An instruction uses a chunk once a copy of it has ended, if there is one."""

    def miss(self, step: Instruction, use: Use, chunk: Chunk) -> None:
        """A step needs a chunk on a tier that does not have it."""

    def use(self, step: Instruction) -> None:
        """Have the chunks of a step where it uses them. What it writes makes all other copies worthless."""
        where, arriving = self.where, self.arriving
        for use, chunks in self.uses.of(step):
            is_read, tier = use.mode is Mode.READ, use.tier
            for chunk in chunks:
                if tier:
                    self.wait(self.last.get(chunk))
                elif chunk in arriving:
                    self.wait(arriving.pop(chunk))
                tiers = where.get(chunk)
                if tiers is None:
                    if use.mode is not Mode.MAKE:
                        self.miss(step, use, chunk)
                    tiers = where[chunk] = {}
                elif tier in tiers:
                    if is_read or len(tiers) == 1:
                        continue
                elif use.mode is not Mode.MAKE:
                    self.miss(step, use, chunk)
                if not is_read:
                    for other in [one for one in tiers if one != tier]:
                        arriving.pop(chunk, None)
                        self.give(chunk, other, tiers.pop(other))
                if tier not in tiers:
                    tiers[tier] = self.take(chunk, tier)

    def move(self, step: Instruction) -> None:
        """A FETCH or EVICT of a chunk."""
        assert step.page is not None, "FETCH and EVICT have a page"
        chunk = chunk_of(self.program, step)
        tier, is_copied, tiers = step.page.tier, step.page.is_copied, self.where[chunk]
        if step.kind is Kind.FETCH:
            tiers[tier] = self.copy(chunk, tier, is_fetch=True)
            return
        if is_copied:
            tiers[tier + 1] = self.copy(chunk, tier, is_fetch=False)
        self.give(chunk, tier, tiers.pop(tier), is_copied=is_copied)
        if not tiers:
            del self.where[chunk]

    def end(self, step: Instruction) -> None:
        """A step ends, and with it the items that no instruction needs any more."""
        for use, chunks in self.uses.of(step):
            if use.ends:
                self.forget(use.item, use.stage, use.number, chunks)

    def forget(self, item: Item, stage: int, number: int, chunks: Collection[Chunk]) -> None:
        """An item is gone, and its chunks with it."""
        for chunk in chunks:
            self.arriving.pop(chunk, None)
            for tier, slot in self.where.pop(chunk, {}).items():
                self.give(chunk, tier, slot)
            self.last.pop(chunk, None)


class Holding(ChunkAccount[None]):
    """The account that proves a track, and how many chunks each tier holds and has held; and the whole
    weights that a rank has from the replicas.
    """

    def __init__(self, program: Program, rank: int) -> None:
        super().__init__(program, rank)
        self.whole: dict[tuple[int, int], bool] = {}
        """The stages and versions whose weights are whole, and whether a pass has used them."""
        self.held = [0] * len(self.tiers.tiers)
        for tier in self.tiers.begin.values():
            self.held[tier] += 1
        self.peak = list(self.held)
        self.on_device: Counter[Item] = Counter(
            chunk.item for chunk, tier in self.tiers.begin.items() if tier == 0
        )
        self.lost: set[Chunk] = set()
        self.summed: set[Chunk] = set()
        """Chunks of gradients to which sums over replicas are added."""
        self._step: Instruction | None = None
        self._problems: list[str] = []

    def start(self, step: Instruction) -> list[str]:
        """A step starts; gives what is wrong with it."""
        self._step, self._problems = step, []
        if step.moves_whole:
            self._move_whole(step)
        elif step.kind in PAGING:
            self.move(step)
        elif self.program.num_sharers > 1:
            self._use_whole(step)
        self.use(step)
        if step.kind in SHARING:
            change = self.summed.update if step.kind is Kind.SCATTER else self.summed.difference_update
            for _, chunks in self.uses.of(step):
                change(chunks)
        return self._problems

    def finish(self) -> Iterator[str]:
        """What must be there after the window for training to go on."""
        for chunk in sorted(self.lost):
            if chunk.item in (Item.OPTIMIZER, Item.FROZEN):
                yield f"Chunk {chunk.chunk} of {_told(chunk)} is lost: no tier has it."
        for stage, version in sorted(self.whole):
            yield f"Version {version} of the weights of stage {stage} is still whole when the window ends."

    def _move_whole(self, step: Instruction) -> None:
        weights = step.stage, step.version or 0
        if step.kind is Kind.FETCH:
            if weights in self.whole:
                self._problems.append(f"{step} runs, but they are whole already.")
            self.whole.setdefault(weights, False)
        elif not self.whole.pop(weights, False):
            self._problems.append(f"{step} runs, but they are not whole, or no pass has used them.")

    def _use_whole(self, step: Instruction) -> None:
        """Passes need whole weights; an update makes this replica's part, so that whole weights in its bank
        are out of date.
        """
        weights = step.stage, step.version or 0
        if step.kind in COMPUTE:
            if weights not in self.whole:
                self._problems.append(f"{step} comes before its weights have been fetched from the replicas.")
            else:
                self.whole[weights] = True
        elif step.kind in (Kind.UPDATE, Kind.AVERAGE_END):
            banks = self.program.banks[step.stage]
            self._problems += [
                f"{step} writes the bank of version {version}, which is still whole."
                for stage, version in self.whole
                if stage == step.stage and version % banks == weights[1] % banks
            ]

    def miss(self, step: Instruction, use: Use, chunk: Chunk) -> None:
        """As `ChunkAccount` says: the first of a sum needs no chunk."""
        tiers = self.where.get(chunk)
        if use.mode is Mode.ADD and tiers is None and chunk not in self.lost:
            return
        where = "no tier has it" if tiers is None else f"it is on {self.tiers.tiers[min(tiers)].name}"
        needed = f"{step} needs chunk {chunk.chunk} of {_told(chunk)}"
        name = self.tiers.tiers[use.tier].name
        self._problems.append(f"{needed} on {'' if use.tier else 'the '}{name}, but {where}.")

    def move(self, step: Instruction) -> None:
        """As `ChunkAccount` says, unless that cannot be."""
        chunk = chunk_of(self.program, step)
        problem = self._wrong_move(step, chunk)
        if problem:
            self._problems.append(problem)
            return
        super().move(step)
        if chunk not in self.where:
            self.lost.add(chunk)

    def _wrong_move(self, step: Instruction, chunk: Chunk) -> str:
        """Why a chunk cannot be moved; a move that is only too early is a problem, and made."""
        assert step.page is not None, "FETCH and EVICT have a page"
        tier, tiers = step.page.tier, self.where.get(chunk, {})
        lowest = tier + 1 if step.kind is Kind.FETCH or step.page.is_copied else tier
        if not 0 <= tier <= lowest < len(self.held):
            return f"{step} names tier {lowest}; the tiers are 0 to {len(self.held) - 1}."
        if step.kind is Kind.FETCH:
            if tier in tiers:
                return f"{step} runs, but the chunk is there already."
            return "" if tier + 1 in tiers else f"{step} finds no copy of the chunk in tier {tier + 1}."
        if tier not in tiers:
            return f"{step} finds no copy of the chunk there."
        if tier == 0 and chunk in self.arriving:
            self._problems.append(
                f"{step} takes away what is still being copied: nobody has used it since its FETCH."
            )
        if tier == 0 and chunk in self.summed:
            self._problems.append(
                f"{step} takes away what sums over replicas are added to: their COLLECT comes later."
            )
        is_there = step.page.is_copied and tier + 1 in tiers
        return f"{step} copies the chunk to where it is already." if is_there else ""

    def take(self, chunk: Chunk, tier: int) -> int:
        """As `ChunkAccount` says: the slots that are held are counted."""
        self.lost.discard(chunk)
        self.held[tier] += 1
        self.peak[tier] = max(self.peak[tier], self.held[tier])
        if tier == 0:
            self.on_device[chunk.item] += 1
        own = self.tiers.tiers[tier]
        if own.capacity is not None and self.held[tier] > own.capacity:
            held, room = self.held[tier], own.capacity
            self._problems.append(
                f"{self._step} puts {held} chunks on {own.name}, which has room for {room}."
            )
        return 0

    def give(self, chunk: Chunk, tier: int, slot: int, *, is_copied: bool = False) -> None:
        """As `ChunkAccount` says."""
        self.held[tier] -= 1
        if tier == 0:
            self.on_device[chunk.item] -= 1

    def copy(self, chunk: Chunk, tier: int, *, is_fetch: bool) -> int:
        """As `ChunkAccount` says."""
        if is_fetch and tier == 0:
            self.arriving[chunk] = None
        return self.take(chunk, tier if is_fetch else tier + 1)


def _told(chunk: Chunk) -> str:
    match chunk.item:
        case Item.WEIGHTS:
            return f"bank {chunk.number} of the weights of stage {chunk.stage}"
        case Item.OPTIMIZER:
            return f"the optimizer of stage {chunk.stage}"
        case Item.FROZEN:
            return f"the frozen weights of stage {chunk.stage}"
    return f"{chunk.item} {chunk.number} of stage {chunk.stage}"
