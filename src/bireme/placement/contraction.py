"""From a `Workload` to `Items`: what must share a device anyway becomes one item.

For contiguous splits these are, in this order: the nodes of a colour; classes that forward edges join in a
circle; operators that take no time and have one neighbour, such as a matrix of weights, which go where that
is. A class of backward nodes alone takes part in the order too: a forward node is imagined for it, and the
mirrored edges of its backward edges.

Where any placement will do, only the colours and the operators without time hold; classes in a circle need
not share a device.
Operators with neither time nor neighbours may go anywhere, so they are merged in both.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import networkx
import numpy as np

from bireme.placement.items import Items, Ragged, room
from bireme.placement.workload import Node, Workload

__all__ = ["Weightless", "circles", "items_of", "walk_in_depth"]


NO_TIME, OF_ALL = 1e-6, 1e-9
"""A time below both, the second as a share of all times together, is held to be none. The first is that of
the published programs; the second keeps it right in any unit."""


class Weightless(Enum):
    """What becomes of an operator without time that has a size and one neighbour.

    `STAY` leaves it alone, which is exact. `JOIN` merges it into its neighbour: any split that comes of it
    is a split of the workload, but where memory is short a better one may part the two. `VANISH` merges it
    and forgets its size: no split of the workload is better than the best of these. Where `JOIN` and `VANISH`
    come to the same value, it is the optimum.
    """

    STAY = "stay"
    JOIN = "join"
    VANISH = "vanish"


def items_of(workload: Workload, *, contiguous: bool, weightless: Weightless = Weightless.JOIN) -> Items:
    """The items of a workload."""
    groups = _Groups(workload, contiguous=contiguous)
    if contiguous:
        groups.merge_circles()
    groups.merge_weightless(weightless)
    groups.merge_isolated()
    return groups.items()


@dataclass(slots=True)
class _Group:
    """Nodes that go together: their places in the workload, and what they come to."""

    places: list[int]
    accelerator_time: list[float]
    cpu_time: list[float]
    size: float
    supported: bool

    @property
    def longest_time(self) -> float:
        return max(*self.accelerator_time, *self.cpu_time)

    def absorb(self, other: "_Group", *, size: float) -> None:
        self.places += other.places
        for column in (0, 1):
            self.accelerator_time[column] += other.accelerator_time[column]
            self.cpu_time[column] += other.cpu_time[column]
        self.size += size
        self.supported &= other.supported


class _Groups:
    """The groups of a workload, by number, while they are merged."""

    def __init__(self, workload: Workload, *, contiguous: bool) -> None:
        self.workload = workload
        self.places = {node.id: place for place, node in enumerate(workload.nodes)}
        self.group_of: list[int] = [0] * len(workload.nodes)
        self.groups: dict[int, _Group] = {}
        # Of times that mean "cannot" none is counted: the smaller of the two is what a node must take.
        together = sum(min(node.accelerator_time, node.cpu_time) for node in workload.nodes)
        self.no_time = min(NO_TIME, OF_ALL * together)
        orphans = set()
        for number, nodes in enumerate(workload.classes()):
            self.groups[number] = self._group(nodes)
            for place in self.groups[number].places:
                self.group_of[place] = number
            if all(node.is_backward for node in nodes):
                orphans.add(number)
        self.order = self._order(orphans) if contiguous else []

    def _takes_time(self, group: _Group) -> bool:
        return group.longest_time > self.no_time

    def _group(self, nodes: Sequence[Node]) -> _Group:
        accelerator_time, cpu_time = [0.0, 0.0], [0.0, 0.0]
        for node in nodes:
            accelerator_time[node.is_backward] += node.accelerator_time
            cpu_time[node.is_backward] += node.cpu_time
        return _Group(
            [self.places[node.id] for node in nodes],
            accelerator_time,
            cpu_time,
            sum(node.size_bytes for node in nodes),
            all(node.supported for node in nodes),
        )

    def _order(self, orphans: set[int]) -> list[tuple[int, int]]:
        """Pairs of nodes' places: the first's group does not come after the second's."""
        nodes = self.workload.nodes
        pairs = []
        for edge in self.workload.edges:
            source, target = self.places[edge.source], self.places[edge.target]
            if not nodes[target].is_backward:
                pairs.append((source, target))
            elif nodes[source].is_backward and orphans & {self.group_of[source], self.group_of[target]}:
                pairs.append((target, source))
        return pairs

    def _followers(self) -> dict[int, set[int]]:
        followers: dict[int, set[int]] = {number: set() for number in self.groups}
        for source, target in self.order:
            if self.group_of[source] != self.group_of[target]:
                followers[self.group_of[source]].add(self.group_of[target])
        return followers

    def _merge(self, into: int, other: int, *, size: float) -> None:
        for place in self.groups[other].places:
            self.group_of[place] = into
        self.groups[into].absorb(self.groups.pop(other), size=size)

    def merge_circles(self) -> None:
        """Make one group of those that follow each other in a circle."""
        for circle in circles(self._followers()):
            first, *others = circle
            for other in others:
                self._merge(first, other, size=self.groups[other].size)

    def merge_weightless(self, weightless: Weightless) -> None:
        """Merge groups without time into their only neighbour, until none is left."""
        neighbours = self._neighbours()
        todo = [number for number in self.groups if len(neighbours[number]) == 1]
        while todo:
            number = todo.pop()
            group = self.groups.get(number)
            if group is None or len(neighbours[number]) != 1 or self._takes_time(group):
                continue
            if group.size and weightless is Weightless.STAY:
                continue
            (into,) = neighbours.pop(number)
            if self.groups[into].supported and not group.supported:
                continue
            self._merge(into, number, size=0.0 if weightless is Weightless.VANISH else group.size)
            neighbours[into].discard(number)
            todo.append(into)

    def merge_isolated(self) -> None:
        """Merge groups that have neither time nor a neighbour, where no placement is lost by it.

        They may go anywhere. Those without a size join any group. Those with one join each other where a CPU
        can take them all, for nothing, or an accelerator can hold all there is.
        """
        nodes, neighbours = self.workload.nodes, self._neighbours()
        alone = [n for n, group in self.groups.items() if not neighbours[n] and not self._takes_time(group)]
        # Sizes of nodes, as groups may have forgotten theirs: all ways to merge must come to the same groups.
        size_of = {n: sum(nodes[place].size_bytes for place in self.groups[n].places) for n in alone}
        light = {n: None for n in alone if not size_of[n] and self.groups[n].supported}
        heavy = [n for n in alone if n not in light]
        total = sum(node.size_bytes for node in nodes)
        if self.workload.num_cpus or total <= self.workload.accelerator_bytes:
            self._merge_all(heavy)
        host = next((n for n in self.groups if n not in light), None)
        self._merge_all([*light] if host is None else [host, *light])

    def _merge_all(self, numbers: list[int]) -> None:
        for number in numbers[1:]:
            self._merge(numbers[0], number, size=self.groups[number].size)

    def _neighbours(self) -> dict[int, set[int]]:
        neighbours: dict[int, set[int]] = defaultdict(set)
        ends = [(self.places[edge.source], self.places[edge.target]) for edge in self.workload.edges]
        for source, target in (*self.order, *ends):
            one, other = self.group_of[source], self.group_of[target]
            if one != other:
                neighbours[one].add(other)
                neighbours[other].add(one)
        return neighbours

    def items(self) -> Items:
        """The groups as items, numbered in the order of a walk in depth."""
        followers = self._followers()
        walk = walk_in_depth(followers)
        number_of = {group: number for number, group in enumerate(walk)}
        after = [sorted(number_of[target] for target in followers[group]) for group in walk]
        before: list[list[int]] = [[] for _ in walk]
        for number, row in enumerate(after):
            for target in row:
                before[target].append(number)
        pins, costs = self._nets(number_of)
        nets: list[list[int]] = [[] for _ in walk]
        for net, pinned in enumerate(pins):
            for pin in pinned:
                nets[pin].append(net)
        groups = [self.groups[group] for group in walk]
        size = np.array([group.size for group in groups], np.float64)
        supported = np.array([group.supported for group in groups], np.bool_)
        is_barred = ~supported | (size > room(size, self.workload.accelerator_bytes))
        accelerator_time = np.array([group.accelerator_time for group in groups], np.float64).reshape(-1, 2)
        # Some write a huge time to say "cannot", which would drown all others in a sum.
        accelerator_time[is_barred] = 0.0
        return Items(
            members=tuple(tuple(sorted(group.places)) for group in groups),
            accelerator_time=accelerator_time,
            cpu_time=np.array([group.cpu_time for group in groups], np.float64).reshape(-1, 2),
            size=size,
            supported=supported,
            before=Ragged.of(before),
            after=Ragged.of(after),
            pins=Ragged.of([list(row) for row in pins]),
            nets=Ragged.of(nets),
            net_cost=np.array(costs, np.float64).reshape(-1, 2),
            num_accelerators=self.workload.num_accelerators,
            num_cpus=self.workload.num_cpus,
            accelerator_bytes=self.workload.accelerator_bytes,
        )

    def _nets(self, number_of: dict[int, int]) -> tuple[list[tuple[int, ...]], list[list[float]]]:
        """The pins of each net and what it costs; outputs with the same pins are one net."""
        pins: dict[int, set[int]] = {}
        of_node = self.workload.costs
        for edge in self.workload.edges:
            if of_node[edge.source] > 0:
                own = number_of[self.group_of[self.places[edge.source]]]
                other = number_of[self.group_of[self.places[edge.target]]]
                pins.setdefault(edge.source, {own}).add(other)
        costs: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for source, row in pins.items():
            if len(row) > 1:
                is_backward = self.workload.nodes[self.places[source]].is_backward
                costs[tuple(sorted(row))][is_backward] += of_node[source]
        return list(costs), list(costs.values())


def walk_in_depth(followers: dict[int, set[int]]) -> list[int]:
    """A topological order that goes on with what the last one made possible; the smallest number first."""
    waiting = dict.fromkeys(followers, 0)
    for targets in followers.values():
        for target in targets:
            waiting[target] += 1
    ready = sorted((number for number, count in waiting.items() if not count), reverse=True)
    walk = []
    while ready:
        number = ready.pop()
        walk.append(number)
        for target in sorted(followers[number], reverse=True):
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    return walk


def circles(followers: dict[int, set[int]]) -> list[list[int]]:
    """The strongly connected components of two groups or more."""
    graph = networkx.DiGraph(followers)
    return [sorted(found) for found in networkx.strongly_connected_components(graph) if len(found) > 1]
