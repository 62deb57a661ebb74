"""Energy of a plan: what its devices draw while they train, per sample.

A device in use draws its `watts` for as long as the batch lasts, whether it computes or waits: makers publish
the power of a board at work and seldom that of one that waits. Devices that a plan does not use draw nothing.
"""

from collections.abc import Iterable

__all__ = ["joules_per_sample", "total_watts"]


def total_watts(watts: Iterable[float]) -> float | None:
    """What some devices draw together; None where that of any is not known, which is 0."""
    each = tuple(watts)
    return sum(each) if each and all(each) else None


def joules_per_sample(watts: float | None, samples_per_s: float) -> float | None:
    """What a sample takes on devices that draw so much together; None where nobody knows that."""
    return None if watts is None else watts / samples_per_s
