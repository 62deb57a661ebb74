"""What crosses the borders between stages, tensor by tensor, at any micro-batch size.

Forward goes everything that the next stage receives, backward the gradients of those of these tensors that
learn. Both ends know this from the graph, so no shapes are sent.
"""

from functools import lru_cache

import torch

from bireme.model.graph import Graph
from bireme.model.learned import learned_values
from bireme.model.length import evaluate
from bireme.runtime.wire import TensorSpec, WireFormat

__all__ = ["Borders"]


class Borders:
    """The borders of a pipeline. `receives` are, stage by stage, the names of what it receives."""

    def __init__(self, graph: Graph, receives: tuple[tuple[str, ...], ...]) -> None:
        self.receives = receives
        self.learned = learned_values(graph)
        self._values = {v.name: v for op in graph.operators for v in op.outputs if v is not None}
        self._values |= {value.name: value for value in graph.inputs}
        self.forward = lru_cache(maxsize=256)(self._forward)
        self.backward = lru_cache(maxsize=256)(self._backward)

    def gradients_into(self, stage: int) -> tuple[str, ...]:
        """The names of the tensors whose gradients a stage receives from the next one."""
        if stage + 1 >= len(self.receives):
            return ()
        return tuple(name for name in self.receives[stage + 1] if name in self.learned)

    def batch_axis(self, name: str) -> int | None:
        """The axis of a tensor that grows with the batch."""
        shape = self._values[name].shape
        return next((axis for axis, length in enumerate(shape) if not isinstance(length, int)), None)

    def _forward(self, to_stage: int, num_samples: int) -> WireFormat:
        """What a stage receives from the one before it, for so many samples."""
        return self._format(self.receives[to_stage], num_samples)

    def _backward(self, to_stage: int, num_samples: int) -> WireFormat:
        """What a stage receives from the next one."""
        return self._format(self.gradients_into(to_stage), num_samples)

    def _format(self, names: tuple[str, ...], num_samples: int) -> WireFormat:
        specs = []
        for name in names:
            value = self._values[name]
            shape = tuple(evaluate(length, num_samples) for length in value.shape)
            specs.append(TensorSpec(name, shape, getattr(torch, value.dtype)))
        return WireFormat(tuple(specs))
