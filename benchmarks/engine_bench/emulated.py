"""Emulated devices: stages that sleep where they would compute, with real tensors, gradients and weights.

Many ranks of them run on few cores, so what is measured is what a pipeline runtime answers for: order,
overlap and waiting. The same modules run here and in torch's runtime.
"""

import ctypes
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bireme.model.chain import chain, chain_resolver
from bireme.model.graph import Graph
from bireme.model.stage import Resolve

FEATURES = 4096
"""Of a sample: 16 KiB in float32."""

_WAKING_S = 1.5e-4
"""How long before the end of its time an emulated device wakes up."""

_HANDOVER_S = 1e-3
"""How soon work must follow on the last to be one piece with it for the device."""

INPUT = "given"


@dataclass(frozen=True, slots=True)
class StagePace:
    """How long a stage takes for a micro-batch. Half of the backward is for the gradient of its input."""

    forward_s: float
    backward_s: float

    @property
    def whole_s(self) -> float:
        """Both passes."""
        return self.forward_s + self.backward_s

    def cut(self, pieces: int) -> "StagePace":
        """Of one of several stages that share the work of this one."""
        return StagePace(self.forward_s / pieces, self.backward_s / pieces)


@dataclass(slots=True)
class _Backward:
    """The backward of one micro-batch: until when its device has had work."""

    end_s: float = 0.0

    def begin_s(self) -> float:
        """When the next part of it begins: now, or where the last one ended if that was just now.

        What torch does between two parts of one backward is its own; the device would have had both.
        """
        now = time.perf_counter()
        return self.end_s if now - self.end_s < _HANDOVER_S else now


class _Work(torch.autograd.Function):
    """The forward of a stage, and the half of its backward that the stage before waits for."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, pace: StagePace, begin_s: float, backward: _Backward) -> Tensor:
        ctx.pace, ctx.backward = pace, backward
        made = given.clone()
        _wait_until(begin_s + pace.forward_s)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.backward.end_s = time.perf_counter() + ctx.pace.backward_s / 2
        made = gradients[0].clone()
        _wait_until(ctx.backward.end_s)
        return made, None, None, None


class _Weight(torch.autograd.Function):
    """The other half of the backward. `ballast` has a gradient too, so that there is much to sum up."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ballast: Tensor, pace: StagePace, backward: _Backward) -> Tensor:
        ctx.pace, ctx.backward = pace, backward
        ctx.ballast_shape = ballast.shape
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        end_s = ctx.backward.begin_s() + ctx.pace.backward_s / 2
        ballast = torch.full(ctx.ballast_shape, 1e-6)
        _wait_until(end_s)
        return gradients[0], ballast, None, None


def sharpen_sleeps() -> None:
    """Let this thread's sleeps end when they should; Linux lets them be 50 µs late to wake up less often."""
    if sys.platform == "linux":
        set_timer_slack, one_nanosecond = 29, 1
        ctypes.CDLL(None).prctl(set_timer_slack, one_nanosecond, 0, 0, 0)


def _wait_until(end_s: float) -> None:
    """Sleep, and be awake for the very end.

    A process that has slept runs its next lines many times slower, and sleeps end late. A rank whose device
    computes has neither: it is awake before the device is done.
    """
    rest_s = end_s - time.perf_counter() - _WAKING_S
    if rest_s > 0:
        time.sleep(rest_s)
    awake = torch.zeros(8)
    while time.perf_counter() < end_s:
        awake.add_(1.0)


class EmulatedStage(nn.Module):
    """A stage that takes its time. The first one has an anchor, as nothing that comes into it learns."""

    def __init__(self, pace: StagePace, *, is_first: bool, num_ballast: int = 1) -> None:
        super().__init__()
        self.pace = pace
        self.weight = nn.Parameter(torch.zeros(FEATURES))
        self.ballast = nn.Parameter(torch.zeros(num_ballast))
        self.anchor = nn.Parameter(torch.zeros(1)) if is_first else None

    def forward(self, given: Tensor) -> Tensor:
        """The same numbers, later."""
        begin_s = time.perf_counter()
        backward = _Backward()
        weight: Tensor = _Weight.apply(self.weight, self.ballast, self.pace, backward)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        begun = given + weight if self.anchor is None else given + weight + self.anchor
        worked: Tensor = _Work.apply(begun, self.pace, begin_s, backward)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return worked


@dataclass(frozen=True, slots=True)
class EmulatedModel:
    """A chain of emulated stages, and what the engine needs to run it."""

    modules: tuple[EmulatedStage, ...]
    graph: Graph
    resolve: Resolve

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where a new stage begins: at every module."""
        return tuple(range(1, len(self.modules)))

    def weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Copies of the weights, by name."""
        held = dict(nn.Sequential(*self.modules).named_parameters())
        return {name: held[name].detach().clone() for name in names}

    def batch(self, num_microbatches: int) -> dict[str, Tensor]:
        """A batch of one sample for each micro-batch."""
        return {INPUT: torch.ones(num_microbatches, FEATURES)}


def square_loss(result: Tensor, _inputs: object) -> Tensor:
    """A loss whose gradient is an ordinary tensor, which torch's runtime needs to send it."""
    return result.square().mean()


def emulated_model(num_stages: int, pace: StagePace, *, num_ballast: int = 1) -> EmulatedModel:
    """So many equal stages."""
    sharpen_sleeps()
    modules = tuple(
        EmulatedStage(pace, is_first=stage == 0, num_ballast=num_ballast) for stage in range(num_stages)
    )
    graph = chain(modules, {INPUT: torch.ones(1, FEATURES)}, loss=square_loss, name="emulated")
    return EmulatedModel(modules, graph, chain_resolver(graph, modules, loss=square_loss))
