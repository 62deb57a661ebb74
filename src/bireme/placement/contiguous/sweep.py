"""The loop of the dynamic program over ideals, in a form that compiles.

For an ideal `J` every smaller ideal is visited once, by taking items out in falling order of their numbers:
since a number is greater than all that must be before it, the greatest of what is taken out can always go
first, and each set has one such order. The load of what is taken out grows item by item. What it computes
and its size only grow, so where that alone is too much on every kind of device, the way ends.
"""

import numpy as np
from numpy.typing import NDArray

from bireme.compiled import compiled
from bireme.placement.contiguous.ideals import Narrow
from bireme.placement.items import Floats, Integers

__all__ = ["sweep"]


@compiled
def sweep(
    uppers: NDArray[np.int64],
    starts: NDArray[np.int64],
    taken: Narrow,
    below: Narrow,
    accelerator_time: Floats,
    cpu_time: Floats,
    size: Floats,
    supported: NDArray[np.bool_],
    net_starts: Integers,
    nets: Integers,
    net_size: Integers,
    net_cost: Floats,
    memory: float,
    forward_limit: float,
    value_limit: float,
    best: Floats,
    came_from: Narrow,
    came_by_cpu: NDArray[np.bool_],
    fewest: Narrow,
    most: Narrow,
) -> int:
    """Fill `best[J, cpus, accelerators]` for the ideals `uppers`, from those of all smaller ideals.

    Each cell is the smallest value with exactly so many devices, infinite where it would not be below
    `value_limit`; `came_from` and `came_by_cpu` say which ideal the last device began at and of which kind it
    is. Column 0 of times and costs must stay below `forward_limit` on each device, column 1 is the value.
    `most[J, cpus]` accelerators are the most from which the rest can still be done; `fewest[J, cpus]` becomes
    the fewest with which `J` can. The number of pairs of ideals is returned.
    """
    num_cpus, num_accelerators = best.shape[1] - 1, best.shape[2] - 1
    num_items = len(size)
    inside = np.zeros(len(net_size), np.int32)
    ideal = np.zeros(num_items + 1, np.int64)
    way = np.zeros(num_items + 1, np.int64)
    item_of = np.zeros(num_items + 1, np.int64)
    computed = np.zeros((num_items + 1, 4))
    moved = np.zeros((num_items + 1, 2))
    bytes_of = np.zeros(num_items + 1)
    runs = np.ones(num_items + 1, np.bool_)
    num_pairs = 0
    for upper in uppers:
        num_useful = 0
        for cpus in range(num_cpus + 1):
            fewest[upper, cpus] = num_accelerators + 1
            if most[upper, cpus] >= 0:
                num_useful = max(num_useful, cpus + most[upper, cpus])
        if not num_useful:
            continue
        # Where only one device may come before the rest, the empty ideal is all there is to reach.
        is_straight = num_useful == 1
        depth = 0
        ideal[0], item_of[0] = upper, num_items
        way[0] = starts[upper + 1] - 1 if is_straight else starts[upper]
        while depth >= 0:
            step = way[depth]
            if step == starts[ideal[depth] + 1] or taken[step] >= item_of[depth]:
                if depth:
                    item = item_of[depth]
                    for place in range(net_starts[item], net_starts[item + 1]):
                        inside[nets[place]] -= 1
                depth -= 1
                continue
            way[depth] += 1
            item, lower = taken[step], below[step]
            above, depth = depth, depth + 1
            for column in range(2):
                computed[depth, column] = computed[above, column] + accelerator_time[item, column]
                computed[depth, 2 + column] = computed[above, 2 + column] + cpu_time[item, column]
                moved[depth, column] = moved[above, column]
            bytes_of[depth] = bytes_of[above] + size[item]
            runs[depth] = runs[above] and supported[item]
            on_accelerator = (
                num_accelerators > 0
                and runs[depth]
                and bytes_of[depth] <= memory
                and computed[depth, 0] < forward_limit
                and computed[depth, 1] < value_limit
            )
            on_cpu = num_cpus > 0 and computed[depth, 2] < forward_limit and computed[depth, 3] < value_limit
            if not on_accelerator and not on_cpu:
                depth = above
                continue
            num_pairs += 1
            for place in range(net_starts[item], net_starts[item + 1]):
                net = nets[place]
                inside[net] += 1
                if inside[net] == 1:
                    moved[depth, 0] += net_cost[net, 0]
                    moved[depth, 1] += net_cost[net, 1]
                elif inside[net] == net_size[net]:
                    moved[depth, 0] -= net_cost[net, 0]
                    moved[depth, 1] -= net_cost[net, 1]
            ideal[depth], item_of[depth] = lower, item
            way[depth] = max(starts[lower], starts[lower + 1] - 1) if is_straight else starts[lower]
            cost = computed[depth, 1] + moved[depth, 1]
            on_accelerator &= computed[depth, 0] + moved[depth, 0] < forward_limit and cost < value_limit
            for cpus in range(num_cpus + 1):
                first = fewest[lower, cpus]
                if on_accelerator:
                    for accelerators in range(first, min(num_accelerators, most[upper, cpus])):
                        value = max(best[lower, cpus, accelerators], cost)
                        if value < best[upper, cpus, accelerators + 1]:
                            best[upper, cpus, accelerators + 1] = value
                            came_from[upper, cpus, accelerators + 1] = lower
                            came_by_cpu[upper, cpus, accelerators + 1] = False
                if on_cpu and cpus < num_cpus:
                    for accelerators in range(first, min(num_accelerators, most[upper, cpus + 1]) + 1):
                        value = max(best[lower, cpus, accelerators], computed[depth, 3])
                        if value < best[upper, cpus + 1, accelerators]:
                            best[upper, cpus + 1, accelerators] = value
                            came_from[upper, cpus + 1, accelerators] = lower
                            came_by_cpu[upper, cpus + 1, accelerators] = True
        for cpus in range(num_cpus + 1):
            for accelerators in range(num_accelerators + 1):
                if best[upper, cpus, accelerators] < value_limit:
                    fewest[upper, cpus] = accelerators
                    break
    return num_pairs
