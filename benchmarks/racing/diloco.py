"""DiLoCo as in its paper: replicas train by themselves, and every so many steps an outer step is made.

The outer optimizer is SGD with Nesterov's momentum of 0.9 and a rate of 0.7, on the mean of the replicas'
changes; inner optimizers keep their state. An evaluation is of the mean of the replicas' weights.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.racing.task import adamw, first_model, set_rate

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9


class _Replica:
    """`choice`: inner_steps, learning_rate."""

    def __init__(self, choice: Mapping[str, Any], seed: int) -> None:
        self._model, self._rate = first_model(seed), choice["learning_rate"]
        self._every = choice["inner_steps"]
        self._optimizer = adamw(self._model, self._rate)
        self._shared = self._flat().requires_grad_()
        self._outer = torch.optim.SGD([self._shared], OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)

    def step(self, number: int, batch: Tensor) -> None:
        set_rate(self._optimizer, self._rate, number)
        self._optimizer.zero_grad()
        own = batch[dist.get_rank() :: dist.get_world_size()]
        self._model(own, own)["loss"].backward()
        self._optimizer.step()
        if (number + 1) % self._every == 0:
            moved = self._shared.detach() - self._flat()
            dist.all_reduce(moved)
            self._shared.grad = moved / dist.get_world_size()
            self._outer.step()
            torch.nn.utils.vector_to_parameters(self._shared.detach(), self._model.parameters())

    def weights(self) -> Mapping[str, Tensor]:
        return dict(self._model.named_parameters())

    def _flat(self) -> Tensor:
        return torch.nn.utils.parameters_to_vector(self._model.parameters()).detach().clone()


def enter(choice: Mapping[str, Any], seed: int) -> _Replica:
    """A replica."""
    return _Replica(choice, seed)
