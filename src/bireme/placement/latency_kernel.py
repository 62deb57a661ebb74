"""The loops of the search for a short latency, compiled: evaluate a placement of steps, change it, anneal it.

They are in one file, since numba keeps what it has compiled until the file of the outermost loop changes.
Random numbers come from a state that is handed over, so that a seed means the same with and without numba.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bireme.compiled import compiled
from bireme.placement.contraction import Floats, Integers
from bireme.placement.latency import LatencySteps

# The arrays that the compiled loops of the search for a short latency work on.
#
# A *slot* is a piece of an accelerator: slot `s` is piece `s % num_pieces` of accelerator `s // num_pieces`.

CIRCLE = -1.0
"""In place of a latency, where pieces wait for each other."""

CPU = -1
"""The slot of all that is on a CPU."""


class _Wiring(NamedTuple):
    """The arrays of some `LatencySteps`, in the form that compiled loops take."""

    accelerator_time: Floats
    cpu_time: Floats
    size: Floats
    family: Integers
    family_starts: Integers
    family_steps: Integers
    can_accelerate: NDArray[np.bool_]
    before_starts: Integers
    before: Integers
    after_starts: Integers
    after: Integers
    net_source: Integers
    user_starts: Integers
    users: Integers
    net_cost: Floats
    num_slots: int
    num_pieces: int
    has_cpu: bool
    room: float


class _StepScratch(NamedTuple):
    """Room for what the loops count; its contents mean nothing between two calls."""

    duration: Floats
    ready: Floats
    waiting: Integers
    first: Integers
    following: Integers
    stamp: Integers
    queue: Integers
    used: Floats
    moved: Integers
    old: Integers
    marks: Integers


def wiring_of(steps: LatencySteps, num_pieces: int) -> _Wiring:
    """The arrays of these steps, for accelerators of so many pieces."""
    return _Wiring(
        steps.accelerator_time,
        steps.cpu_time,
        steps.size,
        steps.family,
        steps.families.starts,
        steps.families.values,
        steps.can_accelerate,
        steps.before.starts,
        steps.before.values,
        steps.after.starts,
        steps.after.values,
        steps.net_source,
        steps.net_users.starts,
        steps.net_users.values,
        steps.net_cost,
        steps.num_accelerators * num_pieces,
        num_pieces,
        steps.num_cpus > 0,
        steps.room,
    )


def scratch_for(wiring: _Wiring) -> _StepScratch:
    """Room for workloads of this extent."""
    num_steps, num_slots = len(wiring.size), wiring.num_slots
    num_jobs = num_steps + num_slots
    return _StepScratch(
        np.zeros(num_slots + 1),
        np.zeros(num_jobs),
        np.zeros(num_jobs, np.int64),
        np.zeros(num_slots + 1, np.int64),
        np.zeros(num_steps, np.int64),
        np.zeros(num_slots + 1, np.int64),
        np.zeros(num_jobs, np.int64),
        np.zeros(num_slots // wiring.num_pieces + 1),
        np.zeros(num_steps, np.int64),
        np.zeros(num_steps, np.int64),
        np.zeros(num_steps, np.int64),
    )


_WEIGHT_OF_LOADS = 0.02
"""How much a slot's load counts in addition to the latency, so that moves off the critical path have a
direction.
"""

_LONGEST_WINDOW = 24
"""Steps that follow each other in number and are moved together, or on a walk through a slot, at most."""

_TRIES = 12
"""Steps that are looked at to find one with a neighbor elsewhere."""


@compiled
def anneal(
    wiring: _Wiring,
    slots: Integers,
    best: Integers,
    scratch: _StepScratch,
    state: NDArray[np.int64],
    num_moves: int,
    hot: float,
    cold: float,
    excess_price: float,
    best_latency: float,
) -> float:
    """Move steps about, at a temperature that falls from `hot` to `cold`, both in units of time.

    `slots` is changed; `best` is overwritten by every placement that fits and is shorter than
    `best_latency`. Returns the latency of the best, or `best_latency`.
    """
    energy = energy_of(wiring, slots, scratch, excess_price)
    cooling = (cold / hot) ** (1.0 / max(1, num_moves))
    temperature = hot
    scratch.marks[:] = 0
    for _ in range(num_moves):
        temperature *= cooling
        num_moved = _propose(wiring, slots, scratch, state)
        if num_moved == 0:
            continue
        changed = energy_of(wiring, slots, scratch, excess_price)
        threshold = energy - temperature * np.log(max(_random(state), 1e-12))
        if changed <= threshold:
            energy = changed
            latency = scratch.duration[wiring.num_slots]
            if 0.0 <= latency < best_latency and scratch.used[scratch.used.shape[0] - 1] == 0.0:
                best_latency = latency
                best[:] = slots
        else:
            for place in range(num_moved):
                slots[scratch.moved[place]] = scratch.old[place]
    return float(best_latency)


@compiled
def _latency_with(wiring: _Wiring, slots: Integers, scratch: _StepScratch) -> float:
    """When one sample is through with these slots; `CIRCLE` where it never is."""
    # Arrays are taken out of tuples before loops: each time, numba counts another reference.
    num_steps, num_slots, num_pieces = slots.shape[0], wiring.num_slots, wiring.num_pieces
    cpu_time, after_starts, after = wiring.cpu_time, wiring.after_starts, wiring.after
    queue, waiting, ready, duration = scratch.queue, scratch.waiting, scratch.ready, scratch.duration
    first, following = scratch.first, scratch.following
    _count_loads(wiring, slots, scratch)
    _count_waiting(wiring, slots, scratch)
    num_ready = num_jobs = 0
    for step in range(num_steps):
        if slots[step] == CPU:
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
                if other == CPU or other != slot:
                    follower = user if other == CPU else num_steps + other
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
    return latency if done == num_jobs else CIRCLE


@compiled
def _count_loads(wiring: _Wiring, slots: Integers, scratch: _StepScratch) -> None:
    """What each slot computes and moves, and the list of its steps."""
    accelerator_time, net_source, net_cost = wiring.accelerator_time, wiring.net_source, wiring.net_cost
    user_starts, users = wiring.user_starts, wiring.users
    duration, stamp, first, following = scratch.duration, scratch.stamp, scratch.first, scratch.following
    duration[:] = 0.0
    stamp[:] = -1
    first[:] = -1
    for step in range(slots.shape[0]):
        slot = slots[step]
        if slot >= 0:
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
                if other >= 0 and stamp[other] != net:
                    stamp[other] = net
                    duration[other] += net_cost[net]
        if leaves and own >= 0:
            duration[own] += net_cost[net]


@compiled
def _count_waiting(wiring: _Wiring, slots: Integers, scratch: _StepScratch) -> None:
    """For how many edges each job waits: a slot waits for the one before it on its accelerator, too."""
    num_steps = slots.shape[0]
    after_starts, after, waiting = wiring.after_starts, wiring.after, scratch.waiting
    waiting[:] = 0
    scratch.ready[:] = 0.0
    for slot in range(wiring.num_slots):
        if slot % wiring.num_pieces:
            waiting[num_steps + slot] = 1
    for step in range(num_steps):
        own = slots[step]
        for place in range(after_starts[step], after_starts[step + 1]):
            user = after[place]
            other = slots[user]
            if other == CPU:
                waiting[user] += 1
            elif other != own:
                waiting[num_steps + other] += 1


@compiled
def energy_of(wiring: _Wiring, slots: Integers, scratch: _StepScratch, excess_price: float) -> float:
    """What annealing makes small: the latency, a little for loads, and a price for bytes without room.

    Infinite where pieces wait in a circle. `scratch.duration[num_slots]` is the latency afterwards, and
    `scratch.used[num_accelerators]` the bytes without room.
    """
    used, size, duration, num_pieces = scratch.used, wiring.size, scratch.duration, wiring.num_pieces
    used[:] = 0.0
    for step in range(slots.shape[0]):
        if slots[step] >= 0:
            used[slots[step] // num_pieces] += size[step]
    excess = 0.0
    for device in range(used.shape[0] - 1):
        excess += max(0.0, used[device] - wiring.room)
    latency = _latency_with(wiring, slots, scratch)
    duration[wiring.num_slots] = latency
    used[used.shape[0] - 1] = excess
    if latency == CIRCLE:
        return np.inf
    loads = 0.0
    for slot in range(wiring.num_slots):
        loads += duration[slot]
    return latency + _WEIGHT_OF_LOADS * loads / max(wiring.num_slots, 1) + excess_price * excess


@compiled
def _random(state: NDArray[np.int64]) -> float:
    """A number in 0 to 1, by the multiplicative generator of Park and Miller."""
    state[0] = (state[0] * 48271) % 2147483647
    return float(state[0] / 2147483647.0)


@compiled
def _below(state: NDArray[np.int64], count: int) -> int:
    return min(int(_random(state) * count), count - 1)


@compiled
def _propose(wiring: _Wiring, slots: Integers, scratch: _StepScratch, state: NDArray[np.int64]) -> int:
    """Change some slots; returns how many. They are in `scratch.moved`, the slots before in `old`."""
    step = target = 0
    kind = _random(state)
    ahead = _random(state) < 0.5
    for _ in range(_TRIES):
        step = _below(state, slots.shape[0])
        target = _target(wiring, slots, state, step, ahead)
        if target != slots[step]:
            break
    num_moved = 0
    if kind < 0.3:
        num_moved = _move(wiring, slots, scratch, step, target, num_moved)
    elif kind < 0.45:
        num_moved = _swap(wiring, slots, scratch, step, _below(state, slots.shape[0]))
    elif kind < 0.55:
        own = slots[step]
        last = min(step + 1 + _below(state, _LONGEST_WINDOW), slots.shape[0])
        for other in range(step, last):
            if slots[other] == own:
                num_moved = _move(wiring, slots, scratch, other, target, num_moved)
    elif kind < 0.95 or wiring.num_pieces == 1:
        step = _walk_away(wiring, slots, state, step, ahead)
        num_moved = _move_side(wiring, slots, scratch, step, target, ahead)
    elif slots[step] >= 0:
        piece = _below(state, wiring.num_pieces)
        target = slots[step] - slots[step] % wiring.num_pieces + piece
        num_moved = _set(slots, scratch, step, target, num_moved)
    for place in range(num_moved):
        scratch.marks[scratch.moved[place]] = 0
    return num_moved


@compiled
def _target(wiring: _Wiring, slots: Integers, state: NDArray[np.int64], step: int, ahead: bool) -> int:
    """A slot to move a step to: mostly that of one it leads to, or of one that it needs; or any."""
    starts = wiring.after_starts if ahead else wiring.before_starts
    near = wiring.after if ahead else wiring.before
    start, end = starts[step], starts[step + 1]
    if end > start and _random(state) < 0.9:
        return int(slots[near[start + _below(state, end - start)]])
    if wiring.has_cpu:
        return _below(state, wiring.num_slots + 1) - 1
    return _below(state, wiring.num_slots)


@compiled
def _walk_away(wiring: _Wiring, slots: Integers, state: NDArray[np.int64], step: int, ahead: bool) -> int:
    """A step of the same slot, a short walk away from the border at which a step is."""
    starts = wiring.before_starts if ahead else wiring.after_starts
    near = wiring.before if ahead else wiring.after
    for _ in range(_below(state, 1 + _below(state, _LONGEST_WINDOW))):
        start, end = starts[step], starts[step + 1]
        if end == start:
            break
        other = near[start + _below(state, end - start)]
        if slots[other] == slots[step]:
            step = other
    return step


@compiled
def _set(slots: Integers, scratch: _StepScratch, step: int, target: int, num_moved: int) -> int:
    """Move one step, unless it was moved before, and remember where it was."""
    if slots[step] == target or scratch.marks[step]:
        return num_moved
    scratch.marks[step] = 1
    scratch.moved[num_moved] = step
    scratch.old[num_moved] = slots[step]
    slots[step] = target
    return num_moved + 1


@compiled
def _move(
    wiring: _Wiring, slots: Integers, scratch: _StepScratch, step: int, target: int, num_moved: int
) -> int:
    """Move a step, and all of its family where it comes to another device."""
    family = wiring.family[step]
    if target >= 0 and not wiring.can_accelerate[family]:
        return num_moved
    own, pieces = slots[step], wiring.num_pieces
    if own >= 0 and target >= 0 and own // pieces == target // pieces:
        return _set(slots, scratch, step, target, num_moved)
    for place in range(wiring.family_starts[family], wiring.family_starts[family + 1]):
        num_moved = _set(slots, scratch, wiring.family_steps[place], target, num_moved)
    return num_moved


@compiled
def _swap(wiring: _Wiring, slots: Integers, scratch: _StepScratch, one: int, other: int) -> int:
    first, second = slots[one], slots[other]
    if first == second or wiring.family[one] == wiring.family[other]:
        return 0
    accelerates_one = wiring.can_accelerate[wiring.family[one]] or second == CPU
    accelerates_other = wiring.can_accelerate[wiring.family[other]] or first == CPU
    if not (accelerates_one and accelerates_other):
        return 0
    num_moved = _move(wiring, slots, scratch, one, second, 0)
    return _move(wiring, slots, scratch, other, first, num_moved)


@compiled
def _move_side(
    wiring: _Wiring, slots: Integers, scratch: _StepScratch, step: int, target: int, ahead: bool
) -> int:
    """Move a step and all that follows it in its slot, or all that leads to it."""
    own = slots[step]
    if own == target:
        return 0
    starts = wiring.after_starts if ahead else wiring.before_starts
    near = wiring.after if ahead else wiring.before
    num_moved = _move(wiring, slots, scratch, step, target, 0)
    done = 0
    while done < num_moved:
        current = scratch.moved[done]
        done += 1
        for place in range(starts[current], starts[current + 1]):
            if slots[near[place]] == own:
                num_moved = _move(wiring, slots, scratch, near[place], target, num_moved)
    return num_moved
