"""Simple placements of steps that a search for a short latency begins with.

Accelerators are filled one after the other in a topological order, up to their memory (as the paper's
greedy does, in its Appendix F) or up to a share of the work. Nothing here promises to fit.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np

# Both are as right for families as they are for groups.
from bireme.placement.contraction import circles, walk_in_depth
from bireme.placement.items import Integers
from bireme.placement.latency.series import in_series
from bireme.placement.latency.steps import LatencySteps
from bireme.placement.latency.wiring import CPU

__all__ = ["starts_of"]


def starts_of(steps: LatencySteps, num_pieces: int) -> Iterator[Integers]:
    """The slots of each step; all on CPUs and all on one accelerator are the first, where there are such."""
    if steps.num_cpus:
        yield np.full(len(steps), CPU, np.int64)
    if not steps.num_accelerators:
        return
    blocks = _blocks(steps)
    total = float(steps.accelerator_time.sum())
    slots = [
        device * num_pieces + piece for device in range(steps.num_accelerators) for piece in range(num_pieces)
    ]
    in_turn = [
        device * num_pieces + piece for piece in range(num_pieces) for device in range(steps.num_accelerators)
    ]
    for order in (blocks, _in_breadth(steps, blocks), _latest(steps, blocks)):
        yield from _series(steps, num_pieces, order)
        fill = _Fill(steps, num_pieces, order)
        yield fill.slots(slots, most_time=np.inf, most_bytes=np.inf)
        yield fill.slots(slots, most_time=np.inf, most_bytes=steps.room)
        for parts in range(2, len(slots) + 1):
            yield fill.slots(slots, most_time=total / parts * 1.001, most_bytes=steps.room)
            yield fill.slots(slots, most_time=total / parts * 1.001, most_bytes=np.inf)
            if num_pieces > 1:
                yield fill.slots(in_turn, most_time=total / parts * 1.001, most_bytes=steps.room)
    if num_pieces > 1:
        for parts in range(2, steps.num_accelerators + 1):
            yield _there_and_back(steps, num_pieces, parts)


def _series(steps: LatencySteps, num_pieces: int, blocks: list[list[int]]) -> Iterator[Integers]:
    """Cuts of an order for one piece on each accelerator, and for all pieces with equal parts of the room."""
    for pieces in sorted({1, num_pieces}):
        places = in_series(steps, steps.num_accelerators * pieces, blocks, steps.room / pieces)
        if places is not None:
            stretch = np.where(places == CPU, CPU, places // pieces * num_pieces + places % pieces)
            yield stretch.astype(np.int64)


def _latest(steps: LatencySteps, blocks: list[list[int]]) -> list[list[int]]:
    """The same order, but each block is right before the first that needs it: weights come late."""
    block_of = {step: number for number, block in enumerate(blocks) for step in block}
    key = [(0, 0)] * len(blocks)
    for number in range(len(blocks) - 1, -1, -1):
        users = {block_of[user] for step in blocks[number] for user in steps.after.row(step)} - {number}
        first = min((key[user] for user in users), default=(number, 0))
        has_needs = any(
            block_of[other] != number for step in blocks[number] for other in steps.before.row(step)
        )
        key[number] = (number, 0) if has_needs else (first[0], first[1] - 1)
    return [blocks[number] for number in sorted(range(len(blocks)), key=lambda number: (key[number], number))]


def _blocks(steps: LatencySteps) -> list[list[int]]:
    """Steps that accelerators of one piece do not part: families that follow each other in a circle."""
    followers: dict[int, set[int]] = {number: set() for number in range(len(steps.families))}
    for step, family in enumerate(steps.family.tolist()):
        followers[family] |= {int(steps.family[user]) for user in steps.after.row(step)} - {family}
    block_of = {family: family for family in followers}
    for circle in circles(followers):
        block_of.update(dict.fromkeys(circle, circle[0]))
    of_blocks: dict[int, set[int]] = {block: set() for block in block_of.values()}
    members: dict[int, list[int]] = {block: [] for block in of_blocks}
    for step, family in enumerate(steps.family.tolist()):
        members[block_of[family]].append(step)
    for family, users in followers.items():
        of_blocks[block_of[family]] |= {block_of[user] for user in users} - {block_of[family]}
    return [members[block] for block in walk_in_depth(of_blocks)]


def _in_breadth(steps: LatencySteps, blocks: list[list[int]]) -> list[list[int]]:
    """The same blocks, those first that the fewest others lead to one after the other."""
    block_of = {step: number for number, block in enumerate(blocks) for step in block}
    users = [
        sorted({block_of[user] for step in block for user in steps.after.row(step)} - {number})
        for number, block in enumerate(blocks)
    ]
    waiting = [0] * len(blocks)
    for row in users:
        for user in row:
            waiting[user] += 1
    ready = deque(number for number, count in enumerate(waiting) if not count)
    order = []
    while ready:
        order.append(ready.popleft())
        for user in users[order[-1]]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    return [blocks[number] for number in order]


class _Fill:
    """Gives blocks, in their order, to one slot until it is full, then to the next."""

    def __init__(self, steps: LatencySteps, num_pieces: int, blocks: list[list[int]]) -> None:
        self.steps = steps
        self.num_pieces = num_pieces
        self.blocks = blocks
        self.before = [steps.before.row(step) for step in range(len(steps))]

    def slots(self, order: list[int], *, most_time: float, most_bytes: float) -> Integers:
        """What is left over goes to a CPU, or else to the last slot."""
        steps = self.steps
        slots = np.full(len(steps), CPU, np.int64)
        # The last place in the order that some path to a step went through and left.
        left_behind = [-1] * len(steps)
        place_of = {slot: place for place, slot in enumerate(order)} | {CPU: -1}
        times, sizes = [0.0] * len(order), [0.0] * steps.num_accelerators
        current = 0
        for block in self.blocks:
            can_accelerate = all(steps.can_accelerate[steps.family[step]] for step in block)
            time, size = float(steps.accelerator_time[block].sum()), float(steps.size[block].sum())
            while can_accelerate and current < len(order):
                device = order[current] // self.num_pieces
                has_room = times[current] + time <= most_time and sizes[device] + size <= most_bytes
                if (has_room or not times[current]) and self._enter(
                    block, order[current], slots, left_behind, place_of
                ):
                    break
                current += 1
            if can_accelerate and current < len(order):
                times[current] += time
                sizes[order[current] // self.num_pieces] += size
            else:
                self._enter(block, CPU if steps.num_cpus else order[-1], slots, left_behind, place_of)
        return slots

    def _enter(
        self, block: list[int], slot: int, slots: Integers, left_behind: list[int], place_of: dict[int, int]
    ) -> bool:
        """Put a block into a slot; false where a path to it has left that slot before."""
        slots[block] = slot
        goes = True
        for step in block:
            left_behind[step] = -1
            for producer in self.before[step]:
                other = int(slots[producer])
                behind = (
                    left_behind[producer] if other == slot else max(left_behind[producer], place_of[other])
                )
                left_behind[step] = max(left_behind[step], behind)
            goes &= slot == CPU or left_behind[step] < place_of[slot]
        return goes


def _there_and_back(steps: LatencySteps, num_pieces: int, parts: int) -> Integers:
    """Families in the order of their first steps, cut into parts of equal work; backward returns to them."""
    slots = np.full(len(steps), CPU, np.int64)
    share = float(steps.accelerator_time.sum()) / parts or 1.0
    work = 0.0
    for family in range(len(steps.families)):
        row = steps.families.row(family)
        work += float(steps.accelerator_time[row].sum())
        if steps.can_accelerate[family] or not steps.num_cpus:
            slots[row] = min(parts - 1, int((work - 1e-9 * share) / share)) * num_pieces
    devices = slots.copy()
    for device in {slot for slot in devices.tolist() if slot != CPU}:
        times_left = [-1] * len(steps)
        for step in range(len(steps)):
            inside = int(devices[step]) == device
            for producer in steps.before.row(step):
                enters = inside and times_left[producer] >= 0 and int(devices[producer]) != device
                times_left[step] = max(times_left[step], times_left[producer] + enters)
            if inside:
                times_left[step] = max(times_left[step], 0)
                slots[step] = device + min(times_left[step], num_pieces - 1)
    return slots
