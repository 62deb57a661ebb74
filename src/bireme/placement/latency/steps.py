"""What the searches for a short latency work on: `LatencySteps`, nodes that can always be in one place
together.

Unlike items, steps are single nodes: what shares a colour shares an accelerator, but on CPUs each of its
nodes starts when it can. Only operators without time and size are merged into a neighbour, where that costs
nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# As right for steps as it is for groups.
from bireme.placement.contraction import walk_in_depth
from bireme.placement.items import Floats, Integers, Ragged, room
from bireme.placement.latency.latency import accelerators_bar
from bireme.placement.workload import Node, Workload

__all__ = ["LatencySteps", "steps_of"]


@dataclass(frozen=True, slots=True, eq=False)
class LatencySteps:
    """Steps numbered in a topological order, the families that share a device, and what is moved.

    `members[i]` are the places of a step's nodes in the workload; the first is the one that the others
    joined. Family `family[i]` holds step `i`; where `can_accelerate` is false, no accelerator can take the
    family, and its times there are those on a CPU. `before` and `after` are direct neighbours. A net is the
    output of the step `net_source`, which the steps `net_users`, all others, use: it costs `net_cost` to
    move, never 0.
    """

    members: tuple[tuple[int, ...], ...]
    accelerator_time: Floats
    cpu_time: Floats
    size: Floats
    family: Integers
    families: Ragged
    can_accelerate: NDArray[np.bool_]
    before: Ragged
    after: Ragged
    net_source: Integers
    net_users: Ragged
    net_cost: Floats
    num_accelerators: int
    num_cpus: int
    accelerator_bytes: float

    def __len__(self) -> int:
        return len(self.members)

    @property
    def room(self) -> float:
        """The bytes that an accelerator may be given."""
        return room(self.size, self.accelerator_bytes)

    def spread(self, of_steps: Sequence[int]) -> tuple[int, ...]:
        """A number for each node, from one for each step."""
        of_nodes = [0] * sum(map(len, self.members))
        for number, places in zip(of_steps, self.members, strict=True):
            for place in places:
                of_nodes[place] = int(number)
        return tuple(of_nodes)


def steps_of(workload: Workload) -> LatencySteps:
    """The steps of a workload."""
    merging = _Merging(workload)
    merging.run()
    return merging.steps()


@dataclass(slots=True)
class _Output:
    """What a node makes, and who uses it, by place."""

    cost: float
    users: set[int]


class _Merging:
    """Which group each node is in, a group being named after the place of the node that others joined."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        nodes, costs = workload.nodes, workload.costs
        places = {node.id: place for place, node in enumerate(nodes)}
        self.group_of = list(range(len(nodes)))
        self.groups = {place: [place] for place in range(len(nodes))}
        self.family_of = [0] * len(nodes)
        barred = accelerators_bar(workload)
        self.can_accelerate = [node.id not in barred for node in nodes]
        self.outputs = [_Output(costs.get(node.id, 0.0), set()) for node in nodes]
        self.producers: list[set[int]] = [set() for _ in nodes]
        for edge in workload.edges:
            self.outputs[places[edge.source]].users.add(places[edge.target])
            self.producers[places[edge.target]].add(places[edge.source])
        self.may_join = [False] * len(nodes)
        for number, family in enumerate(workload.classes()):
            for node in family:
                self.family_of[places[node.id]] = number
                is_nothing = not (node.accelerator_time or node.cpu_time or node.size_bytes)
                self.may_join[places[node.id]] = is_nothing and len(family) == 1

    def run(self) -> None:
        """Merge until nothing can be."""
        todo = [place for place, may in enumerate(self.may_join) if may]
        has_changed = True
        while has_changed:
            has_changed = False
            for group in todo:
                host = self._host(group) if group in self.groups else None
                if host is None or (self.can_accelerate[host] and not self.can_accelerate[group]):
                    continue
                for place in self.groups[group]:
                    self.group_of[place] = host
                self.groups[host] += self.groups.pop(group)
                has_changed = True

    def _host(self, group: int) -> int | None:
        """The neighbour that a group without time and size can join, whatever the rest does.

        Take the best placement, and move the group to its host.

        - It needs nothing from outside, and one group alone uses it: it is done at 0 wherever it is, and
          what moved between the two does so no more.
        - Nobody outside uses it, and one group alone feeds it: the same, mirrored.
        - It needs one output, used by nobody else, and what leaves it costs no more than that: the host
          moves out the cheaper outputs instead of the dearer one; where the group was, they come in
          instead, if at all; all who use them get them as early as before.

        In each case no new path arises between two pieces, so nothing comes to wait in a circle.
        """
        places = self.groups[group]
        inputs = {place for own in places for place in self.producers[own] if self.group_of[place] != group}
        leaving = [self.outputs[own] for own in places if self._users(own) - {group}]
        sources = {self.group_of[place] for place in inputs}
        users = set().union(*(self._users(own) for own in places)) - {group}
        if not sources and len(users) == 1:
            return users.pop()
        if not users and len(sources) == 1:
            return sources.pop()
        if len(inputs) == 1:
            (place,) = inputs
            others = self._users(place) - {group, self.group_of[place]}
            if not others and sum(output.cost for output in leaving) <= self.outputs[place].cost:
                return sources.pop()
        return None

    def _users(self, place: int) -> set[int]:
        return {self.group_of[user] for user in self.outputs[place].users}

    def steps(self) -> LatencySteps:
        """The groups as steps, in the order of a walk in depth."""
        followers = {
            group: set().union(*(self._users(place) for place in places)) - {group}
            for group, places in self.groups.items()
        }
        order = walk_in_depth(followers)
        number_of = {group: number for number, group in enumerate(order)}
        after = [sorted(number_of[user] for user in followers[group]) for group in order]
        before: list[list[int]] = [[] for _ in order]
        for number, row in enumerate(after):
            for user in row:
                before[user].append(number)
        members = tuple(tuple(self.groups[group]) for group in order)
        families: dict[int, list[int]] = {}
        for number, group in enumerate(order):
            families.setdefault(self.family_of[group], []).append(number)
        renumbered = {family: number for number, family in enumerate(families)}
        nets = self._nets(number_of)
        nodes = self.workload.nodes
        sums = np.array(
            [
                [sum(number) for number in zip(*(_numbers(nodes[place]) for place in places), strict=True)]
                for places in members
            ],
            np.float64,
        )
        can_accelerate = np.array([self.can_accelerate[group] for group in order], np.bool_)
        return LatencySteps(
            members=members,
            # Some write a huge time to say "cannot", which would drown all others in a sum.
            accelerator_time=np.where(can_accelerate, sums[:, 0], sums[:, 1]),
            cpu_time=sums[:, 1].copy(),
            size=sums[:, 2].copy(),
            family=np.array([renumbered[self.family_of[group]] for group in order], np.int64),
            families=Ragged.of(list(families.values())),
            can_accelerate=np.array([self.can_accelerate[order[row[0]]] for row in families.values()]),
            before=Ragged.of(before),
            after=Ragged.of(after),
            net_source=np.array([source for source, _ in nets], np.int64),
            net_users=Ragged.of([list(users) for _, users in nets]),
            net_cost=np.array(list(nets.values()), np.float64),
            num_accelerators=self.workload.num_accelerators,
            num_cpus=self.workload.num_cpus,
            accelerator_bytes=self.workload.accelerator_bytes,
        )

    def _nets(self, number_of: dict[int, int]) -> dict[tuple[int, tuple[int, ...]], float]:
        """What it costs to move from a step to others; outputs with the same ends are one."""
        nets: dict[tuple[int, tuple[int, ...]], float] = {}
        for place, output in enumerate(self.outputs):
            source = number_of[self.group_of[place]]
            users = tuple(sorted({number_of[user] for user in self._users(place)} - {source}))
            if users and output.cost > 0:
                nets[source, users] = nets.get((source, users), 0.0) + output.cost
        return nets


def _numbers(node: Node) -> tuple[float, ...]:
    return node.accelerator_time, node.cpu_time, node.size_bytes
