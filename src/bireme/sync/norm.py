"""The squared norm of a tensor in float64, without a copy of it in float64."""

import torch
from torch import Tensor

__all__ = ["squared_norm"]

CHUNK_ELEMENTS = 1 << 16
"""Half a megabyte in float64, which stays in the cache."""


def squared_norm(tensor: Tensor) -> float:
    """The sum of the squares of all elements. It is NaN or infinite if one of them is not finite.

    On the CPU this is several times as fast as torch's norm with a dtype, which converts element by element.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.device.type != "cpu":
        return float(torch.linalg.vector_norm(tensor, dtype=torch.float64).square())
    flat = tensor.reshape(-1)
    if flat.numel() <= CHUNK_ELEMENTS:
        converted = flat.double()
        return float(torch.dot(converted, converted))
    scratch = torch.empty(CHUNK_ELEMENTS, dtype=torch.float64)
    total = 0.0
    for begin in range(0, flat.numel(), CHUNK_ELEMENTS):
        chunk = flat[begin : begin + CHUNK_ELEMENTS]
        converted = scratch[: chunk.numel()].copy_(chunk)
        total += float(torch.dot(converted, converted))
    return total
