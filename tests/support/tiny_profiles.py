"""A small graph to profile, and a bench that counts what is measured on it."""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn

from bireme.cluster.catalogue import device_named
from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.model.sources import load_source
from bireme.profile.estimate import Seconds
from bireme.profile.timing import Effort, Workbench
from tests.support.graphs import captured_once

__all__ = ["CPU", "LAPTOP", "LITTLE", "Bench", "gpt", "line", "mean_square"]

CPU = torch.device("cpu")
LAPTOP = device_named("laptop")
LITTLE = Effort(num_warmup=1, num_least=3, num_most=3, seconds_per_unit=1e-3)


@cache
def gpt(layers: int = 2, dtype: str = "float32", tied: str = "true") -> Graph:
    text = f"gpt:layers={layers},width=16,heads=2,vocab=32,context=8,tied={tied}"
    source = load_source(text, batch=2, dtype=dtype)
    make = partial(capture, source.model, source.example_inputs, name=text)
    return captured_once(f"{text} {dtype} by name", make, is_kept=True)


@cache
def line(dtype: str = "float32") -> Graph:
    """The least that there is to profile: one unit."""
    made = nn.Linear(4, 4, dtype=getattr(torch, dtype))
    inputs = {"input": torch.ones(2, 4, dtype=made.weight.dtype)}
    make = partial(capture, made, inputs, loss=mean_square, name="a line")
    return captured_once(f"a line of {dtype}", make, is_kept=True)


def mean_square(output: Tensor, inputs: object = None) -> Tensor:
    """A loss."""
    return output.square().mean()


class Bench:
    """Counts what is measured in place of measuring it."""

    def __init__(self) -> None:
        self.num_units = 0
        self.num_calls = 0

    def __call__(
        self, benches: Sequence[Workbench], effort: Effort, *, halves: bool, tick: Callable[[float], None]
    ) -> list[Seconds]:
        self.num_calls += 1
        self.num_units += len(benches)
        tick(0.5)
        half = 1.0 if halves else None
        return [Seconds(1.0 + place, 2.0, 3.0, half, half, 0.1) for place in range(len(benches))]
