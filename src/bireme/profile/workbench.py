"""The workbench: some consecutive units with all they need to run, on numbers that mean nothing.

It runs them as the engine does: parameters are arguments, gradients are accumulated into memory that is
there already. Inside `fake_tensors` it holds no memory and shows what would be kept.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from bireme.model.graph import Graph, ModelState, Value
from bireme.model.length import evaluate
from bireme.model.stage import StageFunction

__all__ = ["Workbench"]

DEVIATION = 0.02
"""Of weights: what a layer gives then is neither huge nor so small that arithmetic slows down."""

LOSS = "loss"


class Workbench:
    """Runs units forward and backward, as often as one likes.

    `function` is theirs; `learned` are the values of the graph that a gradient comes back to. `examples` are
    inputs of the model, where there are some: their samples are used as often as the micro-batch needs. What
    else comes in is random; whole numbers are zero, which is a valid place in any table.
    """

    def __init__(
        self,
        graph: Graph,
        function: StageFunction,
        *,
        learned: frozenset[str],
        batch: int,
        device: torch.device,
        examples: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.function = function
        self.device = device
        self.batch = batch
        states = {state.name: state for state in (*graph.parameters, *graph.buffers)}
        values = {value.name: value for value in graph.inputs}
        values |= {v.name: v for op in graph.operators for v in op.outputs if v is not None}
        generator = torch.Generator(device).manual_seed(0) if device.type != "meta" else None
        self._generator = generator
        self.parameters = {name: self._parameter(states[name]) for name in function.parameters}
        self.buffers = {name: self._buffer(states[name]) for name in function.buffers}
        self.received = {
            name: self._value(values[name]).requires_grad_(name in learned) for name in function.receives
        }
        own = {name: self._input(values[name], examples) for name in function.inputs}
        self.given = {**own, **self.received}
        names = [output.name for output in graph.outputs]
        learns_from = [LOSS] if LOSS in names else names
        self.roots = tuple(
            dict.fromkeys((*function.sends, *(n for n in learns_from if n in function.outputs)))
        )
        self._output_gradients: dict[str, Tensor] = {}

    @property
    def trainable(self) -> list[Tensor]:
        """The parameters that get a gradient."""
        return [tensor for tensor in self.parameters.values() if tensor.requires_grad]

    def forward(self) -> dict[str, Tensor]:
        """Run the units."""
        return self.function(self.parameters, self.buffers, self.given, device=self.device)

    def backward(self, roots: Mapping[str, Tensor]) -> None:
        """Bring gradients from the differentiable results back to parameters and to what was received."""
        if roots:
            torch.autograd.backward(list(roots.values()), self.output_gradients(roots))
        for tensor in self.received.values():
            tensor.grad = None

    def differentiable(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The results that get a gradient from outside: what is sent, and the loss."""
        return {name: results[name] for name in self.roots if results[name].requires_grad}

    def output_gradients(self, roots: Mapping[str, Tensor]) -> list[Tensor]:
        """A gradient for each of them; always the same ones, so that making them costs no time later."""
        for name, root in roots.items():
            if name not in self._output_gradients:
                self._output_gradients[name] = torch.ones_like(root, requires_grad=False)
        return [self._output_gradients[name] for name in roots]

    def _parameter(self, state: ModelState) -> Tensor:
        dtype = getattr(torch, state.dtype)
        if len(state.shape) > 1 and dtype.is_floating_point:
            tensor = self._random(state.shape, dtype).mul_(DEVIATION)
        else:
            tensor = torch.ones(state.shape, dtype=dtype, device=self.device)
        if state.trainable:
            tensor.requires_grad_()
            if dtype.itemsize < torch.float32.itemsize:
                tensor.grad_dtype = torch.float32
            tensor.grad = torch.zeros_like(tensor, dtype=tensor.grad_dtype, requires_grad=False)
        return tensor

    def _buffer(self, state: ModelState) -> Tensor:
        dtype = getattr(torch, state.dtype)
        fill = torch.ones if dtype.is_floating_point or dtype is torch.bool else torch.zeros
        return fill(state.shape, dtype=dtype, device=self.device)

    def _value(self, value: Value) -> Tensor:
        shape = tuple(evaluate(length, self.batch) for length in value.shape)
        dtype = getattr(torch, value.dtype)
        if dtype.is_floating_point:
            return self._random(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _input(self, value: Value, examples: Mapping[str, Tensor] | None) -> Tensor:
        example = examples.get(value.name) if examples is not None else None
        if example is None or example.is_meta or not value.shape:
            return self._value(value)
        given = example.to(self.device)
        return given[torch.arange(self.batch, device=self.device) % len(given)]

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=self.device, generator=self._generator)
