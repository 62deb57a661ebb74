"""Devices that take their time: layers that take as long as on a given device, whatever this machine's cores
are. What a half of a layer does not need for its own arithmetic it sleeps.

So devices of different speeds run beside each other on few cores. The operators that sleep are part of a
captured model: one begins a half, one ends it. A backward takes twice as long as a forward: half of it for
the gradient of the input, and half for those of weights, so that a schedule that splits backwards moves the
second half, which then sleeps all of its time. The clock of Bireme's profile counts seconds of a core; here
it also counts those that were slept, so that predictions have them.
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
    """The norm that begins a half of a layer, of that number, which takes `forward_s` for the forward of a
    sample on a device of speed 1.
    """

    def __init__(self, norm: nn.LayerNorm, number: int, forward_s: float) -> None:
        super().__init__(norm.normalized_shape, norm.eps)
        self.weight, self.bias = norm.weight, norm.bias
        self.number, self.forward_s = number, forward_s

    def forward(self, x: Tensor) -> Tensor:
        """The norm of each token."""
        begun = torch.ops.paced.begin(x, self.number, self.forward_s)
        weight = torch.ops.paced.weight(self.weight, x.detach(), self.number, self.forward_s)
        return functional.layer_norm(begun, self.normalized_shape, weight, self.bias, self.eps)


class PacedDropout(nn.Dropout):
    """The dropout that ends a half of a layer."""

    def __init__(self, dropout: nn.Dropout, number: int, forward_s: float) -> None:
        super().__init__(dropout.p)
        self.number, self.forward_s = number, forward_s

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name of the base class)
        """What it gives, when the half has taken its time."""
        ended: Tensor = torch.ops.paced.end(super().forward(input), self.number, self.forward_s)
        return ended


def pace(model: GPT, forward_s: float) -> None:
    """Let the forward of a sample in a layer take so long, each half in proportion to its multiplications."""
    attention, feed_forward = 4 * model.config.width + 2 * model.config.context, 8 * model.config.width
    attention_s = forward_s * attention / (attention + feed_forward)
    feed_forward_s = forward_s - attention_s
    layer: Any
    for number, layer in enumerate(model.layers):
        first, second = 2 * number, 2 * number + 1
        layer.attention_norm = PacedNorm(layer.attention_norm, first, attention_s)
        layer.attention.dropout = PacedDropout(layer.attention.dropout, first, attention_s)
        layer.feed_forward_norm = PacedNorm(layer.feed_forward_norm, second, feed_forward_s)
        layer.feed_forward.dropout = PacedDropout(layer.feed_forward.dropout, second, feed_forward_s)


class _Half(threading.local):
    """The pass through a half of a layer that is under way in this thread: since when, by the wall and by the
    clock of the profile, and how long it is to take up to the last operator that slept. The system wakes a
    thread late, for which the half that comes next sleeps less.
    """

    began_s = clock_s = due_s = late_s = 0.0
    number: int | None = None

    def begin(self, number: int) -> None:
        """Its arithmetic follows."""
        self.number, self.due_s = number, 0.0
        self.began_s, self.clock_s = time.monotonic() - self.late_s, _clock()
        self.late_s = 0.0

    def take(self, number: int, seconds: float, *, is_last: bool = True) -> None:
        """Sleep until it has taken so much longer: all of that if another thread or process began it."""
        global _slept_s  # noqa: PLW0603 (of all operators of the process)
        if self.number != number:
            self.begin(number)
            is_last = True
        if speed := float(os.environ.get(SPEED, "1")):
            self.due_s += seconds / speed
            _slept_s += max(self.clock_s + self.due_s - _clock(), 0.0)
            end_s = self.began_s + self.due_s
            if (left_s := end_s - time.monotonic()) > 0:
                time.sleep(left_s)
                self.late_s = max(time.monotonic() - end_s, 0.0)
        if is_last:
            self.number = None


def _clock() -> float:
    return time.thread_time() + _slept_s


_half = _Half()
_slept_s = 0.0
timing.thread_time = _clock  # type: ignore[attr-defined]


def _begin(x: Tensor, number: int, seconds: float) -> Tensor:
    _half.begin(number)
    return x.clone()


def _end(x: Tensor, number: int, seconds: float) -> Tensor:
    _half.take(number, len(x) * seconds)
    return x.clone()


def _weight(weight: Tensor, x: Tensor, number: int, seconds: float) -> Tensor:
    return weight.clone()


# What the backward of half N begins and ends is half -1 - N: it is under way beside no forward.


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, seconds: float) -> Tensor:
        ctx.number, ctx.seconds = number, seconds
        return _below_autograd("begin", x, number, seconds)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _half.take(-1 - ctx.number, len(gradient) * ctx.seconds)
        return gradient, None, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, seconds: float) -> Tensor:
        ctx.number = number
        return _below_autograd("end", x, number, seconds)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _half.begin(-1 - ctx.number)
        return gradient, None, None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, number: int, seconds: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.number, ctx.seconds = number, seconds  # a capture for any number of samples must not count them
        return _below_autograd("weight", weight, x, number, seconds)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # Torch's engine comes here before the gradient of the input, unless that was asked for alone.
        (x,) = ctx.saved_tensors
        _half.take(-1 - ctx.number, len(x) * ctx.seconds, is_last=False)
        return gradient, None, None, None


def _below_autograd(name: str, *given: Any) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        found: Tensor = getattr(torch.ops.paced, name)(*given)
    return found


# Operators in Python's wrapper of torch, `custom_op`, take several times as long.
_library = torch.library.Library("paced", "DEF")
for _name, _more, _kernel, _function in (
    ("begin", "", _begin, _Begin),
    ("end", "", _end, _End),
    ("weight", "Tensor x, ", _weight, _Weight),
):
    _library.define(f"{_name}(Tensor given, {_more}int number, float seconds) -> Tensor")
    _library.impl(_name, _kernel, "CPU")
    _library.impl(_name, lambda given, *_: torch.empty_like(given), "Meta")
    _library.impl(_name, _function.apply, "Autograd")


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
