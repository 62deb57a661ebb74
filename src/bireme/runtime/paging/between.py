"""Between windows: chunks are put where the next one begins, opened to be written, read where they are."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.memory.lower_tier import HostTier
from bireme.runtime.paging.chunk_store import ChunkStore
from bireme.schedule.instruction import Item
from bireme.schedule.tiers import Chunk

__all__ = ["arrange", "lent", "opened", "read"]


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
