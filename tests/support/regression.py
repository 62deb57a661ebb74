"""A model for tests that learns numbers, made faster than a GPT: layers, and the mean squared error."""

from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from bireme.plan.plan import Plan
from tests.support.small_models import (
    Model,
    captured,
    made_of,
    real_batches,
)

__all__ = ["WIDTH", "Regression", "regression", "regression_plan", "tied_regression"]

WIDTH = 6


class Regression(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        return {"loss": functional.mse_loss(self.layers(x), wanted)}


@cache
def regression() -> Model:
    """Four hidden layers of width 6: units enough for four stages."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    module = Regression(made_of([*layers, nn.Linear(WIDTH, 1)]))
    return captured(module, real_batches(2, 1, WIDTH)[0], name="regression", evaluates=True, is_kept=True)


@cache
def tied_regression() -> Model:
    """The same with one weight in the first and the last hidden layer."""
    first = nn.Linear(WIDTH, WIDTH)
    hidden = [first, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), first]
    layers = [layer for one in hidden for layer in (one, nn.Tanh())]
    module = Regression(made_of([*layers, nn.Linear(WIDTH, 1)]))
    return captured(
        module, real_batches(2, 1, WIDTH)[0], name="tied regression", evaluates=True, is_kept=True
    )


def regression_plan(schedule: str, num_stages: int | None = None, **more: Any) -> Plan:
    """A plan for it with four micro-batches."""
    num = num_stages or (4 if schedule in ("interleaved", "zbv") else 3)
    return Plan({1: (), 2: (2,), 3: (1, 3), 4: (1, 2, 3)}[num], 4, schedule, **more)
