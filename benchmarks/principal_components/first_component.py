"""Rank 1 as it was published first, pair by pair (Hoskins et al. 2019), to compare with `principal:1:1`."""

import torch
from torch import Tensor

__all__ = ["FirstComponent"]

LEAST = 1e-30


class FirstComponent:
    """The first component of a mean of products, by a step of the noisy power method on both sides."""

    def __init__(self, num_outputs: int, num_inputs: int, *, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.output = torch.randn(num_outputs, generator=draw)
        self.input = torch.randn(num_inputs, generator=draw)
        self.value = torch.ones(())

    @torch.no_grad()
    def feed(self, inputs: Tensor, outputs: Tensor) -> None:
        """Take a batch of pairs."""
        for number, (x, d) in enumerate(zip(inputs.float(), outputs.float(), strict=True), start=1):
            old, new = number / (number + 1), 1 / (number + 1)
            self.input = old * self.input + new * x * (d @ _unit(self.output))
            self.output = old * self.output + new * d * (x @ _unit(self.input))
            self.value = old * self.value + new * (x @ _unit(self.input)) * (d @ _unit(self.output))

    def mean(self) -> tuple[Tensor, Tensor]:
        """P (a × 1) and Q (b × 1), so that the mean over pairs is about P QT."""
        return (self.value * _unit(self.output))[:, None], _unit(self.input)[:, None]


def _unit(vector: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(vector).clamp(min=LEAST)
    return vector / length
