"""What holds for all tests: profiles are cached in a folder that goes away, never in the user's own.

The fast core runs compiled loops as plain Python: its graphs are small, and compiling takes longer.
Property tests look for new cases on a developer's machine, and try the same ones every time in CI, fewer
where a test does not say how many; how long they take is not judged.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

CI_EXAMPLES = 40

settings.register_profile("developer", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("developer"), derandomize=True, max_examples=CI_EXAMPLES)
settings.load_profile("ci" if os.environ.get("CI") else "developer")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "not slow":
        os.environ.setdefault("NUMBA_DISABLE_JIT", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more GPUs than there are."""
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu")) is not None]
    if not marked:
        return
    from bireme.devices import num_accelerators

    there = num_accelerators()
    for item, mark in marked:
        needed = mark.args[0] if mark.args else 1
        if there < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, and there are {there}: make gpu"))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "bireme"
    monkeypatch.setenv("BIREME_CACHE", str(folder))
    return folder
