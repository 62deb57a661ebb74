"""A stage of which some units keep nothing for their backward but what comes into them.

It is called like any stage function. Units in a row that recompute do so together, under the same weights and
the same draws, for both are arguments.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bireme.model.graph import Graph
from bireme.model.stage import Resolve, StageFunction, stage_function, torch_operator
from bireme.model.units import Unit

__all__ = ["SegmentedFunction", "untouched"]

Tensors = Mapping[str, Tensor]


class SegmentedFunction:
    """Some consecutive units as one function, those with an index in `recomputed` run again in the
    backward.
    """

    def __init__(
        self,
        graph: Graph,
        units: Sequence[Unit],
        recomputed: Collection[int],
        *,
        resolve: Resolve = torch_operator,
        compile: bool = False,  # noqa: A002 (torch's word for it)
        outputs: Collection[str] | None = None,
    ) -> None:
        runs = [(again, list(run)) for again, run in groupby(units, lambda unit: unit.index in recomputed)]
        self._segments = [
            (again, stage_function(graph, run, resolve=resolve, compile=compile, outputs=outputs))
            for again, run in runs
        ]
        functions = [function for _, function in self._segments]
        self.receives = functions[0].receives
        self.sends = functions[-1].sends
        self.parameters = _merged(function.parameters for function in functions)
        self.buffers = _merged(function.buffers for function in functions)
        self.inputs = _merged(function.inputs for function in functions)
        self.writes = _merged(function.writes for function in functions)
        self.outputs = _merged(function.outputs for function in functions)
        self.is_random = any(function.is_random for function in functions)

    def __call__(
        self,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensors,
        *,
        device: torch.device | None = None,
        seed: int | None = None,
    ) -> dict[str, Tensor]:
        """Run the units, as `StageFunction` does."""
        values = dict(inputs)
        for again, function in self._segments:
            if again and torch.is_grad_enabled():
                values |= _checkpointed(function, parameters, buffers, values, device, seed)
            else:
                values |= function(parameters, buffers, values, device=device, seed=seed)
        return {name: values[name] for name in (*self.sends, *self.outputs)}

    def constants(self, device: torch.device) -> tuple[Tensor, ...]:
        """What the model's code holds as constants, on a device that the stage runs on."""
        return tuple(one for _, function in self._segments for one in function.constants(device))


def _checkpointed(
    function: StageFunction,
    parameters: Tensors,
    buffers: Tensors,
    values: Tensors,
    device: torch.device | None,
    seed: int | None,
) -> dict[str, Tensor]:
    """The function's results, of which autograd keeps only what came in."""
    given = {name: values[name] for name in (*function.inputs, *function.receives)}
    own = {name: parameters[name] for name in function.parameters}
    has_run = False

    def run(weights: Tensors, received: Tensors) -> dict[str, Tensor]:
        nonlocal has_run
        # What the forward writes to its buffers it wrote the first time.
        kept = untouched(buffers, function.writes) if has_run else buffers
        has_run = True
        return function(weights, kept, received, device=device, seed=seed)

    found: dict[str, Tensor] = checkpoint(run, own, given, use_reentrant=False, preserve_rng_state=False)
    return found


def untouched(buffers: Tensors, writes: Iterable[str]) -> Tensors:
    """Buffers for a forward that must not change them: copies of those that it writes to."""
    return {**buffers, **{name: buffers[name].clone() for name in writes}}


def _merged(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in names for name in part))
