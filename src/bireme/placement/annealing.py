"""The loops of the annealing: single items, stretches, blocks and swaps, accepted by how hot it is.

What is made small is not the largest load but a norm of all loads that comes close to it, so that each move
is either good or bad; the true value is watched on the way and the best placement that fits is kept. Loads
must be of the order of 1.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from math import log, sqrt
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bireme.compiled import compiled
from bireme.placement.contraction import Floats, Integers, Items
from bireme.placement.workload import Objective

# Moving an item from one device to another, in time that grows with the number of its nets.
#
# A move changes the loads of the device left and of the one entered, and of no other: whether a net is cut
# for a third device depends only on how many of its pins are there. Loops compiled elsewhere build on these.


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


# Blocks: items that much flows between, two together, then four, then eight, and so on.
#
# A search that moves one item at a time cannot carry a part of the graph over to another device where any
# half of the way is worse. Blocks are what it tries to move at once.

_MOST_LEVELS = 12

_LARGEST_NET = 30
"""A net of more blocks says little about which two of them belong together."""

_LEAST_SHRINKAGE = 0.95
"""Levels end where there would be more than this part of the blocks of the level before."""


class _ItemBlocks(NamedTuple):
    """`of[level, item]` is the block of an item; `items[starts[block] : starts[block + 1]]` are its items."""

    of: Integers
    starts: Integers
    items: Integers


def blocks_of(items: Items, random: Random) -> _ItemBlocks:
    """Blocks of several levels, each level parting the items; at least one level."""
    block_of = np.arange(len(items), dtype=np.int64)
    members = [[item] for item in range(len(items))]
    rows = [items.pins.row(net) for net in range(len(items.pins))]
    cost = items.net_cost.sum(axis=1)
    levels = [block_of.copy()]
    flat = [members]
    while len(members) > 2 and len(levels) <= _MOST_LEVELS:
        fewer = _paired(members, _ties(block_of, rows, cost, len(members)), random)
        if len(fewer) > _LEAST_SHRINKAGE * len(members):
            break
        members = fewer
        for block, row in enumerate(members):
            block_of[row] = block
        levels.append(block_of.copy())
        flat.append(members)
    if len(levels) > 1:
        # Single items are moved anyhow.
        levels, flat = levels[1:], flat[1:]
    return _flattened(levels, flat)


def _ties(block_of: Integers, rows: list[list[int]], cost: Floats, num_blocks: int) -> list[dict[int, float]]:
    """What flows between a block and each other one."""
    ties: list[dict[int, float]] = [defaultdict(float) for _ in range(num_blocks)]
    for net, row in enumerate(rows):
        blocks = sorted({int(block_of[pin]) for pin in row})
        if 2 <= len(blocks) <= _LARGEST_NET:
            share = float(cost[net]) / (len(blocks) - 1)
            for place, one in enumerate(blocks):
                for other in blocks[place + 1 :]:
                    ties[one][other] += share
                    ties[other][one] += share
    return ties


def _paired(members: list[list[int]], ties: list[dict[int, float]], random: Random) -> list[list[int]]:
    """Each block with the free one that it has the strongest tie to, small ones before large ones."""
    order = list(range(len(members)))
    random.shuffle(order)
    is_free = [True] * len(members)
    pairs = []
    for block in order:
        if not is_free[block]:
            continue
        is_free[block] = False
        free = [other for other in ties[block] if is_free[other]]
        if not free:
            pairs.append(members[block])
            continue
        strengths = [ties[block][other] / len(members[other]) ** 0.5 for other in free]
        partner = free[strengths.index(max(strengths))]
        is_free[partner] = False
        pairs.append(members[block] + members[partner])
    return pairs


def _flattened(levels: list[Integers], members: list[list[list[int]]]) -> _ItemBlocks:
    """All levels as one, with blocks numbered throughout."""
    counts = [len(level) for level in members]
    firsts = np.cumsum([0, *counts[:-1]])
    rows = [row for level in members for row in level]
    return _ItemBlocks(
        np.stack([level + first for level, first in zip(levels, firsts, strict=True)]).astype(np.int64),
        np.cumsum([0, *(len(row) for row in rows)]).astype(np.int64),
        np.array([item for row in rows for item in row], np.int64),
    )


_SETS_PERCENT = 20
"""Of all moves, those of several items at once."""

_TRIES = 16
"""Draws of an item until one has a neighbor on another device."""

_LONGEST_STRETCH_BITS = 5

_STEP = 1.0 / (1 << 30)


class Heat(NamedTuple):
    """A rise of the norm by `temperature` is accepted once in e times; each memory too much costs `price`.

    The norm is that of the power 2 ** `squarings`: a higher one is nearer to the maximum, but less smooth.
    """

    temperature: float
    price: float
    squarings: int


class AnnealingScratch(NamedTuple):
    """The powers of the loads, and the items moved on trial with the devices they were on."""

    power: Floats
    moved: Integers
    moved_from: Integers


@compiled
def anneal(
    tables: MoveTables,
    blocks: _ItemBlocks,
    state: MoveState,
    scratch: AnnealingScratch,
    heat: Heat,
    num_moves: int,
) -> None:
    """Try so many moves, at one temperature."""
    recount(tables, state)
    energy = _energy(tables, state, scratch, heat)
    _keep_best(tables, state)
    for _ in range(num_moves):
        item, target = _pick(tables, state)
        if tables.needs_cpu[item] and target < tables.num_accelerators:
            continue
        if draw(state.random, 100) >= _SETS_PERCENT:
            weigh(tables, state, item, target)
            new = _energy_if(tables, state, scratch, heat, item, target)
            if not _accepted(state, energy, new, heat.temperature):
                continue
            source = state.where[item]
            shift(tables, state, item, target)
            _refresh(state, scratch, heat, source)
            _refresh(state, scratch, heat, target)
        else:
            num_moved = _move_set(tables, blocks, state, scratch, item, target)
            new = _energy(tables, state, scratch, heat)
            if not _accepted(state, energy, new, heat.temperature):
                for i in range(num_moved - 1, -1, -1):
                    shift(tables, state, scratch.moved[i], scratch.moved_from[i])
                _energy(tables, state, scratch, heat)
                continue
        energy = new
        _keep_best(tables, state)


@compiled
def _accepted(state: MoveState, energy: float, new: float, temperature: float) -> bool:
    if new <= energy:
        return True
    return new < energy - temperature * log((1 + draw(state.random, 1 << 30)) * _STEP)


@compiled
def _pick(tables: MoveTables, state: MoveState) -> tuple[int, int]:
    """An item and another device, mostly one where something is that it shares a net with."""
    num_items = len(state.where)
    if draw(state.random, 16):
        for _ in range(_TRIES):
            item = draw(state.random, num_items)
            first = tables.net_starts[item]
            degree = tables.net_starts[item + 1] - first
            if degree == 0:
                continue
            net = tables.nets[first + draw(state.random, degree)]
            first = tables.pin_starts[net]
            pin = tables.pins[first + draw(state.random, tables.pin_starts[net + 1] - first)]
            if state.where[pin] != state.where[item]:
                return item, state.where[pin]
    item = draw(state.random, num_items)
    target = draw(state.random, len(state.load) - 1)
    return item, (target + 1 if target >= state.where[item] else target)


@compiled
def _move_set(
    tables: MoveTables,
    blocks: _ItemBlocks,
    state: MoveState,
    scratch: AnnealingScratch,
    item: int,
    target: int,
) -> int:
    """Move several items, as many as the result says: a stretch, a block, or two for each other."""
    way = draw(state.random, 3)
    if way == 0:
        return _move_stretch(tables, state, scratch, item, target)
    if way == 1:
        return _move_block(tables, blocks, state, scratch, item, target)
    return _swap(tables, state, scratch, item, target)


@compiled
def _move_stretch(
    tables: MoveTables, state: MoveState, scratch: AnnealingScratch, item: int, target: int
) -> int:
    """An item and those of the next numbers that are on the same device; short stretches most often."""
    source = state.where[item]
    longest = 2 << draw(state.random, _LONGEST_STRETCH_BITS)
    end = min(len(state.where), item + 1 + draw(state.random, longest))
    num_moved = 0
    for other in range(item, end):
        if state.where[other] != source:
            break
        num_moved = _move(tables, state, scratch, other, target, num_moved)
    return num_moved


@compiled
def _move_block(
    tables: MoveTables,
    blocks: _ItemBlocks,
    state: MoveState,
    scratch: AnnealingScratch,
    item: int,
    target: int,
) -> int:
    """A block of an item: what of it is on the same device or, now and then, all of it."""
    source = state.where[item]
    level = 0
    while level + 1 < len(blocks.of) and draw(state.random, 2):
        level += 1
    block = blocks.of[level, item]
    is_whole = draw(state.random, 3) == 0
    num_moved = 0
    for i in range(blocks.starts[block], blocks.starts[block + 1]):
        other = blocks.items[i]
        if state.where[other] == source or (is_whole and state.where[other] != target):
            num_moved = _move(tables, state, scratch, other, target, num_moved)
    return num_moved


@compiled
def _swap(tables: MoveTables, state: MoveState, scratch: AnnealingScratch, item: int, target: int) -> int:
    """An item, for one on the target; nothing where none was drawn."""
    source = state.where[item]
    for _ in range(_TRIES):
        other = draw(state.random, len(state.where))
        if state.where[other] == target:
            num_moved = _move(tables, state, scratch, other, source, 0)
            return _move(tables, state, scratch, item, target, num_moved)
    return 0


@compiled
def _move(
    tables: MoveTables, state: MoveState, scratch: AnnealingScratch, item: int, target: int, num_moved: int
) -> int:
    """Move one item of a set, if the target can run it, and note it down."""
    if tables.needs_cpu[item] and target < tables.num_accelerators:
        return num_moved
    scratch.moved[num_moved] = item
    scratch.moved_from[num_moved] = state.where[item]
    shift(tables, state, item, target)
    return num_moved + 1


@compiled
def _energy(tables: MoveTables, state: MoveState, scratch: AnnealingScratch, heat: Heat) -> float:
    """The norms of the columns of loads, and the price of the memory that lacks; powers are refreshed."""
    total = 0.0
    for column in range(state.load.shape[1]):
        powers = 0.0
        for device in range(len(state.load)):
            power = _raised(state.load[device, column], heat.squarings)
            scratch.power[device, column] = power
            powers += power
        total += _root(powers, heat.squarings)
    return total + heat.price * overflow(tables, state)


@compiled
def _energy_if(
    tables: MoveTables, state: MoveState, scratch: AnnealingScratch, heat: Heat, item: int, target: int
) -> float:
    """The same had an item moved, with what `weigh` found in `trial`."""
    source = state.where[item]
    total = 0.0
    for column in range(state.load.shape[1]):
        powers = _raised(state.trial[0, column], heat.squarings)
        powers += _raised(state.trial[1, column], heat.squarings)
        for device in range(len(state.load)):
            if device != source and device != target:
                powers += scratch.power[device, column]
        total += _root(powers, heat.squarings)
    lacking = excess(tables, state.held[source] - tables.size[item], source)
    lacking += excess(tables, state.held[target] + tables.size[item], target)
    for device in range(tables.num_accelerators):
        if device != source and device != target:
            lacking += excess(tables, state.held[device], device)
    return total + heat.price * lacking


@compiled
def _refresh(state: MoveState, scratch: AnnealingScratch, heat: Heat, device: int) -> None:
    for column in range(state.load.shape[1]):
        scratch.power[device, column] = _raised(state.load[device, column], heat.squarings)


@compiled
def _raised(load: float, squarings: int) -> float:
    for _ in range(squarings):
        load *= load
    return load


@compiled
def _root(powers: float, squarings: int) -> float:
    for _ in range(squarings):
        powers = sqrt(powers)
    return powers


@compiled
def _keep_best(tables: MoveTables, state: MoveState) -> None:
    value = value_now(state)
    if value < state.best_value[0] and overflow(tables, state) == 0.0:
        state.best_value[0] = value
        state.best[:] = state.where
