"""Other planners' ways to cut a chain into as many stages as there are devices, under their names.

Each sees what its own cost function sees: none knows that devices differ. What else they do, such as
replicating stages, is the search's matter; their cost functions take what that needs. A chain of half-layers
is cut at layers, as they would, when its `merged` layers are given.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from benchmarks.partitioners.dapple import dapple
from bireme.cluster.cluster import Overlap
from bireme.errors import BiremeError
from bireme.plan.partition.autopipe import Cuts
from bireme.plan.partition.chain import layer_bounds
from bireme.plan.partition.loads import Loads, loads_of
from bireme.plan.partition.partition import least_max
from bireme.simulate.links import ring_share

__all__ = ["BASELINES", "Planner", "parameters", "pipedream_2bw", "pipedream_2bw_s", "piper", "uniform"]

Planner = Callable[[Loads], Cuts]
"""Where to cut, whether it fits or not."""


def uniform(loads: Loads) -> Cuts:
    """As many units in each stage; the first have one more where that does not come out even."""
    return _dealt(loads.chain.num_units, loads.num_stages, more_first=True)


def parameters(loads: Loads) -> Cuts:
    """As many bytes of parameters in each stage as can be."""
    width = loads.chain.num_units - loads.num_stages + 1
    table = loads.chain.bytes.parameter.astype(np.float64)
    empty = np.tri(width, width, -1, np.bool_)
    costs = []
    for stage in range(loads.num_stages):
        cost = table[stage : stage + width, stage + 1 : stage + 1 + width].copy()
        cost[empty] = np.inf
        costs.append(cost)
    return least_max(costs).cuts()


def pipedream_2bw(loads: Loads) -> Cuts:
    """As many layers in each stage; the last have one more where that does not come out even.

    What is before the first layer goes to the first stage, what is after the last to the last.
    """
    chain = loads.chain
    bounds = layer_bounds(chain.names)
    layers = [begin for begin, end in pairwise(bounds) if _is_layer(chain.names[begin])]
    if not layers:
        layers = list(bounds[:-1])
    if len(layers) < loads.num_stages:
        raise BiremeError(
            f"{len(layers)} layers cannot be dealt out to {loads.num_stages} stages; each needs one at least."
        )
    return tuple(layers[place] for place in _dealt(len(layers), loads.num_stages, more_first=False))


def piper(loads: Loads) -> Cuts:
    """The least time per sample of the slowest stage, compute and transfers added up.

    Each byte over a boundary counts twice, for the activation and its gradient. Memory is that of the
    smallest device; where nothing fits, it does not count.
    """
    chain, line = loads.chain, loads.line
    least = min(seat.memory_bytes for seat in line.seats)
    seats = tuple(replace(seat, speed=1.0, memory_bytes=least) for seat in line.seats)
    links = tuple(replace(link, overlap=Overlap.FULL) for link in line.links)
    alike = loads_of(chain, replace(line, seats=seats, links=links), loads.setting)
    bytes_per_s = min((link.bytes_per_s for link in line.links), default=math.inf)
    crossing_s = 2 * np.concatenate(([0], chain.boundary_bytes[:-1], [0])) / bytes_per_s
    width = chain.num_units - line.num_stages + 1
    boundaries_s = [
        crossing_s[stage : stage + width, None] + crossing_s[None, stage + 1 : stage + 1 + width]
        for stage in range(line.num_stages)
    ]
    found = least_max(alike.cost_s(stage) + boundary_s for stage, boundary_s in enumerate(boundaries_s))
    if found.value == np.inf:
        found = least_max(alike.busy_s[stage] + boundary_s for stage, boundary_s in enumerate(boundaries_s))
    return found.cuts()


def pipedream_2bw_s(loads: Loads, cuts: Cuts, *, width: int = 1, sync_bytes_per_s: float = math.inf) -> float:
    """PipeDream-2BW's estimate of the seconds per micro-batch of one of `width` replicas.

    Messages do not overlap with computing, the ring all-reduce does over all of a batch.
    """
    chain, line = loads.chain, loads.line
    bytes_per_s = min((link.bytes_per_s for link in line.links), default=math.inf)
    worst_s = 0.0
    for stage, (begin, end) in enumerate(pairwise(chain.bounds(cuts))):
        again = loads.is_recomputed(stage, begin, end)
        backward_s = chain.recompute_backward_s if again else chain.backward_s
        into = chain.boundary_bytes[begin - 1] if stage else 0
        out = chain.boundary_bytes[end - 1] if end < chain.num_units else 0
        busy_s = chain.forward_s[begin:end].sum() + backward_s[begin:end].sum()
        sync_bytes = ring_share(width) * chain.bytes.gradient[begin, end]
        sync_s = sync_bytes / sync_bytes_per_s / loads.setting.num_microbatches
        worst_s = max(worst_s, float(busy_s + 2 * (into + out) / bytes_per_s), float(sync_s))
    return worst_s


BASELINES: Mapping[str, Planner] = MappingProxyType(
    {
        "uniform": uniform,
        "parameters": parameters,
        "dapple": dapple,
        "piper": piper,
        "pipedream-2bw": pipedream_2bw,
    }
)
"""The planners to compare with, by name."""


def _dealt(num_things: int, num_stages: int, *, more_first: bool) -> Cuts:
    each, left = divmod(num_things, num_stages)
    first = left if more_first else num_stages - left
    sizes = [each + ((stage < first) == more_first and left > 0) for stage in range(num_stages)]
    return tuple(int(place) for place in np.cumsum(sizes)[:-1])


def _is_layer(name: str) -> bool:
    return any(part.isdecimal() for part in name.split(" ")[0].split("."))
