"""`bireme memory` as a stranger meets it: one document, a readable report, a picture, or one sentence."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from bireme.profile.behavior import Owner
from tests.support.command import bireme, bireme_once, with_sets

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]

GPT = "gpt:layers=1,width=16,heads=2,vocab=32,context=8"
KEYS = f"model.source={GPT} cluster.device=cpu"

MODELS = """
import torch

class Squares(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.line(x).square().mean()

def squares():
    return Squares(), {"x": torch.ones(2, 4)}

def lossless():
    return torch.nn.Linear(4, 3), {"input": torch.ones(2, 4)}
"""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return bireme_once(
        *with_sets(f"memory {KEYS} training.batch_size=2 --bandwidth 12e9,10e9 --json".split())
    ).document


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)


def test_the_document_accounts_for_every_byte_of_the_peak(document: dict[str, Any]) -> None:
    by_owner = document["by_owner"]
    assert set(by_owner) == {owner.value for owner in Owner}
    assert sum(by_owner.values()) == document["peak_bytes"]
    at_peak = [block for block in document["blocks"] if block["lives_at_peak"]]
    assert {owner: sum(b["bytes"] for b in at_peak if b["owner"] == owner) for owner in by_owner} == by_owner


def test_the_document_tells_the_life_of_every_block(document: dict[str, Any]) -> None:
    blocks = {block["id"]: block for block in document["blocks"]}
    assert len(blocks) == len(document["blocks"])
    for block in blocks.values():
        assert block["num_accesses"] == len(block["accesses"])
        assert block["death_s"] is None or block["birth_s"] <= block["death_s"] <= document["duration_s"]
        assert (block["birth_operator"] is None) == (block["birth_s"] == 0.0)
        assert 0 <= block["longest_idle_s"] <= document["duration_s"]
    num_births = sum(block["birth_operator"] is not None for block in blocks.values())
    num_deaths = sum(block["death_s"] is not None for block in blocks.values())
    num_accesses = sum(block["num_accesses"] for block in blocks.values())
    assert document["num_events"] == num_births + num_deaths + num_accesses
    assert {b["name"] for b in blocks.values() if b["owner"] == "parameter"} >= {"tokens.weight"}


def test_the_document_says_whether_iterations_repeat(document: dict[str, Any]) -> None:
    assert document["iteration_stable"] is True
    assert document["period_events"] == document["num_events"]
    assert document["num_iterations"] >= 2


def test_the_document_s_swaps_are_possible_and_save_what_it_says(document: dict[str, Any]) -> None:
    assert document["swappable_bytes"] == document["peak_bytes"] - document["swapped_peak_bytes"]
    assert 0 <= document["swappable_bytes_in_turn"] <= document["swappable_bytes"]
    assert document["swappable_bytes"] <= document["swappable_block_bytes"]
    round_trip_s = 1 / document["out_bytes_per_s"] + 1 / document["in_bytes_per_s"]
    blocks = {block["id"]: block for block in document["blocks"]}
    for swap in document["swaps"]:
        block = blocks[swap["block"]]
        idle_s = swap["idle_until_s"] - swap["idle_from_s"]
        assert block["bytes"] * round_trip_s <= idle_s <= block["longest_idle_s"] + 1e-12


@pytest.mark.slow
def test_the_report_is_readable_in_80_columns(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = f"memory {KEYS} training.batch_size=32 training.optimizer=sgd --bandwidth 1e9"
    result = bireme(capsys, *with_sets(words.split()))
    assert result.status == 0
    text = " ".join(result.out.split())
    for part in (
        "Its peak is",
        "activation",
        "layers.0.feed_forward gelu",
        "Iterations repeat: the 3 traced",
        "1 GB/s",
    ):
        assert part in text
    assert max(map(len, result.out.splitlines())) <= 80
    assert len(result.out.splitlines()) < 60


@pytest.mark.slow
def test_a_run_file_says_what_is_traced(capsys: Capture, tmp_path: Path) -> None:
    """Keys that are set on the command line come after those of the file."""
    path = tmp_path / "run.toml"
    path.write_text(f'model.source = "{GPT}"\ntraining = {{batch_size = 2, optimizer = "sgd"}}\n')
    found = bireme(capsys, "memory", str(path), "--json").document
    assert (found["batch"], found["length"], found["optimizer"]) == (2, 8, "sgd")
    assert found["by_owner"]["optimizer"] == found["by_owner"]["parameter"], "momentum"
    frozen = bireme(capsys, "memory", str(path), "--json", "--set", "model.train=tokens.*").document
    assert 0 < frozen["by_owner"]["optimizer"] < found["by_owner"]["optimizer"]


@pytest.mark.slow
def test_any_model_with_a_loss_will_do(capsys: Capture, models: None) -> None:
    words = "memory model.source=python:memory_models:squares training.batch_size=3 --json"
    document = bireme(capsys, *with_sets(words.split())).document
    assert document["by_owner"]["parameter"] == 4 * (4 * 3 + 3)
    assert document["by_owner"]["input"] == 4 * 3 * 4


@pytest.mark.slow
def test_a_picture_has_a_rectangle_with_a_name_for_every_large_block(capsys: Capture, tmp_path: Path) -> None:
    picture, page = tmp_path / "m.svg", tmp_path / "m.html"
    words = with_sets(f"memory {KEYS} training.batch_size=1".split())
    result = bireme(capsys, *words, "--picture", str(picture))
    assert f"Wrote {picture}" in result.out.replace("\n", "")
    root = ElementTree.parse(picture).getroot()
    titles = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any("parameter tokens.weight · 2.00 KiB · there before · stays" in title for title in titles)
    texts = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any(text.startswith("peak ") for text in texts)
    assert {"forward", "backward"} <= set(texts)
    assert {text.split()[0] for text in texts if text.split()} >= {"parameter", "optimizer", "activation"}
    assert bireme(capsys, *words, "--picture", str(page), "--json").document["peak_bytes"]
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert "http" not in page.read_text().replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("model.source=gpt:layers=1", "gpt: lacks width"),
        ("model.source=gtp:layers=1", "no model source 'gtp:layers=1'"),
        ("model.source=hf:nowhere", "no folder nowhere"),
        (f"{KEYS} training.batch_size=0", "training.batch_size is 0"),
        (f"{KEYS} training.optimizer=adamm", "training.optimizer is"),
        (f"{KEYS} training.optimiser=adamw", "Did you mean 'training.optimizer'?"),
        (f"{KEYS} cluster.device=meta", "cluster.device is"),
        (f"{KEYS} --warmup -1", "The warm-up is -1 iterations"),
        (f"{KEYS} --bandwidth fast", "--bandwidth is 'fast'; it must be one number"),
        (f"{KEYS} --bandwidth 1,2,3", "--bandwidth is '1,2,3'; it must be one number"),
        (f"{KEYS} --bandwidth 0", "A bandwidth is 0 bytes per second"),
        (f"{KEYS} --bandwidth nan", "A bandwidth is nan bytes per second"),
        (f"{KEYS} --picture x.png", "x.png ends in .png, but this picture can only be .svg or .html"),
        (f"{KEYS} --picture nowhere/x.svg", "there is no folder"),
        ("--batch 3", "has no option --batch. Did you mean 'training.batch_size'?"),
        ("--device cuda:1", "Did you mean 'memory.device' or 'cluster.device'"),
        (GPT, f"--set model.source={GPT}"),
        ("model.source=python:memory_models:lossless", "Linear returns no loss to train on"),
    ],
)
def test_wrong_words_get_one_sentence_and_status_2(
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    models: None,
    words: str,
    sentence: str,
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    result = bireme(capsys, *with_sets(["memory", *words.split()]))
    assert result.status == 2
    assert sentence in result.err
    assert result.err.count("\n") == 1
    assert not result.out
    assert not list(folder.iterdir())
