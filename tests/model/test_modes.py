"""A model that is one program in both modes is captured once; any other is captured in each."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bireme.model.capture import capture, dropouts_of, in_evaluation
from bireme.model.gpt import GPT, GPTConfig

INPUTS = {"x": torch.zeros(3, 4)}


class Layers(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).sum()  # type: ignore[no-untyped-call]


class Asks(nn.Module):
    """Asks for the mode, and does what its function says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.loose = torch.ones(4, device="meta")
        self.num_calls = 0

    def forward(self, x: Tensor) -> Any:
        self.num_calls += 1
        chosen = self.one if self.training or self.kind == "in vain" else self.other
        match self.kind:
            case "another weight" | "in vain":
                return chosen(x).sum()
            case "another number":
                return (self.one(x) * (2 if self.training else 2.0)).sum()
            case "another tensor":
                return (self.one(x) * (self.loose if self.training else self.loose + 0)).sum()
            case "grad mode":
                with torch.set_grad_enabled(self.training):
                    return self.one(x).sum()
            case "dropped always":
                return functional.dropout(self.one(x), 0.5, training=True).sum()
        return torch.dropout(self.one(x), 0.5, self.training).sum()


@pytest.mark.slow
def test_the_graph_for_evaluation_is_the_one_that_would_be_captured() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    with torch.device("meta"):
        gpt = GPT(GPTConfig(1, 8, 2, 16, 4))
        layers = Layers(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.1))
    for model, inputs in ((gpt, {"input_ids": ids, "labels": ids}), (layers, INPUTS)):
        modes = dropouts_of(model, inputs)
        assert modes is not None
        found = in_evaluation(capture(model, inputs), modes)
        assert found == capture(model, inputs, training=False)
    assert in_evaluation(capture(gpt, {"input_ids": ids, "labels": ids}), 1) is None


@pytest.mark.parametrize(
    "kind",
    [
        "another weight",
        "another number",
        "another tensor",
        "grad mode",
        "dropped always",
        "otherwise dropped",
    ],
)
def test_what_the_mode_changes_makes_two_programs(kind: str) -> None:
    with torch.device("meta"):
        assert dropouts_of(Asks(kind), INPUTS) is None


def test_modules_that_are_others_in_evaluation_are_two_programs() -> None:
    with torch.device("meta"):
        drops = GPT(GPTConfig(1, 8, 2, 16, 4, dropout=0.1))
        assert dropouts_of(Layers(nn.Linear(4, 4), nn.BatchNorm1d(4)), INPUTS) is None
    ids = torch.zeros(2, 4, dtype=torch.int64)
    assert dropouts_of(drops, {"input_ids": ids, "labels": ids}) is None


def test_a_model_that_asks_in_vain_is_one_program_and_is_left_as_it_was() -> None:
    with torch.device("meta"):
        model = Asks("in vain")
    assert dropouts_of(model.eval(), INPUTS) is not None
    assert not model.training
    assert not model.num_calls


def test_a_model_with_numbers_is_not_run() -> None:
    model = Asks("in vain")
    assert dropouts_of(model, INPUTS) is None
    assert not model.num_calls
