"""What tests of planning share."""

import pytest

from bireme.plan.search import search
from tests.support.graphs import remember_captures
from tests.support.remembered import find_plan_once

remember_captures()


@pytest.fixture
def remember_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the command line search for nothing that was found before."""
    monkeypatch.setattr(search, "find_plan", find_plan_once)
