"""A rank's chunks in their tiers: what FETCH and EVICT do, and what every other instruction waits for.

Everything here is called by the rank's own thread. What the mover does of it is in the jobs that it is given.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from bireme.devices import is_accelerator, synchronize
from bireme.errors import BiremeError
from bireme.memory.arena import PLAIN, ArenaAllocator
from bireme.memory.disk_tier import DiskTier, HostTier
from bireme.memory.system_memory import AddressRange, ChunkMemory, chunk_memory, copy_bytes, pages
from bireme.runtime.paging.mover import CopyJob, ThreadMover, Wire
from bireme.schedule.accesses import ItemKey, Mode, Use
from bireme.schedule.chunk_account import ChunkAccount, Holding
from bireme.schedule.instruction import Instruction, Item
from bireme.schedule.program import Program
from bireme.schedule.tiers import SMALL_CHUNK_BYTES, Chunk, RankTiers

# The ranges of addresses of a rank's items: which one an item has now, and which one a tensor lies in.


class _Ranges:
    """A bank and an optimizer have a range for good; sums and stashes are lent one while they are there."""

    def __init__(self, memory: ChunkMemory, num_chunks: Mapping[tuple[Item, int], int]) -> None:
        self._memory = memory
        self._num_chunks = num_chunks
        self._of: dict[ItemKey, AddressRange] = {}
        self._free_stashes: dict[int, list[AddressRange]] = {}
        self._left: dict[ItemKey, int] = {}
        self.most_left_bytes = 0
        """The most bytes that stashes had no room for at a time."""
        self._by_address: dict[int, tuple[AddressRange, ItemKey]] = {}
        """The ranges with what they are lent to, or were last, by their addresses."""
        self.reserve_gradients: dict[int, Callable[[int], ArenaAllocator]] = {}
        """For each stage who gives the memory of a batch's sums, before the batch's first gradient comes."""

    def allocator(self, item: Item, stage: int, number: int = 0) -> ArenaAllocator:
        """The range of an item; torch's allocator where the item is not paged."""
        return self.of((item, stage, number)) if self.has(item, stage) else PLAIN

    def has(self, item: Item, stage: int) -> bool:
        """Whether an item of a stage is paged."""
        return self._num_chunks.get((item, stage), 0) > 0

    def more(self, item: Item, stage: int) -> ArenaAllocator:
        """A range that is not lent yet; torch's allocator where the item is not paged."""
        return self._made((item, stage, 0)) if self.has(item, stage) else PLAIN

    def of(self, key: ItemKey) -> AddressRange:
        """The range of an item, which gets one if it has none."""
        found = self._of.get(key)
        if found is None:
            found = self._of[key] = self._lent(*key)
            self._by_address[found.bytes.data_ptr()] = found, key
        return found

    def place(self, chunk: Chunk) -> Tensor:
        return self.of((chunk.item, chunk.stage, chunk.number)).chunk(chunk.chunk)

    def end(self, item: Item, stage: int, number: int) -> None:
        """An item is gone; its range may be lent again."""
        self._left.pop((item, stage, number), None)
        found = self._of.pop((item, stage, number), None)
        if found is not None and item is Item.STASH:
            found.clear()
            self._free_stashes.setdefault(stage, []).append(found)

    def leave(self, key: ItemKey, num_bytes: int) -> None:
        """So many bytes of an item stay with torch while the item is there."""
        self._left[key] = self._left.get(key, 0) + num_bytes
        self.most_left_bytes = max(self.most_left_bytes, sum(self._left.values()))

    def find(self, tensor: Tensor) -> tuple[AddressRange, ItemKey] | None:
        """The range that a tensor lies in, and the item that it is lent to."""
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in any range."""
        return self.find(tensor) is not None

    @property
    def beyond_bytes(self) -> int:
        """The bytes that chunks had no room for: what is there for good, and the most of what comes and
        goes.
        """
        return sum(one.beyond_bytes for one, _ in self._by_address.values()) + self.most_left_bytes

    def _lent(self, item: Item, stage: int, number: int) -> AddressRange:
        if item is Item.GRADIENT:
            found = self.reserve_gradients[stage](number)
            assert isinstance(found, AddressRange), "sums of a stage that is paged lie in ranges"
            return found
        free = self._free_stashes.get(stage) if item is Item.STASH else None
        return free.pop() if free else self._made((item, stage, number))

    def _made(self, key: ItemKey) -> AddressRange:
        made = AddressRange(self._memory, self._num_chunks[key[:2]])
        self._by_address[made.bytes.data_ptr()] = made, key
        return made


# The free slots of a tier, each with the job after which it may be written to.


class SlotPool:
    """Slots 0, 1, 2, … of a tier. One that may be written to at once is taken before all others, and of those
    that may not what was given back first.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free: deque[tuple[int, CopyJob | None]] = deque((slot, None) for slot in range(num_slots))
        self.peak = 0
        """The most slots that were in use at a time."""

    @property
    def num_free(self) -> int:
        """How many slots nobody has."""
        return len(self._free)

    def take(self) -> tuple[int, CopyJob | None]:
        """A free slot, and the job to wait for before it is written to."""
        ready = (place for place, (_, job) in enumerate(self._free) if job is None or job.is_done.is_set())
        place = next(ready, 0)
        found = self._free[place]
        del self._free[place]
        self.peak = max(self.peak, self.num_slots - len(self._free))
        return found

    def give(self, slot: int, after: CopyJob | None) -> None:
        """A slot is free after a job."""
        self._free.append((slot, after))

    def grow(self, num_slots: int) -> None:
        """There are so many slots more."""
        self._free.extend((slot, None) for slot in range(self.num_slots, self.num_slots + num_slots))
        self.num_slots += num_slots


# What paging needs to know of a run, besides its program.


@dataclass(frozen=True, slots=True)
class PagingSettings:
    """`folder` is where the disk's file is made; `mover` makes what copies, and `memory` makes the
    slots of a device, from their number and the bytes of each.
    """

    folder: Path | None = None
    mover: Callable[[torch.device], ThreadMover] = ThreadMover
    memory: Callable[[torch.device, int, int], ChunkMemory] = chunk_memory


class ChunkStore(ChunkAccount[CopyJob]):
    """The chunks of one rank of `program`, which shows all that longer windows keep: the account of its FETCH
    and EVICT, with slots and jobs in it.
    """

    def __init__(self, program: Program, rank: int, device: torch.device, settings: PagingSettings) -> None:
        super().__init__(program, rank)
        self.where = {}  # none is there yet
        self.device = device
        self.mover = settings.mover(device)
        tiers = self.tiers
        is_small = not is_accelerator(device) and tiers.chunk_bytes <= SMALL_CHUNK_BYTES
        self.copies_itself = is_small and settings.mover is ThreadMover
        """Whether the rank copies chunks to and from the host itself, where they can be copied at once."""
        self._under_way: deque[CopyJob] = deque()
        self.moved_bytes: dict[Wire, int] = {}
        """The bytes that jobs have copied, by the tier that they came into and whether from below."""
        self.copied_s: dict[Wire, float] = {}
        """For how long jobs have copied, by the same."""
        self.waited_s = 0.0
        """For how long the rank has waited for jobs."""
        self.lower = [_lower(tier.name, tiers, device, settings) for tier in tiers.tiers[1:]]
        peaks = _peaks(program, rank)
        on_device = tiers.tiers[0].capacity
        self.memory = settings.memory(device, on_device or peaks[0], tiers.chunk_bytes)
        self.counted = peaks
        """The most chunks that windows hold on each tier."""
        self.pools = [SlotPool(on_device or peaks[0])]
        for lower, peak in zip(self.lower, peaks[1:], strict=True):
            lower.grow(peak)
            self.pools.append(SlotPool(peak))
        self.ranges = _Ranges(self.memory, tiers.chunks)
        self.opened: set[Chunk] = set()
        """The chunks that must be on the device for now, between instructions."""
        self.last_read: Chunk | None = None
        """The chunk whose content `scratch` has."""

    @cached_property
    def scratch(self) -> Tensor:
        """Memory to read a chunk into, apart from all tiers."""
        return pages(self.tiers.chunk_bytes)

    # What instructions do.

    def miss(self, step: Instruction, use: Use, chunk: Chunk) -> None:
        """As `ChunkAccount` says: the first of a sum needs no chunk."""
        if use.mode is not Mode.ADD or chunk in self.where:
            there = "the host" if use.tier else "the device"
            raise RuntimeError(f"{step} needs chunk {chunk.chunk} of its {chunk.item} on {there}.")

    def take(self, chunk: Chunk, tier: int) -> int:
        """As `ChunkAccount` says; a slot of the device is mapped beneath the chunk."""
        slot, after = self._free_slot(tier)
        self.wait(after)
        if tier == 0:
            self.wait(self.last.get(chunk))
            self.memory.map(self.ranges.place(chunk), slot)
        return slot

    def give(self, chunk: Chunk, tier: int, slot: int, *, is_copied: bool = False) -> None:
        """As `ChunkAccount` says, once the chunk's last job is done; that of a copy unmaps the slot."""
        if tier == 0 and not is_copied:
            self.memory.unmap(self.ranges.place(chunk))
        self.pools[tier].give(slot, self.last.get(chunk))

    def forget(self, item: Item, stage: int, number: int, chunks: Collection[Chunk]) -> None:
        """As `ChunkAccount` says; chunks that lie together are unmapped at once."""
        if chunks and all(0 in self.where[chunk] for chunk in chunks):
            own = self.ranges.of((item, stage, number))
            self.memory.unmap(own.bytes[: own.paged_bytes])
            for chunk in chunks:
                self.pools[0].give(self.where[chunk].pop(0), self.last.get(chunk))
        super().forget(item, stage, number, chunks)
        self.ranges.end(item, stage, number)

    def copy(self, chunk: Chunk, tier: int, *, is_fetch: bool) -> int:
        """As `ChunkAccount` says, once the slot is free and the chunk's last job is done. A small chunk that
        waits for nothing is copied at once, without a job.
        """
        tiers, lower, into = self.where[chunk], self.lower[tier], tier if is_fetch else tier + 1
        slot, after = self._free_slot(into)
        above, below = (slot, tiers[tier + 1]) if is_fetch else (tiers[tier], slot)
        place = self.ranges.place(chunk) if tier == 0 else self.host.bytes_of(above)

        def run() -> None:
            if tier == 0 and is_fetch:
                self.memory.map(place, slot)
            (lower.read if is_fetch else lower.write)(below, place)
            if tier == 0 and not is_fetch:
                self.memory.unmap(place)

        is_disk = self.tiers.tiers[tier + 1].name == "disk"
        needs = tuple(job for job in (after, self.last.get(chunk)) if job is not None and not job.is_through)
        if self.copies_itself and not is_disk and not needs:
            begin_s = perf_counter()
            run()
            self._note((into, is_fetch), perf_counter() - begin_s)
            self.last.pop(chunk, None)
            self.last_read = None
            return slot
        note = partial(self._note, (into, is_fetch))
        job = CopyJob((tier, is_fetch and not is_disk), self.tiers.chunk_bytes, run, needs, note=note)
        self._post(chunk, job)
        if into == 0:
            self.arriving[chunk] = job
        return slot

    def _post(self, chunk: Chunk, job: CopyJob) -> None:
        """Have a chunk's next job made."""
        self.last[chunk], self.last_read = job, None
        while self._under_way and self._under_way[0].is_done.is_set():
            self._under_way.popleft()
        self._under_way.append(job)
        self.mover.post(job)

    def _note(self, wire: Wire, seconds: float) -> None:
        """A chunk was copied into a tier, maybe from the one below, in these seconds."""
        self.copied_s[wire] = self.copied_s.get(wire, 0.0) + seconds
        self.moved_bytes[wire] = self.moved_bytes.get(wire, 0) + self.tiers.chunk_bytes

    def wait(self, end: CopyJob | None) -> None:
        """Wait for a job, if there is one."""
        if end is None:
            return
        begin_s = 0.0 if end.is_done.is_set() else perf_counter()
        self.mover.wait(end)
        self.waited_s += perf_counter() - begin_s if begin_s else 0.0

    def settle(self) -> None:
        """Wait for all jobs that were posted."""
        while self._under_way:
            self.mover.wait(self._under_way.popleft())

    def _free_slot(self, tier: int) -> tuple[int, CopyJob | None]:
        """A slot of a tier, and the job to wait for before it is written to."""
        if not self.has_room(tier):
            raise RuntimeError(
                f"The {self.tiers.tiers[tier].name} has no slot for a chunk. The program is wrong."
            )
        return self.pools[tier].take()

    def grow(self, tier: int, num_slots: int = 1) -> None:
        """Have more slots in a lower tier."""
        self.lower[tier - 1].grow(num_slots)
        self.pools[tier].grow(num_slots)

    def keep_slots(self, tier: int, num_more: int) -> None:
        """Have so many slots of a lower tier besides those that windows count with, as far as it may grow."""
        wanted, capacity = self.counted[tier] + num_more, self.tiers.tiers[tier].capacity
        wanted = wanted if capacity is None else min(wanted, capacity)
        self.grow(tier, max(wanted - self.pools[tier].num_slots, 0))

    def has_room(self, tier: int) -> bool:
        """Whether a tier can take a chunk more; a lower one grows up to its capacity."""
        if self.pools[tier].num_free:
            return True
        capacity = self.tiers.tiers[tier].capacity
        if tier == 0 or (capacity is not None and self.pools[tier].num_slots >= capacity):
            return False
        self.grow(tier)
        return True

    # What is done between windows, at once.

    def carry(self, chunk: Chunk, tier: int) -> None:
        """Have a chunk on just one tier, which has room."""
        self.put(chunk, tier)
        self.drop(chunk, [one for one in self.where[chunk] if one != tier])

    def drop(self, chunk: Chunk, tiers: Iterable[int]) -> None:
        """Give back a chunk's slots on some tiers."""
        for tier in tiers:
            self.give(chunk, tier, self.where[chunk].pop(tier))

    def put(self, chunk: Chunk, tier: int) -> None:
        """Have a chunk on a tier too, which has room, and wait."""
        tiers = self.where.setdefault(chunk, {})
        self.rest(chunk)
        if tier not in tiers:
            source = min(tiers, default=None)
            tiers[tier] = self.take(chunk, tier)
            into = self.bytes_in(chunk, tier)
            if source is not None and into is not None:
                self._read(chunk, source, into)
            elif source is not None:
                data = self.bytes_in(chunk, source)
                assert data is not None, "a rank has one disk"
                self._write(chunk, tier, data)
        synchronize(self.device)

    def rest(self, chunk: Chunk) -> None:
        """Wait until nothing is under way with a chunk."""
        self.wait(self.last.get(chunk))
        self.arriving.pop(chunk, None)
        self.last_read = None

    @torch.no_grad()
    def change(self, chunk: Chunk, place: slice, content: Tensor) -> None:
        """Change some bytes of a chunk, on every tier that has a copy."""
        self.wait(self.last.get(chunk))
        self.last_read = None
        for tier in self.where[chunk]:
            there = self.bytes_in(chunk, tier)
            if there is None:
                self._read(chunk, tier, self.scratch)
            (self.scratch if there is None else there)[place].copy_(content)
            if there is None:
                self._write(chunk, tier, self.scratch)
        synchronize(self.device)

    def lift(self, chunk: Chunk) -> None:
        """Take a chunk off its only tier; its content is in `scratch`."""
        self.rest(chunk)
        (tier,) = self.where[chunk]
        self._read(chunk, tier, self.scratch)
        synchronize(self.device)
        self.drop(chunk, (tier,))

    def put_down(self, chunk: Chunk, tier: int) -> None:
        """Put a chunk that was lifted on a tier that has room."""
        self.where[chunk][tier] = self.take(chunk, tier)
        self._write(chunk, tier, self.scratch)
        synchronize(self.device)

    def bytes_in(self, chunk: Chunk, tier: int) -> Tensor | None:
        """The bytes of a chunk's copy in a tier; None on a disk."""
        if tier == 0:
            return self.ranges.place(chunk)
        lower = self.lower[tier - 1]
        return lower.bytes_of(self.where[chunk][tier]) if isinstance(lower, HostTier) else None

    def content(self, chunk: Chunk) -> Tensor:
        """The bytes of a chunk, wherever they are, to be read until the next call."""
        self.wait(self.last.get(chunk))
        tier = min(self.where[chunk])
        there = self.bytes_in(chunk, tier)
        if there is None and self.last_read != chunk:
            self._read(chunk, tier, self.scratch)
            self.last_read = chunk
        return self.scratch if there is None else there

    def _read(self, chunk: Chunk, tier: int, into: Tensor) -> None:
        if tier == 0:
            copy_bytes(into, self.ranges.place(chunk))
        else:
            self.lower[tier - 1].read(self.where[chunk][tier], into)

    def _write(self, chunk: Chunk, tier: int, data: Tensor) -> None:
        if tier == 0:
            copy_bytes(self.ranges.place(chunk), data)
        else:
            self.lower[tier - 1].write(self.where[chunk][tier], data)

    @property
    def host(self) -> HostTier:
        """The host's tier, of a rank that has three or updates on the host."""
        found = self.lower[0]
        assert isinstance(found, HostTier), "the first tier below the device's is the host's"
        return found

    def lend_used(self, step: Instruction) -> list[Tensor]:
        """Lend the host's slots of what a step uses there and is not on the device too."""
        used = (chunk for use, chunks in self.uses.of(step) if use.tier for chunk in chunks)
        return [self.lend_host(chunk) for chunk in used if 0 not in self.where[chunk]]

    def lend_host(self, chunk: Chunk) -> Tensor:
        """Have the slot that a chunk has on the host beneath its place, which is given; on a processor."""
        place = self.ranges.place(chunk)
        self.host.map_beneath(place, self.where[chunk][1])
        return place

    def peak_bytes(self, tier: int) -> int:
        """The most that chunks have taken of a tier, with what the device's chunks had no room for."""
        beyond = self.ranges.beyond_bytes if tier == 0 else 0
        return self.pools[tier].peak * self.tiers.chunk_bytes + beyond

    def bytes_into(self, tier: int) -> int:
        """The bytes that instructions have copied into a tier."""
        return sum(count for (into, _), count in self.moved_bytes.items() if into == tier)

    def wire_above(self, tier: int) -> tuple[int, float]:
        """The bytes that instructions have copied from the tier above to a tier and back, and the seconds
        that took; nothing of the device's.
        """
        both = (tier, False), (tier - 1, True)
        num_bytes = sum(self.moved_bytes.get(one, 0) for one in both)
        return num_bytes, sum(self.copied_s.get(one, 0.0) for one in both)

    def close(self) -> None:
        """End the mover. What there is can still be read."""
        self.mover.close()


def _lower(
    name: str, tiers: RankTiers, device: torch.device, settings: PagingSettings
) -> HostTier | DiskTier:
    if name != "disk":
        return HostTier(tiers.chunk_bytes, device)
    if settings.folder is None:
        raise BiremeError("The plan offloads to a disk, and no folder is named for it. Set memory.disk.")
    return DiskTier(settings.folder, tiers.chunk_bytes)


def _peaks(program: Program, rank: int) -> list[int]:
    """The most chunks that each tier holds."""
    holding = Holding(program, rank)
    for step in program.tracks[rank]:
        if problems := holding.start(step):
            raise BiremeError(problems[0])
        holding.end(step)
    return holding.peak
