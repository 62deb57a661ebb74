"""What an instruction does to the items that can be paged.

Follows from the kind of the instruction and the update rule alone. Planning, proof, account and clock all ask
here, so that they cannot disagree.
"""

from collections.abc import Collection, Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

from bireme.schedule.instruction import COMPUTE, PAGING, Instruction, Item, Kind
from bireme.schedule.program import Program
from bireme.schedule.rule import Rule
from bireme.schedule.tiers import Chunk, RankTiers

__all__ = ["ChunkUses", "Mode", "Use", "chunks_of", "uses"]


class Mode(Enum):
    """What becomes of an item's bytes."""

    READ = auto()
    CHANGE = auto()
    """Read and written: copies elsewhere are out of date."""
    MAKE = auto()
    """Written without reading what was there."""
    ADD = auto()
    """MAKE for the first of a sum, CHANGE afterwards."""


class Use(NamedTuple):
    """One item that an instruction uses, on which tier; `ends` where nobody needs it afterwards."""

    item: Item
    stage: int
    number: int
    mode: Mode
    ends: bool = False
    tier: int = 0


def uses(
    program: Program, step: Instruction, *, master: bool, host_updates: Collection[int] = ()
) -> Iterator[Use]:
    """The items that must be there while a step runs: on the device, and on the host for what is updated
    there. `master` and `host_updates` are as in `RankTiers`.
    """
    if step.kind is Kind.UPDATE and step.stage in host_updates:
        for use in _uses(program, step, master=master):
            yield use._replace(tier=1)
    else:
        yield from _uses(program, step, master=master)


def _uses(program: Program, step: Instruction, *, master: bool) -> Iterator[Use]:
    stage = step.stage
    if step.kind in COMPUTE:
        yield Use(Item.FROZEN, stage, 0, Mode.READ)
    match step.kind:
        case Kind.FORWARD:
            yield _weights(program, step, Mode.READ)
            yield _stash(program, step, Mode.CHANGE if step.half == 1 else Mode.MAKE)
        case Kind.RECOMPUTE | Kind.BACKWARD_INPUT:
            yield _weights(program, step, Mode.READ)
            yield _stash(program, step, Mode.READ)
        case Kind.BACKWARD | Kind.BACKWARD_WEIGHT:
            yield _weights(program, step, Mode.READ)
            yield _stash(program, step, Mode.READ, ends=True)
            yield _gradient(program, step, Mode.ADD)
        case Kind.REDUCE:
            yield _gradient(program, step, Mode.READ)
        case Kind.UPDATE:
            yield _gradient(program, step, Mode.READ, ends=True)
            yield Use(Item.OPTIMIZER, stage, 0, Mode.CHANGE)
            yield from _updated(program, step, master=master)
        case Kind.TRIAL:
            if step.seen:
                yield Use(Item.GRADIENT, stage, step.batch - 1, Mode.READ)
            yield Use(Item.OPTIMIZER, stage, 0, Mode.READ)
            yield _weights(program, step, Mode.MAKE)
        case Kind.AVERAGE_START | Kind.AVERAGE_END:
            yield from _averaged(program, step, master=master)


def chunks_of(tiers: RankTiers, use: Use) -> Iterator[Chunk]:
    """The chunks of an item."""
    for chunk in range(tiers.chunks.get((use.item, use.stage), 0)):
        yield Chunk(use.item, use.stage, use.number, chunk)


ItemUses = Sequence[tuple[Use, tuple[Chunk, ...]]]
"""Items that a step uses, each with its chunks."""


class ChunkUses:
    """What instructions of a program do to chunks of a rank. The chunks of an item are listed once."""

    def __init__(self, program: Program, tiers: RankTiers) -> None:
        self._program, self._tiers = program, tiers
        self._chunks: dict[tuple[Item, int, int], tuple[Chunk, ...]] = {}
        self._last: tuple[Instruction | None, ItemUses] = None, ()
        """What was asked last: who asks when a step starts asks again when it ends."""

    def of(self, step: Instruction) -> ItemUses:
        """The items of a step that have chunks, each with these."""
        if step.kind in PAGING:
            return ()
        last, found = self._last
        if last is not step:
            found = self._found(step)
            self._last = step, found
        return found

    def _found(self, step: Instruction) -> ItemUses:
        found = []
        tiers = self._tiers
        for use in uses(self._program, step, master=tiers.master, host_updates=tiers.host_updates):
            key = use.item, use.stage, use.number
            chunks = self._chunks.get(key)
            if chunks is None:
                chunks = self._chunks[key] = tuple(chunks_of(tiers, use))
            if chunks:
                found.append((use, chunks))
        return found


def _updated(program: Program, step: Instruction, *, master: bool) -> Iterator[Use]:
    """The banks of an UPDATE. Under FRESH the newest weights are the optimiser's, with or without master."""
    if program.rule is Rule.FRESH:
        return
    if master:
        yield _weights(program, step, Mode.MAKE)
    elif program.banks[step.stage] == 1:
        yield _weights(program, step, Mode.CHANGE)
    else:
        before = ((step.version or 0) - 1) % program.banks[step.stage]
        yield Use(Item.WEIGHTS, step.stage, before, Mode.READ)
        yield _weights(program, step, Mode.MAKE)


def _averaged(program: Program, step: Instruction, *, master: bool) -> Iterator[Use]:
    """What AVERAGE_START reads and AVERAGE_END changes: the newest weights, wherever they are."""
    is_end = step.kind is Kind.AVERAGE_END
    if master or program.rule is Rule.FRESH:
        yield Use(Item.OPTIMIZER, step.stage, 0, Mode.CHANGE if is_end else Mode.READ)
    if program.rule is not Rule.FRESH and (is_end or not master):
        made = Mode.MAKE if master else Mode.CHANGE
        yield _weights(program, step, made if is_end else Mode.READ)


def _weights(program: Program, step: Instruction, mode: Mode) -> Use:
    bank = (step.version or 0) % program.banks[step.stage]
    return Use(Item.WEIGHTS, step.stage, bank, mode)


def _stash(program: Program, step: Instruction, mode: Mode, *, ends: bool = False) -> Use:
    number = step.batch * program.num_microbatches + (step.microbatch or 0)
    return Use(Item.STASH, step.stage, number, mode, ends)


def _gradient(program: Program, step: Instruction, mode: Mode, *, ends: bool = False) -> Use:
    number = step.batch
    if program.rule is Rule.STASHED:
        number = step.batch * program.num_microbatches + (step.microbatch or 0)
    return Use(Item.GRADIENT, step.stage, number, mode, ends)
