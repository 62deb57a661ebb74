"""Random numbers for rounding up or down by chance, so that the mean of what is sent is what was given.

Drawing a number for every value would take longer than all the rest. So there is one table of numbers spread
evenly over [0, 1) in a random order, and every call begins somewhere else in it.
"""

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["NOISE_LENGTH", "noise", "noise_start", "noise_table", "scattered"]

NOISE_LENGTH = 1 << 17


def noise(count: int, seed: int, device: torch.device) -> Tensor:
    """So many numbers of [0, 1), at most `NOISE_LENGTH`: the same for the same seed. A view; only look."""
    start = noise_start(seed)
    return noise_table(device)[start : start + count]


def noise_start(seed: int) -> int:
    """Where the numbers of a seed begin in the table."""
    return scattered(seed) % NOISE_LENGTH


@lru_cache(maxsize=64)
def noise_table(device: torch.device) -> Tensor:
    """All numbers, twice over."""
    order = torch.randperm(NOISE_LENGTH, generator=torch.Generator().manual_seed(0))
    once = (order.float() + 0.5) / NOISE_LENGTH
    return torch.cat([once, once]).to(device)


def scattered(seed: int) -> int:
    """A number that differs in all its bits where seeds differ a little (the finaliser of splitmix64)."""
    mask = (1 << 64) - 1
    mixed = (seed + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)
