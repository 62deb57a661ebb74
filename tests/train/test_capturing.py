"""The model captured for evaluation by a copy of the process, and here where there is no such graph."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bireme.model.graph_file import graph_hash
from bireme.runtime.processes import preload
from bireme.train import prepare as capturing
from bireme.train.model import RunModel
from bireme.train.prepare import evaluation_beside
from bireme.train.run_file import RunFile, load_run_file

pytestmark = pytest.mark.slow

ANY: Any = None
"""A graph in training mode that nothing is made from."""

DROPS = "gpt:layers=1,width=8,heads=1,vocab=257,context=8,dropout=0.1"
MADE_HERE: Any = object()


@pytest.fixture(autouse=True)
def first_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has a server, two cores, and has captured nothing yet."""
    preload("bireme.train.prepare")
    monkeypatch.setattr(capturing, "_earlier", count())
    monkeypatch.setattr(capturing, "num_cores", lambda: 2)


def run_of(source: str) -> RunFile:
    return load_run_file(None, [f"model.source={source}", "data.length=8"])


def not_here(model: RunModel) -> RunModel:
    """The same; what is captured here is told apart."""
    return replace(
        model,
        evaluation=cast(Any, SimpleNamespace(graph=lambda _batch: MADE_HERE, knows=lambda _batch: False)),
    )


def test_a_copy_captures_what_this_process_would_and_only_the_first_time() -> None:
    model = RunModel.of(run_of(DROPS), 4)
    with evaluation_beside(not_here(model), 4, 2) as evaluation_of:
        found = evaluation_of(ANY)
    assert graph_hash(found) == graph_hash(model.evaluation.graph(2))
    with evaluation_beside(not_here(model), 4, 2) as evaluation_of:
        assert evaluation_of(ANY) is MADE_HERE


def test_what_a_copy_cannot_capture_is_captured_here() -> None:
    model = replace(RunModel.of(run_of(DROPS), 4), run=run_of("python:nowhere:model"))
    with evaluation_beside(not_here(model), 4, 2) as evaluation_of:
        assert evaluation_of(ANY) is MADE_HERE


def test_a_model_that_is_the_same_in_both_modes_is_captured_once() -> None:
    model = RunModel.of(run_of(DROPS.removesuffix(",dropout=0.1")), 4)
    with evaluation_beside(not_here(model), 4, 2) as evaluation_of:
        found = evaluation_of(model.training.graph(2))
    assert not found.training
