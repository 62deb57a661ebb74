"""Devices that take their time: layers that sleep in proportion to their samples, besides what they compute.

So devices of different speeds run beside each other on few cores. The operators that sleep are part of a
captured model. A backward sleeps twice as long as a forward: half of it with the gradient of the layer's
input, and half with that of a weight, so that a schedule that splits backwards moves the second half. The
clock of Bireme's profile counts seconds of a core; here it also counts those that were slept, so that
predictions have them.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bireme.model.gpt import GPT
from bireme.profile import timing

SPEED = "BIREME_BENCHMARK_SPEED"
"""Names the variable with the speed of a process's device; 0 does not sleep at all."""


class PacedNorm(nn.LayerNorm):
    """The first norm of a layer that takes `forward_s` for the forward of a sample on a device of speed 1."""

    def __init__(self, norm: nn.LayerNorm, forward_s: float) -> None:
        super().__init__(norm.normalized_shape, norm.eps)
        self.weight, self.bias = norm.weight, norm.bias
        self.forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        """The norm of each token, after the seconds of the whole layer."""
        late = _input(x, self.forward_s)
        weight = _weight(self.weight, x.detach(), self.forward_s)
        return functional.layer_norm(late, self.normalized_shape, weight, self.bias, self.eps)


def pace(model: GPT, forward_s: float) -> None:
    """Let every layer of a GPT take its time."""
    for layer in model.layers:
        norm = layer.attention_norm
        assert isinstance(norm, nn.LayerNorm), "a GPT has one ahead of each half of a layer"
        layer.attention_norm = PacedNorm(norm, forward_s)


@torch.library.custom_op("paced::input", mutates_args=())
def _input(x: Tensor, seconds: float) -> Tensor:
    _sleep(len(x) * seconds)
    return x.clone()


@torch.library.custom_op("paced::weight", mutates_args=())
def _weight(weight: Tensor, x: Tensor, seconds: float) -> Tensor:
    return weight.clone()


@torch.library.custom_op("paced::gradient", mutates_args=())
def _gradient(gradient: Tensor, like: Tensor, seconds: float) -> Tensor:
    _sleep(len(like) * seconds)
    return gradient.clone()


@_input.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


@_weight.register_fake
def _(weight: Tensor, x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(weight)


@_gradient.register_fake
def _(gradient: Tensor, like: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(gradient)


def _keep_seconds(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.seconds = inputs[-1]


def _keep_samples(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.seconds = inputs[2]


_input.register_autograd(
    lambda ctx, gradient: (_gradient(gradient, gradient, ctx.seconds), None), setup_context=_keep_seconds
)
_weight.register_autograd(
    lambda ctx, gradient: (_gradient(gradient, ctx.saved_tensors[0], ctx.seconds), None, None),
    setup_context=_keep_samples,
)


def _sleep(seconds: float) -> None:
    global _slept_s  # noqa: PLW0603 (of all operators of the process)
    speed = float(os.environ.get(SPEED, "1"))
    if speed:
        _slept_s += seconds / speed
        time.sleep(seconds / speed)


_slept_s = 0.0
# The clock of the profile reads it.
timing.thread_time = lambda: time.thread_time() + _slept_s  # type: ignore[attr-defined]


@contextmanager
def awake() -> Iterator[None]:
    """Nothing sleeps in this process while the block runs."""
    before = os.environ.get(SPEED)
    os.environ[SPEED] = "0"
    try:
        yield
    finally:
        os.environ.pop(SPEED)
        if before is not None:
            os.environ[SPEED] = before
