"""A rank's chunks in their tiers: which tiers have a copy of each, in which slots, and after which jobs.

Everything here is called by the rank's own thread. What the mover does of it is in the jobs that it is given.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from bireme.devices import is_accelerator, synchronize, use
from bireme.errors import BiremeError
from bireme.memory.arena import PLAIN, ArenaAllocator
from bireme.memory.disk_tier import DiskTier, HostTier, LowerTier
from bireme.memory.system_memory import AddressRange, ChunkMemory, chunk_memory, copy_bytes, pages
from bireme.schedule.instruction import Item
from bireme.schedule.program import Program
from bireme.schedule.residency import Holding
from bireme.schedule.tiers import SMALL_CHUNK_BYTES, Chunk, RankTiers

# The ranges of addresses of a rank's items: which one an item has now, and which one a tensor lies in.

_Key = tuple[Item, int, int]
"""An item, its stage and its number, as in `Chunk`."""


class _Ranges:
    """A bank and an optimizer have a range for good; sums and stashes are lent one while they are there."""

    def __init__(self, memory: ChunkMemory, num_chunks: Mapping[tuple[Item, int], int]) -> None:
        self._memory = memory
        self._num_chunks = num_chunks
        self._of: dict[_Key, AddressRange] = {}
        self._free_stashes: dict[int, list[AddressRange]] = {}
        self._left: dict[_Key, int] = {}
        self.most_left_bytes = 0
        """The most bytes that stashes had no room for at a time."""
        self._by_address: dict[int, tuple[AddressRange, _Key]] = {}
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

    def of(self, key: _Key) -> AddressRange:
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

    def leave(self, key: _Key, num_bytes: int) -> None:
        """So many bytes of an item stay with torch while the item is there."""
        self._left[key] = self._left.get(key, 0) + num_bytes
        self.most_left_bytes = max(self.most_left_bytes, sum(self._left.values()))

    def find(self, tensor: Tensor) -> tuple[AddressRange, _Key] | None:
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

    def _made(self, key: _Key) -> AddressRange:
        made = AddressRange(self._memory, self._num_chunks[key[:2]])
        self._by_address[made.bytes.data_ptr()] = made, key
        return made


# Movers: they make the copies between tiers while the rank's own thread goes on.
#
# A copy is a `CopyJob`. It begins when the jobs that it needs are done, which all were posted before it; so
# jobs of one wire can be made in the order in which they were posted, and nobody waits in a circle.

Wire = tuple[int, bool]
"""The tier above, and whether copies go up; a wire for both ways goes by False."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class CopyJob:
    """A copy of so many bytes, or what else must be done in the order of copies. `mark` is where the
    device's stream was when it was posted; `note` is told how long the copy took, once it is complete.
    """

    wire: Wire
    num_bytes: int
    run: Callable[[], None]
    needs: tuple["CopyJob", ...] = ()
    mark: torch.Event | None = None
    is_done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    note: Callable[[float], None] | None = None

    @property
    def is_through(self) -> bool:
        """Whether the copy is made."""
        return self.is_done.is_set() and self.error is None

    def do(self, complete: Callable[[], None] = lambda: None) -> None:
        """Make the copy, unless one that it needs has failed; `complete` waits for what goes on then."""
        self.error = next((one.error for one in self.needs if one.error is not None), None)
        try:
            if self.error is None:
                begin_s = perf_counter()
                self.run()
                complete()
                if self.note is not None:
                    self.note(perf_counter() - begin_s)
        except BaseException as error:
            self.error = error
        finally:
            self.needs = ()
            self.is_done.set()


class _Mover(Protocol):
    """Makes jobs."""

    def post(self, job: CopyJob) -> None:
        """Have a job made. Returns at once."""

    def wait(self, job: CopyJob) -> None:
        """Return when a job is done. Raises what went wrong."""

    def close(self) -> None:
        """Make what was posted, and end."""


class ThreadMover:
    """A thread for each wire. On an accelerator each has a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queues: dict[Wire, queue.SimpleQueue[CopyJob | None]] = {}
        self._threads: list[threading.Thread] = []

    def post(self, job: CopyJob) -> None:
        """As `_Mover` says."""
        own = self._queues.get(job.wire)
        if own is None:
            own = self._queues[job.wire] = queue.SimpleQueue()
            name = f"bireme-mover-{len(self._threads)}"
            thread = threading.Thread(target=self._work, args=(own,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        if is_accelerator(self._device):
            job.mark = torch.Event(self._device)
            job.mark.record(torch.accelerator.current_stream(self._device))
        own.put(job)

    def wait(self, job: CopyJob) -> None:
        """As `_Mover` says."""
        job.is_done.wait()
        if job.error is not None:
            raise job.error

    def close(self) -> None:
        """As `_Mover` says."""
        for own in self._queues.values():
            own.put(None)
        for thread in self._threads:
            thread.join()
        self._queues.clear()
        self._threads.clear()

    def _work(self, jobs: "queue.SimpleQueue[CopyJob | None]") -> None:
        stream: torch.Stream | None = None
        while (job := jobs.get()) is not None:
            for other in job.needs:
                other.is_done.wait()
            try:
                if is_accelerator(self._device):
                    if stream is None:
                        use(self._device)
                        stream = torch.Stream(self._device)
                    if job.mark is not None:
                        job.mark.synchronize()  # here, so that the copy's time is its own
                    with stream:
                        job.do(stream.synchronize)
                else:
                    job.do()
            except BaseException as error:  # of the stream: nobody may wait for ever
                job.error = error
                job.is_done.set()
            del job  # or what it holds would live until the next comes


# The free slots of a tier, each with the job after which it may be written to.


class SlotPool:
    """Slots 0, 1, 2, … of a tier. One that may be written to at once is taken before all others, and of those
    that may not what was given back first.
    """

    def __init__(self, name: str, num_slots: int) -> None:
        self.name = name
        self.num_slots = num_slots
        self._free: deque[tuple[int, CopyJob | None]] = deque((slot, None) for slot in range(num_slots))
        self.peak = 0
        """The most slots that were in use at a time."""

    @property
    def num_free(self) -> int:
        """How many slots nobody has."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """How many slots somebody has."""
        return self.num_slots - len(self._free)

    def take(self) -> tuple[int, CopyJob | None]:
        """A free slot, and the job to wait for before it is written to."""
        ready = (place for place, (_, job) in enumerate(self._free) if job is None or job.is_done.is_set())
        place = next(ready, 0)
        found = self._free[place]
        del self._free[place]
        self.peak = max(self.peak, self.num_held)
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
    """`folder` is where the disk's file is made; `mover` makes what copies. With `poisons` chunks that are
    not there read as NaN; for tests, on a CPU.
    """

    folder: Path | None = None
    mover: Callable[[torch.device], _Mover] = ThreadMover
    poisons: bool = False


@dataclass(slots=True)
class HeldChunk:
    """A chunk: its slot on each tier that has a copy, its last job, and the job that brings it to the
    device, until somebody has waited for it.
    """

    where: dict[int, int] = field(default_factory=dict)
    last: CopyJob | None = None
    arrival: CopyJob | None = None


class ChunkStore:
    """The chunks of one rank of `program`, which shows all that longer windows keep."""

    def __init__(
        self, program: Program, rank: int, tiers: RankTiers, device: torch.device, settings: PagingSettings
    ) -> None:
        self.tiers = tiers
        self.device = device
        self.chunks: dict[Chunk, HeldChunk] = {}
        self.mover = settings.mover(device)
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
        self.lower: list[LowerTier] = [_lower(tier.name, tiers, device, settings) for tier in tiers.tiers[1:]]
        peaks = _peaks(program, rank)
        on_device = tiers.tiers[0].capacity
        self.memory = chunk_memory(device, on_device or peaks[0], tiers.chunk_bytes, poisons=settings.poisons)
        self.counted = peaks
        """The most chunks that windows hold on each tier."""
        self.pools = [SlotPool("device", on_device or peaks[0])]
        for tier, lower, peak in zip(tiers.tiers[1:], self.lower, peaks[1:], strict=True):
            lower.grow(peak)
            self.pools.append(SlotPool(tier.name, peak))
        self.ranges = _Ranges(self.memory, tiers.chunks)
        self.opened: set[Chunk] = set()
        """The chunks that must be on the device for now, between instructions."""
        self.last_read: Chunk | None = None
        """The chunk whose content `scratch` has."""

    @cached_property
    def scratch(self) -> Tensor:
        """Memory to read a chunk into, apart from all tiers."""
        return pages(self.tiers.chunk_bytes)

    def chunks_of(self, item: Item, stage: int, number: int) -> list[Chunk]:
        """The chunks of an item; none if it is not paged."""
        return [Chunk(item, stage, number, place) for place in range(self.tiers.chunks.get((item, stage), 0))]

    def held(self, chunk: Chunk) -> HeldChunk:
        """What there is of a chunk, maybe nothing yet."""
        found = self.chunks.get(chunk)
        if found is None:
            found = self.chunks[chunk] = HeldChunk()
        return found

    def post(self, held: HeldChunk, job: CopyJob) -> None:
        """Have a chunk's next job made."""
        held.last, self.last_read = job, None
        while self._under_way and self._under_way[0].is_done.is_set():
            self._under_way.popleft()
        self._under_way.append(job)
        self.mover.post(job)

    def note(self, tier: int, is_fetch: bool, seconds: float) -> None:
        """A chunk was copied into a tier, from the one below if it `is_fetch`, in these seconds."""
        wire = tier, is_fetch
        self.copied_s[wire] = self.copied_s.get(wire, 0.0) + seconds
        self.moved_bytes[wire] = self.moved_bytes.get(wire, 0) + self.tiers.chunk_bytes

    def wait(self, job: CopyJob | None) -> None:
        """Wait for a job, if there is one."""
        if job is None:
            return
        begin_s = 0.0 if job.is_done.is_set() else perf_counter()
        self.mover.wait(job)
        self.waited_s += perf_counter() - begin_s if begin_s else 0.0

    def settle(self) -> None:
        """Wait for all jobs that were posted."""
        while self._under_way:
            self.mover.wait(self._under_way.popleft())

    def take(self, tier: int) -> tuple[int, CopyJob | None]:
        """A slot of a tier, and the job to wait for before it is written to."""
        if not self.has_room(tier):
            raise RuntimeError(f"The {self.pools[tier].name} has no slot for a chunk. The program is wrong.")
        return self.pools[tier].take()

    def map_new(self, chunk: Chunk, held: HeldChunk) -> None:
        """Give a chunk a slot on the device whose content is to be made."""
        slot, after = self.take(0)
        self.wait(after)
        self.wait(held.last)
        self.memory.map(self.ranges.place(chunk), slot)
        held.where[0] = slot

    def drop(self, chunk: Chunk, held: HeldChunk, tiers: Iterable[int]) -> None:
        """Give back a chunk's slots on some tiers, once its last job is done."""
        for tier in [tier for tier in tiers if tier in held.where]:
            slot = held.where.pop(tier)
            if tier == 0:
                self.memory.unmap(self.ranges.place(chunk))
            self.pools[tier].give(slot, held.last)

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

    def carry(self, chunk: Chunk, tier: int) -> None:
        """Have a chunk on just one tier, which has room; between windows, and at once."""
        held = self._put(chunk, tier)
        self.drop(chunk, held, [one for one in held.where if one != tier])

    def bring(self, chunk: Chunk) -> None:
        """Copy a chunk to the device, which has room, and wait; to be called between windows."""
        self._put(chunk, 0)

    def _put(self, chunk: Chunk, tier: int) -> HeldChunk:
        """Have a chunk on a tier too."""
        held = self.held(chunk)
        self.wait(held.last)
        held.arrival = self.last_read = None
        if tier not in held.where:
            source = min(held.where, default=None)
            self._make_place(chunk, held, tier)
            if source is not None:
                self._copy(chunk, source, tier)
        synchronize(self.device)
        return held

    @torch.no_grad()
    def change(self, chunk: Chunk, place: slice, content: Tensor) -> None:
        """Change some bytes of a chunk, on every tier that has a copy."""
        held = self.chunks[chunk]
        self.wait(held.last)
        self.last_read = None
        for tier in held.where:
            there = self.bytes_in(chunk, tier)
            if there is None:
                self._read(chunk, tier, self.scratch)
            (self.scratch if there is None else there)[place].copy_(content)
            if there is None:
                self._write(chunk, tier, self.scratch)
        synchronize(self.device)

    def end(self, item: Item, stage: int, number: int) -> None:
        """An item is gone, and its chunks with it."""
        for chunk in self.chunks_of(item, stage, number):
            held = self.chunks.pop(chunk)
            self.drop(chunk, held, tuple(held.where))
        self.ranges.end(item, stage, number)

    def lift(self, chunk: Chunk) -> None:
        """Take a chunk off its only tier; its content is in `scratch`."""
        held = self.held(chunk)
        self.wait(held.last)
        held.arrival = self.last_read = None
        (tier,) = held.where
        self._read(chunk, tier, self.scratch)
        synchronize(self.device)
        self.drop(chunk, held, (tier,))

    def put_down(self, chunk: Chunk, tier: int) -> None:
        """Put a chunk that was lifted on a tier that has room."""
        self._make_place(chunk, self.held(chunk), tier)
        self._write(chunk, tier, self.scratch)
        synchronize(self.device)

    def bytes_in(self, chunk: Chunk, tier: int) -> Tensor | None:
        """The bytes of a chunk's copy in a tier; None on a disk."""
        if tier == 0:
            return self.ranges.place(chunk)
        lower = self.lower[tier - 1]
        return lower.bytes_of(self.chunks[chunk].where[tier]) if isinstance(lower, HostTier) else None

    def content(self, chunk: Chunk) -> Tensor:
        """The bytes of a chunk, wherever they are, to be read until the next call."""
        held = self.chunks[chunk]
        self.wait(held.last)
        tier = min(held.where)
        there = self.bytes_in(chunk, tier)
        if there is None and self.last_read != chunk:
            self._read(chunk, tier, self.scratch)
            self.last_read = chunk
        return self.scratch if there is None else there

    def _make_place(self, chunk: Chunk, held: HeldChunk, tier: int) -> None:
        """Give a chunk a slot on a tier, whose content is to be made."""
        if tier == 0:
            self.map_new(chunk, held)
            return
        slot, after = self.take(tier)
        self.wait(after)
        held.where[tier] = slot

    def _copy(self, chunk: Chunk, source: int, target: int) -> None:
        into = self.bytes_in(chunk, target)
        if into is not None:
            self._read(chunk, source, into)
            return
        data = self.bytes_in(chunk, source)
        assert data is not None, "a rank has one disk"
        self._write(chunk, target, data)

    def _read(self, chunk: Chunk, tier: int, into: Tensor) -> None:
        if tier == 0:
            copy_bytes(into, self.ranges.place(chunk))
        else:
            self.lower[tier - 1].read(self.chunks[chunk].where[tier], into)

    def _write(self, chunk: Chunk, tier: int, data: Tensor) -> None:
        if tier == 0:
            copy_bytes(self.ranges.place(chunk), data)
        else:
            self.lower[tier - 1].write(self.chunks[chunk].where[tier], data)

    @property
    def host(self) -> HostTier:
        """The host's tier, of a rank that has three or updates on the host."""
        found = self.lower[0]
        assert isinstance(found, HostTier), "the first tier below the device's is the host's"
        return found

    def lend_host(self, chunk: Chunk) -> Tensor:
        """Have the slot that a chunk has on the host beneath its place, which is given; on a processor."""
        place = self.ranges.place(chunk)
        self.host.map_beneath(place, self.chunks[chunk].where[1])
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


def _lower(name: str, tiers: RankTiers, device: torch.device, settings: PagingSettings) -> LowerTier:
    if name != "disk":
        return HostTier(tiers.chunk_bytes, device)
    if settings.folder is None:
        raise BiremeError("The plan offloads to a disk, and no folder is named for it. Set memory.disk.")
    return DiskTier(settings.folder, tiers.chunk_bytes)


def _peaks(program: Program, rank: int) -> list[int]:
    """The most chunks that each tier holds."""
    holding = Holding(program, rank)
    for step in program.tracks[rank]:
        for problem in holding.start(step):
            raise BiremeError(problem)
        holding.end(step)
    return holding.peak
