"""The best cut of a line of blocks into pieces, and CPU work between them, if all ran one after the other.

Real latencies are no longer, as some of it runs at the same time; so this is a good placement to begin with
where memory is short, which a search that moves steps one by one rarely finds.
"""

import numpy as np

from bireme.compiled import compiled
from bireme.placement.items import Floats, Integers
from bireme.placement.latency.steps import LatencySteps
from bireme.placement.latency.wiring import CPU

__all__ = ["in_series"]


def in_series(
    steps: LatencySteps, num_places: int, blocks: list[list[int]], most_bytes: float
) -> Integers | None:
    """The place of each step among pieces of at most `most_bytes` each; none where they cannot hold all."""
    block_of = np.zeros(len(steps), np.int64)
    for number, block in enumerate(blocks):
        block_of[block] = number
    pins = [
        sorted({int(block_of[source]), *block_of[users].tolist()})
        for source, users in zip(
            steps.net_source.tolist(),
            (steps.net_users.row(net) for net in range(len(steps.net_cost))),
            strict=True,
        )
    ]
    nets: list[list[int]] = [[] for _ in blocks]
    for net, row in enumerate(pins):
        for block in row:
            nets[block].append(net)
    bars = np.array([not all(steps.can_accelerate[steps.family[step]] for step in block) for block in blocks])
    cuts = _cuts(
        np.array([steps.accelerator_time[block].sum() for block in blocks]),
        np.array([steps.cpu_time[block].sum() if steps.num_cpus else np.inf for block in blocks]),
        np.array(
            [np.inf if bar else steps.size[block].sum() for bar, block in zip(bars, blocks, strict=True)]
        ),
        np.array([0, *np.cumsum([len(row) for row in nets])], np.int64),
        np.array([net for row in nets for net in row], np.int64),
        np.array([len(row) for row in pins], np.int64),
        steps.net_cost,
        num_places,
        most_bytes,
    )
    if cuts[0] == -2:
        return None
    return cuts[block_of]


@compiled
def _cuts(
    time: Floats,
    cpu_time: Floats,
    size: Floats,
    net_starts: Integers,
    nets: Integers,
    num_pins: Integers,
    net_cost: Floats,
    num_places: int,
    most_bytes: float,
) -> Integers:
    """The place of each block, -1 on CPUs; -2 everywhere where there is no cut.

    `best[p, i]`: the first `i` blocks with at most `p` pieces. Its last block is on a CPU, or ends a piece
    that is grown block by block to the left; a net costs while some of its pins are inside, but not all.
    """
    num_blocks = time.shape[0]
    best = np.full((num_places + 1, num_blocks + 1), np.inf)
    begin = np.full((num_places + 1, num_blocks + 1), -1, np.int64)
    best[:, 0] = 0.0
    inside = np.zeros(net_cost.shape[0], np.int64)
    for end in range(1, num_blocks + 1):
        for place in range(num_places + 1):
            best[place, end] = best[place, end - 1] + cpu_time[end - 1]
        inside[:] = 0
        compute = held = moved = 0.0
        for first in range(end - 1, -1, -1):
            held += size[first]
            compute += time[first]
            if held > most_bytes or compute >= best[num_places, end]:
                break
            for entry in range(net_starts[first], net_starts[first + 1]):
                net = nets[entry]
                inside[net] += 1
                if inside[net] == 1 and num_pins[net] > 1:
                    moved += net_cost[net]
                if inside[net] == num_pins[net] and num_pins[net] > 1:
                    moved -= net_cost[net]
            for place in range(1, num_places + 1):
                total = best[place - 1, first] + compute + moved
                if total < best[place, end]:
                    best[place, end] = total
                    begin[place, end] = first
    where = np.full(num_blocks, CPU, np.int64)
    if best[num_places, num_blocks] == np.inf:
        where[:] = -2
        return where
    place, end = num_places, num_blocks
    while end > 0:
        first = begin[place, end]
        if first < 0:
            end -= 1
        else:
            where[first:end] = place - 1
            place -= 1
            end = first
    return where
