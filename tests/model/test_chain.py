"""A chain of modules, cut anywhere, gives the numbers of the modules run one after the other."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bireme.errors import BiremeError
from bireme.model.capture import Inputs, capture
from bireme.model.chain import chain, chain_resolver
from bireme.model.graph import Graph
from bireme.model.graph_file import load_graph, save_graph
from bireme.model.stage import StageFunction
from bireme.model.units import units_of

BATCH = 6


class Picky(nn.Module):
    """Takes one of two ways, by the numbers in its tensor: no graph can hold that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.positive = nn.Linear(width, width)
        self.negative = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        way = self.positive if float(x.detach().sum()) > 0 else self.negative
        changed: Tensor = self.dropout(torch.tanh(way(x)))
        return x + changed


class Counting(nn.Module):
    """Puts a new tensor in the place of its buffer every time."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x @ self.scale


class Forking(nn.Module):
    """Two tensors out of one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x


class Crossing(nn.Module):
    """Two tensors out of two."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return both[1] + self.linear(both[0]), both[0]


class Joining(nn.Module):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0] * both[1]


def squared_error(returned: Tensor, inputs: Inputs) -> Tensor:
    assert not isinstance(inputs, dict)
    target: Tensor = inputs[1]  # type: ignore[index]
    return ((returned - target) ** 2).mean()


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def picky() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), *(Picky(4) for _ in range(4)), nn.Linear(4, 4))


def normalized() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Counting(), nn.Linear(4, 4))


def forked() -> nn.Sequential:
    return nn.Sequential(Forking(), Crossing(), Crossing(), Crossing(), Joining(), nn.Linear(4, 4))


def tied() -> nn.Sequential:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), Picky(4), last)


MODELS = [plain, picky, normalized, forked, tied]


def example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 4, dtype=dtype), torch.randn(BATCH, 4, dtype=dtype)


def whole(graph: Graph, modules: Any, loss: Any = None) -> StageFunction:
    return StageFunction(graph, units_of(graph), resolve=chain_resolver(graph, modules, loss=loss))


def stages(graph: Graph, modules: nn.Sequential, count: int, loss: Any) -> list[StageFunction]:
    units = units_of(graph)
    count = min(count, len(units))
    bounds = [len(units) * stage // count for stage in range(count + 1)]
    resolve = chain_resolver(graph, modules, loss=loss)
    return [StageFunction(graph, units[begin:end], resolve=resolve) for begin, end in pairwise(bounds)]


def run(functions: Sequence[StageFunction], parameters: Any, buffers: Any, inputs: Any) -> dict[str, Tensor]:
    """One stage after the other; each gets copies of what it receives, as over a link."""
    outputs: dict[str, Tensor] = {}
    values = dict(inputs)
    for function in functions:
        results = function(parameters, buffers, values)
        outputs |= {name: results[name] for name in function.outputs}
        values = inputs | {name: results[name].clone() for name in function.sends}
    return outputs


@pytest.mark.few(12)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("build", MODELS)
def test_stages_of_a_chain_give_loss_and_gradients_of_the_whole(
    build: Callable[[], nn.Sequential], count: int, training: bool
) -> None:
    torch.manual_seed(0)
    model = build().double()
    x, y = example()
    graph = chain(model, (x, y), loss=squared_error, training=training)
    parameters = {s.name: model.get_parameter(s.name).detach().clone() for s in graph.parameters}
    for tensor in parameters.values():
        tensor.requires_grad_()
    buffers = {state.name: model.get_buffer(state.name).clone() for state in graph.buffers}

    torch.manual_seed(1)
    outputs = run(stages(graph, model, count, squared_error), parameters, buffers, {"0": x, "1": y})
    gradients = torch.autograd.grad(outputs["loss"], list(parameters.values()), allow_unused=True)

    torch.manual_seed(1)
    model.train(training)
    loss = squared_error(model(x), (x, y))
    expected = torch.autograd.grad(
        loss, [model.get_parameter(name) for name in parameters], allow_unused=True
    )
    assert torch.equal(outputs["loss"], loss)
    for name, one, other in zip(parameters, gradients, expected, strict=True):
        assert (one is None) == (other is None), name
        assert one is None or torch.equal(one, other), name
    for name, buffer in buffers.items():
        assert torch.equal(buffer, model.get_buffer(name)), name


def test_the_model_in_the_way_of_capture_is_a_chain() -> None:
    model = picky()
    x, _ = example(torch.float32)
    with pytest.raises(BiremeError, match="chain"):
        capture(model, (x,))
    assert len(units_of(chain(model, (x,)))) == 6


def test_making_a_chain_leaves_modules_and_random_state_alone() -> None:
    model = normalized().double().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = example()
    state = torch.get_rng_state()
    chain(model, inputs, loss=squared_error, training=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module.training for module in model.modules())


def test_equal_modules_are_equal_units() -> None:
    x, y = example(torch.float32)
    kinds = [unit.structure for unit in units_of(chain(picky(), (x, y), loss=squared_error))]
    assert len(set(kinds[1:5])) == 1
    assert len({kinds[0], kinds[1], kinds[5]}) == 3
    wider = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4))
    assert len({unit.structure for unit in units_of(chain(wider, (x,)))}) == 3


def test_a_chain_is_cut_where_a_captured_model_is() -> None:
    x, _ = example(torch.float32)
    model = plain()
    one, other = units_of(chain(model, (x,))), units_of(capture(model, (x,)))
    assert [unit.parameters for unit in one] == [unit.parameters for unit in other]
    assert [unit.name for unit in one] == [unit.name for unit in other] == ["0", "2", "4"]


def test_shapes_hold_for_any_batch_size() -> None:
    graph = chain(nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)), (torch.randn(BATCH, 4),))
    assert graph.any_batch
    assert [value.shape for op in graph.operators for value in op.outputs if value] == [("b", 4), ("4*b",)]


def test_a_module_for_one_batch_size_makes_a_chain_for_that_size() -> None:
    graph = chain([nn.Linear(4, 4), nn.Unflatten(0, (2, 3))], (torch.randn(BATCH, 4),))
    assert not graph.any_batch
    assert graph.inputs[0].shape == (BATCH, 4)


def test_on_the_meta_device_a_chain_needs_no_numbers() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096))
    graph = chain(model, (torch.randn(2, 4096),))
    assert graph.parameter_bytes == 2 * 4 * (4096 * 4096 + 4096)
    assert graph.operators[0].flops == 2 * 2 * 4096 * 4096


def test_inputs_go_to_the_first_module_by_name() -> None:
    class First(nn.Module):
        def forward(self, ids: Tensor, shift: int = 3, mask: Tensor | None = None) -> Tensor:
            assert mask is not None
            return (ids + shift) * mask

    def total(returned: Tensor, inputs: Inputs) -> Tensor:
        return (returned * inputs["labels"]).sum()  # type: ignore[call-overload,no-any-return]

    modules: list[nn.Module] = [First(), nn.Linear(4, 4)]
    inputs = {"labels": torch.randn(2, 4), "mask": torch.ones(2, 4), "ids": torch.randn(2, 4)}
    graph = chain(modules, inputs, loss=total)
    function = whole(graph, modules, total)
    parameters = {f"1.{name}": tensor for name, tensor in modules[1].named_parameters()}
    expected = (modules[1](inputs["ids"] + 3) * inputs["labels"]).sum()
    assert torch.equal(function(parameters, {}, inputs)["loss"], expected)


def test_a_chain_from_a_file_runs_its_modules(tmp_path: Path) -> None:
    model = forked().double()
    x, y = example()
    graph = chain(model, (x, y), loss=squared_error)
    save_graph(graph, tmp_path / "graph.json")
    loaded = load_graph(tmp_path / "graph.json")
    assert loaded == graph
    function = whole(loaded, model, squared_error)
    results = function(dict(model.named_parameters()), {}, {"0": x, "1": y})
    assert torch.equal(results["loss"], squared_error(model(x), (x, y)))


def test_a_chain_without_its_modules_asks_for_them(tmp_path: Path) -> None:
    x, y = example(torch.float32)
    save_graph(chain(plain(), (x, y), loss=squared_error), tmp_path / "graph.json")
    loaded = load_graph(tmp_path / "graph.json")
    for unit in units_of(loaded):
        with pytest.raises(BiremeError, match=r"Give the modules and the loss.*chain_resolver"):
            StageFunction(loaded, [unit])
    with pytest.raises(BiremeError, match="Give the loss"):
        whole(loaded, plain())


class Overwriting(nn.Linear):
    """Writes its result over what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(super().forward(x.detach()))


def test_a_chain_is_not_cut_ahead_of_a_module_that_writes_to_what_it_gets() -> None:
    x, _ = example(torch.float32)
    units = units_of(chain(nn.Sequential(nn.Linear(4, 4), Overwriting(4, 4), nn.Linear(4, 4)), (x,)))
    assert [unit.name for unit in units] == ["Sequential", "2"]


def test_modules_without_parameters_ahead_of_the_first_belong_to_its_unit() -> None:
    x, _ = example(torch.float32)
    model = nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    units = units_of(chain(model, (x,)))
    assert [unit.operators for unit in units] == [(0, 1, 2), (3,)]
    assert [unit.name for unit in units] == ["2", "3"]
    (only,) = units_of(chain(nn.Sequential(nn.Flatten(), nn.Tanh()), (x,)))
    assert only.operators == (0, 1)


def test_other_modules_than_the_graph_was_made_of_are_refused() -> None:
    x, _ = example(torch.float32)
    graph = chain(plain(), (x,))
    with pytest.raises(BiremeError, match=r"chain\.Linear\.\w+ as link 0"):
        whole(graph, list(picky())[1:])


@pytest.mark.parametrize(
    ("modules", "inputs", "sentence"),
    [
        ([], (torch.ones(2, 4),), "no modules"),
        ([nn.Linear(4, 4), "relu"], (torch.ones(2, 4),), "Link 1 of the chain is a str"),
        ([nn.Linear(4, 4)], (torch.ones(2, 4), torch.ones(3)), r"lengths \[2, 3\]"),
        ([nn.Linear(4, 4)], (2,), "input 0 is a int"),
        ([nn.LSTM(4, 4)], (torch.ones(2, 3, 4),), r"Link 0 .* returns a tuple"),
    ],
)
def test_what_cannot_be_a_chain_is_refused_in_a_sentence(modules: Any, inputs: Any, sentence: str) -> None:
    with pytest.raises(BiremeError, match=sentence):
        chain(modules, inputs)
