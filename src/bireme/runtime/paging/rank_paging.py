"""Paging of one rank: the face of this package to the engine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from bireme.devices import is_accelerator
from bireme.errors import BiremeError
from bireme.memory.arena import PLAIN, ArenaAllocator
from bireme.memory.system_memory import ALIGNED, give_back_large_blocks
from bireme.runtime.optimizers import StageMemory, Stash
from bireme.runtime.paging.chunk_store import ChunkStore, PagingSettings
from bireme.runtime.paging.pager import PagedStash, Pager
from bireme.schedule.instruction import Instruction, Item
from bireme.schedule.program import Program
from bireme.schedule.residency import copied_in_bytes
from bireme.schedule.tiers import Chunk, RankTiers

# Between windows: chunks are put where the next one begins, opened to be written, read where they are.


def arrange(store: ChunkStore, begin: Mapping[Chunk, int]) -> None:
    """Put every chunk on the tier where a window begins with it, and on no other.

    A chunk that the window does not know stays, on the lowest tier, in a slot besides those that the window
    counts with. Of one that there is not yet, only a slot is there. No tier ever holds more than it can:
    where nothing else helps, two chunks change places.
    """
    lowest = len(store.pools) - 1
    unknown = store.chunks.keys() - begin.keys()
    store.keep_slots(lowest, len(unknown))
    target = dict.fromkeys(unknown, lowest) | dict(begin)
    for chunk in target:
        _leave_but_one(store, chunk, target[chunk])
    waiting = sorted(target, key=lambda chunk: (-target[chunk], chunk))
    while waiting:
        left = [chunk for chunk in waiting if not _carried(store, chunk, target[chunk])]
        if len(left) == len(waiting):
            # All full. Each time one more comes to its place, so this ends.
            _let_in(store, left, target)
        waiting = left


def _leave_but_one(store: ChunkStore, chunk: Chunk, target: int) -> None:
    """Give back a chunk's slots but the one nearest to its target."""
    where = store.held(chunk).where
    if len(where) > 1:
        store.carry(chunk, min(where, key=lambda tier: abs(tier - target)))


def _carried(store: ChunkStore, chunk: Chunk, tier: int) -> bool:
    if tier not in store.chunks[chunk].where and not store.has_room(tier):
        return False
    store.carry(chunk, tier)
    return True


def _let_in(store: ChunkStore, left: Sequence[Chunk], target: Mapping[Chunk, int]) -> None:
    """Bring the first chunk to its tier, which is full: another that is there on its way elsewhere goes."""
    chunk = left[0]
    tier = target[chunk]
    other = next((one for one in left if tier in store.held(one).where), None)
    room = next((free for free in reversed(range(len(store.pools))) if store.has_room(free)), None)
    here = next(iter(store.held(chunk).where), room)
    if other is None or here is None:
        name, capacity = store.tiers.tiers[tier].name, store.tiers.tiers[tier].capacity
        raise BiremeError(
            f"A window begins with more chunks on {name} than the {capacity} that it has room for. "
            "`bireme schedule --check` proves programs."
        )
    if room is not None:
        store.carry(other, room)
        store.carry(chunk, tier)
    else:
        store.lift(other)
        store.carry(chunk, tier)
        store.put_down(other, here)


@contextmanager
def opened(store: ChunkStore, item: Item, stage: int, number: int) -> Iterator[None]:
    """Within this context all chunks of an item are on the device, be they new; afterwards they are as low as
    there is room. What is only ever used on the host is lent from there.
    """
    num_chunks = store.tiers.chunks.get((item, stage), 0)
    chunks = [Chunk(item, stage, number, place) for place in range(num_chunks)]
    store.opened.update(chunks)
    if item is Item.OPTIMIZER and stage in store.tiers.host_updates:
        lent_places = []
        for chunk in chunks:
            _make_room_on_host(store)
            store.carry(chunk, 1)
            lent_places.append(store.lend_host(chunk))
        yield
        store.opened.difference_update(chunks)
        for place in lent_places:
            store.memory.unmap(place)
        return
    for chunk in chunks:
        if 0 not in store.held(chunk).where:
            _make_room(store)
        store.carry(chunk, 0)  # and nowhere else: it may be written to
    yield
    store.opened.difference_update(chunks)
    for chunk in chunks:
        _stow(store, chunk)


@contextmanager
def lent(store: ChunkStore, items: Sequence[tuple[Item, int, int]]) -> Iterator[bool]:
    """Within this context items, each with its stage and number, can be read on the device, and are on the
    tiers below too; False if the device has no room for them.
    """
    chunks = [
        Chunk(item, stage, number, place)
        for item, stage, number in items
        for place in range(store.tiers.chunks.get((item, stage), 0))
    ]
    store.opened.update(chunks)
    brought: list[Chunk] = []
    has_room = True
    for chunk in chunks:
        if 0 not in store.chunks[chunk].where:
            _make_room(store)
            if not store.pools[0].num_free:
                has_room = False
                break
            store.bring(chunk)
            brought.append(chunk)
    try:
        yield has_room
    finally:
        store.opened.difference_update(chunks)
        for chunk in brought:
            store.drop(chunk, store.chunks[chunk], (0,))


def _make_room(store: ChunkStore) -> None:
    if store.pools[0].num_free:
        return
    for chunk, held in store.chunks.items():
        if 0 in held.where and chunk not in store.opened and _stow(store, chunk):
            return


def _make_room_on_host(store: ChunkStore) -> None:
    if store.has_room(1):
        return
    for chunk, held in store.chunks.items():
        if (
            set(held.where) == {1}
            and chunk not in store.opened
            and len(store.pools) == 3
            and store.has_room(2)
        ):
            store.carry(chunk, 2)
            return


def _stow(store: ChunkStore, chunk: Chunk) -> bool:
    """Take a chunk off the device, if a tier below has it or any has room."""
    held = store.chunks[chunk]
    if len(held.where) > 1:
        store.wait(held.last)
        held.arrival = None
        store.drop(chunk, held, (0,))
        return True
    tier = next((one for one in range(1, len(store.pools)) if store.has_room(one)), None)
    if tier is None:
        return False
    store.carry(chunk, tier)
    return True


def read(store: ChunkStore, tensor: Tensor) -> Tensor:
    """A copy of a tensor that lies in a range, of whatever tiers its chunks are on; others as they are."""
    if not store.ranges.holds(tensor):
        return tensor
    copy = torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
    for piece in _pieces(store, tensor):
        whole = piece.beyond if piece.chunk is None else store.content(piece.chunk)
        copy[piece.of_tensor].copy_(whole[piece.of_chunk])
    return copy.view(tensor.dtype).view(tensor.shape)


def put_back(store: ChunkStore, tensor: Tensor, changed: Tensor) -> None:
    """Have a tensor that lies in a range be what was read of it and changed, on every tier that has a copy;
    others were changed where they are.
    """
    if not store.ranges.holds(tensor):
        return
    flat = changed.reshape(-1).view(torch.uint8)
    for piece in _pieces(store, tensor):
        if piece.chunk is None:
            piece.beyond[piece.of_chunk].copy_(flat[piece.of_tensor])
        else:
            store.change(piece.chunk, piece.of_chunk, flat[piece.of_tensor])


@dataclass(frozen=True, slots=True)
class _ByteRange:
    """Bytes of a tensor that lie in a chunk, or in what is `beyond` the chunks of its range."""

    chunk: Chunk | None
    beyond: Tensor
    of_chunk: slice
    of_tensor: slice


def _pieces(store: ChunkStore, tensor: Tensor) -> Iterator[_ByteRange]:
    """The bytes of a tensor that lies in a range, chunk by chunk."""
    found = store.ranges.find(tensor)
    assert found is not None, "it lies in a range"
    own, item, stage, number = found
    size, paged_bytes = own.chunk_bytes, own.num_chunks * own.chunk_bytes
    begin = at = tensor.storage_offset() * tensor.itemsize
    end = begin + tensor.nbytes
    while at < end:
        place = at // size if at < paged_bytes else None
        first = paged_bytes if place is None else place * size
        until = end if place is None else min(end, first + size)
        chunk = None if place is None else Chunk(item, stage, number, place)
        beyond = own.bytes[paged_bytes:]
        yield _ByteRange(chunk, beyond, slice(at - first, until - first), slice(at - begin, until - begin))
        at = until


@dataclass(frozen=True, slots=True)
class TierMoves:
    """A tier of a rank: the most that its chunks took, and the bytes that instructions copied into it, by the
    programs of the windows that have ended and as counted where they were copied.

    `copied_bytes` went between a lower tier and the one above it, both ways, and took `copied_s`. Of the
    device's tier, `waited_s` is for how long instructions waited for chunks, in windows of `window_s` in all.
    """

    tier: str
    budget_bytes: int | None
    peak_bytes: int
    predicted_bytes_moved: int
    bytes_moved: int
    copied_bytes: int = 0
    copied_s: float = 0.0
    waited_s: float = 0.0
    window_s: float = 0.0


def together(one: Sequence[TierMoves], other: Sequence[TierMoves]) -> tuple[TierMoves, ...]:
    """The tiers of two pipelines of a rank, one after the other."""
    if not (one and other):
        return tuple(one or other)
    return tuple(
        replace(
            a,
            peak_bytes=max(a.peak_bytes, b.peak_bytes),
            predicted_bytes_moved=a.predicted_bytes_moved + b.predicted_bytes_moved,
            bytes_moved=a.bytes_moved + b.bytes_moved,
            copied_bytes=a.copied_bytes + b.copied_bytes,
            copied_s=a.copied_s + b.copied_s,
            waited_s=a.waited_s + b.waited_s,
            window_s=a.window_s + b.window_s,
        )
        for a, b in zip(one, other, strict=True)
    )


class RankPaging:
    """Chunks, tiers and copies of a rank. `settled` is a window that shows all that longer ones do.

    `keeps_gradients` where a batch's gradients of all stages are on the device when the last of them is, and
    no stage is updated before.
    """

    def __init__(
        self,
        settled: Program,
        rank: int,
        device: torch.device,
        settings: PagingSettings,
        *,
        keeps_gradients: bool,
    ) -> None:
        self.keeps_gradients = keeps_gradients
        tiers = settled.tiers_of(rank)
        assert tiers is not None, "the rank pages"
        self._program, self._rank, self._window = settled, rank, settled
        self._predicted_bytes = [0] * len(tiers.tiers)
        self._begin_s = self._window_s = 0.0
        if not is_accelerator(device):
            give_back_large_blocks()
        self._store = ChunkStore(settled, rank, tiers, device, settings)
        self._pager = Pager(settled, self._store)
        self._memory: dict[int, _PagedStage] = {}

    def stage(self, stage: int) -> "_PagedStage":
        """The memory of a stage."""
        return self._memory.setdefault(stage, _PagedStage(self._store, stage, self._program.num_microbatches))

    def around(
        self, action: Callable[[Instruction], None], begins: Callable[[], None]
    ) -> Callable[[Instruction], None]:
        """The action with what it uses on the device; `begins` is told when the work begins."""

        def run(step: Instruction) -> None:
            self._pager.start(step)
            begins()
            action(step)
            self._pager.end(step)

        return run

    def move(self, step: Instruction) -> None:
        """Run a FETCH or an EVICT."""
        self._pager.move(step)

    def begin(self, window: Program, tiers: RankTiers) -> None:
        """A window begins, with chunks on these tiers; nothing is under way."""
        self._window = window
        arrange(self._store, tiers.begin)
        self._begin_s = perf_counter()

    def note(self, num_batches: int) -> None:
        """The window has ended, after so many batches."""
        if num_batches:
            self._window_s += perf_counter() - self._begin_s
            for number, num_bytes in enumerate(copied_in_bytes(self._window, self._rank, num_batches)):
                self._predicted_bytes[number] += num_bytes

    def tiers(self) -> tuple[TierMoves, ...]:
        """What there is to tell of each tier, the device's first, once all copies are made."""
        store = self._store
        store.settle()
        device, *lower = store.tiers.tiers
        found = [
            TierMoves(
                device.name,
                device.budget_bytes,
                store.peak_bytes(0),
                self._predicted_bytes[0],
                store.bytes_into(0),
                waited_s=self._pager.waited_s,
                window_s=self._window_s,
            )
        ]
        for number, tier in enumerate(lower, 1):
            peak_bytes, into = store.peak_bytes(number), store.bytes_into(number)
            predicted = self._predicted_bytes[number]
            copied = store.wire_below(number - 1)
            found.append(TierMoves(tier.name, tier.budget_bytes, peak_bytes, predicted, into, *copied))
        return tuple(found)

    def close(self) -> None:
        """End what copies."""
        self._store.close()


class _PagedStage(StageMemory):
    """Memory of a stage in ranges of addresses, for the items that are paged."""

    is_paged = True

    def __init__(self, store: ChunkStore, stage: int, num_microbatches: int) -> None:
        self._store, self._stage = store, stage
        self._num_microbatches = num_microbatches
        self.has_master = store.tiers.master

    def allocator(self, item: Item, number: int = 0) -> ArenaAllocator:
        return self._store.ranges.allocator(item, self._stage, number)

    def gradients(self) -> ArenaAllocator:
        return self._store.ranges.more(Item.GRADIENT, self._stage)

    def frozen(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        allocator = self.allocator(Item.FROZEN)
        if allocator is PLAIN:
            return weights
        # Those that leave a gap after them come last.
        names = sorted(weights, key=lambda name: weights[name].nbytes % ALIGNED != 0)
        flat = {
            name: allocator.carve(one.numel(), one.dtype, one.device)
            for name, one in ((name, weights[name]) for name in names)
        }
        with self.opened(Item.FROZEN):
            for name, one in flat.items():
                one.view(weights[name].shape).copy_(weights[name])
        return {name: flat[name].view(weights[name].shape) for name in weights}

    def before_gradients(self, reserve: Callable[[int], ArenaAllocator]) -> None:
        self._store.ranges.reserve_gradients[self._stage] = reserve

    def stash(self, batch: int, microbatch: int) -> Stash:
        ranges = self._store.ranges
        if not ranges.has(Item.STASH, self._stage):
            return super().stash(batch, microbatch)
        number = batch * self._num_microbatches + microbatch
        key = Item.STASH, self._stage, number
        return PagedStash(ranges.of(key), ranges.holds, partial(ranges.leave, key))

    def lasting(self, tensor: Tensor) -> Tensor:
        """As `StageMemory` says: what passes a stage unchanged lies in its activations."""
        return tensor.clone() if self._store.ranges.holds(tensor) else tensor

    def opened(self, item: Item, number: int = 0) -> AbstractContextManager[None]:
        return opened(self._store, item, self._stage, number)

    def lent(self, items: Sequence[tuple[Item, int]]) -> AbstractContextManager[bool]:
        return lent(self._store, [(item, self._stage, number) for item, number in items])

    def read(self, tensor: Tensor) -> Tensor:
        return read(self._store, tensor)

    def put_back(self, tensor: Tensor, changed: Tensor) -> None:
        put_back(self._store, tensor, changed)

    def end(self, item: Item, number: int) -> None:
        self._store.end(item, self._stage, number)
