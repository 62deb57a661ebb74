"""What runs for the operator of `fused_loss`: a linear layer and its cross-entropy, on pieces of the rows.

The softmax is computed in the memory of the logits, and its gradient overwrites it. The backward continues
from the smaller of two gradients:

  few rows    the gradient of all logits, as large as the logits; two products are left to the backward
  many rows   the gradients of hidden states and weight; logits exist for a piece of the rows at a time

If the weight does not learn, the gradient of the hidden states is always the smaller one. Both ways take the
three products of plain operators, and no fourth. Without gradients there is one, piece by piece.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bireme.devices import is_accelerator
from bireme.model.fused_loss import MEAN, keeps_logits, rows_at_once

_BLOCK_BYTES, _ACCELERATOR_BLOCK_BYTES = 2**22, 2**27
"""Bytes of the rows that a softmax is made of at a time: few enough for a processor's cache, or enough to
keep a device busy."""

_SUM_PARTS = 8
"""Parts in which products of 16 bits are added to a gradient in float32, so that a product is short-lived."""

_OPERATORS = torch.ops.bireme

_local = threading.local()

RowOperator = Sequence[Any]
"""The name of an operator, and what it is given after the tensor."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rows: Sequence[RowOperator],
    dtype: torch.dtype,
    reduction: int,
    ignored: int,
) -> Tensor:
    """The loss of `linear(hidden, weight, bias)`, after the operators in `rows`, at the targets.

    The loss is computed in float32 at least, and given in `dtype`.
    """
    for name, *given in rows:
        hidden = _operator(name)(hidden, *given)
    counted = (targets != ignored).sum() if reduction == MEAN else targets.new_ones(())
    factor = counted.to(_wide(hidden.dtype)).reciprocal()
    num_rows, width = hidden.shape
    learns = any(one is not None and one.requires_grad for one in (hidden, weight, bias))
    of_logits: Callable[..., Tensor] = _KeptLogits.apply
    of_pieces: Callable[..., Tensor] = _KeptGradients.apply
    if not torch.is_grad_enabled() or not learns:
        loss = _loss_of_pieces(hidden, weight, bias, targets, factor, ignored)
    elif keeps_logits(num_rows, width, hidden.element_size(), learns=weight.requires_grad):
        loss = of_logits(functional.linear(hidden, weight, bias), targets, factor, ignored)
    else:
        loss = of_pieces(hidden, weight, bias, targets, factor, ignored)
    return loss.to(dtype)


@contextmanager
def without_gradients() -> Iterator[None]:
    """Let forwards of this thread make the loss alone, because they run again before their backward."""
    _local.skips = True
    try:
        yield
    finally:
        _local.skips = False


def _operator(name: str) -> Any:
    _, operator, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, operator), overload)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums and exponents are computed in."""
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


class _KeptLogits(torch.autograd.Function):
    """The loss of logits, which are overwritten by their gradient: nothing else may read them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, factor: Tensor, ignored: int) -> Tensor:
        gradient = logits.detach()
        loss: Tensor = _OPERATORS.softmax_loss(gradient, targets, factor, ignored, makes_gradient=True)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(gradients[0]), None, None, None


class _KeptGradients(torch.autograd.Function):
    """The loss of a linear layer, piece by piece, with the gradients of what it is given."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        factor: Tensor,
        ignored: int,
    ) -> Tensor:
        needs = zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        given = [one if is_needed else None for one, is_needed in needs]
        kinds = hidden.dtype, _wide(weight.dtype), _wide(weight.dtype)
        if getattr(_local, "skips", False):
            # What is saved now is thrown away, and only its shape is looked at.
            made = (
                None if one is None else one.new_empty((), dtype=kind).expand(one.shape)
                for one, kind in zip(given, kinds, strict=True)
            )
            ctx.save_for_backward(*made)
            return _loss_of_pieces(hidden, weight, bias, targets, factor, ignored)
        of_hidden = None if given[0] is None else torch.empty_like(hidden)
        of_weight, of_bias = (
            None if one is None else torch.zeros_like(one, dtype=_wide(one.dtype)) for one in given[1:]
        )
        loss = torch.zeros_like(factor)
        for piece, logits in _pieces(hidden, weight, bias):
            loss += _OPERATORS.softmax_loss(logits, targets[piece], factor, ignored, makes_gradient=True)
            if of_hidden is not None:
                torch.mm(logits, weight, out=of_hidden[piece])
            if of_weight is not None:
                _add_product(of_weight, logits, hidden[piece])
            if of_bias is not None:
                of_bias += logits.sum(0, dtype=of_bias.dtype)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if one is None else one.mul_(gradients[0]) for one in ctx.saved_tensors)
        return (*found, None, None, None)


def _add_product(total: Tensor, logits: Tensor, hidden: Tensor) -> None:
    """Add the gradient of a weight that is made of some rows."""
    if total.dtype == hidden.dtype:
        total.addmm_(logits.T, hidden)
        return
    size = -(-len(total) // _SUM_PARTS)
    for begin in range(0, len(total), size):
        total[begin : begin + size] += logits[:, begin : begin + size].T @ hidden


def _loss_of_pieces(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, factor: Tensor, ignored: int
) -> Tensor:
    """The loss alone."""
    loss = torch.zeros_like(factor)
    with torch.no_grad():
        for piece, logits in _pieces(hidden, weight, bias):
            loss += _OPERATORS.softmax_loss(logits, targets[piece], factor, ignored, makes_gradient=False)
    return loss


def _pieces(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Pieces of the rows with their logits. All use the same memory: new memory has to be cleared."""
    num_rows = rows_at_once(*hidden.shape)
    memory = hidden.new_empty(num_rows, len(weight))
    for begin in range(0, max(len(hidden), 1), num_rows):
        piece = slice(begin, begin + num_rows)
        given = hidden[piece]
        logits = memory[: len(given)]
        if bias is None:
            torch.mm(given, weight.T, out=logits)
        else:
            torch.addmm(bias, given, weight.T, out=logits)
        yield piece, logits


def _softmax_loss(
    logits: Tensor, targets: Tensor, factor: Tensor, ignored: int, *, makes_gradient: bool
) -> Tensor:
    """The sum of the losses of some rows, times `factor`. The logits are overwritten, if `makes_gradient` by
    the gradient of this loss.
    """
    block_bytes = _ACCELERATOR_BLOCK_BYTES if is_accelerator(logits.device) else _BLOCK_BYTES
    wide = factor.dtype
    num_rows = max(block_bytes // (logits.shape[1] * wide.itemsize), 1)
    loss = torch.zeros_like(factor)
    for begin in range(0, len(logits), num_rows):
        given, wanted = logits[begin : begin + num_rows], targets[begin : begin + num_rows]
        counts = wanted != ignored
        place = torch.where(counts, wanted, 0).unsqueeze(1)
        scores = given.to(wide)
        largest = scores.amax(1, keepdim=True)
        chosen = scores.gather(1, place)
        total = scores.sub_(largest).exp_().sum(1, keepdim=True)
        own = total.log().add_(largest).sub_(chosen).squeeze(1)
        loss += torch.where(counts, own, 0.0).sum()
        if makes_gradient:
            each = torch.where(counts, factor, 0.0).unsqueeze(1)
            scores.mul_(each / total).scatter_add_(1, place, -each)
            if scores is not given:
                given.copy_(scores)
    return loss.mul_(factor)


def _without_numbers(_logits: Tensor, _targets: Tensor, factor: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(factor)


# As an operator of torch, compilers leave it alone, and bytes are counted without a look at its blocks.
# `torch.library.custom_op` would import the compiler at the first call, which takes 80 MiB and 1.6 s.

if not hasattr(torch.ops.bireme, "softmax_loss"):  # else this module was imported before, and is once more
    _library: Any = torch.library.Library("bireme", "FRAGMENT")
    _library.define(
        "softmax_loss(Tensor(a!) logits, Tensor targets, Tensor factor, int ignored, *, bool makes_gradient) "
        "-> Tensor"
    )
    _library.impl("softmax_loss", _softmax_loss, "CompositeExplicitAutograd")
    _library.impl("softmax_loss", _without_numbers, "Meta")
