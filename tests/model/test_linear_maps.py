"""Linear maps found in graphs, and what flows back through them in place of gradients of their weights."""

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bireme.codec.sum_description import GradientForm
from bireme.errors import BiremeError
from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.model.halves import GradientHook, feeding
from bireme.model.stage import StageFunction, torch_operator
from bireme.model.units import chosen_maps, linear_maps, units_of
from tests.support.small_models import gpt


class Maps(nn.Module):
    """Every kind of linear map, one after the other, and an embedding that is the output's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.line = nn.Conv1d(6, 8, 3, padding=1, dilation=1)
        self.plane = nn.Conv2d(8, 5, (3, 2), stride=(2, 1), padding=(1, 0))
        self.grouped = nn.Conv1d(5, 10, 1, groups=5)
        self.last = nn.Linear(10, 7)
        self.product = nn.Parameter(torch.randn(7, 6))
        self.shift = nn.Parameter(torch.randn(6))

    def forward(self, numbers: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        x = self.line(self.tokens(numbers).transpose(1, 2))
        x = self.plane(torch.stack([x, 2 * x], 3)).squeeze(3)
        x = self.last(torch.tanh(self.grouped(x)).transpose(1, 2))
        x = torch.addmm(self.shift, x.reshape(-1, 7), self.product)
        scores = functional.linear(x.view(len(numbers), -1, 6), self.tokens.weight)
        return {"loss": functional.cross_entropy(scores.mean(1), wanted)}


@cache
def made() -> tuple[Graph, dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Maps().double()
    inputs = {"numbers": torch.randint(11, (3, 9)), "wanted": torch.randint(11, (3,))}
    return capture(model, inputs), {n: p.detach() for n, p in model.named_parameters()}, inputs


@pytest.mark.slow
def test_maps_give_what_they_gave_and_pairs_in_place_of_their_gradient() -> None:
    graph, weights, inputs = made()
    maps = linear_maps(graph)
    assert sorted(maps) == ["last.weight", "line.weight", "plane.weight", "product"]
    gradient_hook, found = GradientHook(), dict.fromkeys(maps, torch.zeros(()).double())

    def feed(name: str, left: Tensor, right: Tensor) -> None:
        found[name] = found[name] + left.T @ right

    gradient_hook.feed = feed
    results = []
    for resolve in (torch_operator, feeding(torch_operator, maps, gradient_hook)):
        own = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        loss = StageFunction(graph, units_of(graph), resolve=resolve)(own, {}, inputs)["loss"]
        loss.backward()
        results.append((loss.detach(), own))
    (wanted, plain), (loss, fed) = results
    assert torch.equal(loss, wanted)
    for name, one in plain.items():
        gradient = fed[name].grad
        assert one.grad is not None
        assert (gradient is None) == (name in maps)
        given = found[name] if gradient is None else gradient.reshape(len(one), -1)
        assert torch.allclose(given, one.grad.reshape(len(one), -1), atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "words"),
    [
        (GradientForm(8, patterns=("last.weight",)), r"a matrix of 7 × 10.*rank 7 at most"),
        (GradientForm(2, patterns=("lost.*",)), "matches no parameter"),
        (GradientForm(2, patterns=("tokens.weight",)), r"2 places \(tied weights\)"),
        (GradientForm(2, patterns=("shift",)), "is not the weight of a linear map"),
        (GradientForm(60), "the best is line.weight, a matrix of 8 × 18"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(form: GradientForm, words: str) -> None:
    with pytest.raises(BiremeError, match=words):
        chosen_maps(made()[0], form)


@pytest.mark.slow
def test_all_means_what_gets_smaller_by_it() -> None:
    graph = gpt("layers=3,tied=false").graph
    for rank in (1, 4):
        found = chosen_maps(graph, GradientForm(rank))
        assert found
        assert all(rank * (one.rows + one.columns + 1) < math.prod(one.shape) for one in found.values())
    of_all: Callable[[int], int] = lambda rank: len(chosen_maps(graph, GradientForm(rank)))  # noqa: E731
    assert of_all(1) >= of_all(8)
