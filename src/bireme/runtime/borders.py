"""What crosses the borders between stages, tensor by tensor, at any micro-batch size.

Forward goes everything that the next stage receives, backward the gradients of those of these tensors that
learn. Both ends know this from the graph, so no shapes are sent.

A codec is for activations and their gradients. What no gradient comes back for (integers, masks, positions)
and what is tiny is sent as it is.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch

from bireme.codec.description import FEWEST_ENTRIES, NONE, CodecChoice
from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.learned import learned_values
from bireme.model.length import evaluate
from bireme.model.units import Unit
from bireme.plan.program_plan import ProgramPlan
from bireme.runtime.tensor_spec import TensorSpec
from bireme.runtime.wire import WireFormat

__all__ = ["Borders", "received_by"]


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

    def check_halves(self, schedule: str) -> None:
        """Where micro-batches go in halves, everything that crosses a border must be cut along with them."""
        for names in self.receives:
            for name in names:
                if self.batch_axis(name) is None:
                    raise BiremeError(
                        f"{schedule} sends micro-batches in halves, and {name}, which crosses between "
                        "stages, is not cut by samples. Use 1f1b."
                    )

    def _forward(
        self, to_stage: int, num_samples: int, codec: CodecChoice = NONE, of_samples: int = 0
    ) -> WireFormat:
        """What a stage receives from the one before it, for so many samples: part of a micro-batch of
        `of_samples`, if that is more.
        """
        return self._format(self.receives[to_stage], num_samples, codec, of_samples, is_back=False)

    def _backward(
        self, to_stage: int, num_samples: int, codec: CodecChoice = NONE, of_samples: int = 0
    ) -> WireFormat:
        """What a stage receives from the next one."""
        return self._format(self.gradients_into(to_stage), num_samples, codec, of_samples, is_back=True)

    def _format(
        self, names: tuple[str, ...], num_samples: int, codec: CodecChoice, of_samples: int, *, is_back: bool
    ) -> WireFormat:
        specs = []
        for name in names:
            shape = self._shape(name, num_samples)
            dtype = getattr(torch, self._values[name].dtype)
            # A half is encoded where the whole is, for the whole gradient will need the masks of both.
            if self._is_encoded(name, codec, dtype, max(num_samples, of_samples)):
                axis = self.batch_axis(name) or 0
                specs.append(TensorSpec(name, shape, dtype, codec, is_back, axis))
            else:
                specs.append(TensorSpec(name, shape, dtype))
        return WireFormat(tuple(specs))

    def _shape(self, name: str, num_samples: int) -> tuple[int, ...]:
        return tuple(evaluate(length, num_samples) for length in self._values[name].shape)

    def _is_encoded(self, name: str, codec: CodecChoice, dtype: torch.dtype, num_samples: int) -> bool:
        """Whether a tensor is encoded. Rows, which `keep` takes entries from, must not go over samples."""
        if codec == NONE or name not in self.learned or not dtype.is_floating_point:
            return False
        shape = self._shape(name, num_samples)
        has_rows = codec.name != "keep" or codec.life is not None or self.batch_axis(name) != len(shape) - 1
        return has_rows and prod(shape) >= FEWEST_ENTRIES


def received_by(units: Sequence[Unit], plan: ProgramPlan) -> tuple[tuple[str, ...], ...]:
    """What each stage receives."""
    return tuple(units[plan.units_of(stage, len(units))[0]].receives for stage in range(plan.num_stages))
