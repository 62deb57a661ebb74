"""The accesses of a tier: which chunk is read or written at which step. What paging is planned from."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from itertools import chain
from typing import NamedTuple

from bireme.schedule.instruction import COMPUTE, PAGING, SHARING, Instruction, Item, Kind
from bireme.schedule.program import Program, Rule
from bireme.schedule.tiers import Chunk, RankTiers

# What an instruction does to the items that can be paged.
#
# Follows from the kind of the instruction and the update rule alone. Planning, proof, account and clock all
# ask here, so that they cannot disagree.


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

    If replicas share weights, items are this replica's parts. Passes run on whole weights, which a FETCH
    makes of the parts, and their whole gradients are added to the parts from a SCATTER to its COLLECT.
    """
    is_on_host = step.kind is Kind.UPDATE and step.stage in host_updates
    needs_whole = step.kind in COMPUTE and program.num_sharers > 1
    for use in _uses(program, step, master=master):
        if not needs_whole or use.item is Item.STASH:
            yield use._replace(tier=1) if is_on_host else use


def _uses(program: Program, step: Instruction, *, master: bool) -> Iterator[Use]:
    if step.kind in COMPUTE:
        yield _use(program, step, Item.FROZEN)
    match step.kind:
        case Kind.FORWARD:
            yield _use(program, step, Item.WEIGHTS)
            yield _use(program, step, Item.STASH, Mode.CHANGE if step.half == 1 else Mode.MAKE)
        case Kind.RECOMPUTE | Kind.BACKWARD_INPUT:
            yield _use(program, step, Item.WEIGHTS)
            yield _use(program, step, Item.STASH)
        case Kind.BACKWARD | Kind.BACKWARD_WEIGHT:
            yield _use(program, step, Item.WEIGHTS)
            yield _use(program, step, Item.STASH, ends=True)
            yield _use(program, step, Item.GRADIENT, Mode.ADD)
        case Kind.FETCH if step.moves_whole:
            yield _use(program, step, Item.FROZEN)
            yield _use(program, step, Item.WEIGHTS)
        case Kind.SCATTER:
            yield _use(program, step, Item.GRADIENT, Mode.ADD)
        case Kind.REDUCE | Kind.COLLECT:
            yield _use(program, step, Item.GRADIENT)
        case Kind.UPDATE:
            yield _use(program, step, Item.GRADIENT, ends=True)
            yield _use(program, step, Item.OPTIMIZER, Mode.CHANGE)
            yield from _updated(program, step, master=master)
        case Kind.TRIAL:
            if step.seen:
                yield Use(Item.GRADIENT, step.stage, step.batch - 1, Mode.READ)
            yield _use(program, step, Item.OPTIMIZER)
            yield _use(program, step, Item.WEIGHTS, Mode.MAKE)
        case Kind.AVERAGE_START | Kind.AVERAGE_END:
            yield from _averaged(program, step, master=master)


_ItemUses = Sequence[tuple[Use, tuple[Chunk, ...]]]
"""Items that a step uses, each with its chunks."""


class ChunkUses:
    """What instructions of a program do to chunks of a rank. The chunks of an item are listed once."""

    def __init__(self, program: Program, tiers: RankTiers) -> None:
        self._program, self._tiers = program, tiers
        self._chunks: dict[tuple[Item, int, int], tuple[Chunk, ...]] = {}
        self._last: tuple[Instruction | None, _ItemUses] = None, ()
        """What was asked last: who asks when a step starts asks again when it ends."""

    def of(self, step: Instruction) -> _ItemUses:
        """The items of a step that have chunks, each with these."""
        if step.kind in PAGING and not step.moves_whole:
            return ()
        last, found = self._last
        if last is not step:
            found = self._found(step)
            self._last = step, found
        return found

    def _found(self, step: Instruction) -> _ItemUses:
        found = []
        tiers = self._tiers
        for use in uses(self._program, step, master=tiers.master, host_updates=tiers.host_updates):
            key = use.item, use.stage, use.number
            chunks = self._chunks.get(key)
            if chunks is None:
                chunks = self._chunks[key] = tiers.chunks_of(*key)
            if use.ends:
                del self._chunks[key]  # a run goes on for ever
            if chunks:
                found.append((use, chunks))
        return found


def _updated(program: Program, step: Instruction, *, master: bool) -> Iterator[Use]:
    """The banks of an UPDATE. Under FRESH the newest weights are the optimizer's, with or without master."""
    if program.rule is Rule.FRESH:
        return
    is_in_place = program.banks[step.stage] == 1 and not master
    if not (master or is_in_place):
        before = ((step.version or 0) - 1) % program.banks[step.stage]
        yield Use(Item.WEIGHTS, step.stage, before, Mode.READ)
    yield _use(program, step, Item.WEIGHTS, Mode.CHANGE if is_in_place else Mode.MAKE)


def _averaged(program: Program, step: Instruction, *, master: bool) -> Iterator[Use]:
    """What AVERAGE_START reads and AVERAGE_END changes: the newest weights, wherever they are."""
    is_end = step.kind is Kind.AVERAGE_END
    if master or program.rule is Rule.FRESH:
        yield _use(program, step, Item.OPTIMIZER, Mode.CHANGE if is_end else Mode.READ)
    if program.rule is not Rule.FRESH and (is_end or not master):
        made = Mode.MAKE if master else Mode.CHANGE
        yield _use(program, step, Item.WEIGHTS, made if is_end else Mode.READ)


def _use(
    program: Program, step: Instruction, item: Item, mode: Mode = Mode.READ, *, ends: bool = False
) -> Use:
    return Use(item, step.stage, number_of(program, step, item), mode, ends)


def number_of(program: Program, step: Instruction, item: Item) -> int:
    """The number of the item that a step uses or moves, as `Chunk` has it."""
    if item is Item.WEIGHTS:
        return (step.version or 0) % program.banks[step.stage]
    if item is Item.OPTIMIZER or item is Item.FROZEN:
        return 0
    if item is Item.GRADIENT and program.rule is not Rule.STASHED:
        return step.batch
    return step.batch * program.num_microbatches + (step.microbatch or 0)


# The bytes of what each stage keeps, and which of them can be paged.


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of what each stage keeps.

    `stash` and `inputs` are for one micro-batch: all activations kept for the backward, and the stage's
    input alone, which is what a recomputed stage keeps. `activation` and `gradient_message` are the
    messages that come into the stage from the stages before and after. `workspace` is what a pass of a
    micro-batch takes and gives back; empty stands for none. Where `master` is set, the newest weights live in
    the optimizer's own master copy, counted in `optimizer`. `buffers` are always there besides the
    optimizer's bytes; of them `frozen` are weights that do not learn, which alone are paged; empty stands for
    none. `tied_gradient` is what other stages add to of a stage's gradients: where replicas share weights, it
    stays whole from the first backward of a batch to its update. Of a backward in halves, `waiting` are a
    micro-batch's gradients between the two, and `halves` is what they take beside `workspace`. Empty stands
    for none.
    """

    version: tuple[float, ...]
    gradient: tuple[float, ...]
    optimizer: tuple[float, ...]
    stash: tuple[float, ...]
    inputs: tuple[float, ...]
    activation: tuple[float, ...]
    gradient_message: tuple[float, ...]
    master: bool = False
    workspace: tuple[float, ...] = ()
    buffers: tuple[float, ...] = ()
    frozen: tuple[float, ...] = ()
    tied_gradient: tuple[float, ...] = ()
    waiting: tuple[float, ...] = ()
    halves: tuple[float, ...] = ()


def item_bytes(program: Program, sizes: Sizes, item: Item, stage: int) -> float:
    """The bytes of an item that can be paged: one bank, one sum of gradients, one micro-batch; of weights and
    gradients that replicas share, one replica's part.
    """
    match item:
        case Item.WEIGHTS:
            return sizes.version[stage] / program.num_sharers
        case Item.GRADIENT:
            tied = sizes.tied_gradient[stage] if sizes.tied_gradient else 0.0
            return (sizes.gradient[stage] - tied) / program.num_sharers
        case Item.OPTIMIZER:
            has_newest = program.rule is Rule.FRESH and not sizes.master
            return sizes.optimizer[stage] + (sizes.version[stage] if has_newest else 0.0)
        case Item.STASH:
            return (sizes.inputs if stage in program.recomputed else sizes.stash)[stage]
        case Item.FROZEN:
            return sizes.frozen[stage] / program.num_sharers if sizes.frozen else 0.0
        case Item.WHOLE:
            return 0.0  # it comes from other replicas, and is in no chunk of this rank's tiers


def unpaged(program: Program, sizes: Sizes, paged: Collection[tuple[Item, int]]) -> Sizes:
    """The sizes without the items that are paged: of messages, of what is recomputed, and of small items."""
    if not paged:
        return sizes

    def without(item: Item, values: tuple[float, ...], *, but: Collection[int] = ()) -> tuple[float, ...]:
        return tuple(
            0.0 if (item, stage) in paged and stage not in but else value
            for stage, value in enumerate(values)
        )

    recomputed = program.recomputed
    frozen, tied = without(Item.FROZEN, sizes.frozen), sizes.tied_gradient
    left = without(Item.GRADIENT, sizes.gradient)
    buffers = sizes.buffers
    if frozen:
        kept = zip(buffers, sizes.frozen, frozen, strict=True)
        buffers = tuple(all_of_it - whole + one for all_of_it, whole, one in kept)
    return replace(
        sizes,
        buffers=buffers,
        frozen=frozen,
        version=without(Item.WEIGHTS, sizes.version),
        gradient=tuple(map(max, left, tied)) if tied else left,
        optimizer=without(Item.OPTIMIZER, sizes.optimizer),
        stash=without(Item.STASH, sizes.stash, but=recomputed),
        inputs=without(Item.STASH, sizes.inputs, but=set(range(program.num_stages)) - recomputed),
    )


class ChunkAccess(NamedTuple):
    """One use of a chunk in a tier, at a step.

    `label` is the same in every batch; `step` tells which it is. `takes` where the chunk must have a slot
    during the step, `ends` where it is gone from the tier afterwards. `is_below` where the step uses the
    chunk in the tier below, so that it must be there and not here; `is_kept_below` where all that write the
    chunk do, so that there is always a valid copy.
    """

    at: int
    chunk: Chunk
    label: Hashable
    step: Instruction
    reads: bool
    writes: bool
    ends: bool = False
    takes: bool = True
    is_below: bool = False
    is_kept_below: bool = False


_access: Callable[[tuple[object, ...]], ChunkAccess] = partial(tuple.__new__, ChunkAccess)
"""Makes an access in less time: a search makes millions."""

ItemKey = tuple[Item, int, int]
"""An item by its stage and number; its chunks are all used alike."""


@dataclass(frozen=True, slots=True)
class TrackAccesses:
    """What the instructions of a track do to chunks `on_device`, by their place in the track. Those that are
    made `on_host` are accesses of that tier, at no step yet.
    """

    on_device: dict[int, list[ChunkAccess]]
    on_host: dict[int, list[ChunkAccess]]


def accesses_of(program: Program, rank: int, tiers: RankTiers, *, is_summed: bool = False) -> TrackAccesses:
    """What the instructions of a track do to chunks.

    Each instruction that uses chunks is a step. Where gradients are summed over replicas, they are used all
    the time from REDUCE to UPDATE, and parts of them from SCATTER to COLLECT. An update on the host uses
    gradients and weights below; what it remembers is never on the device.
    """
    found: dict[int, list[ChunkAccess]] = {}
    on_host: defaultdict[int, list[ChunkAccess]] = defaultdict(list)
    made: set[ItemKey] = set()
    times: Counter[tuple[Kind, int, int]] = Counter()
    summed: dict[tuple[ItemKey, bool], tuple[Chunk, ...]] = {}
    """The gradients that sums over replicas are added to, by item, and whether a whole batch is summed."""
    uses = ChunkUses(program, tiers)
    for index, step in enumerate(program.tracks[rank]):
        used = {(use.item, use.stage, use.number): (use, chunks) for use, chunks in uses.of(step)}
        if not used:
            continue
        at, label = len(found), _label(step)
        if step.kind in SHARING or step.moves_whole:
            times[step.kind, step.stage, step.batch] += 1
            label = label, times[step.kind, step.stage, step.batch]
        besides = {key: chunks for (key, _), chunks in summed.items() if key not in used}
        own = found[index] = [
            ChunkAccess(at, chunk, label, step, reads=True, writes=False)
            for chunk in sorted(chain.from_iterable(besides.values()))
        ]
        for key, (use, chunks) in used.items():
            if use.tier:
                made.discard(key)
                below = [_on_host(at, chunk, step, use) for chunk in chunks]
                on_host[index] += below
                own += _seen_above(below, use)
                continue
            is_kept_below = use.item is Item.WEIGHTS and use.stage in tiers.host_updates
            reads = not (use.mode is Mode.MAKE or (use.mode is Mode.ADD and key not in made))
            writes, ends = use.mode is not Mode.READ, use.ends
            made.add(key)
            if ends:
                made.discard(key)
            if use.item is Item.GRADIENT:
                is_of_batch = step.kind in (Kind.REDUCE, Kind.UPDATE)
                if step.kind is Kind.SCATTER or (step.kind is Kind.REDUCE and is_summed):
                    summed[key, is_of_batch] = chunks
                elif step.kind in (Kind.COLLECT, Kind.UPDATE):
                    summed.pop((key, is_of_batch), None)
            own += [
                _access((at, chunk, label, step, reads, writes, ends, True, False, is_kept_below))
                for chunk in chunks
            ]
    return TrackAccesses(found, on_host)


def _on_host(at: int, chunk: Chunk, step: Instruction, use: Use) -> ChunkAccess:
    reads, writes = use.mode is not Mode.MAKE, use.mode is not Mode.READ
    return ChunkAccess(at, chunk, _label(step), step, reads, writes, use.ends)


def _seen_above(below: Sequence[ChunkAccess], use: Use) -> Iterator[ChunkAccess]:
    """What an update on the host is to the device: it needs gradients below, and makes weights there. What
    an optimizer remembers is never on the device, and of weights there is always a copy below.
    """
    is_made = use.item is Item.WEIGHTS and use.mode is not Mode.READ
    for one in below if is_made or use.item is Item.GRADIENT else ():
        seen = one._replace(takes=False, is_below=True, is_kept_below=is_made)
        yield seen._replace(reads=not is_made, writes=is_made)


def _label(step: Instruction) -> Hashable:
    return step.kind, step.microbatch, step.half
