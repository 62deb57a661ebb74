"""How far apart the marks of an axis stand."""

import math

__all__ = ["round_step"]


def round_step(least: float) -> float:
    """The least of 1, 2, 5, 10, … and their tenths that is no less."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
