"""Moving an item from one device to another, in time that grows with the number of its nets.

A move changes the loads of the device left and of the one entered, and of no other: whether a net is cut for
a third device depends only on how many of its pins are there. Loops compiled elsewhere build on these.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bireme.compiled import compiled
from bireme.placement.contraction import Floats, Integers, Items
from bireme.placement.workload import Objective


class MoveTables(NamedTuple):
    """What does not change while items move.

    `time` is by kind of device (0 accelerator, 1 CPU), item and column; loads have two columns where forward
    and backward count apart, else one. Only CPUs take an item that `needs_cpu`. Rows of `nets` and `pins` are
    as in `Ragged`.
    """

    time: Floats
    size: Floats
    needs_cpu: NDArray[np.bool_]
    net_starts: Integers
    nets: Integers
    pin_starts: Integers
    pins: Integers
    net_cost: Floats
    num_accelerators: int
    most_bytes: float
    per_byte: float


class MoveState(NamedTuple):
    """Where the items are, and what follows from it: pins of each net on each device, loads, bytes held.

    `trial` has the loads of two devices for a move that is weighed. `best` is the best placement that was
    kept, and `best_value[0]` what it comes to. `random[0]` is the state of the random numbers.
    """

    where: Integers
    pins_on: Integers
    load: Floats
    held: Floats
    trial: Floats
    best: Integers
    best_value: Floats
    random: Integers


def tables_of(items: Items, objective: Objective, *, unit: float = 1.0) -> MoveTables:
    """The tables of items, with all times and costs divided by a unit."""
    time = np.stack([items.accelerator_time, items.cpu_time]) / unit
    cost = items.net_cost / unit
    if objective is not Objective.FLUSH:
        time, cost = time.sum(axis=2, keepdims=True), cost.sum(axis=1, keepdims=True)
    most_bytes = items.room
    return MoveTables(
        np.ascontiguousarray(time),
        items.size,
        ~items.supported,
        items.nets.starts,
        items.nets.values,
        items.pins.starts,
        items.pins.values,
        np.ascontiguousarray(cost),
        items.num_accelerators,
        most_bytes,
        1 / most_bytes if 0 < most_bytes < math.inf else 1.0,
    )


def state_of(items: Items, tables: MoveTables, where: Sequence[int], seed: int) -> MoveState:
    """The state of a placement, with nothing kept as the best so far."""
    columns = tables.net_cost.shape[1]
    state = MoveState(
        np.array(where, np.int64),
        np.zeros((len(tables.net_cost), items.num_devices), np.int64),
        np.zeros((items.num_devices, columns)),
        np.zeros(items.num_devices),
        np.zeros((2, columns)),
        np.array(where, np.int64),
        np.array([math.inf]),
        np.array([(seed * 2654435761 + 0x9E3779B9) % 0xFFFFFFFF + 1], np.int64),
    )
    recount(tables, state)
    return state


@compiled
def draw(random: Integers, limit: int) -> int:
    """A random number from 0 to below the limit (xorshift, in 32 bits so that Python gives the same)."""
    x = int(random[0])
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    random[0] = x
    return (x * int(limit)) >> 32


@compiled
def recount(tables: MoveTables, state: MoveState) -> None:
    """Work out pins, loads and bytes from where the items are."""
    state.pins_on[:] = 0
    state.load[:] = 0.0
    state.held[:] = 0.0
    columns = state.load.shape[1]
    for item in range(len(state.where)):
        device = state.where[item]
        kind = 0 if device < tables.num_accelerators else 1
        state.held[device] += tables.size[item]
        for column in range(columns):
            state.load[device, column] += tables.time[kind, item, column]
        for i in range(tables.net_starts[item], tables.net_starts[item + 1]):
            state.pins_on[tables.nets[i], device] += 1
    for net in range(len(tables.net_cost)):
        num_pins = tables.pin_starts[net + 1] - tables.pin_starts[net]
        for device in range(tables.num_accelerators):
            if 0 < state.pins_on[net, device] < num_pins:
                for column in range(columns):
                    state.load[device, column] += tables.net_cost[net, column]


@compiled
def weigh(tables: MoveTables, state: MoveState, item: int, target: int) -> None:
    """What would be the loads of an item's device and of another one, had it moved there: in `trial`."""
    source = state.where[item]
    on_source = source < tables.num_accelerators
    on_target = target < tables.num_accelerators
    trial = state.trial
    columns = trial.shape[1]
    for column in range(columns):
        trial[0, column] = state.load[source, column] - tables.time[0 if on_source else 1, item, column]
        trial[1, column] = state.load[target, column] + tables.time[0 if on_target else 1, item, column]
    for i in range(tables.net_starts[item], tables.net_starts[item + 1]):
        net = tables.nets[i]
        num_pins = tables.pin_starts[net + 1] - tables.pin_starts[net]
        here = state.pins_on[net, source]
        there = state.pins_on[net, target]
        if on_source:
            change = (1 if here > 1 else 0) - (1 if here < num_pins else 0)
            if change != 0:
                for column in range(columns):
                    trial[0, column] += change * tables.net_cost[net, column]
        if on_target:
            change = (1 if there + 1 < num_pins else 0) - (1 if there > 0 else 0)
            if change != 0:
                for column in range(columns):
                    trial[1, column] += change * tables.net_cost[net, column]


@compiled
def shift(tables: MoveTables, state: MoveState, item: int, target: int) -> None:
    """Move an item to another device."""
    weigh(tables, state, item, target)
    source = state.where[item]
    for column in range(state.load.shape[1]):
        state.load[source, column] = state.trial[0, column]
        state.load[target, column] = state.trial[1, column]
    state.held[source] -= tables.size[item]
    state.held[target] += tables.size[item]
    for i in range(tables.net_starts[item], tables.net_starts[item + 1]):
        state.pins_on[tables.nets[i], source] -= 1
        state.pins_on[tables.nets[i], target] += 1
    state.where[item] = target


@compiled
def excess(tables: MoveTables, held: float, device: int) -> float:
    """What a device holds too much, as a part of an accelerator's memory."""
    if device >= tables.num_accelerators:
        return 0.0
    return max(0.0, held - tables.most_bytes) * tables.per_byte


@compiled
def overflow(tables: MoveTables, state: MoveState) -> float:
    """What all devices hold too much."""
    total = 0.0
    for device in range(tables.num_accelerators):
        total += excess(tables, state.held[device], device)
    return total


@compiled
def value_now(state: MoveState) -> float:
    """What the placement comes to: the largest load of each column, added."""
    value = 0.0
    for column in range(state.load.shape[1]):
        most = 0.0
        for device in range(len(state.load)):
            most = max(most, state.load[device, column])
        value += most
    return value
