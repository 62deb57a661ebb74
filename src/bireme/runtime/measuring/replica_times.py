"""How long each replica takes for micro-batches of several sizes, measured on its own devices.

All ranks run the forward and the backward of their own stages at the same time, on the real model and shapes
and with the weights that they train, which stay as they are. What comes from a neighbour is made up. A
replica is as fast as its slowest rank.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from bireme.balance.knee import Times
from bireme.devices import synchronize
from bireme.model.segments import untouched
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.stage import LOSS, Stage

__all__ = ["replica_times"]

NUM_RUNS, LEAST_S = 5, 0.2
"""So often, and for so long, is each stage run at each size: what is over soon scatters most."""
NEVER = float("inf")

Rows = Callable[[int, Sequence[str]], Mapping[str, Tensor]]
"""Gives so many samples of some inputs of the model."""


def replica_times(pipeline: Pipeline, rows: Rows, sizes: Sequence[int], most: Sequence[int]) -> list[Times]:
    """What each replica takes for each of the sizes, of which its memory holds those up to `most[replica]`.

    All ranks call it, when nothing is under way.
    """
    per_replica = pipeline.layout.num_pipeline_ranks
    found: list[list[float]] = [[] for _ in most]
    for size in sizes:
        own_s = 0.0
        for stage in pipeline.stages.values():
            with _gathered(stage):
                if size <= most[pipeline.layout.replica]:
                    own_s += _seconds(pipeline, stage, rows, size)
        of_ranks = pipeline.gather([own_s])
        for replica, seconds in enumerate(found):
            ranks = of_ranks[replica * per_replica : (replica + 1) * per_replica]
            seconds.append(max(row[0] for row in ranks) if size <= most[replica] else NEVER)
    return [Times(tuple(sizes), tuple(seconds)) for seconds in found]


def _gathered(stage: Stage) -> AbstractContextManager[object]:
    """Within this context a stage's weights are whole here, where each replica keeps a part of them."""
    gathered = stage.banks.gathered
    return nullcontext() if gathered is None else gathered.lent(stage.banks.newest_version)


def _seconds(pipeline: Pipeline, stage: Stage, rows: Rows, size: int) -> float:
    """The median of a stage's forward and backward, after a first one that does not count."""
    device = pipeline.device
    given = {name: one.to(device) for name, one in rows(size, stage.function.inputs).items()}
    received = {
        spec.name: _made_up(spec.shape, spec.dtype, device) for spec in pipeline.received(stage.index, size)
    }
    laps: list[float] = []
    while len(laps) <= NUM_RUNS or sum(laps) < LEAST_S:
        synchronize(device)
        begin_s = perf_counter()
        _run(stage, given, received, device)
        synchronize(device)
        laps.append(perf_counter() - begin_s)
    return median(laps[1:])


def _made_up(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)


def _run(
    stage: Stage, given: Mapping[str, Tensor], received: Mapping[str, Tensor], device: torch.device
) -> None:
    """One forward and one backward, of which nothing is kept."""
    function, banks = stage.function, stage.banks
    leaves = {
        name: tensor.requires_grad_(name in banks.trainable)
        for name, tensor in banks.newest_to_compute_with().items()
    }
    into = {
        name: tensor.detach().requires_grad_(tensor.dtype.is_floating_point)
        for name, tensor in received.items()
    }
    buffers = untouched(stage.buffers, function.writes)
    results = function(leaves, buffers, {**given, **into}, device=device, seed=0)
    roots = [results[name] for name in (*function.sends, LOSS) if name in results]
    roots = [root for root in roots if root.requires_grad]
    wanted = [one for one in (*leaves.values(), *into.values()) if one.requires_grad]
    if roots and wanted:
        torch.autograd.grad(roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True)
