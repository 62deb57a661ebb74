"""Which parameters learn: patterns over the model's own names."""

import pytest
from torch import nn

from bireme.errors import BiremeError
from bireme.model.part import TrainedPart
from bireme.model.sources import choose_trainable, load_source
from bireme.train.model import RunModel
from bireme.train.run_file import load_run_file

GPT = "gpt:layers=2,width=8,heads=1,vocab=32,context=8"


def learning(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def test_train_freezes_all_that_it_does_not_match() -> None:
    model = load_source(GPT, part=TrainedPart(train=("layers.1.*", "*norm*"))).model
    assert learning(model) == {
        name for name in names(model) if name.startswith("layers.1.") or "norm" in name
    }


def test_freeze_leaves_the_rest_as_the_model_has_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.requires_grad_(False)
    choose_trainable(model, freeze=["0.*"])
    assert learning(model) == {"1.bias", "2.weight", "2.bias"}


def test_a_tied_weight_is_matched_under_any_of_its_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    choose_trainable(model, train=["1.weight"])
    assert learning(model) == {"0.weight"}


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (TrainedPart(train=("layers.1",)), "model.train has 'layers.1', which matches none"),
        (TrainedPart(train=("layers.1",)), "Did you mean 'layers.1.*'?"),
        (TrainedPart(freeze=("*", "nowhere")), "model.freeze has 'nowhere', which matches none"),
        (TrainedPart(freeze=("*",)), "With this model.freeze no parameter learns."),
    ],
)
def test_a_pattern_that_is_of_no_use_is_refused(part: TrainedPart, said: str) -> None:
    with pytest.raises(BiremeError) as caught:
        load_source(GPT, part=part)
    assert said in str(caught.value)


@pytest.mark.slow
def test_a_run_file_s_patterns_say_which_parameters_of_the_graph_learn() -> None:
    patterns = 'model.train=["layers.1.*", "norm.*"]'
    model = RunModel.of(load_run_file(None, [f"model.source={GPT}", patterns]), 2)
    graph = model.training.graph(2)
    model.check_loss(graph)
    found = {state.name for state in graph.parameters if state.trainable}
    assert found == {name for name in names(model.source.model) if name.startswith(("layers.1.", "norm."))}


@pytest.mark.slow
def test_a_loss_that_nothing_that_learns_has_a_part_in_is_refused() -> None:
    model = RunModel.of(load_run_file(None, [f"model.source={GPT}"]), 2)
    model.source.model.requires_grad_(False)
    with pytest.raises(BiremeError, match="Nothing that learns has a part in the loss of gpt:"):
        model.check_loss(model.training.graph(2))
