"""What the ranks tell each other about a batch, and what comes of it."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.errors import BiremeError

__all__ = ["NUMBERS_BYTES", "OwnPart", "Reduced", "numbers_of", "reduced_of"]

NUMBERS_BYTES = 5 * 8
"""What a rank keeps of a batch until all ranks' numbers are added."""

STAMP_LIMIT = 2**20
"""Squares of stamps, summed over thousands of ranks, are exact in float64."""


@dataclass(frozen=True, slots=True)
class OwnPart:
    """What a replica has of a batch: so much `weight` in so many samples. Its gradients and its loss are
    means of `nominal` in weight, which is that of the whole batch where it knows it.
    """

    weight: float
    nominal: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a batch came to, of the whole model, and the same on every rank.

    `votes` is the sum of the numbers that ranks gave along, for whoever wants them to agree on something;
    `more` are the sums of further ones, if there are any.
    """

    loss: float
    grad_norm: float
    is_finite: bool
    votes: float = 0.0
    more: tuple[float, ...] = ()


def numbers_of(
    *, loss_sum: float | Tensor, squared_norm: float, stamp: int, votes: float, more: Sequence[float] = ()
) -> Tensor:
    """One rank's part of what is summed over all: its loss, the square of its norm, its stamp, its votes, and
    what else there is.
    """
    stamp %= STAMP_LIMIT
    numbers = [float(loss_sum), squared_norm, float(stamp), float(stamp**2), votes, *more]
    return torch.tensor(numbers, dtype=torch.float64)


def reduced_of(total: Tensor, batch: Hashable, *, num_ranks: int) -> Reduced:
    """The outcome of a batch from the sum of all ranks' numbers; raises where their stamps differ."""
    loss, norm, stamps, squares, votes, *more = total.tolist()
    if int(stamps) ** 2 != num_ranks * int(squares):
        # The square of a sum is so large only where all of its parts are equal.
        raise BiremeError(
            f"Batch {batch} is not the same on all ranks, so its result is useless. Give "
            "every rank the same batches in the same order: shuffle with one seed, and do not split the data "
            "between ranks, because the pipeline does that."
        )
    # One element that is not finite anywhere makes every sum that it enters so.
    return Reduced(loss, math.sqrt(norm), math.isfinite(norm), votes, tuple(more))
