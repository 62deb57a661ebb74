"""Which blocks could be away while they lie idle, for nothing, and what that takes off the peak.

A block of S bytes can be swapped out and back during an idle interval no shorter than S/out + S/in. It is
away from the end of the copy out to the start of the copy in. Copies run during the computation.
"""

import math
from bisect import bisect, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bireme.errors import BiremeError
from bireme.grouping import grouped
from bireme.profile.behavior import Behavior, EventKind, Idle, MemoryBlock, Owner, idle_intervals, live_bytes
from bireme.schedule.accesses import ChunkAccess
from bireme.schedule.eviction import Evictions, OverfullError, gaps_of, most_at_a_step, settle
from bireme.schedule.instruction import Instruction, Item, Kind
from bireme.schedule.tiers import Chunk, best_chunk_bytes, is_paged, num_chunks


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Of the link that blocks leave and come back over; both ways can be used at once."""

    out_bytes_per_s: float
    in_bytes_per_s: float

    def __post_init__(self) -> None:
        for bytes_per_s in (self.out_bytes_per_s, self.in_bytes_per_s):
            if not 0 < bytes_per_s < math.inf:
                raise BiremeError(
                    f"A bandwidth is {bytes_per_s:g} bytes per second; it must be finite and more than 0."
                )

    def round_trip_s(self, num_bytes: float) -> float:
        """How long a block needs to go out and come back."""
        return num_bytes * (1 / self.out_bytes_per_s + 1 / self.in_bytes_per_s)

    def fits_bytes(self, seconds: float) -> float:
        """The largest block that can do so in a time."""
        return seconds / (1 / self.out_bytes_per_s + 1 / self.in_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Swap:
    """A block is away from `out_s` to `in_s`, which may be in the next iteration, past the end of this."""

    idle: Idle
    out_s: float
    in_s: float


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """The swaps that lower the peak, and where they leave it.

    `num_feasible` of `num_intervals` idle intervals are long enough for their block; `swappable_block_bytes`
    are the bytes of all blocks that have such an interval, whether that helps the peak or not.
    """

    bandwidth: Bandwidth
    num_intervals: int
    num_feasible: int
    num_swappable_blocks: int
    swappable_block_bytes: int
    swaps: tuple[Swap, ...]
    before_bytes: int
    peak_bytes: int

    @property
    def saved_bytes(self) -> int:
        """What the swaps take off the peak."""
        return self.before_bytes - self.peak_bytes


def plan_swaps(behavior: Behavior, bandwidth: Bandwidth, *, in_turn: bool = False) -> SwapPlan:
    """The swaps that lower the peak most, larger S·interval first.

    Every block has the link for itself, as in the paper, so that the peak is the lowest there is. With
    `in_turn` copies of one direction wait for each other, and a swap that no longer fits is left out.
    """
    intervals = idle_intervals(behavior)
    feasible = [idle for idle in intervals if bandwidth.round_trip_s(idle.block.num_bytes) <= idle.seconds]
    feasible.sort(key=lambda idle: (-idle.block.num_bytes * idle.seconds, idle.block.id, idle.start_s))
    blocks = {idle.block.id: idle.block.num_bytes for idle in feasible}
    curve = _Curve(behavior)
    before_bytes = curve.peak_bytes
    link = _Link(behavior.duration_s, bandwidth)
    return SwapPlan(
        bandwidth=bandwidth,
        num_intervals=len(intervals),
        num_feasible=len(feasible),
        num_swappable_blocks=len(blocks),
        swappable_block_bytes=sum(blocks.values()),
        swaps=tuple(_chosen(curve, feasible, link, in_turn=in_turn)),
        before_bytes=before_bytes,
        peak_bytes=curve.peak_bytes,
    )


def _chosen(curve: "_Curve", feasible: Sequence[Idle], link: "_Link", *, in_turn: bool) -> list[Swap]:
    """As long as a block can be away at the highest moment, send the first such block away. A link that
    nothing is reserved on each has for itself.
    """
    swaps: list[Swap] = []
    absences = [curve.absence(swap) if (swap := link.room_for(idle)) else [] for idle in feasible]
    left = dict.fromkeys(range(len(feasible)))
    while True:
        highest = curve.highest
        choice = next((i for i in left if _covers(absences[i], highest)), None)
        if choice is None:
            return swaps
        del left[choice]
        swap = link.room_for(feasible[choice])
        if swap is None or not _covers(curve.absence(swap), highest):
            continue
        if in_turn:
            link.reserve(swap)
        curve.remove(swap)
        swaps.append(swap)


def _covers(absence: Sequence[slice], place: int) -> bool:
    return any(part.start <= place < part.stop for part in absence)


class _Curve:
    """The live bytes between each event and the next, from which absent blocks are taken away."""

    def __init__(self, behavior: Behavior) -> None:
        self._duration_s = behavior.duration_s
        self._bounds_s = np.array([0.0, *behavior.event_s, max(behavior.duration_s, *behavior.event_s)])
        self._bytes: NDArray[np.int64] = np.array(behavior.live_bytes(), dtype=np.int64)

    @property
    def peak_bytes(self) -> int:
        return int(self._bytes.max())

    @property
    def highest(self) -> int:
        """Where the peak is."""
        return int(self._bytes.argmax())

    def remove(self, swap: Swap) -> None:
        for part in self.absence(swap):
            self._bytes[part] -= swap.idle.block.num_bytes

    def absence(self, swap: Swap) -> list[slice]:
        """The pieces of the curve during all of which a block is away."""
        end_s = self._duration_s
        if swap.in_s <= end_s:
            return [self._within(swap.out_s, swap.in_s)]
        if swap.out_s >= end_s:
            return [self._within(swap.out_s - end_s, swap.in_s - end_s)]
        return [self._within(swap.out_s, math.inf), self._within(0.0, swap.in_s - end_s)]

    def _within(self, start_s: float, end_s: float) -> slice:
        first = int(np.searchsorted(self._bounds_s, start_s, "left"))
        last = int(np.searchsorted(self._bounds_s, end_s, "right")) - 1
        return slice(first, max(last, first))


class _Link:
    """The two directions of a link, in an iteration that comes again and again."""

    def __init__(self, duration_s: float, bandwidth: Bandwidth) -> None:
        self._bandwidth = bandwidth
        self._outs = _Direction(duration_s)
        # The latest room before a moment is the first one after it where time runs backward.
        self._ins = _Direction(duration_s)

    def room_for(self, idle: Idle) -> Swap | None:
        """Let a block leave as early and come back as late as the link has room, if it does; what only
        rounding keeps from it does not count.
        """
        copy_out_s, copy_in_s = self._copies_s(idle)
        out_s = self._outs.first_room(idle.start_s, copy_out_s) + copy_out_s
        in_s = -self._ins.first_room(-idle.end_s, copy_in_s) - copy_in_s
        is_late = out_s > in_s and not math.isclose(out_s, in_s, rel_tol=1e-12, abs_tol=1e-12 * idle.seconds)
        return None if is_late else Swap(idle, out_s, max(in_s, out_s))

    def reserve(self, swap: Swap) -> None:
        """Take that room."""
        copy_out_s, copy_in_s = self._copies_s(swap.idle)
        self._outs.take(swap.out_s - copy_out_s, swap.out_s)
        self._ins.take(-swap.in_s - copy_in_s, -swap.in_s)

    def _copies_s(self, idle: Idle) -> tuple[float, float]:
        num_bytes = idle.block.num_bytes
        return num_bytes / self._bandwidth.out_bytes_per_s, num_bytes / self._bandwidth.in_bytes_per_s


class _Direction:
    """When one direction is taken: intervals in order that begin in the iteration and never overlap."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._taken: list[tuple[float, float]] = []

    def take(self, start_s: float, end_s: float) -> None:
        turn_s = start_s // self._duration_s * self._duration_s
        insort(self._taken, (start_s - turn_s, end_s - turn_s))

    def first_room(self, from_s: float, length_s: float) -> float:
        """The first moment from which so much time is free; past one turn there is none to be had."""
        if not self._taken:
            return from_s
        turn_s = from_s // self._duration_s * self._duration_s
        moment_s = from_s - turn_s
        latest_s = moment_s + self._duration_s
        place = bisect(self._taken, (moment_s, math.inf)) - 1  # it may still last at the moment
        while moment_s <= latest_s:
            again, index = divmod(place, len(self._taken))
            start_s, end_s = (s + again * self._duration_s for s in self._taken[index])
            if start_s >= moment_s + length_s:
                break
            moment_s = max(moment_s, end_s)
            place += 1
        return moment_s + turn_s


# What paging would save on a traced iteration: the least device memory it could run in, and at which cost.
#
# Parameters, gradients, optimizer state and activations are cut into chunks of one size, as `schedule/` does
# with the items of a stage, and an operator needs the chunks of the blocks that it touches. So the least
# device memory is that of the operator that needs most. What is evicted then is chosen by the same rules as
# for programs. Unlike swaps for nothing, these copies may take longer than the iteration: both are told.

_PAGED = {
    Owner.PARAMETER: Item.WEIGHTS,
    Owner.GRADIENT: Item.GRADIENT,
    Owner.OPTIMIZER: Item.OPTIMIZER,
    Owner.ACTIVATION: Item.STASH,
}
_BUDGETS = (0.0, 0.25, 0.5, 0.75)
"""Where between the least device memory and the peak."""
STEP = Instruction(Kind.FORWARD, 0, 0)
"""Stands for an operator: what is evicted depends on when chunks are used, not on by whom."""


@dataclass(frozen=True, slots=True)
class _PagedBudget:
    """An iteration within a budget: the bytes that leave the device and come back, and for how long the
    busier direction of the link carries them.
    """

    device_bytes: int
    out_bytes: int
    in_bytes: int
    copies_s: float


@dataclass(frozen=True, slots=True)
class BlockPaging:
    """The least device memory, of which `unpaged_bytes` is what is never paged, and budgets from there on."""

    chunk_bytes: int
    least_bytes: int
    unpaged_bytes: int
    budgets: tuple[_PagedBudget, ...]


def page_blocks(behavior: Behavior, bandwidth: Bandwidth) -> BlockPaging | None:
    """What paging would do; None where no block can be paged."""
    blocks = [block for block in behavior.blocks if block.owner in _PAGED and block.accesses]
    if not any(block.num_bytes for block in blocks):
        return None
    chunk_bytes = best_chunk_bytes(Counter(float(block.num_bytes) for block in blocks))
    paged = [block for block in blocks if is_paged(block.num_bytes, chunk_bytes)]
    accesses, num_steps = _accesses(paged, chunk_bytes)
    most = most_at_a_step(accesses)
    paged_ids = {block.id for block in paged}
    unpaged = [block for block in behavior.blocks if block.id not in paged_ids]
    unpaged_bytes = max(live_bytes(unpaged, behavior.num_events))
    least_bytes = unpaged_bytes + most * chunk_bytes
    budgets = []
    for share in _BUDGETS:
        device_bytes = round(least_bytes + share * max(behavior.peak.num_bytes - least_bytes, 0))
        gaps = gaps_of(accesses)
        capacity = max((device_bytes - unpaged_bytes) // chunk_bytes, most)
        try:
            settle(gaps, Evictions(accesses, gaps, num_steps, capacity).leads(0), num_steps)
        except OverfullError:
            continue
        evicted = [gap for gap in gaps if gap.is_evicted]
        out_bytes = sum(gap.is_copied for gap in evicted) * chunk_bytes
        in_bytes = sum(gap.is_fetched for gap in evicted) * chunk_bytes
        copies_s = max(out_bytes / bandwidth.out_bytes_per_s, in_bytes / bandwidth.in_bytes_per_s)
        budgets.append(_PagedBudget(device_bytes, out_bytes, in_bytes, copies_s))
    return BlockPaging(chunk_bytes, least_bytes, unpaged_bytes, tuple(budgets))


def _accesses(blocks: Sequence[MemoryBlock], chunk_bytes: int) -> tuple[list[ChunkAccess], int]:
    """What operators do to chunks, in the order of time, and how many operators there are."""
    moments = sorted({access.start_s for block in blocks for access in block.accesses})
    step_at = {moment: step for step, moment in enumerate(moments)}
    found = [access for block in blocks for access in _of_block(block, step_at, chunk_bytes)]
    return sorted(found, key=lambda access: access.at), len(moments)


def _of_block(block: MemoryBlock, step_at: dict[float, int], chunk_bytes: int) -> Iterator[ChunkAccess]:
    by_step = grouped((step_at[access.start_s], access.kind) for access in block.accesses)
    steps = sorted(by_step)
    for at in steps:
        is_born = at == steps[0] and block.birth_event >= 0
        is_written = is_born or EventKind.WRITE in by_step[at]
        is_last = at == steps[-1] and block.death_event is not None
        for number in range(num_chunks(block.num_bytes, chunk_bytes)):
            yield ChunkAccess(
                at,
                Chunk(_PAGED[block.owner], 0, block.id, number),
                (at, block.id),
                STEP,
                reads=not is_born,
                writes=is_written,
                ends=is_last,
            )
