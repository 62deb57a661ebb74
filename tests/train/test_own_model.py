"""A model that a function of the user makes begins with exactly what the function made, on any stages."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bireme.errors import BiremeError
from bireme.model.sources import load_source
from bireme.model.stage import StageFunction
from bireme.model.units import units_of
from bireme.train.folder import load_asked
from bireme.train.model import InitialWeights, RunModel, placeholders, read_initial
from bireme.train.worker import optimizer_of
from bireme.user_code import user_function
from tests.support.alone import alone
from tests.support.command import Result, bireme
from tests.support.training import losses, settings, write_run

pytestmark = pytest.mark.slow

MODELS = """
import torch
from pathlib import Path
from torch import nn
from torch.nn import functional

HERE = Path(__file__).parent


class Net(nn.Module):
    def __init__(self, deviation=3.0):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.wide = nn.Linear(16, 16)
        self.narrow = nn.Linear(16, 8)
        self.again = nn.Linear(8, 16)
        self.again.weight = self.first.weight
        self.head = nn.Linear(16, 1)
        self.bare = nn.Parameter(torch.zeros(16, 3))
        self.register_buffer("kept", torch.linspace(-1, 1, 16) ** 3)
        self.register_buffer("made", torch.rand(16), persistent=False)
        nn.init.normal_(self.wide.weight, std=deviation)

    def forward(self, x, y):
        hidden = torch.tanh(self.first(x)) * self.kept
        hidden = torch.tanh(self.wide(hidden)) + self.made
        hidden = torch.tanh(self.again(torch.tanh(self.narrow(hidden)))) + self.bare.sum(1)
        return {"loss": functional.mse_loss(self.head(hidden)[:, 0], y)}


def inputs():
    return {"x": torch.ones(2, 8, device="cpu"), "y": torch.zeros(2, device="cpu")}


def initialized():
    if not torch.empty(0).is_meta:
        with (HERE / "calls").open("a") as calls:
            calls.write("x")
    return Net(), inputs()


def loaded():
    model = Net(deviation=0.1)
    model.load_state_dict(torch.load(HERE / "weights.pt"))
    return model, inputs()


def reads_numbers():
    return Net(deviation=torch.linspace(0, 1, 3)[1].item()), inputs()


def with_nan():
    model = Net()
    with torch.no_grad():
        model.narrow.bias[2] = float("nan")
    return model, inputs()


def off_the_cpu():
    if not torch.empty(0).is_meta:
        raise RuntimeError("no card here")
    return Net(), inputs()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


def classifier():
    return Classifier(), (torch.ones(2, 8, device="cpu"),)


def classes():
    x = samples()["x"]
    return {"x": x, "y": x.argmax(1) % 3}


def own_loss(outputs, inputs):
    return functional.cross_entropy(outputs, inputs["y"])


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(257, 16), nn.Linear(16, 257)

    def forward(self, input_ids):
        return self.head(self.tokens(input_ids))


def reader():
    return Reader(), {"input_ids": torch.ones(2, 32, dtype=torch.long, device="cpu")}


def samples():
    generator = torch.Generator().manual_seed(2)
    return {"x": torch.randn(8, 8, generator=generator), "y": torch.randn(8, generator=generator)}
"""

ALL = {
    "data__evaluation_fraction": 0.0,
    "training__optimizer": "sgd",
    "training__clip_norm": 0,
    "training__weight_decay": 0,
    "training__steps": 6,
    "checkpoint__every_steps": 0,
    "model__seed": 3,
}
"""Every batch is all samples, so that their order does not matter."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with the user's file."""
    (tmp_path / "own.py").write_text(MODELS)
    torch.manual_seed(11)
    own = user_function(f"{tmp_path}/own.py:Net", "a module")()
    torch.save({name: 1.5 * tensor for name, tensor in own.state_dict().items()}, tmp_path / "weights.pt")
    return tmp_path


def train(
    capsys: pytest.CaptureFixture[str], home: Path, function: str, depth: int, *words: str, **values: object
) -> Result:
    path = write_run(home, "1f1b", depth, model=f"{home}/own.py:{function}", data=f"{home}/own.py:samples")
    return bireme(capsys, "train", str(path), *settings(**(ALL | values)), *words, "--json")


def plain(home: Path, function: str) -> nn.Module:
    """The module as one process gets it from the function with the seed of the run."""
    torch.manual_seed(3)
    module: nn.Module = user_function(f"{home}/own.py:{function}", "a module")()[0]
    return module


def plain_losses(home: Path, module: nn.Module, steps: int) -> Iterator[float]:
    """The losses of a loop in one process, which trains the module."""
    samples = user_function(f"{home}/own.py:samples", "samples")()
    run = load_asked(home / "runs" / "run" / "run.toml", ())
    made = optimizer_of(run.training)(list(module.named_parameters()))
    optimizers = made if isinstance(made, Sequence) else [made]
    for _ in range(steps):
        loss = module(**samples)["loss"]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        yield loss.item()


def states(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


@pytest.mark.parametrize("function", ["initialized", "loaded"])
def test_two_stages_learn_what_the_module_of_the_function_learns_in_one_process(
    home: Path, capfd: pytest.CaptureFixture[str], function: str
) -> None:
    result = train(capfd, home, function, 2)
    assert result.status == 0, result.err
    assert "Warning" not in result.err
    run, module = home / "runs" / "run", plain(home, function)
    wide = states(module)["wide.weight"].detach().clone()
    assert wide.std() > 2
    assert list(losses(run).values()) == pytest.approx(list(plain_losses(home, module, 6)), rel=1e-5)
    exported = load_file(run / "model" / "model.safetensors")
    assert exported.keys() == states(module).keys() - {"again.weight", "made"}
    for name, tensor in exported.items():
        assert torch.allclose(tensor, states(module)[name], rtol=1e-4, atol=1e-6), name
    assert not (run / "initial").exists()


def test_a_run_calls_the_function_for_numbers_once_and_a_resume_never(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with alone():
        begun = train(capsys, home, "initialized", 1, training__steps=3, checkpoint__every_steps=3)
        assert begun.status == 0, begun.err
        calls = len((home / "calls").read_text())
        more = settings(training__steps=6)
        resumed = bireme(capsys, "resume", str(home / "runs" / "run"), *more, "--json")
    assert resumed.status == 0, resumed.err
    assert (calls, len((home / "calls").read_text())) == (1, 1)
    module = plain(home, "initialized")
    found = losses(home / "runs" / "run")
    assert list(found.values()) == pytest.approx(list(plain_losses(home, module, 6)), rel=1e-5)


def model_of(home: Path, function: str, **values: object) -> RunModel:
    words = settings(model__source=f"{home}/own.py:{function}", model__seed=3, **values)
    return RunModel.of(load_asked(None, words[1::2]), 2)


@pytest.mark.parametrize("function", ["initialized", "loaded", "reads_numbers"])
def test_every_state_has_the_bits_that_the_function_gave_it(home: Path, function: str) -> None:
    model, module = model_of(home, function), plain(home, function)
    graph = model.training.graph(2)
    names = [state.name for state in (*graph.parameters, *graph.buffers)]
    assert "made" in names
    assert "again.weight" not in names, "it is tied"
    before = torch.get_rng_state()
    found = model.weights(graph)(names)
    assert torch.equal(torch.get_rng_state(), before)
    for name in names:
        assert torch.equal(found[name], states(module)[name]), name


def test_a_model_that_needs_numbers_is_moved_to_the_meta_device_with_its_ties(home: Path) -> None:
    model: Any = load_source(f"python:{home}/own.py:reads_numbers").model
    assert all(tensor.is_meta for tensor in states(model).values())
    assert model.again.weight is model.first.weight


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("with_nan", ("narrow.bias holds NaN (1 of 8 elements)",)),
        ("off_the_cpu", ("RuntimeError: no card here", "save the weights as safetensors", "model.weights")),
    ],
)
def test_a_model_that_cannot_begin_is_refused_before_the_run(
    home: Path, capsys: pytest.CaptureFixture[str], function: str, words: tuple[str, ...]
) -> None:
    result = train(capsys, home, function, 1, "--dry-run")
    assert result.status == 2
    assert all(word in result.err for word in words), result.err


def test_a_model_larger_than_the_free_memory_is_refused_with_the_ways_to_give_its_weights(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bireme.train.model.available_bytes", lambda: 1000)
    model = model_of(home, "initialized")
    with pytest.raises(BiremeError, match=r"0\.0 GiB of free memory.*model\.weights.*from_scratch = true"):
        model.initial_weights(model.training.graph(2), lambda _done, _what: None)


def test_a_folder_of_safetensors_takes_the_place_of_the_function_s_weights(home: Path) -> None:
    module = plain(home, "initialized")
    kept = {name: tensor.detach() + 1 for name, tensor in states(module).items()}
    (home / "weights").mkdir()
    del kept["again.weight"]
    save_file(kept, home / "weights" / "model.safetensors")
    model = model_of(home, "initialized", model__weights=home / "weights")
    graph = model.training.graph(2)
    with pytest.raises(BiremeError, match="its buffer made holds no numbers"):
        model.check_weights(graph)  # it is not persistent, so no folder has it
    names = [state.name for state in (*graph.parameters, *graph.buffers) if state.persistent]
    found = model.weights(graph)(names)
    assert all(torch.equal(found[name], kept[name]) for name in names)


def test_new_weights_are_refused_where_only_the_constructor_makes_them(home: Path) -> None:
    model = model_of(home, "initialized", model__from_scratch="true")
    graph = model.training.graph(2)
    weights = model.weights(graph)
    assert weights(["wide.weight"])["wide.weight"].std() < 1
    with pytest.raises(BiremeError, match=r"none of them writes bare.*leave out model\.from_scratch"):
        weights(["bare"])
    with pytest.raises(BiremeError, match="none of them writes bare"):
        model.check_weights(graph)


def test_a_changed_byte_of_the_initial_weights_is_found_by_the_rank_that_reads_it(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(4.0), "b": torch.ones(3, dtype=torch.complex64)}
    InitialWeights(dict(tensors)).write(tmp_path / "initial")
    read = read_initial(tmp_path / "initial")
    assert all(torch.equal(read([name])[name], tensors[name]) for name in tensors)
    (file,) = (tmp_path / "initial").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(BiremeError, match=r"is damaged: a is not as it was written"):
        read(["b", "a"])
    (tmp_path / "initial" / "index.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(BiremeError, match=r"index\.json cannot be read"):
        read_initial(tmp_path / "initial")


def test_weights_that_come_later_are_nan_until_then(home: Path) -> None:
    graph = model_of(home, "initialized").training.graph(2)
    found = placeholders(graph)(["bare", "made"])
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {"bare": (16, 3), "made": (16,)}
    assert all(tensor.isnan().all() for tensor in found.values())


@pytest.mark.parametrize("loss", ["cross_entropy", "{home}/own.py:own_loss"])
def test_a_classifier_whose_forward_takes_no_labels_learns_from_those_of_the_samples(
    home: Path, capsys: pytest.CaptureFixture[str], loss: str
) -> None:
    data = {"data__source": f"{home}/own.py:classes", "model__loss": loss.format(home=home)}
    with alone():
        result = train(capsys, home, "classifier", 1, plan__file="", **data)
    assert result.status == 0, result.err
    module, samples = plain(home, "classifier"), user_function(f"{home}/own.py:classes", "samples")()
    first = nn.functional.cross_entropy(module(samples["x"]), samples["y"])
    assert losses(home / "runs" / "run")[1] == pytest.approx(first.item(), rel=1e-5)


def test_a_loss_by_name_on_tokens_is_that_of_the_next_token(home: Path) -> None:
    model = model_of(home, "reader", model__loss="cross_entropy", data__length=32)
    assert model.source.example_inputs.keys() == {"input_ids", "labels"}
    module = plain(home, "reader")
    graph = model.training.graph(2)
    ids = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(0))
    wanted = nn.functional.cross_entropy(module(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    weights = model.weights(graph)([state.name for state in graph.parameters])
    outputs = StageFunction(graph, units_of(graph))(weights, {}, {"input_ids": ids, "labels": ids})
    assert torch.allclose(outputs["loss"], wanted)


def test_a_target_of_another_shape_is_refused_and_not_broadcast(home: Path) -> None:
    model = model_of(home, "classifier", model__loss="mse", data__source=f"{home}/own.py:classes")
    with pytest.raises(BiremeError, match=r"same shape, but they are of the shapes \[b, 3\] and \[b\]"):
        model.training.graph(2)
