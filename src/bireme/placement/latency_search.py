"""A short latency, soon: simple placements, improved by simulated annealing.

What comes back fits and can run, and never is worse than any of the placements it began with. Nothing is
proven but the combinatorial bound.
"""

import math
from collections.abc import Iterator

import numpy as np

from bireme.compiled import compiled
from bireme.errors import BiremeError
from bireme.placement.annealing import Annealing
from bireme.placement.annealing_loops import Heat, Neighbors, anneal_steps, step_tables
from bireme.placement.contraction import Floats, Integers, Ragged, circles, in_order, turned, walk_in_depth
from bireme.placement.latency import (
    LatencyFound,
    LatencySteps,
    latency_lower_bound,
    latency_of,
    steps_of,
    times_left,
)
from bireme.placement.workload import Workload

_CPU = -1
"""The slot of all that is on a CPU."""

# The best cut of a line of blocks into pieces, and CPU work between them, if all ran one after the other.
#
# Real latencies are no longer, as some of it runs at the same time; so this is a good placement to begin with
# where memory is short, which a search that moves steps one by one rarely finds.


def _in_series(
    steps: LatencySteps, num_places: int, blocks: list[list[int]], most_bytes: float
) -> Integers | None:
    """The place of each step among pieces of at most `most_bytes` each; none where they cannot hold all."""
    block_of = np.zeros(len(steps), np.int64)
    for number, block in enumerate(blocks):
        block_of[block] = number
    users = (steps.net_users.row(net) for net in range(len(steps.net_cost)))
    pins = [
        sorted({int(block_of[source]), *block_of[row].tolist()})
        for source, row in zip(steps.net_source.tolist(), users, strict=True)
    ]
    nets = Ragged.of(turned(pins, len(blocks)))
    can_hold = [all(steps.can_accelerate[steps.family[step]] for step in block) for block in blocks]
    cuts = _cuts(
        np.array([steps.accelerator_time[block].sum() for block in blocks]),
        np.array([steps.cpu_time[block].sum() if steps.num_cpus else np.inf for block in blocks]),
        np.array([steps.size[b].sum() if can else np.inf for can, b in zip(can_hold, blocks, strict=True)]),
        nets.starts,
        nets.values,
        np.array([len(row) for row in pins], np.int64),
        steps.net_cost,
        num_places,
        most_bytes,
    )
    return None if cuts[0] == -2 else cuts[block_of]


@compiled
def _cuts(
    time: Floats,
    cpu_time: Floats,
    size: Floats,
    net_starts: Integers,
    nets: Integers,
    num_pins: Integers,
    net_cost: Floats,
    num_places: int,
    most_bytes: float,
) -> Integers:
    """The place of each block, -1 on CPUs; -2 everywhere where there is no cut.

    `best[p, i]`: the first `i` blocks with at most `p` pieces. Its last block is on a CPU, or ends a piece
    that is grown block by block to the left; a net costs while some of its pins are inside, but not all.
    """
    num_blocks = time.shape[0]
    best = np.full((num_places + 1, num_blocks + 1), np.inf)
    begin = np.full((num_places + 1, num_blocks + 1), -1, np.int64)
    best[:, 0] = 0.0
    inside = np.zeros(net_cost.shape[0], np.int64)
    for end in range(1, num_blocks + 1):
        for place in range(num_places + 1):
            best[place, end] = best[place, end - 1] + cpu_time[end - 1]
        inside[:] = 0
        compute = held = moved = 0.0
        for first in range(end - 1, -1, -1):
            held += size[first]
            compute += time[first]
            if held > most_bytes or compute >= best[num_places, end]:
                break
            for entry in range(net_starts[first], net_starts[first + 1]):
                net = nets[entry]
                inside[net] += 1
                if inside[net] == 1 and num_pins[net] > 1:
                    moved += net_cost[net]
                if inside[net] == num_pins[net] and num_pins[net] > 1:
                    moved -= net_cost[net]
            for place in range(1, num_places + 1):
                total = best[place - 1, first] + compute + moved
                if total < best[place, end]:
                    best[place, end] = total
                    begin[place, end] = first
    where = np.full(num_blocks, _CPU, np.int64)
    if best[num_places, num_blocks] == np.inf:
        where[:] = -2
        return where
    place, end = num_places, num_blocks
    while end > 0:
        first = begin[place, end]
        if first < 0:
            end -= 1
        else:
            where[first:end] = place - 1
            place -= 1
            end = first
    return where


# Simple placements of steps that a search for a short latency begins with.
#
# Accelerators are filled one after the other in a topological order, up to their memory (as the paper's
# greedy does, in its Appendix F) or up to a share of the work. Nothing here promises to fit.


def _starts_of(steps: LatencySteps, num_pieces: int) -> Iterator[Integers]:
    """The slots of each step; all on CPUs and all on one accelerator are the first, where there are such."""
    if steps.num_cpus:
        yield np.full(len(steps), _CPU, np.int64)
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
    for order in (blocks, _in_breadth(steps, blocks)):
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
        places = _in_series(steps, steps.num_accelerators * pieces, blocks, steps.room / pieces)
        if places is not None:
            stretch = np.where(places == _CPU, _CPU, places // pieces * num_pieces + places % pieces)
            yield stretch.astype(np.int64)


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
    users = {
        number: {block_of[user] for step in block for user in steps.after.row(step)} - {number}
        for number, block in enumerate(blocks)
    }
    return [blocks[number] for number in in_order(users, lambda _, depth: depth)]


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
        slots = np.full(len(steps), _CPU, np.int64)
        # The last place in the order that some path to a step went through and left.
        left_behind = [-1] * len(steps)
        place_of = {slot: place for place, slot in enumerate(order)} | {_CPU: -1}
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
                self._enter(block, _CPU if steps.num_cpus else order[-1], slots, left_behind, place_of)
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
            goes &= slot == _CPU or left_behind[step] < place_of[slot]
        return goes


def _there_and_back(steps: LatencySteps, num_pieces: int, parts: int) -> Integers:
    """Families in the order of their first steps, cut into parts of equal work; backward returns to them."""
    slots = np.full(len(steps), _CPU, np.int64)
    share = float(steps.accelerator_time.sum()) / parts or 1.0
    work = 0.0
    for family in range(len(steps.families)):
        row = steps.families.row(family)
        work += float(steps.accelerator_time[row].sum())
        if steps.can_accelerate[family] or not steps.num_cpus:
            slots[row] = min(parts - 1, int((work - 1e-9 * share) / share)) * num_pieces
    devices: list[int] = slots.tolist()
    before = [steps.before.row(step) for step in range(len(steps))]
    for device in set(devices) - {_CPU}:
        for step, times in times_left(range(len(steps)), before, devices, device).items():
            slots[step] = device + min(times, num_pieces - 1)
    return slots


_NUM_ROUNDS = 12
"""Rounds of annealing, from every kind of start in turn, if time allows."""


def search_latency(
    workload: Workload, *, num_pieces: int = 1, time_limit_s: float, seed: int = 0
) -> LatencyFound:
    """A placement with a short latency, with up to `num_pieces` pieces on each accelerator.

    The same workload and seed give the same placement, unless the time is over before the search is.
    """
    lower_bound = latency_lower_bound(workload)
    steps = steps_of(workload)
    search = _StepAnnealing(steps, num_pieces, seed)
    starts: list[Integers] = []
    for slots in _starts_of(steps, num_pieces):
        placed = np.where(slots == _CPU, steps.num_accelerators * num_pieces, slots)
        if not any(np.array_equal(placed, other) for other in starts):
            starts.append(placed)
    search.run(starts, time_limit_s=time_limit_s, lower_bound=lower_bound, num_rounds=_NUM_ROUNDS)
    if search.best_value == math.inf:
        raise BiremeError(
            f"The search found no placement that fits: {workload.num_accelerators} accelerators of "
            f"{workload.accelerator_bytes:g} bytes, with {num_pieces} pieces each, and no CPU. More time may "
            "help, or the integer program, which also tells if there is none."
        )
    devices, pieces = (steps.spread(of.tolist()) for of in np.divmod(search.walk.best, num_pieces))
    value = latency_of(workload, devices, pieces).latency
    return LatencyFound(devices, pieces, value, min(lower_bound, value))


class _StepAnnealing(Annealing):
    """Annealing of steps by the latency."""

    def __init__(self, steps: LatencySteps, num_pieces: int, seed: int) -> None:
        num_accelerated = steps.num_accelerators * num_pieces
        near = Neighbors(
            steps.family,
            steps.families.starts,
            steps.families.values,
            steps.can_accelerate,
            steps.before.starts,
            steps.before.values,
            steps.after.starts,
            steps.after.values,
            num_pieces,
            num_accelerated,
            num_accelerated + (steps.num_cpus > 0),
            0.3,
        )
        times = steps.cpu_time if steps.num_cpus else steps.accelerator_time
        super().__init__(near, float(times.sum()), float(steps.size.sum()), seed)
        self._tables = step_tables(steps, num_pieces)

    def anneal(self, heat: Heat, num_moves: int) -> float:
        """As `Annealing` says; all is counted afresh for every move."""
        return anneal_steps(self.near, self._tables, self.walk, heat, num_moves)
