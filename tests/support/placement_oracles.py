"""Small random workloads, and their best placement by going through all of them.

Nothing here uses items, nets or ideals: loads are counted on nodes and edges, as the problem is stated.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

from bireme.placement.workload import Edge, Node, Objective, Workload


def random_workload(
    random: Random,
    *,
    most_nodes: int = 8,
    most_accelerators: int = 3,
    most_cpus: int = 1,
    training: bool | None = None,
    tight_memory: bool | None = None,
) -> Workload:
    """A workload with colours, orphans, nodes without time and nodes that no accelerator runs, by chance."""
    training = random.random() < 0.5 if training is None else training
    num_nodes = random.randint(2, most_nodes)
    num_backward = random.randint(1, num_nodes - 1) if training else 0
    num_forward = num_nodes - num_backward
    num_cpus = random.randint(0, most_cpus)
    num_accelerators = random.randint(0 if num_cpus else 1, most_accelerators)
    density = random.choice([0.2, 0.4, 0.7])
    ids = random.sample(range(100), num_nodes)
    may_be_unsupported = num_cpus > 0 and random.random() < 0.4
    nodes = []
    for place, number in enumerate(ids):
        time = 0.0 if random.random() < 0.2 else round(random.uniform(0.1, 5), 2)
        colour = None
        if place >= num_forward and random.random() < 0.8:
            colour = random.randrange(num_forward)
        elif place < num_forward:
            colour = place if random.random() < 0.85 else random.randrange(num_forward)
        nodes.append(
            Node(
                number,
                accelerator_time=time,
                cpu_time=round(time * random.choice([1.5, 3, 10]), 2),
                size_bytes=random.choice([0, 0, 1, 2, 3]),
                supported=not (may_be_unsupported and random.random() < 0.2),
                is_backward=place >= num_forward,
                colour=colour,
            )
        )
    cost = {number: round(random.uniform(0, 2), 2) for number in ids}
    edges = tuple(
        Edge(ids[i], ids[j], cost[ids[i]])
        for j in range(num_nodes)
        for i in range(j)
        if random.random() < density
    )
    tight_memory = random.random() < 0.5 if tight_memory is None else tight_memory
    largest = max(_class_sizes(nodes), default=0)
    memory = largest + random.randint(0, 3) if tight_memory else 1e9
    return Workload(tuple(nodes), edges, num_accelerators, num_cpus, memory)


def _class_sizes(nodes: Sequence[Node]) -> list[float]:
    sizes: dict[tuple[int, int | None], float] = defaultdict(float)
    for node in nodes:
        sizes[(node.id, None) if node.colour is None else (-1, node.colour)] += node.size_bytes
    return list(sizes.values())


def best_by_force(workload: Workload, objective: Objective, *, contiguous: bool) -> float:
    """The best value of all placements; infinite where none fits."""
    best = math.inf
    for devices in all_placements(workload):
        if contiguous and not can_stand_in_line(workload, devices):
            continue
        best = min(best, value_by_hand(workload, devices, objective))
    return best


def all_placements(workload: Workload) -> Iterator[tuple[int, ...]]:
    """Every placement that keeps colours together, supports its nodes and has room; equal devices once."""
    classes = workload.classes()
    place_of = {node.id: place for place, node in enumerate(workload.nodes)}
    num_accelerators = workload.num_accelerators
    for choice in product(range(num_accelerators + workload.num_cpus), repeat=len(classes)):
        if not _is_first_of_its_kind(choice, num_accelerators):
            continue
        sizes: dict[int, float] = defaultdict(float)
        devices = [0] * len(workload.nodes)
        is_supported = True
        for device, group in zip(choice, classes, strict=True):
            for node in group:
                devices[place_of[node.id]] = device
                sizes[device] += node.size_bytes
                is_supported &= node.supported or device >= num_accelerators
        has_room = all(
            size <= workload.accelerator_bytes for d, size in sizes.items() if d < num_accelerators
        )
        if is_supported and has_room:
            yield tuple(devices)


def _is_first_of_its_kind(choice: Sequence[int], num_accelerators: int) -> bool:
    """Whether devices of a kind appear in the order of their numbers."""
    next_accelerator, next_cpu = 0, num_accelerators
    for device in choice:
        if device < num_accelerators:
            if device > next_accelerator:
                return False
            next_accelerator = max(next_accelerator, device + 1)
        else:
            if device > next_cpu:
                return False
            next_cpu = max(next_cpu, device + 1)
    return True


def value_by_hand(workload: Workload, devices: Sequence[int], objective: Objective) -> float:
    """The loads, node by node and edge by edge."""
    device_of = {node.id: device for node, device in zip(workload.nodes, devices, strict=True)}
    num_devices = workload.num_accelerators + workload.num_cpus
    loads = [[0.0, 0.0] for _ in range(num_devices)]
    for node in workload.nodes:
        device = device_of[node.id]
        on_accelerator = device < workload.num_accelerators
        loads[device][node.is_backward] += node.accelerator_time if on_accelerator else node.cpu_time
        elsewhere = {device_of[e.target] for e in workload.edges if e.source == node.id} - {device}
        cost = max((e.cost for e in workload.edges if e.source == node.id), default=0.0)
        for payer in (elsewhere | {device}) if elsewhere else ():
            if payer < workload.num_accelerators:
                loads[payer][node.is_backward] += cost
    if objective is Objective.FLUSH:
        return max(load[0] for load in loads) + max(load[1] for load in loads)
    return max(sum(load) for load in loads)


def can_stand_in_line(workload: Workload, devices: Sequence[int]) -> bool:
    """Whether no devices follow each other in a circle, over forward edges and orphans' mirrored edges."""
    device_of = {node.id: device for node, device in zip(workload.nodes, devices, strict=True)}
    is_backward = {node.id: node.is_backward for node in workload.nodes}
    orphans = {
        node.id for group in workload.classes() if all(node.is_backward for node in group) for node in group
    }
    follows: dict[int, set[int]] = defaultdict(set)
    for edge in workload.edges:
        if not is_backward[edge.target]:
            follows[device_of[edge.source]].add(device_of[edge.target])
        elif is_backward[edge.source] and orphans & {edge.source, edge.target}:
            follows[device_of[edge.target]].add(device_of[edge.source])
    left = set(device_of.values())
    while left:
        first = [d for d in left if not any(d in follows[other] for other in left - {d})]
        if not first:
            return False
        left -= set(first)
    return True
