"""From a `Workload` to `Items`: what must share a device anyway becomes one item.

For contiguous splits these are, in this order: the nodes of a colour; classes that forward edges join in a
circle; operators that take no time and have one neighbor, such as a matrix of weights, which go where that
is. A class of backward nodes alone takes part in the order too: a forward node is imagined for it, and the
mirrored edges of its backward edges.

Where any placement will do, only the colours and the operators without time hold; classes in a circle need
not share a device.
Operators with neither time nor neighbors may go anywhere, so they are merged in both.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import networkx
import numpy as np
from numpy.typing import NDArray

from bireme.placement.workload import Node, Objective, Workload

# What the solvers work on: `Items`, groups of nodes that go to one device together, as arrays.
#
# A *net* is the output of one or more nodes: the items that make and use it are its pins. A device with some
# of the pins but not all of them moves that output, in or out, and pays for it once; with none or all of them
# it pays nothing. So the load of a set of items is what they compute plus the costs of the nets it cuts,
# which holds for outputs and inputs alike and needs no directions.

_BYTES_SLACK = 1e-12
"""Relative room for the rounding of sums of bytes, where these are not whole numbers."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
"""Of one kind, that of numbers in loops too: numba compiles a loop once for each kind that it is given."""


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of different lengths, one after the other: row `i` is `values[starts[i] : starts[i + 1]]`."""

    starts: Integers
    values: Integers

    @classmethod
    def of(cls, rows: Collection[Sequence[int]]) -> "Ragged":
        """The rows of a list of lists."""
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=starts[1:])
        return cls(starts, np.array([value for row in rows for value in row], np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, place: int) -> list[int]:
        """One of the rows."""
        values: list[int] = self.values[self.starts[place] : self.starts[place + 1]].tolist()
        return values


@dataclass(frozen=True, slots=True, eq=False)
class PlacedParts:
    """What goes to one device together, numbered in a topological order: whatever must be before a part has a
    lower number.

    `members[i]` are the places of its nodes in the workload. `size` is what a part takes on an accelerator.
    `before` are its direct predecessors, `after` its direct successors.

    A device is a number: the accelerators come first, then the CPUs.
    """

    members: tuple[tuple[int, ...], ...]
    accelerator_time: Floats
    cpu_time: Floats
    size: Floats
    before: Ragged
    after: Ragged
    num_accelerators: int
    num_cpus: int
    accelerator_bytes: float

    def __len__(self) -> int:
        return len(self.members)

    @property
    def num_devices(self) -> int:
        """Of both kinds."""
        return self.num_accelerators + self.num_cpus

    @property
    def room(self) -> float:
        """The bytes that an accelerator may be given."""
        return room(self.size, self.accelerator_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Items(PlacedParts):
    """Parts whose nodes go together wherever they go.

    Times and costs have two columns: 0 is forward work, 1 is backward work. `supported` is whether an
    accelerator can run an item; where none can run or hold it, its time on one is 0. `before` and `after` go
    through forward nodes and through what stands for them; where any placement will do, both are without
    meaning and empty. `pins` are the items of each net and `nets` the nets of each item.
    """

    supported: NDArray[np.bool_]
    pins: Ragged
    nets: Ragged
    net_cost: Floats


def room(size: Floats, accelerator_bytes: float) -> float:
    """The bytes that an accelerator may be given of these sizes: a hair more than it has, for rounding.

    Sums of whole numbers are exact, so there it is what it has.
    """
    is_exact = size.sum() < 2**53 and bool((size == np.floor(size)).all())
    return float(accelerator_bytes) if is_exact else accelerator_bytes * (1 + _BYTES_SLACK)


# What a solver found on `Items`, and what a placement of them comes to.

SLACK = 1e-9
"""Relative: values that differ by less are the same, added up in another order."""


@dataclass(frozen=True, slots=True)
class FoundPlacement:
    """A placement: the device of each item, its value, and a value that no placement is below."""

    where: tuple[int, ...]
    value: float
    lower_bound: float


def loads_of(items: Items, where: Sequence[int]) -> Floats:
    """Forward and backward load of each device, in two columns; who computes on a CPU moves nothing."""
    loads = np.zeros((items.num_devices, 2))
    for item, device in enumerate(where):
        on_accelerator = device < items.num_accelerators
        loads[device] += (items.accelerator_time if on_accelerator else items.cpu_time)[item]
    for net, cost in enumerate(items.net_cost):
        devices = {where[pin] for pin in items.pins.row(net)}
        if len(devices) > 1:
            for device in devices:
                if device < items.num_accelerators:
                    loads[device] += cost
    return loads


def value_of(loads: Floats, objective: Objective) -> float:
    """What the loads of all devices come to."""
    if objective is Objective.FLUSH:
        return float(loads[:, 0].max() + loads[:, 1].max())
    return float(loads.sum(axis=1).max())


def placed(items: Items, objective: Objective, where: Sequence[int]) -> FoundPlacement:
    """A placement with its value, of which nothing is proven."""
    return FoundPlacement(tuple(where), value_of(loads_of(items, where), objective), 0.0)


def fits(items: Items, where: Sequence[int]) -> bool:
    """Whether accelerators can run and hold what they are given."""
    devices = np.array(where, np.int64)
    on_accelerator = devices < items.num_accelerators
    sizes = np.bincount(devices[on_accelerator], items.size[on_accelerator])
    return bool(items.supported[on_accelerator].all() and (sizes <= items.room).all())


# A bound on the value of every placement, contiguous or not, by counting work alone.
#
# It looks at times only: communication and memory can make no placement better. So it costs next to nothing
# and holds for every objective but latency.

ROUNDING = 1e-12
"""Relative room for sums that were added up in another order."""


def simple_bound(items: Items, objective: Objective) -> float:
    """A value that no placement is below: work shared out evenly, or more heavy items than devices.

    Every item must have a device that can take it.
    """
    bound = 0.0
    for on_accelerator, on_cpu in zip(
        each_maximum(items.accelerator_time, objective), each_maximum(items.cpu_time, objective), strict=True
    ):
        least = np.where(runs_on_accelerator(items), on_accelerator, on_cpu)
        if items.num_cpus:
            least = np.minimum(least, on_cpu)
        bound += max(_crowded(least, items.num_devices), _shared_out(items, on_accelerator, on_cpu))
    return bound * (1 - ROUNDING)


def each_maximum(numbers: Floats, objective: Objective) -> Floats:
    """The forward and backward column as what counts: a row for each maximum that the objective adds up."""
    if objective is Objective.FLUSH:
        return numbers.T
    summed: Floats = numbers.sum(axis=1)[np.newaxis, :]
    return summed


def runs_on_accelerator(items: Items) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which items an accelerator can run and hold, alone."""
    fitting = items.supported & (items.size <= items.room)
    return fitting & (items.num_accelerators > 0)


def _crowded(least: Floats, num_devices: int) -> float:
    """Of the `j * m + 1` heaviest items one of `m` devices has `j + 1`: at least the lightest of them."""
    heaviest_first = np.sort(least)[::-1]
    return max(
        float(heaviest_first[others * (num_devices - 1) : others * num_devices + 1].sum())
        for others in range((len(least) - 1) // num_devices + 1)
    )


def _shared_out(items: Items, on_accelerator: Floats, on_cpu: Floats) -> float:
    """The load of all devices if items could be cut, and what gains least by an accelerator is on CPUs."""
    forced = ~runs_on_accelerator(items)
    if not items.num_cpus:
        return float(on_accelerator.sum()) / items.num_accelerators
    if not items.num_accelerators:
        return float(on_cpu.sum()) / items.num_cpus
    movable = (~forced & (on_accelerator > 0)).nonzero()[0]
    movable = movable[np.argsort(on_cpu[movable] / on_accelerator[movable], kind="stable")]
    gone = np.concatenate([[0.0], np.cumsum(on_accelerator[movable])])
    come = np.concatenate([[0.0], np.cumsum(on_cpu[movable])])
    accelerators = (gone[-1] - gone) / items.num_accelerators
    cpus = (on_cpu[forced].sum() + come) / items.num_cpus
    crossing = int((cpus >= accelerators).argmax())
    if not crossing:
        return float(cpus[0])
    ahead = accelerators[crossing - 1] - cpus[crossing - 1]
    share = ahead / (ahead + cpus[crossing] - accelerators[crossing])
    return float(accelerators[crossing - 1] + share * (accelerators[crossing] - accelerators[crossing - 1]))


_NO_TIME, _OF_ALL = 1e-6, 1e-9
"""A time below both, the second as a share of all times together, is held to be none. The first is that of
the published programs; the second keeps it right in any unit."""


class Weightless(Enum):
    """What becomes of an operator without time that has a size and one neighbor.

    `STAY` leaves it alone, which is exact. `JOIN` merges it into its neighbor: any split that comes of it
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
        self.no_time = min(_NO_TIME, _OF_ALL * together)
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
        """Merge groups without time into their only neighbor, until none is left."""
        neighbors = self._neighbors()
        todo = [number for number in self.groups if len(neighbors[number]) == 1]
        while todo:
            number = todo.pop()
            group = self.groups.get(number)
            if group is None or len(neighbors[number]) != 1 or self._takes_time(group):
                continue
            if group.size and weightless is Weightless.STAY:
                continue
            (into,) = neighbors.pop(number)
            if self.groups[into].supported and not group.supported:
                continue
            self._merge(into, number, size=0.0 if weightless is Weightless.VANISH else group.size)
            neighbors[into].discard(number)
            todo.append(into)

    def merge_isolated(self) -> None:
        """Merge groups that have neither time nor a neighbor, where no placement is lost by it.

        They may go anywhere. Those without a size join any group. Those with one join each other where a CPU
        can take them all, for nothing, or an accelerator can hold all there is.
        """
        nodes, neighbors = self.workload.nodes, self._neighbors()
        alone = [n for n, group in self.groups.items() if not neighbors[n] and not self._takes_time(group)]
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

    def _neighbors(self) -> dict[int, set[int]]:
        neighbors: dict[int, set[int]] = defaultdict(set)
        ends = [(self.places[edge.source], self.places[edge.target]) for edge in self.workload.edges]
        for source, target in (*self.order, *ends):
            one, other = self.group_of[source], self.group_of[target]
            if one != other:
                neighbors[one].add(other)
                neighbors[other].add(one)
        return neighbors

    def items(self) -> Items:
        """The groups as items, numbered in the order of a walk in depth."""
        followers = self._followers()
        walk = walk_in_depth(followers)
        number_of = {group: number for number, group in enumerate(walk)}
        after = [sorted(number_of[target] for target in followers[group]) for group in walk]
        costs = self._nets(number_of)
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
            before=Ragged.of(turned(after, len(walk))),
            after=Ragged.of(after),
            pins=Ragged.of(costs),
            nets=Ragged.of(turned(costs, len(walk))),
            net_cost=np.array(list(costs.values()), np.float64).reshape(-1, 2),
            num_accelerators=self.workload.num_accelerators,
            num_cpus=self.workload.num_cpus,
            accelerator_bytes=self.workload.accelerator_bytes,
        )

    def _nets(self, number_of: dict[int, int]) -> dict[tuple[int, ...], list[float]]:
        """What each net costs, by its pins; outputs with the same pins are one net."""
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
        return costs


def in_order(followers: Mapping[int, Iterable[int]], key: Callable[[int, int], Any]) -> list[int]:
    """The topological order that takes, of what can come next, what has the smallest key.

    The key is of the number and of how many came before it when it could come.
    """
    waiting = dict.fromkeys(followers, 0)
    for targets in followers.values():
        for target in targets:
            waiting[target] += 1
    ready = [(key(number, 0), number) for number, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        number = heapq.heappop(ready)[1]
        order.append(number)
        for target in followers[number]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, (key(target, len(order)), target))
    return order


def walk_in_depth(followers: Mapping[int, Iterable[int]]) -> list[int]:
    """A topological order that goes on with what the last one made possible; the smallest number first."""
    return in_order(followers, lambda _, depth: -depth)


def turned(rows: Iterable[Iterable[int]], count: int) -> list[list[int]]:
    """For each number below `count` the rows that have it."""
    found: list[list[int]] = [[] for _ in range(count)]
    for number, row in enumerate(rows):
        for value in row:
            found[value].append(number)
    return found


def essential_edges(after: Ragged) -> Integers:
    """The edges, in rows of two, that no longer path stands for; numbers are in a topological order."""
    reach = [0] * len(after)
    edges = []
    for number in reversed(range(len(after))):
        followers = after.row(number)
        farther = 0
        for follower in followers:
            farther |= reach[follower]
        edges += [(number, follower) for follower in followers if not farther >> follower & 1]
        reach[number] = farther | sum(1 << follower for follower in followers)
    return np.array(edges[::-1], np.int64).reshape(-1, 2)


def circles(followers: dict[int, set[int]]) -> list[list[int]]:
    """The strongly connected components of two groups or more."""
    graph = networkx.DiGraph(followers)
    return [sorted(found) for found in networkx.strongly_connected_components(graph) if len(found) > 1]
