"""Capture and its limits: what a graph keeps of a module, and what is said where there can be none."""

import math
import time
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from bireme.errors import BiremeError
from bireme.model.capture import Inputs, capture
from bireme.model.gpt import GPT, GPTConfig
from bireme.model.graph import Graph
from bireme.model.stage import StageFunction
from bireme.model.units import units_of
from tests.support.extent import draws
from tests.support.together import run_threads

pytestmark = pytest.mark.slow


@dataclass
class Result:
    loss: torch.Tensor
    scores: torch.Tensor
    note: str = "not a tensor"


class Small(nn.Module):
    """Linear, a buffer that is not saved, a frozen layer, dropout, and a dataclass out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(8, 3)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.full((8,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Result:
        hidden = torch.relu(self.first(x)) * self.scale
        scores = self.last(self.dropout(torch.relu(self.frozen(hidden))))
        return Result(nn.functional.cross_entropy(scores, y), scores)


def example(rows: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(rows, 4, generator=generator), "y": torch.arange(rows) % 3}


def test_a_graph_keeps_the_model_s_own_names_and_kinds() -> None:
    graph = capture(Small(), example())
    assert {p.name: p.trainable for p in graph.parameters} == {
        "first.weight": True,
        "first.bias": True,
        "frozen.weight": False,
        "frozen.bias": False,
        "last.weight": True,
        "last.bias": True,
    }
    assert [(buffer.name, buffer.persistent) for buffer in graph.buffers] == [("scale", False)]
    assert [output.name for output in graph.outputs] == ["loss", "scores"]
    assert [value.name for value in graph.inputs] == ["x", "y"]
    assert graph.parameter_bytes == 4 * (4 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3)


def test_training_and_evaluation_are_different_graphs_and_the_model_stays_as_it_was() -> None:
    model = Small().eval()
    training, evaluation = capture(model, example()), capture(model, example(), training=False)
    assert not model.training
    assert any(operator.is_random for operator in training.operators)

    def loss(graph: Graph) -> torch.Tensor:
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        return StageFunction(graph, units_of(graph))(parameters, buffers, example())["loss"]

    torch.manual_seed(1)
    assert torch.equal(loss(evaluation), loss(evaluation))
    assert not torch.equal(loss(training), loss(training))


class Slow(Small):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Result:
        time.sleep(0.1)  # so that another thread begins meanwhile
        return super().forward(x, y)


def test_threads_that_capture_at_once_get_the_same_graph() -> None:
    graphs = run_threads(3, lambda _: capture(Slow(), example()))
    assert graphs[0] == graphs[1] == graphs[2]
    assert not torch.compiler.is_exporting()


def test_a_frozen_parameter_gets_no_gradient_in_stages_either() -> None:
    model = Small()
    graph = capture(model, example())
    flowing = example()
    units = units_of(graph)
    assert len(units) == 3
    for unit in units:
        stage = StageFunction(graph, [unit])
        flowing |= stage(dict(model.named_parameters()), dict(model.named_buffers()), flowing)
    torch.autograd.backward(flowing["loss"])
    assert model.frozen.weight.grad is None
    assert model.first.weight.grad is not None


def test_one_sample_is_enough_for_a_graph_of_any_batch_size() -> None:
    graph = capture(Small(), example(1))
    assert graph.any_batch
    model = Small()
    stage = StageFunction(graph, units_of(graph))
    for rows in (1, 2, 7):
        out = stage(dict(model.named_parameters()), dict(model.named_buffers()), example(rows))
        assert out["scores"].shape == (rows, 3)


def test_a_loss_of_one_s_own_is_part_of_the_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(2, 4)

    def loss(out: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        assert isinstance(inputs, tuple)
        target: torch.Tensor = inputs[0].sum()
        return (out - target).square().mean()

    graph = capture(model, (x,), loss=loss)
    assert [output.name for output in graph.outputs] == ["loss", "output"]
    found = StageFunction(graph, units_of(graph))(
        dict(model.named_parameters()), {}, {graph.inputs[0].name: x}
    )
    assert torch.equal(found["loss"], (model(x) - x.sum()).square().mean())


class CausalTransformer(nn.Module):
    """A decoder and an encoder of torch with a causal mask, and without the flag that says that it is one."""

    def __init__(self) -> None:
        super().__init__()
        decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.decoder, self.encoder = nn.TransformerDecoder(decoder, 1), nn.TransformerEncoder(encoder, 1)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        decoded: torch.Tensor = self.encoder(self.decoder(x, memory, tgt_mask=mask), mask=mask)
        return decoded.square().mean()


def test_torch_s_transformers_are_captured_with_a_causal_mask_and_without_its_flag() -> None:
    torch.manual_seed(0)
    model = CausalTransformer().double()
    inputs = {"x": torch.randn(3, 5, 8).double(), "memory": torch.randn(3, 4, 8).double()}
    graph = capture(model, inputs)
    assert graph.any_batch
    parameters = dict(model.named_parameters())
    found = StageFunction(graph, units_of(graph))(parameters, dict(model.named_buffers()), inputs)
    assert torch.allclose(found["loss"], model(**inputs), rtol=1e-12)


class Counting(nn.Module):
    """Counts whole numbers, and leaves autocast off, as experts of transformers and their adapters do; a list
    is an index, as in Falcon.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type=x.device.type, enabled=False):
            scores = self.layer(x)[..., [2, 0, 1]]
        chosen = scores.argmax(-1)
        counts = torch.histc(chosen.float() if x.device.type == "cpu" else chosen.int(), 3, min=0, max=2)
        loss: torch.Tensor = (scores.mean(0) * counts.to(scores.dtype)).sum()
        return loss


def test_a_graph_of_the_meta_device_counts_on_the_cpu() -> None:
    with torch.device("meta"):
        graph = capture(Counting(), {"x": torch.zeros(2, 4)})
    model, x = Counting(), torch.randn(5, 4)
    found = StageFunction(graph, units_of(graph))(dict(model.named_parameters()), {}, {"x": x})
    assert torch.equal(found["loss"], model(x))


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.layer(x)
        return torch.cat((scores, scores[:, []]), 1).sum()


def test_an_index_may_be_an_empty_list() -> None:
    """A tensor was made of each list that is an index, also of one without numbers, of tensors or slices."""
    graph = capture(Empty(), {"x": torch.randn(2, 4)})
    model, x = Empty(), torch.randn(3, 4)
    found = StageFunction(graph, units_of(graph))(dict(model.named_parameters()), {}, {"x": x})
    assert torch.equal(found["loss"], model(x))


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Parametrized(nn.Module):
    """Torch sets a weight to itself when a parametrization is registered, as adapters of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nn.utils.parametrize.register_parametrization(self.layer, "weight", Doubled())
        scores: torch.Tensor = self.layer(x)
        nn.utils.parametrize.remove_parametrizations(self.layer, "weight", leave_parametrized=False)
        return scores.square().mean()


def test_weights_that_are_set_to_themselves_do_not_change() -> None:
    graph = capture(Parametrized(), {"x": torch.randn(2, 4)})
    assert not any(one.mutates for one in graph.operators)
    model, x = Parametrized(), torch.randn(3, 4)
    found = StageFunction(graph, units_of(graph))(dict(model.named_parameters()), {}, {"x": x})
    assert torch.equal(found["loss"], model(x))


class Flattening(nn.Module):
    """The batch disappears into another axis, comes back, and meets a number of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        flat = self.layers[1](self.layers[0](x).reshape(rows * 5, 4)) * torch.tensor(3.0)
        back: torch.Tensor = self.layers[2](flat).reshape(rows, 5, 4)
        return back.square().mean()


def test_a_stage_that_gets_the_batch_in_another_axis_still_knows_its_size() -> None:
    model = Flattening()
    graph = capture(model, {"x": torch.randn(2, 5, 4)})
    x = torch.randn(3, 5, 4)
    flowing = {"x": x}
    for unit in units_of(graph):
        flowing |= StageFunction(graph, [unit])(dict(model.named_parameters()), {}, flowing)
    assert torch.equal(flowing["loss"], model(x))


class Masked(nn.Module):
    """Returns a mask that nothing in it uses, and without `layer` nothing that depends on a parameter."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mask": x > 0, "result": self.layer(x)}


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Tanh()])
def test_a_result_that_depends_on_no_parameter_is_made_in_the_last_unit(layer: nn.Module) -> None:
    model, x = Masked(layer), torch.randn(2, 4)
    graph = capture(model, {"x": x})
    found = StageFunction(graph, units_of(graph)[-1:])(dict(model.named_parameters()), {}, {"x": x})
    assert torch.equal(found["mask"], x > 0)
    assert torch.equal(found["result"], layer(x))


class Branching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        if hidden.sum() > 0:
            return hidden.mean()
        return hidden.square().mean()


class Reading(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        scale = hidden.sum().item()
        return (hidden * math.sqrt(scale)).mean()


class Looping(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        while hidden.norm() > 1:
            hidden = hidden / 2
        return hidden.mean()


class Choosing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        positive = hidden[hidden > 0]
        return hidden[: len(positive)].mean()


@pytest.mark.parametrize("kind", [Branching, Reading, Looping, Choosing])
def test_python_that_looks_at_numbers_is_named_with_its_line_and_the_way_out(kind: type[nn.Linear]) -> None:
    with pytest.raises(BiremeError) as caught:
        capture(kind(4, 4), {"x": torch.randn(2, 4)})
    sentence = str(caught.value)
    line = kind.forward.__code__.co_firstlineno + (3 if kind in (Reading, Choosing) else 2)
    assert f"{kind.__name__} cannot be captured because of {__file__}, line {line}: " in sentence
    assert "depends on the numbers" in sentence
    assert sentence.endswith("the model as a chain: an nn.Sequential or a list of modules to run one by one.")
    assert "\n" not in sentence


class Silent(nn.Module):
    def forward(self, x: torch.Tensor) -> str:
        return f"{x.shape}"


@pytest.mark.parametrize(
    ("model", "inputs", "sentence"),
    [
        (Silent(), {"x": torch.zeros(2, 4)}, "returns a str"),
        (Small(), {"x": torch.zeros(2, 4), "y": torch.zeros(3)}, "lengths \\[2, 3\\]"),
        (Small(), {"x": torch.zeros(2, 5), "y": torch.zeros(2, dtype=torch.long)}, "runs with these inputs"),
    ],
)
def test_what_cannot_be_captured_is_said_in_one_sentence(
    model: nn.Module, inputs: dict[str, torch.Tensor], sentence: str
) -> None:
    with pytest.raises(BiremeError, match=sentence):
        capture(model, inputs)


def test_a_model_of_billions_is_captured_without_a_weight() -> None:
    num_layers = draws(32, 10)
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=num_layers, width=4096, heads=32, vocab=32000, context=2048))
        ids = torch.zeros(1, 2048, dtype=torch.long)
    graph = capture(model, {"input_ids": ids, "labels": ids})
    units = units_of(graph)
    assert graph.parameter_bytes > num_layers * 2e8 * 4 >= 1e9 * 4
    assert len(units) == 1 + 2 * num_layers + 1
    assert len({unit.structure for unit in units}) == 4
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


class _WritesThroughAView(torch.nn.Module):
    """Fills zeros through a view of them, and reads them again layers later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        written = torch.zeros(x.shape[0], 4, dtype=x.dtype)
        hidden = self.layers[0](x)
        written[:, 0] = hidden[:, 1]
        hidden = self.layers[2](torch.tanh(self.layers[1](torch.tanh(hidden))))
        return {"loss": (hidden * written).square().mean()}


def test_what_is_written_through_a_view_is_not_made_again_empty() -> None:
    """Once they were taken for free values, as only the view counted as written; the loss was another one."""
    torch.manual_seed(0)
    model = _WritesThroughAView().double()
    inputs = {"x": torch.randn(3, 4, dtype=torch.float64)}
    graph = capture(model, inputs)
    parameters = dict(model.named_parameters())
    flowing = dict(inputs)
    for unit in units_of(graph):
        flowing |= StageFunction(graph, [unit])(parameters, {}, flowing)
    assert len(units_of(graph)) > 1
    assert torch.equal(flowing["loss"], model(**inputs)["loss"])
