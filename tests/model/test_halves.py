"""A backward in two halves gives what a whole one gives, and does no product of matrices twice."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from bireme.model.capture import capture
from bireme.model.gpt import GPT, GPTConfig
from bireme.model.halves import Rest, backward_input
from bireme.model.stage import StageFunction
from bireme.model.torch_private import DispatchMode
from bireme.model.units import units_of
from tests.support.graphs import captured_once

PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")


class Products(DispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).startswith(PRODUCTS)
        return func(*args, **(kwargs or {}))


class Tied(nn.Module):
    """One linear map, used `times` times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(6, 6), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.linear(x))
        return x


class TransposedOnce(nn.Module):
    """One node of the graph for two uses of a weight, of which one is behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        turned = self.weight.t()
        return torch.tanh(torch.tanh(x @ turned) @ turned)


class Attention(nn.Module):
    """With a norm ahead and a residual, and a norm that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inside = nn.LayerNorm(8), nn.LayerNorm(8)
        self.query_key_value, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query_key_value(self.norm(x)).chunk(3, dim=-1)
        seen = functional.scaled_dot_product_attention(self.inside(query), self.inside(key), value)
        result: Tensor = x + self.out(seen)
        return result


class Recurrent(nn.Module):
    """The same map over and over, split into gates: nodes with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.cell(x)[0]
        return result


class Experts(nn.Module):
    """The weights of all experts in one parameter, taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.weights.unbind()
        return torch.tanh(x @ one) * (x @ two) + torch.tanh(torch.tanh(x @ one) @ three)


class ScaledTwice(torch.autograd.Function):
    """An operator of one's own, which always computes all its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return 2 * x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        ScaledTwice.calls += 1
        return 2 * gradients[0] * scale, (2 * gradients[0] * x).sum(0)

    calls = 0


class OwnOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = ScaledTwice.apply(self.linear(x), self.scale)  # type: ignore[no-untyped-call]
        return result


class Generated(nn.Module):
    """A weight that depends on the input, and a parameter that is a view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.bank = nn.Linear(6, 6), nn.Parameter(torch.randn(42))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.bank[:36].view(6, 6), self.bank[36:]
        return functional.linear(x @ self.maker(x).tanh().t() @ x, weight, bias)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 6))


def images() -> nn.Module:
    layers = [
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.BatchNorm2d(4),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 2 * 2, 3))


def shared_convolution() -> nn.Module:
    layer = nn.Conv2d(3, 3, 3, padding=1)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (5, 6)),
    "tied twice": (lambda: Tied(2), (5, 6)),
    "tied four times": (lambda: Tied(4), (5, 6)),
    "transposed once": (TransposedOnce, (5, 6)),
    "attention": (Attention, (3, 5, 8)),
    "recurrent": (Recurrent, (2, 4, 8)),
    "experts": (Experts, (5, 6)),
    "own operator": (OwnOperator, (5, 6)),
    "generated": (Generated, (5, 6)),
    "images": (images, (4, 3, 7, 7)),
    "shared convolution": (shared_convolution, (2, 3, 5, 5)),
}


def same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def all_same(ones: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    return all(same(*pair) for pair in zip(ones, others, strict=True))


def in_halves(model: nn.Module, x: Tensor) -> Rest:
    y = model(x)
    return backward_input([y], [torch.cos(y.detach())], [x], list(model.parameters()))


def at_once(model: nn.Module, x: Tensor) -> tuple[Tensor | None, ...]:
    y = model(x)
    return torch.autograd.grad([y], [x, *model.parameters()], [torch.cos(y.detach())])


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, shape = CASES[request.param]
    return build().double(), torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_two_halves_are_the_whole_to_the_last_bit(case: tuple[nn.Module, Tensor]) -> None:
    expected_input, *expected = at_once(*case)
    rest = in_halves(*case)
    assert all_same(rest.input_gradients, [expected_input])
    assert all_same(rest.weight_gradients(), expected)


@pytest.mark.parametrize("name", ["mlp", "tied twice", "tied four times", "attention"])
def test_products_for_weights_are_all_left_to_the_second_half(name: str) -> None:
    torch.manual_seed(0)
    build, shape = CASES[name]
    model, x = build().double(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = model(x)
    with Products() as for_input:
        torch.autograd.grad([y], [x], [y.detach()], retain_graph=True)
    with Products() as whole:
        torch.autograd.grad([y], [x, *model.parameters()], [y.detach()], retain_graph=True)
    with Products() as first:
        rest = backward_input([y], [y.detach()], [x], list(model.parameters()))
    with Products() as second:
        rest.weight_gradients()
    assert first.count == for_input.count < whole.count
    assert first.count + second.count == whole.count


def test_an_operator_of_ones_own_runs_once() -> None:
    model, x = OwnOperator(), torch.randn(5, 6, requires_grad=True)
    ScaledTwice.calls = 0
    in_halves(model, x).weight_gradients()
    assert ScaledTwice.calls == 1


def gpt_inputs() -> dict[str, Tensor]:
    ids = torch.randint(32, (3, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stages_of_a_gpt_run_backward_in_halves(count: int) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=16, heads=2, vocab=32, context=8)).double()
    parameters = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.named_parameters()}
    inputs = gpt_inputs()
    graph = captured_once("a gpt to run backward in halves", lambda: capture(model, inputs), is_kept=True)
    units = units_of(graph)
    bounds = [round(stage * len(units) / count) for stage in range(count + 1)]
    stages = [StageFunction(graph, units[begin:end]) for begin, end in pairwise(bounds)]

    sent: dict[str, Tensor] = {}
    ran = []
    for stage in stages:
        received = {name: sent[name].detach().requires_grad_() for name in stage.receives}
        results = stage(parameters, {}, inputs | received)
        sent = {name: results[name] for name in stage.sends}
        ran.append((stage, received, sent or {"loss": results["loss"]}))
    gradients: dict[str, Tensor | None] = {"loss": torch.ones((), dtype=torch.float64)}
    rests = []
    for stage, received, made in reversed(ran):
        used = [parameters[name] for name in stage.parameters]
        rest = backward_input(
            list(made.values()), [gradients[name] for name in made], list(received.values()), used
        )
        gradients |= dict(zip(received, rest.input_gradients, strict=True))
        rests.append((stage, rest))

    found: dict[str, Tensor] = {}
    for stage, rest in rests:
        for name, gradient in zip(stage.parameters, rest.weight_gradients(), strict=True):
            assert gradient is not None
            found[name] = found[name] + gradient if name in found else gradient
    expected = torch.autograd.grad(model(**inputs)["loss"], list(model.parameters()))
    for name, tensor in zip(parameters, expected, strict=True):
        assert torch.equal(found[name], tensor), name


def test_without_an_input_that_learns_all_is_left_to_the_second_half() -> None:
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(5, 6)
    y = model(x)
    with Products() as first:
        rest = backward_input([y], [torch.cos(y.detach())], [x], list(model.parameters()))
    assert first.count == 0
    assert rest.input_gradients == (None,)
    y = model(x)
    expected = torch.autograd.grad([y], list(model.parameters()), [torch.cos(y.detach())])
    assert all_same(rest.weight_gradients(), expected)


def test_outputs_may_be_inputs_need_no_gradient_get_none_or_depend_on_parameters_alone() -> None:
    torch.manual_seed(0)
    layer, alone = nn.Linear(6, 6), nn.Linear(6, 6)
    frozen = nn.Linear(6, 6).requires_grad_(False)
    x, passed = (torch.randn(5, 6, requires_grad=True) for _ in range(2))
    unused = torch.randn(5, 6, requires_grad=True)
    ids = torch.arange(5)
    y, penalty, dropped = frozen(layer(x)), alone.weight.square().sum(), alone(x)
    outputs = [y, passed, ids, penalty, dropped]
    gradients = [torch.ones(5, 6), torch.full((5, 6), 2.0), None, torch.tensor(3.0), None]
    parameters = [layer.weight, layer.bias, alone.weight, alone.bias, frozen.weight]
    rest = backward_input(outputs, gradients, [x, passed, unused, ids], parameters)
    assert same(rest.input_gradients[0], torch.ones(5, 6) @ frozen.weight @ layer.weight)
    assert same(rest.input_gradients[1], gradients[1])
    assert rest.input_gradients[2:] == (None, None)
    found = rest.weight_gradients()
    expected = torch.autograd.grad(frozen(layer(x)).sum(), [layer.weight, layer.bias])
    assert all_same(found, [*expected, 6 * alone.weight.detach(), None, None])


def test_a_junction_that_no_gradient_reaches_gives_none() -> None:
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    one, _ = Half.apply(x * w)  # type: ignore[no-untyped-call]
    rest = backward_input([one], [torch.ones(3)], [x], [w])
    assert rest.input_gradients == (None,)
    assert rest.weight_gradients() == (None,)


class Half(torch.autograd.Function):
    """Lets no gradient through."""

    @staticmethod
    def forward(_ctx: FunctionCtx, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), x.clone()

    @staticmethod
    def backward(_ctx: FunctionCtx, *_gradients: Tensor) -> None:
        return None


def test_a_parameter_may_also_be_an_input_and_stand_in_the_list_twice() -> None:
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    rest = backward_input([x * w * x], [torch.ones(3)], [x, w], [w, w])
    expected = (x * x).detach()
    assert all(gradient is not None for gradient in rest.input_gradients)
    assert torch.allclose(torch.stack([g for g in rest.input_gradients[1:] if g is not None]), expected)
    first, second = rest.weight_gradients()
    assert same(first, second)
    assert first is not None
    assert torch.allclose(first, expected)


def test_a_parameter_may_depend_on_the_inputs() -> None:
    torch.manual_seed(0)
    maker, x = nn.Linear(6, 6), torch.randn(6, 6, requires_grad=True)
    weight = torch.tanh(maker(x))
    y = torch.tanh(x @ weight)
    parameters = [weight, *maker.parameters()]
    expected = torch.autograd.grad([y], [x, *parameters], [y.detach()], retain_graph=True)
    rest = backward_input([y], [y.detach()], [x], parameters)
    assert all_same((*rest.input_gradients, *rest.weight_gradients()), expected)


def test_without_parameters_the_first_half_is_all_and_lets_go() -> None:
    model, x = mlp().requires_grad_(False), torch.randn(5, 6, requires_grad=True)
    y = model(x)
    assert backward_input([y], [y.detach()], [x], list(model.parameters())).weight_gradients() == (None,) * 6
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad([y], [x], [y.detach()])


def test_another_backward_in_between_changes_nothing() -> None:
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(5, 6, requires_grad=True)
    y = model(x)
    expected = torch.autograd.grad([y], list(model.parameters()), [y.detach()], retain_graph=True)
    rest = backward_input([y], [y.detach()], [x], list(model.parameters()))
    torch.autograd.grad([y], [x], [torch.ones(5, 6)], retain_graph=True)
    assert all_same(rest.weight_gradients(), expected)


class Saved:
    """What the forward has put aside for the backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_the_second_half_runs_once_and_lets_go_of_what_the_forward_saved() -> None:
    saved: list[ref[Saved]] = []

    def pack(tensor: Tensor) -> Saved:
        made = Saved(tensor.detach())  # else a result would keep the node that made it
        saved.append(ref(made))
        return made

    model, x = mlp(), torch.randn(5, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
        rest = in_halves(model, x)
    assert sum(one() is not None for one in saved) >= 5
    rest.weight_gradients()
    assert not any(one() is not None for one in saved)
    with pytest.raises(RuntimeError, match="runs once"):
        rest.weight_gradients()
