"""Streaming principal components of a gradient that is never formed (Huang et al. 2020, arXiv 2004.12041).

A weight W (a × b) has the gradient G = sum of d xT over pairs of an input x (b) and what flows back into its
output, d (a). Kept are D (a × k) and X (b × k), orthonormal, and k values s, so that the gradient's mean
over pairs is about D diag(s) XT: k (a + b + 1) numbers for a · b. They go on from batch to batch, which is
what makes few pairs enough.

Of the published algorithm three things are mended: pairs that fill no whole piece are taken too, by their
number; values stay positive, so that to divide by one never explodes; the sign of zero is one. Column by
column it is the rank-1 algorithm of Hoskins et al. 2019 (`FirstComponent`), which takes pair by pair.
"""

import torch
from torch import Tensor

__all__ = ["PIECE", "FirstComponent", "PrincipalComponents", "merged"]

PIECE = 32
"""Pairs that a step takes."""

LEAST_SHARE, LEAST = 1e-6, 1e-30
"""Of the largest value, and of all: no value is less."""


class PrincipalComponents:
    """The components of one weight's gradient. `feed` takes pairs, `close` ends a batch."""

    def __init__(
        self, num_outputs: int, num_inputs: int, rank: int, *, seed: int = 0, piece: int = PIECE
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        rank = min(rank, num_outputs, num_inputs)
        self.outputs = _orthonormal(torch.randn(num_outputs, rank, generator=draw))
        self.inputs = _orthonormal(torch.randn(num_inputs, rank, generator=draw))
        self.values = torch.ones(rank)
        self.num_pairs = 0
        self._piece = piece
        self._has_values = False

    @property
    def num_bytes(self) -> int:
        """What is kept: k (a + b + 1) numbers of 32 bits."""
        return self.outputs.nbytes + self.inputs.nbytes + self.values.nbytes

    @torch.no_grad()
    def feed(self, inputs: Tensor, outputs: Tensor) -> None:
        """Take pairs: rows of inputs (n × b), and what flows back into the rows of outputs (n × a)."""
        pieces = (torch.split(one.float(), self._piece) for one in (inputs, outputs))
        for x, d in zip(*pieces, strict=True):
            self._step(x, d)

    def close(self) -> None:
        """The batch is over; the next one's pairs are counted from none."""
        self.num_pairs = 0

    def factors(self) -> tuple[Tensor, Tensor]:
        """P (a × k) and Q (b × k), so that the sum over the batch's pairs is about P QT."""
        return self.outputs * (self.num_pairs * self.values), self.inputs

    def _step(self, x: Tensor, d: Tensor) -> None:
        if not self._has_values:
            # The first values are those of the first pairs, or the first steps would divide by any number.
            self.values = _positive(((d @ self.outputs) * (x @ self.inputs)).mean(0).abs())
            self._has_values = True
        before = self._piece + self.num_pairs  # what was there before counts as one piece
        old, new = before / (before + len(x)), 1 / (before + len(x))
        self.inputs = _orthonormal(old * self.inputs + new * (x.T @ (d @ self.outputs)) / self.values)
        self.outputs = _orthonormal(old * self.outputs + new * (d.T @ (x @ self.inputs)) / self.values)
        seen = ((d @ self.outputs) * (x @ self.inputs)).sum(0)
        self.values = _positive(old * self.values + new * seen)
        self.num_pairs += len(x)


class FirstComponent:
    """Rank 1, pair by pair: a step of the noisy power method on both sides (Hoskins et al. 2019)."""

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


@torch.no_grad()
def merged(factors: list[tuple[Tensor, Tensor]], rank: int) -> tuple[Tensor, Tensor]:
    """The best P and Q of a rank for the sum of some P QT: of replicas, whose factors are stacked and cut."""
    left, left_rest = torch.linalg.qr(torch.cat([one for one, _ in factors], 1))
    right, right_rest = torch.linalg.qr(torch.cat([one for _, one in factors], 1))
    outer, values, inner = torch.linalg.svd(left_rest @ right_rest.T)
    return left @ (outer[:, :rank] * values[:rank]), right @ inner[:rank].T


def _orthonormal(columns: Tensor) -> Tensor:
    found, rest = torch.linalg.qr(columns)
    signed: Tensor = found * torch.where(rest.diagonal() >= 0, 1.0, -1.0)
    return signed


def _positive(values: Tensor) -> Tensor:
    return values.clamp(min=max(LEAST_SHARE * float(values.abs().amax()), LEAST))


def _unit(vector: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(vector).clamp(min=LEAST)
    return vector / length
