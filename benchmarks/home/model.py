"""The model and the data of the home lab: a GPT with tied weights on a device that takes its time.

Each layer sleeps in proportion to its samples, besides what it really computes, so that devices of different
speeds run beside each other on few cores. Sleeping is an operator of the captured model. The clock of
Bireme's profile counts seconds of a core; here it also counts those that were slept, so that predictions have
them.
"""

import os
import time

import torch
from torch import Tensor, nn

from bireme.model.gpt import GPT, GPTConfig
from bireme.profile import timing

SPEED = "BIREME_HOME_LAB_SPEED"
"""Names the variable with the speed of a process's device; 0 does not sleep at all."""
FORWARD_S, BACKWARD_S = 0.003, 0.006
"""Of a sample in a layer, on a device of speed 1."""
CONFIG = GPTConfig(layers=6, width=128, heads=4, vocab=64, context=16)
NUM_SAMPLES, IN_USE, CHOICES = 6000, 8, 4
"""Samples, tokens that occur in them, and tokens that may follow each: few, so that a short run learns all
there is to learn, and its loss tells what faults cost.
"""


@torch.library.custom_op("home_lab::forward", mutates_args=())
def forward(x: Tensor) -> Tensor:
    """The same numbers, after the seconds of a forward."""
    _sleep(len(x) * FORWARD_S)
    return x.clone()


@torch.library.custom_op("home_lab::backward", mutates_args=())
def _backward(gradient: Tensor) -> Tensor:
    _sleep(len(gradient) * BACKWARD_S)
    return gradient.clone()


def _sleep(seconds: float) -> None:
    global _slept_s  # noqa: PLW0603 (of all operators of the process)
    speed = float(os.environ.get(SPEED, "1"))
    if speed:
        _slept_s += seconds / speed
        time.sleep(seconds / speed)


_slept_s = 0.0
# The clock of the profile reads it.
timing.thread_time = lambda: time.thread_time() + _slept_s  # type: ignore[attr-defined]


@forward.register_fake
@_backward.register_fake
def _shape(x: Tensor) -> Tensor:
    return torch.empty_like(x)


forward.register_autograd(lambda _context, gradient: _backward(gradient))


class _SlowLayer(nn.Module):
    """A layer of a GPT on a slow device."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        made: Tensor = self.layer(forward(x), mask)
        return made


def model() -> tuple[nn.Module, dict[str, Tensor]]:
    """For `model.source`."""
    made = GPT(CONFIG)
    made.layers = nn.ModuleList(map(_SlowLayer, made.layers))
    ids = torch.zeros(2, CONFIG.context, dtype=torch.int64)
    return made, {"input_ids": ids, "labels": ids.clone()}


def samples() -> dict[str, Tensor]:
    """For `data.source`: walks over the tokens. From each token a walk goes on to one of a few, the first of
    them in most cases.
    """
    generator = torch.Generator().manual_seed(1)
    following = torch.randint(IN_USE, (IN_USE, CHOICES), generator=generator)
    likely = 0.5 ** torch.arange(1.0, CHOICES + 1)
    ids = torch.empty(NUM_SAMPLES, CONFIG.context, dtype=torch.int64)
    ids[:, 0] = torch.randint(IN_USE, (NUM_SAMPLES,), generator=generator)
    for place in range(1, CONFIG.context):
        choice = torch.multinomial(likely, NUM_SAMPLES, replacement=True, generator=generator)
        ids[:, place] = following[ids[:, place - 1], choice]
    return {"input_ids": ids, "labels": ids}
