"""Devices that take their time: layers that take as long as on a given device, whatever this machine's cores
are. What a half of a layer does not need for its own arithmetic it sleeps.

So devices of different speeds run beside each other on few cores. The operators that sleep are part of a
captured model: one begins a half of a layer, one ends it. A backward takes twice as long as a forward: half
of it for the gradient of the input, and half for those of weights, so that a schedule that splits backwards
moves the second half, which then sleeps all of its time. The clock of Bireme's profile counts seconds of a
core; here it also counts those that were slept, so that predictions have them.
"""

import os
import threading
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
    """The norm that begins a half of a layer, which takes `forward_s` for the forward of a sample on a device
    of speed 1.
    """

    def __init__(self, norm: nn.LayerNorm, forward_s: float) -> None:
        super().__init__(norm.normalized_shape, norm.eps)
        self.weight, self.bias = norm.weight, norm.bias
        self.forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        """The norm of each token."""
        begun = _begin(x, self.forward_s)
        weight = _weight(self.weight, x.detach(), self.forward_s)
        return functional.layer_norm(begun, self.normalized_shape, weight, self.bias, self.eps)


class PacedLinear(nn.Linear):
    """The product that ends a half of a layer."""

    def __init__(self, linear: nn.Linear, forward_s: float) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.forward_s = forward_s

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name of the base class)
        """The product, when the half has taken its time."""
        ended: Tensor = _end(super().forward(input), self.forward_s)
        return ended


def pace(model: GPT, forward_s: float) -> None:
    """Let the forward of a sample in a layer take so long, each half in proportion to its multiplications."""
    width, context = model.config.width, model.config.context
    attention, feed_forward = 4 * width + 2 * context, 8 * width
    attention_s = forward_s * attention / (attention + feed_forward)
    layer: Any
    for layer in model.layers:
        layer.attention_norm = PacedNorm(layer.attention_norm, attention_s)
        layer.attention.out = PacedLinear(layer.attention.out, attention_s)
        layer.feed_forward_norm = PacedNorm(layer.feed_forward_norm, forward_s - attention_s)
        layer.feed_forward.down = PacedLinear(layer.feed_forward.down, forward_s - attention_s)


class _Half(threading.local):
    """The half of a layer under way in this thread: since when, by the wall and by the clock of the profile,
    and how long it is to take up to the last operator that slept; None if none is under way.
    """

    began_s = clock_s = 0.0
    due_s: float | None = None

    def begin(self) -> None:
        """Its arithmetic follows."""
        self.began_s, self.clock_s, self.due_s = time.monotonic(), _clock(), 0.0

    def take(self, seconds: float, *, is_last: bool) -> None:
        """Sleep until it has taken so much longer: all of that if its arithmetic was not seen to begin."""
        global _slept_s  # noqa: PLW0603 (of all operators of the process)
        if self.due_s is None:
            self.begin()
        due_s = self.due_s or 0.0
        if speed := float(os.environ.get(SPEED, "1")):
            due_s += seconds / speed
            _slept_s += max(self.clock_s + due_s - _clock(), 0.0)
            time.sleep(max(self.began_s + due_s - time.monotonic(), 0.0))
        self.due_s = None if is_last else due_s


def _clock() -> float:
    return time.thread_time() + _slept_s


_half = _Half()
_slept_s = 0.0
timing.thread_time = _clock  # type: ignore[attr-defined]


@torch.library.custom_op("paced::begin", mutates_args=())
def _begin(x: Tensor, seconds: float) -> Tensor:
    _half.begin()
    return x.clone()


@torch.library.custom_op("paced::end", mutates_args=())
def _end(x: Tensor, seconds: float) -> Tensor:
    _half.take(len(x) * seconds, is_last=True)
    return x.clone()


@torch.library.custom_op("paced::weight", mutates_args=())
def _weight(weight: Tensor, x: Tensor, seconds: float) -> Tensor:
    return weight.clone()


@torch.library.custom_op("paced::gradient_begin", mutates_args=())
def _gradient_begin(gradient: Tensor) -> Tensor:
    _half.begin()
    return gradient.clone()


@torch.library.custom_op("paced::gradient_end", mutates_args=())
def _gradient_end(gradient: Tensor, seconds: float) -> Tensor:
    _half.take(len(gradient) * seconds, is_last=True)
    return gradient.clone()


@torch.library.custom_op("paced::gradient_weight", mutates_args=())
def _gradient_weight(gradient: Tensor, like: Tensor, seconds: float) -> Tensor:
    # Torch's engine comes here before the gradient of the input, unless that was asked for alone.
    _half.take(len(like) * seconds, is_last=_half.due_s is None)
    return gradient.clone()


@_begin.register_fake
@_end.register_fake
@_gradient_end.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


@_weight.register_fake
@_gradient_weight.register_fake
def _(weight: Tensor, x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(weight)


@_gradient_begin.register_fake
def _(gradient: Tensor) -> Tensor:
    return torch.empty_like(gradient)


def _keep_seconds(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.seconds = inputs[-1]


def _keep_samples(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.seconds = inputs[2]


_begin.register_autograd(
    lambda ctx, gradient: (_gradient_end(gradient, ctx.seconds), None), setup_context=_keep_seconds
)
_end.register_autograd(lambda ctx, gradient: (_gradient_begin(gradient), None), setup_context=_keep_seconds)
_weight.register_autograd(
    lambda ctx, gradient: (_gradient_weight(gradient, ctx.saved_tensors[0], ctx.seconds), None, None),
    setup_context=_keep_samples,
)


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
