"""Gradients of a GPT in one backward, and what the first samples of a batch gave to each of them.

A stage that begins its next batch has the gradients of the first micro-batches alone. To run these apart from
the others would be many small passes in place of a large one; only the gradients of weights must be apart,
and so they are two products in place of one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bireme.errors import BiremeError

__all__ = ["Divided"]


class Divided:
    """Has the backward of a model write what the first samples give into `seen`, by the parameters' names.

    `first_of` says by a parameter's name how many of so many samples come first; where all of them do,
    nothing is written.
    """

    def __init__(
        self, model: nn.Module, seen: Mapping[str, Tensor], first_of: Callable[[str, int], int]
    ) -> None:
        self._batch = _Batch()
        for prefix, module in model.named_modules():
            own = [f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False)]
            if own:
                part = _Part(self._batch, [seen[name] for name in own], partial(first_of, own[0]))
                module.forward = partial(_forward_of(prefix, module), module, part)

    def begin(self, num_samples: int | None) -> None:
        """Passes are of so many samples and divided until the end; None stands for passes as ever."""
        self._batch.num_samples = num_samples

    def end(self) -> None:
        """Passes are as ever, of any number of samples."""
        self._batch.num_samples = None


@dataclass(slots=True)
class _Batch:
    """Of how many samples it is, where it is divided."""

    num_samples: int | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """Where a module's gradients of the first samples belong: its weight's, and its bias's if it has one."""

    batch: _Batch
    seen: list[Tensor]
    first_of: Callable[[int], int]

    @property
    def first(self) -> int | None:
        """How many samples come first; None where nothing is to be written."""
        if self.batch.num_samples is None:
            return None
        first = self.first_of(self.batch.num_samples)
        return None if first == self.batch.num_samples else first


def _forward_of(name: str, module: nn.Module) -> Callable[..., Tensor]:
    match module:
        case nn.Linear():
            return _linear
        case nn.LayerNorm():
            return _norm
        case nn.Embedding():
            return _positions if name == "positions" else _tokens
    raise BiremeError(f"The gradient of a {type(module).__name__} cannot be divided by samples.")


def _linear(module: nn.Linear, part: _Part, x: Tensor) -> Tensor:
    if part.first is None:
        return functional.linear(x, module.weight, module.bias)
    return _applied(_Linear, x, module.weight, module.bias, part)


def _norm(module: nn.LayerNorm, part: _Part, x: Tensor) -> Tensor:
    if part.first is None:
        return functional.layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)
    return _applied(_Norm, x, module.weight, module.bias, module.eps, part)


def _tokens(module: nn.Embedding, part: _Part, ids: Tensor) -> Tensor:
    if part.first is None:
        return functional.embedding(ids, module.weight)
    return _applied(_Embedding, ids, module.weight, part)


def _positions(module: nn.Embedding, part: _Part, ids: Tensor) -> Tensor:
    """The same rows for all samples, each sample with its own."""
    if part.first is None or part.batch.num_samples is None:
        return functional.embedding(ids, module.weight)
    return _applied(_Embedding, ids.expand(part.batch.num_samples, -1), module.weight, part)


def _applied(function: type[torch.autograd.Function], *values: Any) -> Tensor:
    found: Tensor = function.apply(*values)
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, part: _Part) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.part = part
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (flowing,), part = gradients, ctx.part
        first = part.first * (x.numel() // x.shape[0] // x.shape[-1])
        given, back = x.reshape(-1, x.shape[-1]), flowing.reshape(-1, flowing.shape[-1])
        torch.mm(back[:first].T, given[:first], out=part.seen[0])
        of_weight = torch.addmm(part.seen[0], back[first:].T, given[first:])
        of_bias = None
        if len(part.seen) > 1:
            torch.sum(back[:first], 0, out=part.seen[1])
            of_bias = part.seen[1] + back[first:].sum(0)
        return flowing @ weight, of_weight, of_bias, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, part: _Part) -> Tensor:
        found, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.part = part
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        part, (flowing,) = ctx.part, gradients
        found = [
            torch.ops.aten.native_layer_norm_backward(
                flowing[some],
                x[some],
                x.shape[-1:],
                mean[some],
                rstd[some],
                weight,
                bias,
                [True, True, True],
            )
            for some in (slice(part.first), slice(part.first, None))
        ]
        part.seen[0].copy_(found[0][1])
        part.seen[1].copy_(found[0][2])
        of_x, of_weight, of_bias = zip(*found, strict=True)
        return torch.cat(of_x), of_weight[0] + of_weight[1], of_bias[0] + of_bias[1], None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, part: _Part) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_rows = len(weight)
        ctx.part = part
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), (flowing,), part = ctx.saved_tensors, gradients, ctx.part
        seen, rest = (
            torch.ops.aten.embedding_dense_backward(flowing[some], ids[some], ctx.num_rows, -1, False)
            for some in (slice(part.first), slice(part.first, None))
        )
        part.seen[0].copy_(seen)
        return None, seen + rest, None
