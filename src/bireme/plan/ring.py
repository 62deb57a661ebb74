"""What a sum over replicas costs in a ring, as all planners here count it."""

__all__ = ["ring_share"]


def ring_share(width: int) -> float:
    """How many times its own gradients each of so many replicas sends on."""
    return 2 * (width - 1) / width
