"""Matrices of low rank, by one step of a power iteration that goes on from step to step.

As PowerSGD (Vogels et al. 2019) does: P = M Q is summed over the replicas and made orthonormal, then Q = MT P
is summed, and the sum of all M is about P QT. Both are linear in M, so factors are summed like gradients. The
next step begins with this Q. What is lost stays with the caller, who adds it to the next gradient.

What all replicas compute alike here is made of operations that give the same bits on every machine: products
of single numbers, sums in halves, roots, quotients. A product of matrices may differ in its last bit from
processor to processor, and replicas would drift apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["LowRank", "first_basis", "next_basis", "orthonormal", "product"]

LEAST_LEFT = 1e-5
"""What is left of a column, next to what it was, where the columns before it say the same as it."""

PART_VALUES = 1 << 17
"""Values of a product that are made at a time on a CPU, for they fit into a cache."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """One tensor by itself: `rank` columns P and Q. The engine sums the factors of all replicas instead."""

    rank: int

    def most_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The bytes of every message of such a tensor."""
        return self.rank * (shape[0] + math.prod(shape[1:])) * dtype.itemsize

    def encode(self, tensor: Tensor, out: Tensor, basis: Tensor | None = None) -> int:
        """Write P and Q of a tensor with at least two axes into `out`; gives how many bytes they are.

        `basis` is the Q of the tensor before, which becomes this one's.
        """
        matrix = as_matrix(tensor)
        known = first_basis(matrix.shape[1], self.rank, seed=0).to(matrix) if basis is None else basis
        left = orthonormal(matrix @ known)
        right = matrix.T @ left
        if basis is not None:
            basis.copy_(next_basis(right, seed=0))
        both = torch.cat([left.reshape(-1), right.reshape(-1)]).view(torch.uint8)
        out[: both.numel()].copy_(both)
        return both.numel()

    def decode(self, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor of a message."""
        both = message[: self.most_bytes(shape, dtype)].clone().view(dtype)
        left, right = torch.split(both, [self.rank * shape[0], self.rank * math.prod(shape[1:])])
        return product(left.view(-1, self.rank), right.view(-1, self.rank)).view(tuple(shape))


def as_matrix(tensor: Tensor) -> Tensor:
    """A tensor as a matrix: its first axis, and all others together. A view if the tensor is contiguous."""
    return tensor.reshape(tensor.shape[0], -1)


def first_basis(num_rows: int, rank: int, *, seed: int) -> Tensor:
    """Columns of numbers between -1 and 1, which are the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**20), 2**20, (num_rows, rank), generator=generator).double() / 2**20


def next_basis(right: Tensor, *, seed: int) -> Tensor:
    """The columns of Q in a size that squares well; one that has become zero starts again."""
    largest = right.abs().amax(0)
    fresh = first_basis(*right.shape, seed=seed).to(right)
    return torch.where(largest == 0, fresh, right / torch.where(largest == 0, 1.0, largest))


def orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns with the same span, by Gram and Schmidt; zero where one is not independent.

    Of several matrices at once, where there are more axes.
    """
    num_rows = columns.shape[-2]
    largest = columns.abs().amax(-2, keepdim=True)
    found = functional.pad(
        columns / torch.where(largest == 0, 1.0, largest), (0, 0, 0, _power_of_two(num_rows) - num_rows)
    )
    for place in range(found.shape[-1]):
        column, known = found[..., place : place + 1], found[..., :place]
        before = _sum(column * column)
        for _ in range(2 if place else 0):  # once leaves what rounding makes of nearly equal columns
            for part in (known * _sum(known * column)).unbind(-1):
                column = column - part.unsqueeze(-1)
        length = _sum(column * column).sqrt()
        is_lost = length <= LEAST_LEFT * before.sqrt()  # never where it is NaN, which stays so
        found[..., place : place + 1] = torch.where(is_lost, 0.0, column / torch.where(is_lost, 1.0, length))
    return found[..., :num_rows, :]


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """The matrix left · rightT, with the same bits on every machine."""
    whole = left.new_empty(len(left), len(right)) if out is None else out
    columns = right.T.contiguous()
    num_rows = max(1, PART_VALUES // max(len(right), 1) if left.is_cpu else len(left))
    term = torch.empty_like(whole[:num_rows])
    for begin in range(0, len(left), num_rows):
        rows, part = left[begin : begin + num_rows], whole[begin : begin + num_rows]
        torch.mul(rows[:, :1], columns[0], out=part)
        for place in range(1, len(columns)):
            part += torch.mul(rows[:, place : place + 1], columns[place], out=term[: len(part)])
    return whole


def _sum(terms: Tensor) -> Tensor:
    """The sums over the rows, a power of two: halves are added until one row is left."""
    while terms.shape[-2] > 1:
        half = terms.shape[-2] // 2
        terms = terms[..., :half, :] + terms[..., half:, :]
    return terms


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
