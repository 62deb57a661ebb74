"""How much the suite tries: a sample of the cases by default, every case with `BIREME_TESTS=all`.

`BIREME_TESTS=few` is the fast core's: half of the sample.

Properties tried on thousands of random cases cost minutes and seldom find something new. The default run
tries enough of them to catch a plain mistake; `make test-all` tries all.
"""

import os
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from random import Random
from typing import Any, TypeVar

from hypothesis import settings

__all__ = ["IS_FEW", "PART", "TRY_ALL", "draws", "examples", "part_of", "several"]

Case = TypeVar("Case")

TRY_ALL = os.environ.get("BIREME_TESTS") == "all"
IS_FEW = os.environ.get("BIREME_TESTS") == "few"
PART = 4.0 if IS_FEW else 2.0
"""The fast core tries one in so many of the cases that a test names as enough, and the default run more."""

FEWEST = 15
SHARE = 8
"""The default run tries one in so many random cases, and at least `FEWEST` where there are as many."""


def part_of(count: int) -> int:
    """The part of so many cases that is tried; at least one."""
    return ceil(count / PART)


def examples(most: int, quick: int | None = None, **more: Any) -> settings:
    """Settings of a property test: `most` random cases, and by default `quick` or a share of them.

    The default run tries the same cases every time, so that it fails for what was changed; all cases are
    drawn anew.
    """
    fewer = max(FEWEST, most // SHARE) if quick is None else quick
    count = most if TRY_ALL else part_of(min(most, fewer))
    return settings(**{"derandomize": not TRY_ALL} | more, max_examples=count)


def draws(most: int, quick: int) -> int:
    """How many cases a test draws by itself: `most`, and by default `quick`."""
    return most if TRY_ALL else part_of(quick)


def several(cases: Sequence[Case], quick: int) -> Sequence[Case]:
    """All of these cases; by default `quick` of them, one drawn from each of as many equal parts.

    Every so-manieth would leave out whole values of a parameter that comes round with the same period.
    """
    quick = part_of(quick)
    if TRY_ALL or len(cases) <= quick:
        return cases
    random, bounds = Random(0), [part * len(cases) // quick for part in range(quick + 1)]
    return [cases[random.randrange(begin, end)] for begin, end in pairwise(bounds)]
