"""What holds for all tests.

Processes that tests start import the same tree as the tests, whatever is installed. All workers of a run of
the suite share one folder of what was measured and captured, which goes away at its end: the user's own is
never touched, and nothing is measured twice. Each process computes with one thread, for several share the
processors.

The fast core runs compiled loops as plain Python: its graphs are small, and compiling takes longer.
Property tests look for new cases on a developer's machine, and try the same ones every time in CI; how long
they take is not judged. `tests/support/extent.py` says how many cases they try.

Compiled modules are kept even where the environment says otherwise, for otherwise each process would compile
what it imports.

What a worker has imported and collected stays to its end, so Python's collector of cycles need not look
through it: it rests while tests are collected, and leaves out afterwards what is there by then.
"""

import gc
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.extent import IS_FEW, PART, TRY_ALL, part_of, several
from tests.support.kept import KEPT_GRAPHS, kept_graphs
from tests.support.workers import LARGE, Template

ROOT = Path(__file__).parents[1]
DEFAULT_EXAMPLES, ALL_EXAMPLES = part_of(15), 100
"""Of a property test that does not say how many."""

settings.register_profile(
    "developer",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=ALL_EXAMPLES if TRY_ALL else DEFAULT_EXAMPLES,
)
settings.register_profile("ci", settings.get_profile("developer"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "developer")

MANY = 4
"""Cases of a test that the fast core tries in any case."""

SLOW_LIMIT_S = 1200 if TRY_ALL else 600
"""Of a test that starts processes, on a machine that does many other things too."""

FAST = "not slow"
"""What `make test-fast` asks for."""

ALL_SLOW = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", re.MULTILINE)

FOLDER = pytest.StashKey[str]()
TEMPLATE = pytest.StashKey[Template]()


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist and their template inherit what is set by the process that starts them."""
    gc.disable()
    # What Python and pytest have compiled is kept beside its source: compiling it takes half of a collection.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if "BIREME_TESTS_FOLDER" not in os.environ:
        config.stash[FOLDER] = tempfile.mkdtemp(prefix="bireme-tests-")
        os.environ["BIREME_TESTS_FOLDER"] = config.stash[FOLDER]
        os.environ["BIREME_CACHE"] = str(Path(config.stash[FOLDER], "cache"))
        os.environ[KEPT_GRAPHS] = str(_folder_of_graphs(config))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    os.environ["OMP_NUM_THREADS"] = "1"
    # As the engine's benchmark sets it, so that the fork server need not be another one there. A new one has
    # imported nothing, and each process that it starts imports torch's compiler by itself.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as the command sets it, for the same reason
    if config.option.markexpr == FAST:
        os.environ.setdefault("NUMBA_DISABLE_JIT", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Workers are copies of one process that has imported what tests import."""
    if sys.platform != "linux":
        return
    asked = [word.partition("::")[0] for word in config.args]
    is_fast = config.option.markexpr == FAST
    template = config.stash[TEMPLATE] = Template(
        Path(config.stash[FOLDER]), () if is_fast else LARGE, ["-m", config.option.markexpr, *asked]
    )
    for spec in specs:
        spec.python = template.client


def _folder_of_graphs(config: pytest.Config) -> Path:
    cache = getattr(config, "cache", None)  # somebody may want none
    return Path(config.stash[FOLDER]) if cache is None else kept_graphs(cache.mkdir("graphs"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the collector of cycles look at what tests make, and at nothing else.

    And seldom: a capture makes so many objects that to look at them took a tenth of its processor seconds.
    """
    if session.items:  # the template of the workers has none, and all wait for it
        gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    if TEMPLATE in config.stash:
        config.stash[TEMPLATE].end()
    if FOLDER in config.stash:
        shutil.rmtree(config.stash[FOLDER], ignore_errors=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast core need not import files in which every test is slow."""
    if config.option.markexpr != FAST or collection_path.suffix != ".py":
        return None
    return True if _is_slow(collection_path) else None


def _is_slow(path: Path) -> bool:
    """Whether every test of a file is slow."""
    return ALL_SLOW.search(path.read_text(encoding="utf-8")) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _keep_few(config, items)
    _skip_without_gpus(items)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    for item in items:
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))


def _keep_few(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `few(count)` leave so many of its cases, spread evenly; all that somebody names.

    The fast core leaves a part of the cases of every test that has many.
    """
    if TRY_ALL or any("::" in word for word in config.args):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped: set[pytest.Item] = set()
    for own in cases.values():
        mark = own[0].get_closest_marker("few")
        if mark is not None:
            dropped |= {*own} - {*several(own, mark.args[0])}
        elif IS_FEW and len(own) > MANY:
            dropped |= {*own} - {*several(own, max(len(own), round(PART * MANY)))}
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]


def _skip_without_gpus(items: list[pytest.Item]) -> None:
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


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that only this test sees, empty at its start."""
    folder = tmp_path_factory.mktemp("cache") / "bireme"
    monkeypatch.setenv("BIREME_CACHE", str(folder))
    return folder
