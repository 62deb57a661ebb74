"""Where the memory of a stage lies that training changes: with torch, or in ranges that chunks come to.

Weight banks and stages know of offloading by `StageMemory` alone. Between windows chunks are opened to be
written, lent to be read, and read where they are.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bireme.memory.arena import PLAIN, ArenaAllocator
from bireme.memory.system_memory import ALIGNED, AddressRange, copy_memory
from bireme.model.torch_private import storage_id, storage_watch, version_of
from bireme.runtime.paging.chunk_store import ChunkStore
from bireme.schedule.instruction import Item
from bireme.schedule.tiers import Chunk


class StageMemory:
    """Memory that is always there."""

    is_paged = False
    """Whether reading what there is makes copies of it."""
    has_master = False
    """Whether weights must be made from a master copy, because the version before may be elsewhere."""

    def allocator(self, _item: Item, _number: int = 0) -> ArenaAllocator:
        """For an item that is there for good: a bank of weights, an optimizer's state, or frozen weights."""
        return PLAIN

    def gradients(self) -> ArenaAllocator:
        """For the sums of one batch more."""
        return PLAIN

    def frozen(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Weights that do not learn, where they stay; maybe copies."""
        return weights

    def before_gradients(self, reserve: Callable[[int], ArenaAllocator]) -> None:
        """`reserve` is to be asked for the memory of a batch's `gradients` when the first is about to come
        there.
        """

    def stash(self, _batch: int, _microbatch: int) -> "PagedStash | None":
        """For what a micro-batch keeps between its passes; None if that stays with torch."""
        return None

    def lasting(self, tensor: Tensor) -> Tensor:
        """A result of a pass that can be read when what the pass used has left; a copy if it lies there."""
        return tensor

    def opened(self, _item: Item, _number: int = 0) -> AbstractContextManager[None]:
        """Within this context an item may be read and written between instructions."""
        return nullcontext()

    def lent(self, _items: Sequence[tuple[Item, int]]) -> AbstractContextManager[bool]:
        """Within this context items, each with its number, can be read where they lie, between instructions;
        False if the device has no room for them.
        """
        return nullcontext(True)

    def read(self, tensor: Tensor) -> Tensor:
        """A tensor with its content, whichever tier has it; a copy if it is paged."""
        return tensor

    def put_back(self, _tensor: Tensor, _changed: Tensor) -> None:
        """Have a tensor be what `read` gave of it, which has been changed since."""

    def end(self, _item: Item, _number: int) -> None:
        """Nobody needs an item any more that was opened."""


# What a micro-batch keeps between its passes, in a range that chunks come and go in.
#
# Autograd is asked through `saved_tensors_hooks` to put what it saves there, memory by memory, so that
# several views of one memory take room once; what it saves comes back as views of the range, with the strides
# that it had. What lies in a range already, as weights do, and what is always there, as buffers, stays where
# it is.


class _Copied(NamedTuple):
    """A tensor whose memory was copied to a range: all of the range in its dtype, and its place there."""

    flat: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class PagedStash:
    """Room in a range for what a micro-batch keeps. `is_paged` tells of memory by its tensor whether it lies
    in any range; `leave` is told the bytes of what stays with torch because the range has no room for it.
    """

    own: AddressRange
    is_paged: Callable[[Tensor], bool]
    leave: Callable[[int], None] = lambda _num_bytes: None

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in the room; what there is no room for stays where it is."""
        begin = self.own.room(tensor.nbytes) if tensor.is_contiguous() else None
        if begin is None:
            self.leave(tensor.untyped_storage().nbytes())
            return tensor
        flat = self.own.of_dtype(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), begin // tensor.itemsize).copy_(tensor)

    @contextmanager
    def saving(self, others: Iterable[Tensor]) -> Iterator[None]:
        """Within this context, what autograd saves goes into the room, but for the memory of the others."""
        # What is asked of each of many tensors takes longer than to copy a small one, so it is little.
        own, apart = self.own, {storage_id(tensor) for tensor in others}
        copies: dict[tuple[int, int], tuple[object, int | None]] = {}

        def pack(tensor: Tensor) -> Tensor | _Copied:
            if self._may_move(tensor):
                key = storage_id(tensor), version_of(tensor)
                copy = copies.get(key)
                if copy is None and key[0] not in apart and not self.is_paged(tensor):
                    copy = copies[key] = storage_watch(tensor), self._moved(tensor)
                if copy is not None and copy[1] is not None:
                    offset = copy[1] // tensor.itemsize + int(tensor.storage_offset())
                    return _Copied(own.of_dtype(tensor.dtype), tensor.shape, tensor.stride(), offset)
            return tensor.detach()  # itself it would hold the node that holds it, for ever

        def unpack(saved: Tensor | _Copied) -> Tensor:
            return saved if isinstance(saved, Tensor) else saved.flat.as_strided(*saved[1:])

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _may_move(self, tensor: Tensor) -> bool:
        """Whether a tensor is its bytes on the device, read with strides; others stay as they are."""
        is_plain = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
        return is_plain and tensor.device == self.own.bytes.device and tensor.numel() > 0

    def _moved(self, tensor: Tensor) -> int | None:
        """Where a copy of all memory of a tensor begins in the range; None if its chunks have no room."""
        memory = tensor.untyped_storage()
        begin = self.own.room(memory.nbytes())
        if begin is None:
            self.leave(memory.nbytes())
        else:
            copy_memory(self.own.bytes, begin, memory)
        return begin


class PagedStage(StageMemory):
    """Memory of a stage of a rank with these chunks, in ranges of addresses, for the items that are paged."""

    is_paged = True

    def __init__(self, store: ChunkStore, stage: int, num_microbatches: int) -> None:
        self._store, self._stage = store, stage
        self._num_microbatches = num_microbatches
        self.has_master = store.tiers.master

    def allocator(self, item: Item, number: int = 0) -> ArenaAllocator:
        """As `StageMemory` says."""
        return self._store.ranges.allocator(item, self._stage, number)

    def gradients(self) -> ArenaAllocator:
        """As `StageMemory` says."""
        return self._store.ranges.more(Item.GRADIENT, self._stage)

    def frozen(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """As `StageMemory` says."""
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
        """As `StageMemory` says."""
        self._store.ranges.reserve_gradients[self._stage] = reserve

    def stash(self, batch: int, microbatch: int) -> PagedStash | None:
        """As `StageMemory` says."""
        ranges = self._store.ranges
        if not ranges.has(Item.STASH, self._stage):
            return None
        number = batch * self._num_microbatches + microbatch
        key = Item.STASH, self._stage, number
        return PagedStash(ranges.of(key), ranges.holds, partial(ranges.leave, key))

    def lasting(self, tensor: Tensor) -> Tensor:
        """As `StageMemory` says: what passes a stage unchanged lies in its activations."""
        return tensor.clone() if self._store.ranges.holds(tensor) else tensor

    @contextmanager
    def opened(self, item: Item, number: int = 0) -> Iterator[None]:
        """As `StageMemory` says: all chunks of the item are on the device, be they new; afterwards they are
        as low as there is room. What is only ever used on the host is lent from there.
        """
        store, stage = self._store, self._stage
        chunks = store.tiers.chunks_of(item, stage, number)
        tier = 1 if item is Item.OPTIMIZER and stage in store.tiers.host_updates else 0
        store.opened.update(chunks)
        for chunk in chunks:
            if tier not in store.where.get(chunk, ()):
                _make_room(store, tier)
            store.carry(chunk, tier)  # and nowhere else: it may be written to
        lent_places = [store.lend_host(chunk) for chunk in chunks if tier]
        yield
        store.opened.difference_update(chunks)
        for place in lent_places:
            store.memory.unmap(place)
        for chunk in chunks if tier == 0 else ():
            _stow(store, chunk)

    @contextmanager
    def lent(self, items: Sequence[tuple[Item, int]]) -> Iterator[bool]:
        """As `StageMemory` says: the items are on the device, and on the tiers below too."""
        store = self._store
        chunks = [
            chunk for item, number in items for chunk in store.tiers.chunks_of(item, self._stage, number)
        ]
        store.opened.update(chunks)
        brought: list[Chunk] = []
        has_room = True
        for chunk in chunks:
            if 0 not in store.where[chunk]:
                _make_room(store, 0)
                if not store.has_room(0):
                    has_room = False
                    break
                store.put(chunk, 0)
                brought.append(chunk)
        try:
            yield has_room
        finally:
            store.opened.difference_update(chunks)
            for chunk in brought:
                store.drop(chunk, (0,))

    def read(self, tensor: Tensor) -> Tensor:
        """As `StageMemory` says, from whatever tiers its chunks are on."""
        store = self._store
        if not store.ranges.holds(tensor):
            return tensor
        copy = torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
        for piece in _pieces(store, tensor):
            whole = piece.beyond if piece.chunk is None else store.content(piece.chunk)
            copy[piece.of_tensor].copy_(whole[piece.of_chunk])
        return copy.view(tensor.dtype).view(tensor.shape)

    def put_back(self, tensor: Tensor, changed: Tensor) -> None:
        """As `StageMemory` says, on every tier that has a copy; others were changed where they are."""
        flat = changed.reshape(-1).view(torch.uint8)
        for piece in _pieces(self._store, tensor):
            if piece.chunk is None:
                piece.beyond[piece.of_chunk].copy_(flat[piece.of_tensor])
            else:
                self._store.change(piece.chunk, piece.of_chunk, flat[piece.of_tensor])

    def end(self, item: Item, number: int) -> None:
        """As `StageMemory` says."""
        self._store.forget(item, self._stage, number, self._store.tiers.chunks_of(item, self._stage, number))


# Between windows.


def _make_room(store: ChunkStore, tier: int) -> None:
    """Have room for a chunk more in a tier, if any of those that are not opened can leave it."""
    if store.has_room(tier):
        return
    for chunk, tiers in store.where.items():
        is_here = min(tiers, default=None) == tier
        if is_here and chunk not in store.opened and _stow(store, chunk):
            return


def _stow(store: ChunkStore, chunk: Chunk) -> bool:
    """Take a chunk off its uppermost tier, if a tier below has it or any has room."""
    upper = min(store.where[chunk])
    if len(store.where[chunk]) > 1:
        store.rest(chunk)
        store.drop(chunk, (upper,))
        return True
    tier = next((one for one in range(upper + 1, len(store.pools)) if store.has_room(one)), None)
    if tier is None:
        return False
    store.carry(chunk, tier)
    return True


@dataclass(frozen=True, slots=True)
class _ByteRange:
    """Bytes of a tensor that lie in a chunk, or in what is `beyond` the chunks of its range."""

    chunk: Chunk | None
    beyond: Tensor
    of_chunk: slice
    of_tensor: slice


def _pieces(store: ChunkStore, tensor: Tensor) -> Iterator[_ByteRange]:
    """The bytes of a tensor that lies in a range, chunk by chunk; nothing of others."""
    found = store.ranges.find(tensor)
    if found is None:
        return
    own, (item, stage, number) = found
    size, paged_bytes = own.chunk_bytes, own.paged_bytes
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
