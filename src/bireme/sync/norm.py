"""Norms of many tensors in a few calls, with one look at the device."""

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

__all__ = [
    "PieceNorms",
    "are_finite",
    "norm_workspace_bytes",
    "piece_norms",
    "squared_norm",
    "squared_norm_of",
]

PIECE_ELEMENTS = 2**18

BYTES_OF_A_PIECE = 4 + 8 + 8
"""What one piece's norm takes until all are added up: in float32, in float64, and among the others."""


PieceNorms = Sequence[Tensor]
"""The norms of pieces of tensors, from which the norm of all is made."""


def squared_norm(tensors: Collection[Tensor]) -> float:
    """The sum of the squares of all elements. It is NaN or infinite if one of them is not finite."""
    real = [piece for one in tensors for piece in _pieces(one)]
    if not real:
        return 0.0
    found = _sum_of_squares(torch._foreach_norm(real))
    if math.isfinite(found):
        return found
    # The squares may only have been too large for the tensors' own dtype.
    return _sum_of_squares([torch.linalg.vector_norm(one, dtype=torch.float64) for one in real])


def piece_norms(tensors: Collection[Tensor]) -> PieceNorms:
    """The norms of some tensors' pieces, for `squared_norm_of`, which may be asked when they are gone."""
    real = [piece for one in tensors for piece in _pieces(one)]
    found = torch._foreach_norm(real) if real else ()
    if not real or math.isfinite(_sum_of_squares(found)):
        return found
    return [torch.linalg.vector_norm(one, dtype=torch.float64) for one in real]


def squared_norm_of(norms: Iterable[PieceNorms]) -> float:
    """What `squared_norm` gives of all the tensors together."""
    pieces = [norm for some in norms for norm in some]
    return _sum_of_squares(pieces) if pieces else 0.0


def are_finite(tensors: Collection[Tensor]) -> bool:
    """Whether no element is infinite or NaN."""
    return math.isfinite(squared_norm(tensors))


def norm_workspace_bytes(num_elements: Iterable[int]) -> int:
    """What the norm of float32 tensors of these lengths takes while it is computed."""
    return BYTES_OF_A_PIECE * sum(max(-(-one // PIECE_ELEMENTS), 1) for one in num_elements)


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """A tensor as real numbers, in pieces whose squares add up well in 32 bits."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return (real,) if real.numel() <= PIECE_ELEMENTS else torch.split(real.reshape(-1), PIECE_ELEMENTS)


def _sum_of_squares(norms: Sequence[Tensor]) -> float:
    return float(torch.stack([norm.double() for norm in norms]).square().sum())
