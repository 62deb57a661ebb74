"""The ranges of addresses of a rank's items: which one an item has now, and which one a tensor lies in."""

from collections.abc import Callable, Mapping

from torch import Tensor

from bireme.memory.address_range import AddressRange, ChunkMemory
from bireme.memory.carver import PLAIN, ArenaAllocator
from bireme.schedule.instruction import Item
from bireme.schedule.tiers import Chunk

__all__ = ["Ranges"]

Key = tuple[Item, int, int]
"""An item, its stage and its number, as in `Chunk`."""


class Ranges:
    """A bank and an optimiser have a range for good; sums and stashes are lent one while they are there."""

    def __init__(self, memory: ChunkMemory, num_chunks: Mapping[tuple[Item, int], int]) -> None:
        self._memory = memory
        self._num_chunks = num_chunks
        self._of: dict[Key, AddressRange] = {}
        self._free_stashes: dict[int, list[AddressRange]] = {}
        self._left: dict[Key, int] = {}
        self.most_left_bytes = 0
        """The most bytes that stashes had no room for at a time."""
        self._by_address: dict[int, tuple[AddressRange, Item, int]] = {}
        self._number_of: dict[int, int] = {}
        """The numbers of ranges by their addresses, of those that are lent for now."""
        self.reserve_gradients: dict[int, Callable[[], ArenaAllocator]] = {}
        """For each stage who gives the memory of a batch's sums, before the batch's first gradient comes."""

    def carver(self, item: Item, stage: int, number: int = 0) -> ArenaAllocator:
        """The range of an item; torch's allocator where the item is not paged."""
        return self.of((item, stage, number)) if self.has(item, stage) else PLAIN

    def has(self, item: Item, stage: int) -> bool:
        """Whether an item of a stage is paged."""
        return self._num_chunks.get((item, stage), 0) > 0

    def more(self, item: Item, stage: int) -> ArenaAllocator:
        """A range that is not lent yet; torch's allocator where the item is not paged."""
        return self._made(item, stage) if self.has(item, stage) else PLAIN

    def of(self, key: Key) -> AddressRange:
        """The range of an item, which gets one if it has none."""
        found = self._of.get(key)
        if found is None:
            found = self._of[key] = self._lent(*key)
            self._number_of[found.bytes.data_ptr()] = key[2]
        return found

    def place(self, chunk: Chunk) -> Tensor:
        """The bytes of a chunk."""
        return self.of((chunk.item, chunk.stage, chunk.number)).chunk(chunk.chunk)

    def end(self, item: Item, stage: int, number: int) -> None:
        """An item is gone; its range may be lent again."""
        self._left.pop((item, stage, number), None)
        found = self._of.pop((item, stage, number), None)
        if found is not None and item is Item.STASH:
            found.clear()
            self._free_stashes.setdefault(stage, []).append(found)

    def leave(self, key: Key, num_bytes: int) -> None:
        """So many bytes of an item stay with torch while the item is there."""
        self._left[key] = self._left.get(key, 0) + num_bytes
        self.most_left_bytes = max(self.most_left_bytes, sum(self._left.values()))

    def find(self, tensor: Tensor) -> tuple[AddressRange, Item, int, int] | None:
        """The range that a tensor lies in, with its item, stage and number."""
        address = tensor.untyped_storage().data_ptr()
        found = self._by_address.get(address)
        return None if found is None else (*found, self._number_of[address])

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in any range."""
        return tensor.untyped_storage().data_ptr() in self._by_address

    @property
    def beyond_bytes(self) -> int:
        """The bytes that chunks had no room for: what is there for good, and the most of what comes and
        goes.
        """
        return sum(one.beyond_bytes for one, _, _ in self._by_address.values()) + self.most_left_bytes

    def _lent(self, item: Item, stage: int, _number: int) -> AddressRange:
        if item is Item.GRADIENT:
            found = self.reserve_gradients[stage]()
            assert isinstance(found, AddressRange), "sums of a stage that is paged lie in ranges"
            return found
        free = self._free_stashes.get(stage) if item is Item.STASH else None
        return free.pop() if free else self._made(item, stage)

    def _made(self, item: Item, stage: int) -> AddressRange:
        made = AddressRange(self._memory, self._num_chunks[item, stage])
        self._by_address[made.bytes.untyped_storage().data_ptr()] = made, item, stage
        return made
