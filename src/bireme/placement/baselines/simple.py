"""Baselines: simple ways to place, to start others from and to compare them with.

`greedy` and `single` give splits that are contiguous where the items are numbered topologically. None of them
proves a bound.
"""

from dataclasses import replace

import networkx
import numpy as np
from numpy.typing import NDArray

from bireme.errors import BiremeError
from bireme.placement.baselines.local_search import local_search
from bireme.placement.contiguous.chain import cut_chain, no_split_found
from bireme.placement.contraction import Floats, FoundPlacement, Items, fits, items_of, loads_of, value_of
from bireme.placement.workload import Objective, Workload

__all__ = ["greedy", "local_search", "pipedream", "single"]

_Places = NDArray[np.int64]

_HALVINGS = 40
"""Of the range in which the lowest level is searched that `greedy` can fill devices up to."""


def greedy(items: Items, objective: Objective) -> FoundPlacement:
    """Fill one device after the other, in the order of the items, up to the lowest level that takes them all.

    The level counts times only: what moves between devices is paid but not looked at. Raises `BiremeError`
    where no cut of this order fits.
    """
    line = _Line(items)
    where = line.fill(np.inf)
    if where is None:
        raise no_split_found(items, "in the order tried")
    low, high = 0.0, 2 * float(items.accelerator_time.sum() + items.cpu_time.sum())
    for _ in range(_HALVINGS):
        level = (low + high) / 2
        filled = line.fill(level)
        if filled is None:
            low = level
        else:
            where, high = filled, level
    return _found(items, objective, where)


def single(items: Items, objective: Objective) -> FoundPlacement:
    """Everything on one accelerator, or on one CPU where it does not fit there.

    Raises `BiremeError` where neither takes it all.
    """
    firsts = ([0] if items.num_accelerators else []) + ([items.num_accelerators] if items.num_cpus else [])
    for device in firsts:
        where = (device,) * len(items)
        if fits(items, where):
            return _found(items, objective, where)
    raise BiremeError(
        f"No single device takes it all: the operators take {items.size.sum():g} bytes, an accelerator has "
        f"{items.accelerator_bytes:g}, {int((~items.supported).sum())} of {len(items)} groups of operators "
        "need a CPU, and there is none. Use a method that splits."
    )


def pipedream(workload: Workload, objective: Objective) -> tuple[FoundPlacement, Items]:
    """PipeDream's way: make the graph a chain, then cut that in the best way; and the items of the chain.

    Parallel branches become one: of each biconnected component all but the last operators are merged. What
    is not a chain even so is taken in a topological order. Raises `BiremeError` where no cut fits.
    """
    items = items_of(_without_branches(workload, items_of(workload, contiguous=True)), contiguous=True)
    return cut_chain(items, objective), items


def _found(items: Items, objective: Objective, where: tuple[int, ...]) -> FoundPlacement:
    return FoundPlacement(where, value_of(loads_of(items, where), objective), 0.0)


class _Line:
    """The items in their order, as sums over what comes before each place."""

    def __init__(self, items: Items) -> None:
        self.count = len(items)
        self.first_cpu = items.num_accelerators
        # More devices of a kind than items are of no use.
        self.num_accelerators = min(items.num_accelerators, self.count)
        self.num_cpus = min(items.num_cpus, self.count)
        self.on_accelerator = _sums(items.accelerator_time.sum(axis=1))
        self.on_cpu = _sums(items.cpu_time.sum(axis=1))
        size = _sums(items.size)
        holds = np.searchsorted(size, size + items.room, "right") - 1
        cpu_only = np.append(np.flatnonzero(~items.supported), self.count)
        self.runs_to: _Places = np.minimum(
            holds, cpu_only[np.searchsorted(cpu_only, np.arange(self.count + 1))]
        )

    def fill(self, level: float) -> tuple[int, ...] | None:
        """The device of each item when none is filled above the level; none where they do not all fit."""
        accelerator_ends = np.minimum(self.runs_to, _ends(self.on_accelerator, level))
        cpu_ends = _ends(self.on_cpu, level)
        # After so many devices of each kind, the furthest place reached: more of the line is never worse.
        furthest = np.zeros((self.num_accelerators + 1, self.num_cpus + 1), np.int64)
        for accelerators in range(self.num_accelerators + 1):
            for cpus in range(self.num_cpus + 1):
                if accelerators:
                    furthest[accelerators, cpus] = accelerator_ends[furthest[accelerators - 1, cpus]]
                if cpus:
                    by_cpu = cpu_ends[furthest[accelerators, cpus - 1]]
                    furthest[accelerators, cpus] = max(by_cpu, furthest[accelerators, cpus])
        if furthest[-1, -1] < self.count:
            return None
        return self._trace(furthest, accelerator_ends)

    def _trace(self, furthest: _Places, accelerator_ends: _Places) -> tuple[int, ...]:
        """The devices of a line that is filled, from its end back."""
        accelerators, cpus = self.num_accelerators, self.num_cpus
        where = np.empty(self.count, np.int64)
        while accelerators or cpus:
            end = furthest[accelerators, cpus]
            if accelerators and accelerator_ends[furthest[accelerators - 1, cpus]] == end:
                accelerators -= 1
                device = accelerators
            else:
                cpus -= 1
                device = self.first_cpu + cpus
            where[furthest[accelerators, cpus] : end] = device
        return tuple(where.tolist())


def _sums(values: Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(values)))


def _ends(sums: Floats, level: float) -> _Places:
    """For every place, how far a device that begins there gets before it is filled."""
    ends: _Places = np.searchsorted(sums, sums + level, "right") - 1
    return ends


def _without_branches(workload: Workload, items: Items) -> Workload:
    """The workload with one colour for all that a chain cannot tell apart."""
    edges = [(tail, head) for tail in range(len(items)) for head in items.after.row(tail)]
    together = networkx.empty_graph(len(items))
    for component in networkx.biconnected_component_edges(networkx.Graph(edges)):
        # Items are in an order that all edges follow, so the tail is the lesser end.
        networkx.add_path(together, sorted({min(edge) for edge in component}))
    nodes = list(workload.nodes)
    for colour, found in enumerate(networkx.connected_components(together)):
        group = sorted(found)
        if not workload.num_cpus:
            _check_room(items, group)
        for item in group:
            for place in items.members[item]:
                nodes[place] = replace(nodes[place], colour=colour)
    return replace(workload, nodes=tuple(nodes))


def _check_room(items: Items, group: list[int]) -> None:
    size = items.size[group].sum()
    if size > items.accelerator_bytes:
        raise BiremeError(
            f"PipeDream's chain does not fit: branches that it keeps together take {size:g} bytes, an "
            f"accelerator has {items.accelerator_bytes:g}, and there is no CPU. Use a method that parts "
            "branches."
        )
