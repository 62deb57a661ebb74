"""The graph in evaluation mode: made from that in training mode, or captured."""

import pytest

from bireme.model.graph_file import graph_hash
from bireme.train import prepare
from bireme.train.model import RunModel
from bireme.train.run_file import load_run_file

DROPS = "gpt:layers=1,width=8,heads=1,vocab=257,context=8,dropout=0.1"


@pytest.mark.parametrize("source", [DROPS, DROPS.removesuffix(",dropout=0.1")])
def test_a_model_is_captured_once_more_only_if_it_is_another_program(source: str) -> None:
    model = RunModel.of(load_run_file(None, [f"model.source={source}", "data.length=8"]), 4)
    found = prepare._in_evaluation(model, model.training.graph(2), 2)
    assert model.evaluation.knows(2) == (source == DROPS)
    assert graph_hash(found) == graph_hash(model.evaluation.graph(2))
    assert not found.training
