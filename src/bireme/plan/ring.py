"""What a sum over replicas costs in a ring, as all planners here count it."""

from collections.abc import Sequence

__all__ = ["hops", "ring_share"]


def ring_share(width: int) -> float:
    """How many times its own gradients each of so many replicas sends on."""
    return 2 * (width - 1) / width


def hops(ring: Sequence[int]) -> list[tuple[int, int]]:
    """From each device to the next one, and from the last to the first."""
    return [(a, b) for a, b in zip(ring, [*ring[1:], *ring[:1]], strict=True) if a != b]
