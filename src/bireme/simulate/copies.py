"""Copies between tiers on a clock: when each sets out and ends, and which instructions wait for it.

Each rank has a wire from its device to the host and one back, one wire to the disk for both ways, and one to
the replicas that it shares weights with. Copies of one wire go one after the other, in the order of the
track. A copy sets out when the copies of its chunk before it are through and its slot is free; an instruction
starts when its chunks are there and, for what it makes, slots are free. An update on the host waits for its
chunks there. All of that follows from what the rank has done before, so a copy's time is known when it is
posted.

If a rank's device is a processor, a copy to or from the host takes a core as work does. So does an exchange
with replicas, for as long as processes copy its bytes; while a network carries them no core is busy. If the
machine has no core to spare, the rank's work beside copies takes longer; copies that run while the rank waits
cost it nothing. The rank's own thread posts copies, maps slots beneath what is
made, and copies what a micro-batch keeps into its chunks; small chunks it copies itself as soon as they can
be. That is added to its next work.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from bireme.errors import BiremeError
from bireme.schedule.chunk_account import ChunkAccount
from bireme.schedule.instruction import COMPUTE, PAGING, Instruction, Item, Kind
from bireme.schedule.program import Program
from bireme.schedule.tiers import Chunk
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network, Path
from bireme.timeline.timeline import Copies, RankCopies

REPLICAS = "replicas"
"""The name of the other end of the wire between replicas, in copies."""


class _BesideWork:
    """Copies that take a core, and what work loses to them: this share of the time that both overlap."""

    def __init__(self, core_share: float) -> None:
        self._core_share = core_share
        self._spans: list[tuple[float, float, float]] = []
        """The begin and the end of each copy that has not met work yet, and its share, as a heap."""

    def add(self, begin: float, end: float, busy_share: float = 1.0) -> None:
        """A copy runs between these times, and takes a core for a share of them."""
        if self._core_share and busy_share:
            heappush(self._spans, (begin, end, self._core_share * busy_share))

    def taken_s(self, now: float, seconds: float) -> float:
        """How much longer work takes that begins now and takes these seconds alone."""
        more_s = 0.0
        while self._spans and self._spans[0][0] < now + seconds + more_s:
            begin, end, share = heappop(self._spans)
            more_s += share * max(end - max(begin, now), 0.0)
        return more_s


class _ReplicaWire:
    """The wire between a rank and the replicas that it shares weights with: whole weights come in, with those
    that do not learn, and gradients go to the owners of their parts.

    Exchanges go one after the other, in the order of the track. A FETCH or SCATTER sets out when it is posted
    and the wire is free. The first pass that uses the weights waits for them, and COLLECT for the sums.
    Replicas count as in step. Of w replicas each gets (w − 1)/w of the weights, and gives as much of the
    gradients: half of what a sum of whole gradients takes, in half of its hops.
    """

    def __init__(
        self, program: Program, rank: int, costs: Costs, network: Network, beside: _BesideWork
    ) -> None:
        self._costs = costs
        self._beside = beside
        self._network = network
        self._path = network.sync_paths.get(rank, Path(()))
        self._share = (program.num_sharers - 1) / program.num_sharers
        self._free_s = 0.0
        self._there_s: dict[tuple[int, int], float] = {}
        """When the weights of a stage and version are whole, of those that no pass has used since."""
        self._summed_s = 0.0
        """When the last SCATTER is through."""
        self.copies = {Kind.FETCH: Copies(REPLICAS, "device"), Kind.SCATTER: Copies("device", REPLICAS)}

    def ready_s(self, step: Instruction, now: float, index: int) -> float:
        """When an instruction can start that has that index and comes up now."""
        weights = step.stage, step.version or 0
        if step.kind is Kind.FETCH:
            frozen = self._costs.frozen_bytes[step.stage] if self._costs.frozen_bytes else 0.0
            whole = self._costs.weight_bytes[step.stage] + frozen
            self._there_s[weights] = self._exchanged(step, whole, now, index)
        elif step.kind is Kind.SCATTER:
            summed = self._costs.part_gradient_bytes[step.stage] * self._costs.part_sum_share
            self._summed_s = self._exchanged(step, summed, now, index)
        elif step.kind is Kind.COLLECT:
            return max(now, self._summed_s)
        elif step.kind in COMPUTE:
            return max(now, self._there_s.pop(weights, 0.0))
        return now

    def _exchanged(self, step: Instruction, num_bytes: float, now: float, index: int) -> float:
        """When so many bytes have been exchanged: a network carries them, and processes copy them."""
        moved = self._share * num_bytes
        engine = self._costs.engine
        per_byte_s = engine.gather_s_per_byte if step.kind is Kind.FETCH else engine.scatter_s_per_byte
        copies_s = per_byte_s * moved
        seconds = self._path.latency_s / 2 + max(self._network.seconds(self._path, moved), copies_s)
        start = max(now, self._free_s)
        end = self._free_s = start + seconds
        self._beside.add(start, end, copies_s and copies_s / seconds)
        _note(self.copies[step.kind], start, end, moved, index)
        return end


def _note(copies: Copies, start: float, end: float, num_bytes: float, index: int) -> None:
    copies.start_s.append(start)
    copies.end_s.append(end)
    copies.num_bytes.append(num_bytes)
    copies.posted_by.append(index)


@dataclass(frozen=True, slots=True)
class TierLinks:
    """How fast a rank's chunks travel: between device and host each way, and to the disk or back.

    A latency is added to every copy. `core_share` is what of a copy between device and host work that runs
    beside it loses: all of it where one core does both, nothing where copies have cores of their own.
    `chunk_s` is for how long a rank is busy with each chunk that it has copied or makes, and with each item
    that it ends; what it keeps of a micro-batch it puts into chunks itself, `stash_bytes_per_s`. Chunks of
    `own_bytes` or less it copies to and from the host itself.
    """

    host_bytes_per_s: float = math.inf
    disk_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    core_share: float = 0.0
    chunk_s: float = 0.0
    stash_bytes_per_s: float = math.inf
    own_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("host_bytes_per_s", "disk_bytes_per_s", "stash_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise BiremeError(f"{name} is {getattr(self, name)}; it must be more than 0.")
        for what, seconds in (("latency of copies", self.latency_s), ("time of a chunk", self.chunk_s)):
            if not 0 <= seconds < math.inf:
                raise BiremeError(f"The {what} is {seconds}; it must be 0 or more seconds.")
        if not 0 <= self.core_share <= 1:
            raise BiremeError(f"The core share of copies is {self.core_share}; it must be 0 to 1.")

    def seconds(self, lower: str, num_bytes: float) -> float:
        """How long a copy to or from the tier of that name takes."""
        bytes_per_s = self.host_bytes_per_s if lower == "host" else self.disk_bytes_per_s
        return self.latency_s + num_bytes / bytes_per_s


class _Slots:
    """The free slots of a tier, and when those that are given back will be free."""

    def __init__(self, free: float) -> None:
        self.free = free
        """Infinite without a limit."""
        self.given_back: list[float] = []

    def take(self) -> float:
        """When the slot is free that is free first."""
        if self.free > 0:
            self.free -= 1
            return 0.0
        if not self.given_back:
            raise BiremeError("A tier has no slot for a chunk. `bireme schedule --check` proves programs.")
        return heappop(self.given_back)

    def give(self, at_s: float) -> None:
        """A slot is free from then on."""
        if self.free < math.inf:
            heappush(self.given_back, at_s)


class RankMover(ChunkAccount[float]):
    """The copies of one rank, between its tiers and from its replicas: it is given every instruction, in the
    order of the track. A copy ends at a time.
    """

    def __init__(self, program: Program, rank: int, links: TierLinks, costs: Costs, network: Network) -> None:
        super().__init__(program, rank)
        self.beside = _BesideWork(links.core_share)
        self.replicas = (
            _ReplicaWire(program, rank, costs, network, self.beside) if program.num_sharers > 1 else None
        )
        self.rank = rank
        self.links = links
        host_speed = costs.host_speed[rank] if costs.host_speed else 1.0
        self.move_s = links.chunk_s + costs.engine.instruction_s / host_speed
        """For how long the rank is busy with a FETCH or EVICT, besides its copy."""
        self.steps: Iterator[Instruction] = iter(program.tracks[rank])
        self.step: Instruction | None = None
        self.index = -1
        self.ready_s = 0.0
        """When the instruction under way has its chunks and slots, as far as is known."""
        held = Counter(self.tiers.begin.values())
        self.slots = [
            _Slots(math.inf if tier.capacity is None else tier.capacity - held[number])
            for number, tier in enumerate(self.tiers.tiers)
        ]
        self.wire_free_s: dict[tuple[int, bool], float] = {}
        self.copies: dict[tuple[int, bool], Copies] = {}
        self.waited_s = 0.0
        self.own_s = 0.0
        """What the rank's thread did about chunks since its last work."""

    def start(self, index: int, now: float) -> float:
        """When the instruction of that index, which comes up now, has its chunks and slots."""
        if index > self.index:
            self.step, self.index = next(self.steps), index
            self.ready_s = now
            if self.step.kind in PAGING and not self.step.moves_whole:
                self.own_s += self.move_s
                self.move(self.step)
                self.ready_s = now
                return now
            if self.tiers.chunks:
                self.use(self.step)
            if self.replicas is not None:  # weights set out when the chunks of this rank's part are there
                self.ready_s = self.replicas.ready_s(self.step, self.ready_s, index)
            self.waited_s += self.ready_s - now
        return self.ready_s

    def taken_s(self, now: float, seconds: float) -> float:
        """How much longer work takes that begins now and takes so long alone, for the copies beside it."""
        own_s, self.own_s = self.own_s, 0.0
        return own_s + self.beside.taken_s(now, seconds + own_s)

    def ended(self, now: float) -> None:
        """That instruction has ended."""
        assert self.step is not None, "what ends has started"
        self.ready_s = now
        self.end(self.step)

    def result(self) -> RankCopies:
        """All copies of the window."""
        found = [self.copies[wire] for wire in sorted(self.copies)]
        if self.replicas is not None:
            found += [copies for copies in self.replicas.copies.values() if copies.start_s]
        return RankCopies(self.rank, self.waited_s, tuple(found))

    def wait(self, end: float | None) -> None:
        """As `ChunkAccount` says."""
        self.ready_s = max(self.ready_s, end or 0.0)

    def take(self, chunk: Chunk, tier: int) -> int:
        """As `ChunkAccount` says. The rank puts what it keeps of a micro-batch into chunks itself."""
        self.ready_s = max(self.ready_s, self.slots[tier].take())
        if tier == 0:
            self.own_s += self.links.chunk_s
            if chunk.item is Item.STASH:
                self.own_s += self.tiers.chunk_bytes / self.links.stash_bytes_per_s
        return 0

    def give(self, chunk: Chunk, tier: int, slot: int, *, is_copied: bool = False) -> None:
        """As `ChunkAccount` says: a slot is free when the last copy of its chunk is through."""
        self.slots[tier].give(max(self.ready_s, self.last.get(chunk, 0.0)))

    def forget(self, item: Item, stage: int, number: int, chunks: Collection[Chunk]) -> None:
        """As `ChunkAccount` says."""
        self.own_s += self.links.chunk_s
        super().forget(item, stage, number, chunks)

    def copy(self, chunk: Chunk, tier: int, *, is_fetch: bool) -> int:
        """As `ChunkAccount` says: when the slot is free, the chunk's last copy is through and so is the last
        on the wire; at once if the rank copies it itself.
        """
        now, size, lower = self.ready_s, self.tiers.chunk_bytes, self.tiers.tiers[tier + 1].name
        room_s = self.slots[tier if is_fetch else tier + 1].take()
        wire = tier, is_fetch and lower != "disk"
        start = max(now, room_s, self.last.get(chunk, 0.0), self.wire_free_s.get(wire, 0.0))
        seconds = self.links.seconds(lower, size)
        end = ready = start + seconds
        if lower != "disk" and start <= now and size <= self.links.own_bytes:
            self.own_s += seconds
            self.last[chunk] = ready = now
        else:
            self.wire_free_s[wire] = self.last[chunk] = end
            if lower != "disk":
                self.beside.add(start, end)
        copies = self.copies.get((tier, is_fetch))
        if copies is None:
            upper = self.tiers.tiers[tier].name
            ends = (lower, upper) if is_fetch else (upper, lower)
            copies = self.copies[tier, is_fetch] = Copies(*ends)
        _note(copies, start, end, size, self.index)
        if is_fetch and tier == 0:
            self.arriving[chunk] = ready
        return 0
