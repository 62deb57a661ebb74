"""A graph read from its file is the graph that was saved, and runs as that one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bireme.errors import BiremeError
from bireme.model.capture import capture
from bireme.model.graph import Argument, Graph, ModelState, Operator, Output, Reference, Token, Value
from bireme.model.graph_file import graph_hash, load_graph, save_graph
from bireme.model.stage import StageFunction
from bireme.model.units import units_of


class Everything(nn.Module):
    """Holds buffers, a tied weight, a constant, a frozen weight; uses slices, infinity and the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.table
        x = x + torch.tensor([0.1, 1 / 3, 1e-30, -0.0, 5.0, 6.0, 7.0, float("inf")])[:1]
        x = self.norm(x.reshape(-1, 8)).reshape(ids.shape[0], -1, 8)
        x = x.masked_fill(x > 100.0, float("-inf"))
        x = self.frozen(nn.functional.dropout(x, 0.1, self.training))
        logits = self.head(x[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def everything(*, training: bool = True) -> tuple[Everything, Graph, Tensor]:
    torch.manual_seed(0)
    model = Everything()
    ids = torch.randint(0, 16, (3, 5))
    return model, capture(model, {"ids": ids}, training=training), ids


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    save_graph(everything()[1], path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_a_loaded_graph_is_the_saved_one_and_runs_as_it(tmp_path: Path, training: bool) -> None:
    model, graph, ids = everything(training=training)
    save_graph(graph, tmp_path / "graph.json")
    loaded = load_graph(tmp_path / "graph.json")
    assert loaded == graph
    assert repr(loaded) == repr(graph)
    assert units_of(loaded) == units_of(graph)
    results = []
    for one in (graph, loaded):
        torch.manual_seed(7)
        buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
        function = StageFunction(one, units_of(one))
        results.append(function(dict(model.named_parameters()), buffers, {"ids": ids})["loss"])
    assert torch.equal(results[0], results[1])


def arguments() -> st.SearchStrategy[Argument]:
    plain: st.SearchStrategy[Argument] = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(),
        st.builds(Token, st.sampled_from(["dtype", "float", "length", "slice"]), st.text()),
        st.just(Reference("x")),
    )
    return st.recursive(plain, lambda parts: st.lists(parts, max_size=4).map(tuple), max_leaves=12)


def small_graph(argument: Argument, keyword: Argument = None, data: bytes = b"\x00\xff") -> Graph:
    operator = Operator(
        target="aten.add.Tensor",
        arguments=(argument,),
        keywords=(("other", keyword),),
        outputs=(None, Value("y", ("2*b", 3), "float32")),
        is_tuple=True,
    )
    return Graph(
        name="small",
        training=False,
        batch=2,
        any_batch=True,
        inputs=(Value("x", ("b", 3), "float32"),),
        parameters=(),
        buffers=(),
        constants=(ModelState("held", (len(data),), "uint8", data=data),),
        operators=(operator,),
        outputs=(Output("output", Reference("y")), Output("shape", (1, 2.0))),
    )


@given(arguments(), arguments(), st.binary())
def test_every_argument_comes_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, argument: Argument, keyword: Argument, data: bytes
) -> None:
    graph = small_graph(argument, keyword, data)
    path = tmp_path_factory.getbasetemp() / "graph.json"
    save_graph(graph, path)
    # Not only equal: 1, 1.0 and True are, but they are not the same to an operator.
    assert repr(load_graph(path)) == repr(graph)


def test_the_hash_tells_graphs_apart_but_not_by_name() -> None:
    graph = small_graph(1)
    assert graph_hash(replace(graph, name="another")) == graph_hash(graph)
    others = [small_graph(1.0), small_graph(2), small_graph(1, data=b"\x00\xfe")]
    others += [replace(graph, any_batch=False, batch=batch) for batch in (3, 4)]
    assert len({graph_hash(one) for one in (graph, *others)}) == 6
    assert len(graph_hash(graph)) == 16


def test_the_hash_of_a_graph_for_any_batch_size_does_not_know_at_which_it_was_captured() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    graphs = [capture(model, {"input": torch.zeros(size, 3)}) for size in (2, 5)]
    assert all(graph.any_batch for graph in graphs)
    assert graphs[0] != graphs[1]
    assert len({graph_hash(graph) for graph in graphs}) == 1
    assert graph_hash(replace(graphs[0], any_batch=False)) != graph_hash(replace(graphs[1], any_batch=False))


@pytest.mark.slow
def test_the_hash_is_the_same_in_another_process_without_torch(saved: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from bireme.model.graph_file import *; "
        "print(graph_hash(load_graph(Path(sys.argv[1])))); assert 'torch' not in sys.modules"
    )
    environment = os.environ | {"PYTHONHASHSEED": "5"}
    command = [sys.executable, "-c", code, str(saved)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert shown.stdout.strip() == graph_hash(load_graph(saved))


def without(key: str) -> Callable[[dict[str, Any]], None]:
    def change(plain: dict[str, Any]) -> None:
        del plain[key]

    return change


def with_value(*path: Any) -> Callable[[dict[str, Any]], None]:
    *way, last, value = path

    def change(plain: Any) -> None:
        for step in way:
            plain = plain[step]
        plain[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (with_value("format", 2), "format"),
        (without("operators"), "lacks operators"),
        (without("format"), "lacks format"),
        (with_value("operator", []), "unknown key 'operator'.*'operators'"),
        (with_value("batch", "2"), "batch"),
        (with_value("operators", 0, "arguments", 0, {"referense": "x"}), r"operators\[0\]\.arguments\[0\]"),
        (with_value("operators", 0, "arguments", 0, {"reference": "nowhere"}), "nowhere"),
        (with_value("outputs", 0, "value", {"reference": "nowhere"}), "nowhere"),
        (with_value("inputs", 0, "shape", [-1]), "shape"),
        (with_value("constants", 0, "data", "A*8="), r"constants\[0\]\.data.*base64"),
        (with_value("constants", 0, "data", "AP8A"), "held has 3 bytes"),
        (with_value("constants", 0, "dtype", "float31"), "float31"),
        (with_value("constants", 0, "name", "x"), "two values called x"),
    ],
)
def test_a_damaged_file_is_refused_in_a_sentence(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    path = tmp_path / "graph.json"
    save_graph(small_graph(Reference("x")), path)
    plain = json.loads(path.read_text())
    change(plain)
    path.write_text(json.dumps(plain))
    with pytest.raises(BiremeError, match=rf"(?s)graph\.json.*{sentence}"):
        load_graph(path)


def test_a_file_cut_short_is_refused(saved: Path, tmp_path: Path) -> None:
    data = saved.read_bytes()
    for length in (0, 1, len(data) // 2, len(data) - 2):
        (tmp_path / "cut.json").write_bytes(data[:length])
        with pytest.raises(BiremeError, match=r"cut\.json is not JSON"):
            load_graph(tmp_path / "cut.json")


def test_a_missing_file_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(BiremeError, match="no file"):
        load_graph(tmp_path / "graph.json")
    with pytest.raises(BiremeError, match="no folder"):
        save_graph(small_graph(1), tmp_path / "nowhere" / "graph.json")
