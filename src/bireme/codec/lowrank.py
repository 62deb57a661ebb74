"""Matrices of low rank, by one step of a power iteration that goes on from step to step.

As PowerSGD (Vogels et al. 2019) does: P = M Q is summed over the replicas and made orthonormal, then Q = MT P
is summed, and the sum of all M is about P QT. Both are linear in M, so factors are summed like gradients. The
next step begins with this Q. What is lost stays with the caller, who adds it to the next gradient.

What all replicas compute alike here is made of operations that give the same bits on every machine: products
of single numbers, sums in halves, roots, quotients. A product of matrices may differ in its last bit from
processor to processor, and replicas would drift apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_LEAST_LEFT = 1e-5
"""What is left of a column, next to what it was, where the columns before it say the same as it."""

PART_VALUES = 1 << 17
"""Values of a product that are made at a time on a CPU, for they fit into a cache."""


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
        columns / torch.where(largest == 0, 1.0, largest),
        (0, 0, 0, (1 << (num_rows - 1).bit_length()) - num_rows),
    )
    for place in range(found.shape[-1]):
        column, known = found[..., place : place + 1], found[..., :place]
        before = _sum(column * column)
        for _ in range(2 if place else 0):  # once leaves what rounding makes of nearly equal columns
            for part in (known * _sum(known * column)).unbind(-1):
                column = column - part.unsqueeze(-1)
        length = _sum(column * column).sqrt()
        is_lost = length <= _LEAST_LEFT * before.sqrt()  # never where it is NaN, which stays so
        found[..., place : place + 1] = torch.where(is_lost, 0.0, column / torch.where(is_lost, 1.0, length))
    return found[..., :num_rows, :]


def orthonormal_all(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Each with orthonormal columns; those with as many rows together, which costs as much as one."""
    alike: dict[tuple[int, torch.dtype], list[int]] = {}
    for place, matrix in enumerate(matrices):
        alike.setdefault((len(matrix), matrix.dtype), []).append(place)
    found = list(matrices)
    for places in alike.values():
        made = orthonormal(torch.stack([matrices[place] for place in places]))
        for place, matrix in zip(places, made, strict=True):
            found[place] = matrix
    return found


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


# Streaming principal components of a gradient that is never formed (Huang et al. 2020, arXiv 2004.12041).
#
# A weight W (a × b) has the gradient G = sum of l rT over pairs of rows: for y = W x, l is what flows back
# into the output and r the input. In its place are kept D (a × k) and X (b × k), orthonormal, and k values,
# so that G is about D diag(values) XT: k (a + b + 1) numbers for a · b. They go on from batch to batch, which
# is what makes few pairs enough.
#
# Each piece of pairs is a two-sided step of the power method on M, the sum so far and a share of the batch
# before, as in the published algorithm. Five things are changed. Pairs that fill no whole piece are taken
# too, by their number. Nothing is divided by a value, so none needs to be kept from zero; they are singular
# values, never negative, and signs of columns decide nothing. What is off the diagonal is kept within a
# batch: M is projected on the shorter side's columns alone, so with k = min(a, b) the sum is exact. And the
# share of the batch before is taken out again at the end: it steers the components, but is no gradient.

_HISTORY = 0.25
"""The weight of the batch before, where each pair of this batch has weight 1; k components have a k-th of it.

It keeps directions where a piece has fewer pairs than there are components, and one component from turning
with each batch. But each weak component that it holds is one that this batch does not find.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Components:
    """D, values and X of a gradient; values do not rise."""

    left: Tensor
    values: Tensor
    right: Tensor

    @property
    def rank(self) -> int:
        """How many there are."""
        return len(self.values)

    @property
    def num_bytes(self) -> int:
        """What they take: k (a + b + 1) numbers."""
        return self.left.nbytes + self.values.nbytes + self.right.nbytes

    def product(self, shape: Sequence[int]) -> "Product":
        """The gradient that they stand for, of a weight of this shape."""
        return Product(self.left * self.values, self.right, tuple(shape))


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A gradient as P QT, in the shape of its weight: the first axis, and all others together."""

    left: Tensor
    right: Tensor
    shape: tuple[int, ...]

    def rows(self, rows: slice | None = None) -> Tensor:
        """Some rows of the gradient, or all; a new tensor."""
        left = self.left if rows is None else self.left[rows]
        return (left @ self.right.T).view(-1, *self.shape[1:])

    def scaled(self, factor: float) -> "Product":
        """So many times the gradient."""
        return self if factor == 1.0 else Product(self.left * factor, self.right, self.shape)

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """P and Q, which are finite exactly where the gradient may be."""
        return self.left, self.right


def first_components(
    rows: int, columns: int, rank: int, *, seed: int, dtype: torch.dtype, device: torch.device | None = None
) -> Components:
    """Components of nothing, before the first batch: directions to begin with, and values of zero."""
    left, right = (
        torch.linalg.qr(first_basis(length, rank, seed=seed + place)).Q.to(device, dtype)
        for place, length in enumerate((rows, columns))
    )
    return Components(left, torch.zeros(rank, dtype=dtype, device=device), right)


class PrincipalStream:
    """The gradient of one weight in one batch, which goes on from the components of a batch before.

    `feed` takes pairs as they come. With `piece` the components turn after so many, else once for each call.
    """

    def __init__(self, before: Components, *, piece: int = 0) -> None:
        self._before = before
        self._piece = piece
        self._is_tall = len(before.left) > len(before.right)
        self._begin = _HISTORY / before.rank * before.values
        near, far = self._sides(before.left, before.right)
        self._near, self._far = near, far * self._begin
        self._first: Tensor | None = far
        self.num_pairs = 0
        """How many it has taken."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the gradient."""
        return len(self._before.left), len(self._before.right)

    @property
    def rank(self) -> int:
        """How many components there are."""
        return self._before.rank

    @property
    def dtype(self) -> torch.dtype:
        """What all is kept and computed in."""
        return self._near.dtype

    @property
    def num_bytes(self) -> int:
        """What it keeps of its own: k (a + b) numbers, once it has taken pairs."""
        return self._near.nbytes + self._far.nbytes if self.num_pairs else 0

    @torch.no_grad()
    def feed(self, left: Tensor, right: Tensor) -> None:
        """Take pairs: rows for the weight's first axis (n × a), and for its others (n × b)."""
        near, far = self._sides(left.to(self._near.dtype), right.to(self._near.dtype))
        size = self._piece or max(len(near), 1)
        for u, v in zip(torch.split(near, size), torch.split(far, size), strict=True):
            self._turn(u, v)
        self.num_pairs += len(left)

    def _turn(self, u: Tensor, v: Tensor) -> None:
        """A step on M = near farT + uT v: new columns are what M makes of the others, and M goes on them.

        Several components make the step twice, which finds the weak ones. A single one trains better if it
        lags: what it does not turn to at once, it has from the batches before.
        """
        if self._first is None:
            basis, rest = torch.linalg.qr(self._far)
        else:  # values of zero would lose its directions
            basis, rest = self._first, torch.diag(self._begin)
            self._first = None
        near = torch.linalg.qr(self._near @ rest.T + u.T @ (v @ basis)).Q
        if self.rank > 1:
            basis = torch.linalg.qr(self._far @ (self._near.T @ near) + v.T @ (u @ near)).Q
            near = torch.linalg.qr(self._near @ (self._far.T @ basis) + u.T @ (v @ basis)).Q
        self._far = self._far @ (self._near.T @ near) + v.T @ (u @ near)
        self._near = near

    @torch.no_grad()
    def factors(self) -> tuple[Tensor, Tensor]:
        """P (a × k) and Q (b × k): the sum over the pairs so far is about P QT. One is orthonormal."""
        near, far = self._sides(self._before.left, self._before.right)
        own = self._far - (far * self._begin) @ (near.T @ self._near)
        return self._sides(self._near, own)

    def _sides(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """What belongs to the shorter side, and what to the longer; or back again."""
        return (right, left) if self._is_tall else (left, right)


@torch.no_grad()
def merged(factors: Sequence[tuple[Tensor, Tensor]], rank: int) -> Components:
    """The best components of a rank for the sum of some P QT, which are stacked and cut.

    If any number in them is not finite, no value is.
    """
    left, left_rest = torch.linalg.qr(torch.cat([one for one, _ in factors], 1))
    right, right_rest = torch.linalg.qr(torch.cat([one for _, one in factors], 1))
    core = left_rest @ right_rest.T
    if not bool(core.isfinite().all()):
        return Components(left[:, :rank], torch.full_like(core[0, :rank], torch.nan), right[:, :rank])
    outer, values, inner = torch.linalg.svd(core)
    return Components(left @ outer[:, :rank], values[:rank], right @ inner[:rank].T)
