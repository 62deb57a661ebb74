"""Floating-point operations of the operators that are made of multiplications; the others count as none."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch

__all__ = ["flops_of"]

Shape = tuple[int, ...]


def flops_of(node: torch.fx.Node) -> float:
    """Of one call at the size it was captured with."""
    count = COUNTS.get(str(node.target).removeprefix("aten.").rpartition(".")[0])
    result = node.meta.get("val")
    first = result[0] if isinstance(result, tuple | list) and result else result
    if count is None or not isinstance(first, torch.Tensor):
        return 0.0
    given = [_shape(argument) for argument in node.args]
    return float(count(given, _concrete(first)))


def _shape(argument: Any) -> Shape:
    value = argument.meta.get("val") if isinstance(argument, torch.fx.Node) else None
    return _concrete(value) if isinstance(value, torch.Tensor) else ()


def _concrete(tensor: torch.Tensor) -> Shape:
    """The lengths at the captured size: an expression's hint is what it was then."""
    return tuple(n if isinstance(n, int) else int(n.node.hint) for n in tensor.shape)


def _linear(given: list[Shape], out: Shape) -> int:
    return 2 * prod(out) * given[0][-1]


def _addmm(given: list[Shape], out: Shape) -> int:
    return 2 * prod(out) * given[1][-1]


def _convolution(given: list[Shape], out: Shape) -> int:
    return 2 * prod(out) * prod(given[1][1:])


def _attention(given: list[Shape], out: Shape) -> int:
    query, key = given[0], given[1]
    return 2 * prod(query) * key[-2] + 2 * prod(out) * key[-2]


COUNTS: dict[str, Callable[[list[Shape], Shape], int]] = {
    "linear": _linear,
    "mm": _linear,
    "bmm": _linear,
    "matmul": _linear,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "scaled_dot_product_attention": _attention,
}
