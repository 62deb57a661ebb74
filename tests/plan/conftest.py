"""What tests of planning share."""

import pytest

from bireme.plan import plan as paging
from bireme.plan.search import explorers, search, unequal_widths
from bireme.profile import profiler
from tests.support.estimates import estimated_once
from tests.support.extent import TRY_ALL
from tests.support.graphs import remember_captures
from tests.support.remembered import find_plan_once

remember_captures()


@pytest.fixture
def remember_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the command line search for nothing that was found before."""
    monkeypatch.setattr(search, "find_plan", find_plan_once)


@pytest.fixture
def remember_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the command line estimate no profile that was estimated before."""
    monkeypatch.setattr(profiler, "profile", estimated_once)


@pytest.fixture
def few_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have plans cut memory into large chunks, for tests in which it does not matter how much they waste."""
    if not TRY_ALL:
        monkeypatch.setattr(paging, "MOST_CHUNKS", paging.MOST_CHUNKS // 4)


@pytest.fixture
def brief_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have searches end soon, for tests in which it does not matter how good the plans are."""
    if not TRY_ALL:
        parts = {"LEAST_INSTRUCTIONS": 40, "MOST_INSTRUCTIONS": 40, "MOST_SHAPES": 12, "MOST_EXCHANGES": 12}
        for name, part in parts.items():
            monkeypatch.setattr(explorers, name, getattr(explorers, name) // part)
        for name in ("LEAST_INSTRUCTIONS", "MOST_INSTRUCTIONS", "MOST_PLANS"):
            monkeypatch.setattr(unequal_widths, name, getattr(unequal_widths, name) // 40)
