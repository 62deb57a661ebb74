"""A model is captured as often as it has to be: once, or once for each batch size."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bireme.errors import BiremeError
from bireme.model.capture import Captures, capture, resized
from bireme.model.chain import chain
from bireme.model.graph import Graph
from bireme.model.stage import StageFunction
from bireme.model.units import units_of


class General(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.relu(self.first(x))).square().mean()
        return result


class Special(General):
    """Makes a number of the batch size: a graph of it holds for no other."""

    def forward(self, x: Tensor) -> Tensor:
        rows = int(x.shape[0])
        weights = torch.tensor([1.0 / (row + 1) for row in range(rows)])
        result: Tensor = (self.last(torch.relu(self.first(x))).mean(dim=1) * weights).sum()
        return result


class Counted:
    """Capture, with the batch sizes that it was called for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, model: Any, inputs: Any, **settings: Any) -> Graph:
        self.sizes.append(len(inputs["x"]))
        return capture(model, inputs, **settings)


def rows(count: int) -> dict[str, Tensor]:
    return {"x": torch.randn(count, 4, generator=torch.Generator().manual_seed(count))}


def test_a_model_for_any_batch_is_captured_once() -> None:
    counted = Counted()
    captures = Captures(General(), rows(3), front_end=counted)
    graphs = [captures.graph(batch) for batch in (2, 5, 2, 1)]
    assert counted.sizes == [2]
    assert all(graph is graphs[0] for graph in graphs)


@pytest.mark.slow
def test_a_model_that_specializes_is_captured_once_for_each_batch_size() -> None:
    model, counted = Special(), Counted()
    captures = Captures(model, rows(3), front_end=counted)
    for batch in (2, 5, 2, 1, 5):
        graph = captures.graph(batch)
        stage = StageFunction(graph, units_of(graph))
        inputs = rows(batch)
        assert torch.equal(stage(dict(model.named_parameters()), {}, inputs)["loss"], model(**inputs))
    assert counted.sizes == [2, 5, 1]
    assert captures.graph().batch == 3


def test_equal_layers_of_different_batch_sizes_are_different_units() -> None:
    captures = Captures(Special(), rows(3))
    two, five = (units_of(captures.graph(batch))[0].structure for batch in (2, 5))
    assert two != five


def test_a_chain_for_one_batch_size_is_traced_for_each() -> None:
    captures = Captures([nn.Linear(4, 4), Halving()], (torch.randn(6, 4),), front_end=chain, training=False)
    assert [captures.graph(batch).inputs[0].shape for batch in (6, 2)] == [(6, 4), (2, 4)]
    with pytest.raises(RuntimeError, match="shape"):
        captures.graph(3)


class Halving(nn.Module):
    """Takes an even number of samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, x.shape[0] // 2, 4)


def test_samples_are_repeated_or_left_out_from_the_first_on() -> None:
    inputs = {"x": torch.tensor([[0], [1], [2]]), "scale": torch.tensor(2.0), "flag": True}
    assert resized(inputs, 5)["x"].flatten().tolist() == [0, 1, 2, 0, 1]
    assert resized(inputs, 2)["x"].flatten().tolist() == [0, 1]
    assert (resized(inputs, 5)["scale"].ndim, resized(inputs, 5)["flag"]) == (0, True)
    assert len(resized((torch.zeros(1, 2), 3), 4)[0]) == 4


def test_inputs_without_one_batch_size_are_refused() -> None:
    with pytest.raises(BiremeError, match=r"lengths \[2, 3\]"):
        Captures(General(), {"x": torch.zeros(2, 4), "y": torch.zeros(3)}).graph()
