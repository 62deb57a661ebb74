"""Between windows: chunks are put where the next one begins, opened to be written, read where they are."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from bireme.memory.lower_tier import HostTier
from bireme.runtime.paging.chunk_store import ChunkStore
from bireme.schedule.instruction import Item
from bireme.schedule.tiers import Chunk

__all__ = ["arrange", "opened", "read"]


def arrange(store: ChunkStore, begin: Mapping[Chunk, int]) -> None:
    """Put every chunk on the tier where a window begins with it.

    A chunk that the window does not know stays, on the lowest tier, in a slot besides those that the window
    counts with. Of one that there is not yet, only a slot is there.
    """
    lowest = len(store.pools) - 1
    for chunk in store.chunks.keys() - begin.keys():
        if lowest not in store.chunks[chunk].where:
            store.grow(lowest)
        store.carry(chunk, lowest)
    for chunk in begin:
        store.held(chunk)
    waiting = sorted(begin, key=lambda chunk: (-begin[chunk], chunk))
    while waiting:
        left = [chunk for chunk in waiting if not _carried(store, chunk, begin[chunk])]
        if len(left) == len(waiting):
            # All full: one goes out of the way for now.
            store.grow(lowest)
            store.carry(left[-1], lowest)
        waiting = left


def _carried(store: ChunkStore, chunk: Chunk, tier: int) -> bool:
    if tier not in store.chunks[chunk].where and not store.has_room(tier):
        return False
    store.carry(chunk, tier)
    return True


@contextmanager
def opened(store: ChunkStore, item: Item, stage: int, number: int) -> Iterator[None]:
    """Within this context all chunks of an item are on the device, be they new; afterwards they are as low as
    there is room.
    """
    num_chunks = store.tiers.chunks.get((item, stage), 0)
    chunks = [Chunk(item, stage, number, place) for place in range(num_chunks)]
    store.opened.update(chunks)
    for chunk in chunks:
        if 0 not in store.held(chunk).where:
            _make_room(store)
            store.carry(chunk, 0)
    yield
    store.opened.difference_update(chunks)
    for chunk in chunks:
        _stow(store, chunk)


def _make_room(store: ChunkStore) -> None:
    if store.pools[0].num_free:
        return
    for chunk, held in store.chunks.items():
        if 0 in held.where and chunk not in store.opened and _stow(store, chunk):
            return


def _stow(store: ChunkStore, chunk: Chunk) -> bool:
    """Take a chunk off the device, if any tier below has room."""
    for tier in range(1, len(store.pools)):
        if store.has_room(tier):
            store.carry(chunk, tier)
            return True
    return False


def read(store: ChunkStore, tensor: Tensor) -> Tensor:
    """A copy of a tensor that lies in a range, of whatever tiers its chunks are on; others as they are."""
    found = store.ranges.find(tensor)
    if found is None:
        return tensor
    own, item, stage, number = found
    size = own.chunk_bytes
    begin = tensor.storage_offset() * tensor.itemsize
    end = begin + tensor.nbytes
    copy = torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
    at = begin
    while at < end:
        place = at // size
        until = min(end, (place + 1) * size) if place < own.num_chunks else end
        if place < own.num_chunks:
            whole = _content(store, Chunk(item, stage, number, place))
            piece = whole[at - place * size : until - place * size]
        else:
            piece = own.bytes[at:until]
        copy[at - begin : until - begin].copy_(piece)
        at = until
    return copy.view(tensor.dtype).view(tensor.shape)


def _content(store: ChunkStore, chunk: Chunk) -> Tensor:
    """The bytes of a chunk, wherever they are."""
    held = store.chunks[chunk]
    store.wait(held.last)
    tier = min(held.where)
    if tier == 0:
        return store.ranges.place(chunk)
    lower, slot = store.lower[tier - 1], held.where[tier]
    if isinstance(lower, HostTier):
        return lower.bytes_of(slot)
    if store.last_read != chunk:
        lower.read(slot, store.scratch)
        store.last_read = chunk
    return store.scratch
