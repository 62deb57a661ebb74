"""Which frozen weights checkpoints leave out, and whether they are there again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bireme.errors import BiremeError
from bireme.model.graph import Graph, ModelState, Operator
from bireme.train.resume_checks import (
    BASE,
    BaseWeights,
    base_identity,
    check_same_base,
    keep_base,
    load_base,
    names_in_base,
)
from bireme.train.run_file import RunFile, load_run_file


def run_of(folder: Path, *sets: str) -> RunFile:
    return load_run_file(None, [f"model.source=hf:{folder}", 'model.freeze=["a.*"]', *sets])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "base"
    made.mkdir()
    save_file({"a.weight": torch.arange(4.0)}, made / "model.safetensors")
    return made


def test_a_base_is_its_files_wherever_they_are(folder: Path, tmp_path: Path) -> None:
    known = base_identity(run_of(folder))
    assert known is not None
    moved = folder.rename(tmp_path / "moved")
    check_same_base(known, run_of(moved), "step-8")
    with pytest.raises(BiremeError, match=r"step-8 needs the frozen weights of .* has no safetensors"):
        check_same_base(known, run_of(folder), "step-8")
    save_file({"a.weight": torch.arange(1.0, 5.0)}, moved / "model.safetensors")
    with pytest.raises(BiremeError, match=r"holds others now: the SHA-256 .* was"):
        check_same_base(known, run_of(moved), "step-8")


def test_a_run_has_a_base_only_if_it_trains_a_part_of_a_model_from_a_folder(folder: Path) -> None:
    assert base_identity(load_run_file(None, [f"model.source=hf:{folder}"])) is None
    assert base_identity(run_of(folder, "model.from_scratch=true")) is None
    seeded = "model.source=gpt:layers=1,width=8,heads=1,vocab=32,context=8"
    assert base_identity(load_run_file(None, [seeded, 'model.freeze=["tokens.*"]'])) is None


def test_a_run_that_resumes_from_a_checkpoint_with_all_weights_saves_all(
    folder: Path, tmp_path: Path
) -> None:
    run, path = run_of(folder), tmp_path / "base.json"
    keep_base(path, run, None)
    known = load_base(path)
    assert known == base_identity(run)
    assert known is not None
    later: Any = type("Later", (), {"extra": {BASE: known.plain()}})
    keep_base(path, run, later)
    assert load_base(path) == known
    old: Any = type("Old", (), {"extra": {}})
    keep_base(path, run, old)
    assert load_base(path) is None


def graph_of(parameters: list[ModelState], buffers: list[ModelState], written: str) -> Graph:
    operator = Operator("aten.add_.Tensor", (), (), (), mutates=(written,))
    return Graph("g", True, 1, True, (), tuple(parameters), tuple(buffers), (), (operator,), ())


def test_weights_that_learn_and_buffers_that_change_are_not_in_the_base() -> None:
    parameters = [ModelState(f"{name}.weight", (4,), "float32", True, trainable=name == "b") for name in "ab"]
    buffers = [
        ModelState(name, (1,), "int64", persistent=name != "scratch")
        for name in ("table", "count", "scratch")
    ]
    assert names_in_base(graph_of(parameters, buffers, "count")) == {"a.weight", "table"}


def test_frozen_weights_of_another_base_are_not_read(folder: Path) -> None:
    run = run_of(folder)
    known = base_identity(run)
    assert known is not None
    graph = graph_of([], [], "count")
    with (
        BaseWeights(run, graph, replace(known, sha256="0" * 64), "step-8") as weights,
        pytest.raises(BiremeError, match="step-8 needs the frozen weights of"),
    ):
        weights["a.weight"]
