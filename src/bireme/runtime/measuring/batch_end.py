"""What the end of a batch takes for some parameters: REDUCE, TRIAL and UPDATE, run by the engine.

The parameters of a unit are put into a model that does nothing with them but give each a gradient, and the
engine trains that on this process alone under the rule that has all three instructions. Between batches other
memory is gone through, for in training a step finds the caches full of activations.
"""

from collections.abc import Iterable, Sequence
from statistics import median

import torch
from torch import Tensor, nn

from bireme.model.graph import Graph, State
from bireme.model.units import Unit
from bireme.plan.plan import Plan
from bireme.profile.measuring import BatchEnd
from bireme.runtime.optimizers import named_optimizer
from bireme.runtime.pipeline import Pipeline
from bireme.schedule.instruction import Kind

__all__ = ["batch_end_of"]

NUM_SETTLING, NUM_COUNTED = 3, 7
"""Batches: an optimiser makes its state in the first ones."""

OTHER_BYTES = 32 * 2**20
"""More than a core's own cache."""

RATE = 1e-6


class _Holder(nn.Module):
    """Parameters of the given names and shapes, each of which has a part in the loss."""

    def __init__(self, states: Sequence[State]) -> None:
        super().__init__()
        for state in states:
            *path, name = state.name.split(".")
            where: nn.Module = self
            for part in path:
                if part not in where._modules:
                    where.add_module(part, nn.Module())
                where = where.get_submodule(part)
            dtype = getattr(torch, state.dtype)
            where.register_parameter(name, nn.Parameter(torch.full(state.shape, 0.01, dtype=dtype)))

    def forward(self, given: Tensor) -> dict[str, Tensor]:
        """The sum of all parameters' first numbers, as far as it matters."""
        firsts = [parameter.reshape(-1)[:1].float() for parameter in self.parameters()]
        return {"loss": (torch.cat(firsts) * given.mean()).sum()}


def batch_end_of(graph: Graph, unit: Unit, optimizer: str) -> BatchEnd:
    """The medians for the parameters of a unit; nothing where none of them learns. On the CPU."""
    states = [state for state in graph.parameters if state.name in unit.parameters and state.trainable]
    if not states:
        return BatchEnd(0.0, 0.0, 0.0)
    shortest = min((getattr(torch, state.dtype) for state in states), key=lambda one: one.itemsize)
    pipeline = Pipeline(
        _Holder(states),
        Plan((), 1, "2bw-fresh"),
        example_inputs={"given": torch.ones(2, 1)},
        optimizer=named_optimizer(optimizer, lr=RATE),
        clip_norm=1.0,
        bank_dtype=shortest if shortest.itemsize < torch.float32.itemsize else None,
    )
    other = torch.zeros(OTHER_BYTES // 4)

    def batches(count: int) -> Iterable[dict[str, Tensor]]:
        for _ in range(count):
            other.add_(1.0)
            yield {"given": torch.ones(2, 1)}

    for _ in pipeline.train(batches(NUM_SETTLING)):
        pass
    for _ in pipeline.train(batches(NUM_COUNTED + 1), record=True):
        pass
    (rank,) = pipeline.timeline().ranks
    pipeline.close()
    seconds: dict[Kind, list[float]] = {}
    for interval in rank.intervals():
        seconds.setdefault(interval.instruction.kind, []).append(interval.end_s - interval.start_s)
    return BatchEnd(*(median(seconds[kind][1:]) for kind in (Kind.REDUCE, Kind.UPDATE, Kind.TRIAL)))
