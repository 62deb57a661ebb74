"""The model captured for evaluation by a copy of the process, and here where there is no such graph."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from bireme.model.graph_file import graph_hash
from bireme.runtime.processes import preload
from bireme.train import capturing
from bireme.train.capturing import evaluation_beside
from bireme.train.model import RunModel
from bireme.train.run_file import RunFile, load_run_file

pytestmark = pytest.mark.slow

MADE_HERE: Any = object()
HERE: Any = SimpleNamespace(evaluation=SimpleNamespace(graph=lambda _batch: MADE_HERE))
"""A model that tells who captures it."""


@pytest.fixture(autouse=True)
def first_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has a server, two cores, and has captured nothing yet."""
    preload("bireme.train.capturing")
    monkeypatch.setattr(capturing, "_earlier", count())
    monkeypatch.setattr(capturing, "num_cores", lambda: 2)


def run_of(source: str) -> RunFile:
    return load_run_file(None, [f"model.source={source}", "data.length=8"])


def test_a_copy_captures_what_this_process_would_and_only_the_first_time() -> None:
    run = run_of("gpt:layers=1,width=8,heads=1,vocab=257,context=8")
    with evaluation_beside(run, 4, 2) as captured:
        found = captured(HERE)
    assert graph_hash(found) == graph_hash(RunModel.of(run, 4).evaluation.graph(2))
    with evaluation_beside(run, 4, 2) as captured:
        assert captured(HERE) is MADE_HERE


def test_what_a_copy_cannot_capture_is_captured_here() -> None:
    with evaluation_beside(run_of("python:nowhere:model"), 4, 2) as captured:
        assert captured(HERE) is MADE_HERE
