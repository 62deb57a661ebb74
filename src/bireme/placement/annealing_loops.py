"""The compiled loops of annealing: how moves are drawn, their effects, and which of them are kept.

Two searches use them: for the loads of devices (`solve.py`) and for a short latency (`latency_search.py`).
They are in one file, since numba keeps a compiled loop until the file of the outermost loop changes.
Random numbers come from a state that is handed over, so a seed means the same with and without numba.

A *slot* is a piece of an accelerator: slot `s` is piece `s % num_pieces` of accelerator `s // num_pieces`.
The slots of CPUs follow. Loads have one piece on each accelerator, so there a slot is a device.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bireme.compiled import compiled
from bireme.placement.contraction import Floats, Integers, Items, loads_of
from bireme.placement.latency import LatencySteps
from bireme.placement.workload import Objective

_LONGEST_WINDOW = 24
"""Parts that follow each other in number and are moved together, or on a walk through a slot, at most."""

_TRIES = 12
"""Parts that are tried to find one with a neighbor elsewhere."""


class Neighbors(NamedTuple):
    """The parts that move together, and those that are neighbors.

    Parts of one `family` share a device; where `can_accelerate` is false, no accelerator takes the family.
    `before` and `after` are the neighbors of lower and of higher numbers, in rows as in `Ragged`.
    `num_accelerated` slots are on accelerators, of `num_slots` in all. Of the moves that are drawn, the share
    `alone` is about one part.
    """

    family: Integers
    family_starts: Integers
    family_parts: Integers
    can_accelerate: NDArray[np.bool_]
    before_starts: Integers
    before: Integers
    after_starts: Integers
    after: Integers
    num_pieces: int
    num_accelerated: int
    num_slots: int
    alone: float


class Walk(NamedTuple):
    """Where the parts are, and the best placement that was met: its value is `best_value[0]`.

    `outcome` has the value of the present placement and its missing bytes. `moved` are the parts of the
    move that is tried, `old` the slots they came from, `marks` those that have been moved. `random[0]` is the
    state of the random numbers.
    """

    slots: Integers
    best: Integers
    best_value: Floats
    outcome: Floats
    moved: Integers
    old: Integers
    marks: Integers
    random: Integers


class Heat(NamedTuple):
    """A temperature from `hot` to `cold`, in units of the value, and the price of a byte too much.

    The norm of loads is that of the power 2 ** `squarings`: a higher one is nearer to the largest load, but
    less smooth.
    """

    hot: float
    cold: float
    price: float
    squarings: int


# Moves: one part, two for each other, several numbers in a row, one side of a slot.


@compiled
def _random(walk: Walk) -> float:
    """A number in 0 to 1, by the multiplicative generator of Park and Miller."""
    walk.random[0] = (walk.random[0] * 48271) % 2147483647
    return float(walk.random[0] / 2147483647.0)


@compiled
def _below(walk: Walk, count: int) -> int:
    return min(int(_random(walk) * count), count - 1)


@compiled
def _propose(near: Neighbors, walk: Walk) -> int:
    """Change some slots; returns their number. The parts are in `moved`, their slots before in `old`."""
    slots = walk.slots
    part = target = 0
    kind = (_random(walk) - near.alone) / (1.0 - near.alone)
    ahead = _random(walk) < 0.5
    for _ in range(_TRIES):
        part = _below(walk, slots.shape[0])
        target = _target(near, walk, part, ahead)
        if target != slots[part]:
            break
    num_moved = 0
    if kind < 0.0:
        num_moved = _move(near, walk, part, target, num_moved)
    elif kind < 0.2:
        num_moved = _swap(near, walk, part, _below(walk, slots.shape[0]))
    elif kind < 0.35:
        own = slots[part]
        last = min(part + 1 + _below(walk, _LONGEST_WINDOW), slots.shape[0])
        for other in range(part, last):
            if slots[other] == own:
                num_moved = _move(near, walk, other, target, num_moved)
    elif kind < 0.92 or near.num_pieces == 1:
        part = _walk_away(near, walk, part, ahead)
        num_moved = _move_side(near, walk, part, target, ahead)
    elif slots[part] < near.num_accelerated:
        piece = _below(walk, near.num_pieces)
        num_moved = _set(walk, part, slots[part] - slots[part] % near.num_pieces + piece, num_moved)
    for place in range(num_moved):
        walk.marks[walk.moved[place]] = 0
    return num_moved


@compiled
def _target(near: Neighbors, walk: Walk, part: int, ahead: bool) -> int:
    """A slot to move a part to: mostly that of a neighbor after it, or of one before it; or any."""
    starts = near.after_starts if ahead else near.before_starts
    others = near.after if ahead else near.before
    start, end = starts[part], starts[part + 1]
    if end > start and _random(walk) < 0.9:
        return int(walk.slots[others[start + _below(walk, end - start)]])
    return _below(walk, near.num_slots)


@compiled
def _walk_away(near: Neighbors, walk: Walk, part: int, ahead: bool) -> int:
    """A part of the same slot, a short walk away from the boundary at which a part is."""
    starts = near.before_starts if ahead else near.after_starts
    others = near.before if ahead else near.after
    for _ in range(_below(walk, 1 + _below(walk, _LONGEST_WINDOW))):
        start, end = starts[part], starts[part + 1]
        if end == start:
            break
        other = others[start + _below(walk, end - start)]
        if walk.slots[other] == walk.slots[part]:
            part = other
    return part


@compiled
def _set(walk: Walk, part: int, target: int, num_moved: int) -> int:
    """Move one part, unless it was moved before, and remember where it was."""
    if walk.slots[part] == target or walk.marks[part]:
        return num_moved
    walk.marks[part] = 1
    walk.moved[num_moved] = part
    walk.old[num_moved] = walk.slots[part]
    walk.slots[part] = target
    return num_moved + 1


@compiled
def _move(near: Neighbors, walk: Walk, part: int, target: int, num_moved: int) -> int:
    """Move a part, and all of its family if it goes to another device."""
    family = near.family[part]
    on_accelerator = target < near.num_accelerated
    if on_accelerator and not near.can_accelerate[family]:
        return num_moved
    own, pieces = walk.slots[part], near.num_pieces
    if on_accelerator and own < near.num_accelerated and own // pieces == target // pieces:
        return _set(walk, part, target, num_moved)
    for place in range(near.family_starts[family], near.family_starts[family + 1]):
        num_moved = _set(walk, near.family_parts[place], target, num_moved)
    return num_moved


@compiled
def _swap(near: Neighbors, walk: Walk, one: int, other: int) -> int:
    first, second = walk.slots[one], walk.slots[other]
    if first == second or near.family[one] == near.family[other]:
        return 0
    can_one = near.can_accelerate[near.family[one]] or second >= near.num_accelerated
    can_other = near.can_accelerate[near.family[other]] or first >= near.num_accelerated
    if not (can_one and can_other):
        return 0
    num_moved = _move(near, walk, one, second, 0)
    return _move(near, walk, other, first, num_moved)


@compiled
def _move_side(near: Neighbors, walk: Walk, part: int, target: int, ahead: bool) -> int:
    """Move a part and all that follows it in its slot, or all that leads to it."""
    own = walk.slots[part]
    if own == target:
        return 0
    starts = near.after_starts if ahead else near.before_starts
    others = near.after if ahead else near.before
    num_moved = _move(near, walk, part, target, 0)
    done = 0
    while done < num_moved:
        current = walk.moved[done]
        done += 1
        for place in range(starts[current], starts[current + 1]):
            if walk.slots[others[place]] == own:
                num_moved = _move(near, walk, others[place], target, num_moved)
    return num_moved


@compiled
def _accepted(walk: Walk, heat: Heat, progress: float, energy: float, changed: float) -> bool:
    """Whether to stay where a move has led, at this share of all moves; the best placement is kept."""
    temperature: float = heat.hot * (heat.cold / heat.hot) ** progress
    stays = changed <= energy - temperature * math.log(max(_random(walk), 1e-12))
    if stays:
        _keep_best(walk)
    return stays


@compiled
def _keep_best(walk: Walk) -> None:
    if 0.0 <= walk.outcome[0] < walk.best_value[0] and walk.outcome[1] == 0.0:
        walk.best_value[0] = walk.outcome[0]
        for part in range(walk.slots.shape[0]):  # not as a slice, as for `copy_loads`
            walk.best[part] = walk.slots[part]


@compiled
def _take_back(walk: Walk, num_moved: int) -> None:
    for place in range(num_moved):
        walk.slots[walk.moved[place]] = walk.old[place]


# The loads of devices, followed move by move.
#
# A move changes the loads of the device left and of the one entered, and of no other: whether a net is cut
# for a third device depends only on how many of its pins are there. What is made small is not the largest
# load but a norm of all loads that comes close to it, so that each move is either good or bad.


class LoadTables(NamedTuple):
    """Tables that stay the same while items move.

    `time` is by kind of device (0 accelerator, 1 CPU), item and column; loads have two columns where forward
    and backward count apart, else one. Rows of `nets` are as in `Ragged`.
    """

    time: Floats
    size: Floats
    net_starts: Integers
    nets: Integers
    num_pins: Integers
    net_cost: Floats
    num_accelerators: int
    most_bytes: float


class LoadState(NamedTuple):
    """The state that follows from a placement: pins of each net on each device, loads, bytes held.

    `before` are the loads before a move. They are put back if it is refused: some times are huge, to say
    "cannot", and leave nothing of the other times in a sum that they are subtracted from again.
    """

    pins_on: Integers
    load: Floats
    held: Floats
    before: Floats


def tables_of(items: Items, objective: Objective) -> LoadTables:
    """The tables of items."""
    time, cost = np.stack([items.accelerator_time, items.cpu_time]), items.net_cost
    if objective is not Objective.FLUSH:
        time, cost = time.sum(axis=2, keepdims=True), cost.sum(axis=1, keepdims=True)
    return LoadTables(
        np.ascontiguousarray(time),
        items.size,
        items.nets.starts,
        items.nets.values,
        np.diff(items.pins.starts),
        np.ascontiguousarray(cost),
        items.num_accelerators,
        items.room,
    )


def state_of(items: Items, tables: LoadTables, where: Integers) -> LoadState:
    """The state of a placement."""
    pins_on = np.zeros((len(tables.net_cost), items.num_devices), np.int64)
    np.add.at(pins_on, (tables.nets, np.repeat(where, np.diff(tables.net_starts))), 1)
    load = loads_of(items, where.tolist())
    if tables.net_cost.shape[1] == 1:
        load = load.sum(axis=1, keepdims=True)
    held = np.bincount(where, items.size, items.num_devices).astype(np.float64)
    return LoadState(pins_on, np.ascontiguousarray(load), held, np.zeros_like(load, order="C"))


@compiled
def shift(tables: LoadTables, state: LoadState, item: int, source: int, target: int) -> None:
    """Update the state for an item that goes from one device to another."""
    for end in range(2):
        device, change = (target, 1) if end else (source, -1)
        on_accelerator = device < tables.num_accelerators
        state.held[device] += change * tables.size[item]
        for column in range(state.load.shape[1]):
            state.load[device, column] += change * tables.time[0 if on_accelerator else 1, item, column]
        for i in range(tables.net_starts[item], tables.net_starts[item + 1]):
            net = tables.nets[i]
            before = state.pins_on[net, device]
            after = before + change
            state.pins_on[net, device] = after
            if on_accelerator:
                cuts = (1 if 0 < after < tables.num_pins[net] else 0) - (
                    1 if 0 < before < tables.num_pins[net] else 0
                )
                if cuts != 0:
                    for column in range(state.load.shape[1]):
                        state.load[device, column] += cuts * tables.net_cost[net, column]


@compiled
def value_now(state: LoadState) -> float:
    """The value of the loads: the sum of the largest of each column."""
    value = 0.0
    for column in range(state.load.shape[1]):
        most = 0.0
        for device in range(len(state.load)):
            most = max(most, state.load[device, column])
        value += most
    return value


@compiled
def copy_loads(given: Floats, copy: Floats) -> None:
    """Copy one by one: to assign a slice, numba compiles the sentence of an error too, for two seconds."""
    for device in range(given.shape[0]):
        for column in range(given.shape[1]):
            copy[device, column] = given[device, column]


@compiled
def lacking(tables: LoadTables, state: LoadState) -> float:
    """The bytes above the memory of accelerators."""
    total = 0.0
    for device in range(tables.num_accelerators):
        total += max(0.0, state.held[device] - tables.most_bytes)
    return total


@compiled
def _energy_of_loads(tables: LoadTables, state: LoadState, walk: Walk, heat: Heat) -> float:
    """The norms of the columns of loads, and the price of missing bytes."""
    walk.outcome[0], walk.outcome[1] = value_now(state), lacking(tables, state)
    total = heat.price * walk.outcome[1]
    for column in range(state.load.shape[1]):
        most = 0.0
        for device in range(len(state.load)):
            most = max(most, state.load[device, column])
        powers = 0.0
        for device in range(len(state.load)):
            power = state.load[device, column] / max(most, 1e-300)
            for _ in range(heat.squarings):
                power *= power
            powers += power
        for _ in range(heat.squarings):
            powers = math.sqrt(powers)
        total += most * powers
    return float(total)


@compiled
def anneal_loads(
    near: Neighbors, tables: LoadTables, state: LoadState, walk: Walk, heat: Heat, num_moves: int
) -> float:
    """Move items, at a falling temperature; keep the best placement that fits; returns the last energy."""
    energy = _energy_of_loads(tables, state, walk, heat)
    _keep_best(walk)
    for move in range(num_moves):
        num_moved = _propose(near, walk)
        if num_moved == 0:
            continue
        copy_loads(state.load, state.before)
        for place in range(num_moved):
            item = walk.moved[place]
            shift(tables, state, item, walk.old[place], walk.slots[item])
        changed = _energy_of_loads(tables, state, walk, heat)
        if _accepted(walk, heat, (move + 1) / num_moves, energy, changed):
            energy = changed
        else:
            for place in range(num_moved):
                item = walk.moved[place]
                shift(tables, state, item, walk.slots[item], walk.old[place])
            copy_loads(state.before, state.load)
            _take_back(walk, num_moved)
    return _energy_of_loads(tables, state, walk, heat)


# The latency of steps, counted afresh for every move.

_CIRCLE = -1.0
"""In place of a latency, where pieces wait for each other."""

_WEIGHT_OF_LOADS = 0.02
"""How much a slot's load counts in addition to the latency, so that moves off the critical path have a
direction.
"""


class _StepTables(NamedTuple):
    """The arrays of some `LatencySteps`, which do not change, and scratch memory of the loops."""

    accelerator_time: Floats
    cpu_time: Floats
    size: Floats
    net_source: Integers
    user_starts: Integers
    users: Integers
    net_cost: Floats
    room: float
    duration: Floats
    ready: Floats
    waiting: Integers
    first: Integers
    following: Integers
    stamp: Integers
    queue: Integers
    used: Floats


def step_tables(steps: LatencySteps, num_pieces: int) -> _StepTables:
    """The arrays of these steps, for accelerators of `num_pieces`."""
    num_steps, num_slots = len(steps), steps.num_accelerators * num_pieces
    num_jobs = num_steps + num_slots
    return _StepTables(
        steps.accelerator_time,
        steps.cpu_time,
        steps.size,
        steps.net_source,
        steps.net_users.starts,
        steps.net_users.values,
        steps.net_cost,
        steps.room,
        duration=np.zeros(num_slots),
        ready=np.zeros(num_jobs),
        waiting=np.zeros(num_jobs, np.int64),
        first=np.zeros(num_slots, np.int64),
        following=np.zeros(num_steps, np.int64),
        stamp=np.zeros(num_slots, np.int64),
        queue=np.zeros(num_jobs, np.int64),
        used=np.zeros(steps.num_accelerators),
    )


@compiled
def _latency(near: Neighbors, tables: _StepTables, slots: Integers) -> float:
    """When one sample is done with these slots; `_CIRCLE` if it never is."""
    # Arrays are taken out of tuples before loops: each time, numba counts another reference.
    num_steps, num_slots, num_pieces = slots.shape[0], near.num_accelerated, near.num_pieces
    cpu_time, after_starts, after = tables.cpu_time, near.after_starts, near.after
    queue, waiting, ready, duration = tables.queue, tables.waiting, tables.ready, tables.duration
    first, following = tables.first, tables.following
    _count_loads(near, tables, slots)
    _count_waiting(near, tables, slots)
    num_ready = num_jobs = 0
    for step in range(num_steps):
        if slots[step] >= num_slots:
            num_jobs += 1
            if waiting[step] == 0:
                queue[num_ready] = step
                num_ready += 1
    for slot in range(num_slots):
        num_jobs += 1
        if waiting[num_steps + slot] == 0:
            queue[num_ready] = num_steps + slot
            num_ready += 1
    latency = 0.0
    done = 0
    while done < num_ready:
        job = queue[done]
        done += 1
        slot = job - num_steps
        step = job if slot < 0 else first[slot]
        finish = ready[job] + (cpu_time[job] if slot < 0 else duration[slot])
        latency = max(latency, finish)
        while step >= 0:
            for place in range(after_starts[step], after_starts[step + 1]):
                user = after[place]
                other = slots[user]
                if other >= num_slots or other != slot:
                    follower = user if other >= num_slots else num_steps + other
                    ready[follower] = max(ready[follower], finish)
                    waiting[follower] -= 1
                    if waiting[follower] == 0:
                        queue[num_ready] = follower
                        num_ready += 1
            step = -1 if slot < 0 else following[step]
        if slot >= 0 and (slot + 1) % num_pieces:
            ready[job + 1] = max(ready[job + 1], finish)
            waiting[job + 1] -= 1
            if waiting[job + 1] == 0:
                queue[num_ready] = job + 1
                num_ready += 1
    return float(latency) if done == num_jobs else _CIRCLE


@compiled
def _count_loads(near: Neighbors, tables: _StepTables, slots: Integers) -> None:
    """Count the seconds of each slot, for computing and moving, and list its steps."""
    accelerator_time, net_source, net_cost = tables.accelerator_time, tables.net_source, tables.net_cost
    user_starts, users, num_slots = tables.user_starts, tables.users, near.num_accelerated
    duration, stamp, first, following = tables.duration, tables.stamp, tables.first, tables.following
    duration[:] = 0.0
    stamp[:] = -1
    first[:] = -1
    for step in range(slots.shape[0]):
        slot = slots[step]
        if slot < num_slots:
            duration[slot] += accelerator_time[step]
            following[step] = first[slot]
            first[slot] = step
    for net in range(net_cost.shape[0]):
        own = slots[net_source[net]]
        leaves = False
        for place in range(user_starts[net], user_starts[net + 1]):
            other = slots[users[place]]
            if other != own:
                leaves = True
                if other < num_slots and stamp[other] != net:
                    stamp[other] = net
                    duration[other] += net_cost[net]
        if leaves and own < num_slots:
            duration[own] += net_cost[net]


@compiled
def _count_waiting(near: Neighbors, tables: _StepTables, slots: Integers) -> None:
    """Count the edges that each job waits for. A slot also waits for the one before it on its device."""
    num_steps, num_slots = slots.shape[0], near.num_accelerated
    after_starts, after, waiting = near.after_starts, near.after, tables.waiting
    waiting[:] = 0
    tables.ready[:] = 0.0
    for slot in range(num_slots):
        if slot % near.num_pieces:
            waiting[num_steps + slot] = 1
    for step in range(num_steps):
        own = slots[step]
        for place in range(after_starts[step], after_starts[step + 1]):
            user = after[place]
            other = slots[user]
            if other >= num_slots:
                waiting[user] += 1
            elif other != own:
                waiting[num_steps + other] += 1


@compiled
def _energy_of_steps(near: Neighbors, tables: _StepTables, walk: Walk, price: float) -> float:
    """The latency, a little for loads, and a price for missing bytes; infinite if pieces wait in a circle."""
    slots, used, size, num_slots = walk.slots, tables.used, tables.size, near.num_accelerated
    used[:] = 0.0
    for step in range(slots.shape[0]):
        if slots[step] < num_slots:
            used[slots[step] // near.num_pieces] += size[step]
    excess = 0.0
    for device in range(used.shape[0]):
        excess += max(0.0, used[device] - tables.room)
    latency = _latency(near, tables, slots)
    walk.outcome[0], walk.outcome[1] = latency, excess
    if latency == _CIRCLE:
        return math.inf
    loads = 0.0
    for slot in range(num_slots):
        loads += tables.duration[slot]
    return latency + _WEIGHT_OF_LOADS * loads / max(num_slots, 1) + price * excess


@compiled
def anneal_steps(near: Neighbors, tables: _StepTables, walk: Walk, heat: Heat, num_moves: int) -> float:
    """Move steps, at a falling temperature; keep the best placement that fits; returns the last energy."""
    energy = _energy_of_steps(near, tables, walk, heat.price)
    _keep_best(walk)
    for move in range(num_moves):
        num_moved = _propose(near, walk)
        if num_moved == 0:
            continue
        changed = _energy_of_steps(near, tables, walk, heat.price)
        if _accepted(walk, heat, (move + 1) / num_moves, energy, changed):
            energy = changed
        else:
            _take_back(walk, num_moved)
    return _energy_of_steps(near, tables, walk, heat.price)
