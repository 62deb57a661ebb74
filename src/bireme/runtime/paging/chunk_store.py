"""A rank's chunks in their tiers: which tiers have a copy of each, in which slots, and after which jobs.

Everything here is called by the rank's own thread. What the mover does of it is in the jobs that it is given.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter

import torch
from torch import Tensor

from bireme.devices import is_accelerator, synchronize
from bireme.errors import BiremeError
from bireme.memory.chunk_memory import chunk_memory
from bireme.memory.disk_tier import DiskTier
from bireme.memory.lower_tier import HostTier, LowerTier
from bireme.memory.system_memory import copy_bytes, pages
from bireme.runtime.paging.mover import CopyJob, Wire
from bireme.runtime.paging.ranges import Ranges
from bireme.runtime.paging.settings import PagingSettings
from bireme.runtime.paging.slot_pool import SlotPool
from bireme.schedule.chunks import SMALL_CHUNK_BYTES
from bireme.schedule.holding import Holding
from bireme.schedule.program import Program
from bireme.schedule.tiers import Chunk, RankTiers

__all__ = ["ChunkStore", "HeldChunk"]


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
        self.copies_itself = not is_accelerator(device) and tiers.chunk_bytes <= SMALL_CHUNK_BYTES
        """Whether chunks are copied to and from the host by who posts it, where they can be."""
        self._under_way: deque[CopyJob] = deque()
        self.moved_bytes: dict[Wire, int] = {}
        """The bytes that jobs have copied, by the tier that they came into and whether from below."""
        self.copied_s: dict[Wire, float] = {}
        """For how long jobs have copied, by the same."""
        self.waited_s = 0.0
        """For how long the rank has waited for jobs."""
        self.lower: list[LowerTier] = [_lower(tier.name, tiers, device, settings) for tier in tiers.tiers[1:]]
        peaks = _peaks(program, rank, tiers)
        on_device = tiers.tiers[0].capacity
        self.memory = chunk_memory(device, on_device or peaks[0], tiers.chunk_bytes, poisons=settings.poisons)
        self.counted = peaks
        """The most chunks that windows hold on each tier."""
        self.pools = [SlotPool("device", on_device or peaks[0])]
        for tier, lower, peak in zip(tiers.tiers[1:], self.lower, peaks[1:], strict=True):
            lower.grow(peak)
            self.pools.append(SlotPool(tier.name, peak))
        self.ranges = Ranges(self.memory, tiers.chunks)
        self.opened: set[Chunk] = set()
        """The chunks that must be on the device for now, between instructions."""
        self.last_read: Chunk | None = None
        """The chunk whose content `scratch` has."""

    @cached_property
    def scratch(self) -> Tensor:
        """Memory to read a chunk into, apart from all tiers."""
        return pages(self.tiers.chunk_bytes)

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
        held = self.held(chunk)
        self.wait(held.last)
        held.arrival = self.last_read = None
        others = [one for one in held.where if one != tier]
        if tier not in held.where:
            source = min(held.where, default=None)
            if tier == 0:
                self.map_new(chunk, held)
            else:
                slot, after = self.take(tier)
                self.wait(after)
                held.where[tier] = slot
            if source is not None:
                self._copy(chunk, held, source, tier)
        self.drop(chunk, held, others)
        synchronize(self.device)

    def bring(self, chunk: Chunk) -> None:
        """Copy a chunk to the device, which has room, and wait; to be called between windows."""
        held = self.held(chunk)
        self.wait(held.last)
        held.arrival = self.last_read = None
        source = min(held.where)
        self.map_new(chunk, held)
        self._copy(chunk, held, source, 0)
        synchronize(self.device)

    def lift(self, chunk: Chunk) -> None:
        """Take a chunk off its only tier; its content is in `scratch`."""
        held = self.held(chunk)
        self.wait(held.last)
        held.arrival = self.last_read = None
        (tier,) = held.where
        if tier == 0:
            copy_bytes(self.scratch, self.ranges.place(chunk))
        else:
            self.lower[tier - 1].read(held.where[tier], self.scratch)
        synchronize(self.device)
        self.drop(chunk, held, (tier,))

    def put_down(self, chunk: Chunk, tier: int) -> None:
        """Put a chunk that was lifted on a tier that has room."""
        held = self.held(chunk)
        if tier == 0:
            self.map_new(chunk, held)
            copy_bytes(self.ranges.place(chunk), self.scratch)
        else:
            slot, after = self.take(tier)
            self.wait(after)
            held.where[tier] = slot
            self.lower[tier - 1].write(slot, self.scratch)
        synchronize(self.device)

    def _copy(self, chunk: Chunk, held: HeldChunk, source: int, target: int) -> None:
        if target == 0:
            self.lower[source - 1].read(held.where[source], self.ranges.place(chunk))
        elif source == 0:
            self.lower[target - 1].write(held.where[target], self.ranges.place(chunk))
        else:
            host, disk = self.host, self.lower[-1]
            if target == 1:
                disk.read(held.where[source], host.bytes_of(held.where[target]))
            else:
                disk.write(held.where[target], host.bytes_of(held.where[source]))

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

    def wire_below(self, tier: int) -> tuple[int, float]:
        """The bytes that instructions have copied from a tier to the one below and back, and the seconds that
        took.
        """
        both = (tier + 1, False), (tier, True)
        return sum(self.moved_bytes.get(one, 0) for one in both), sum(
            self.copied_s.get(one, 0.0) for one in both
        )

    def close(self) -> None:
        """End the mover. What there is can still be read."""
        self.mover.close()


def _lower(name: str, tiers: RankTiers, device: torch.device, settings: PagingSettings) -> LowerTier:
    if name != "disk":
        return HostTier(tiers.chunk_bytes, device)
    if settings.folder is None:
        raise BiremeError("The plan pages to a disk, and no folder is named for it. Set memory.disk.")
    return DiskTier(settings.folder, tiers.chunk_bytes)


def _peaks(program: Program, rank: int, tiers: RankTiers) -> list[int]:
    """The most chunks that each tier holds."""
    holding = Holding(program, tiers)
    for step in program.tracks[rank]:
        for problem in holding.start(step):
            raise BiremeError(problem)
        holding.end(step)
    return holding.peak
