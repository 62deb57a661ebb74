"""`bireme profile` as a stranger meets it: one document, a readable table, a file, or one sentence."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from bireme.cluster.machine import num_cores
from bireme.profile import profiler
from bireme.profile.profile import Profile, UnitCost, UnitProfile, load_profile
from bireme.profile.stages import stage_cost
from bireme.train import captured_run
from tests.support.command import bireme, bireme_once, with_sets
from tests.support.tiny_profiles import LITTLE

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]

GPT = "gpt:layers=2,width=16,heads=2,vocab=32,context=8"
KEYS = f"model.source={GPT} cluster.workers=1"
ESTIMATED = f"{KEYS} --like laptop"

DEVICE = {
    "name": "a box under the desk",
    "kind": "cuda",
    "memory_bytes": 2**34,
    "bytes_per_s": 4e11,
    "float32_flops_per_s": 1e13,
    "bfloat16_flops_per_s": 4e13,
}

MODELS = """
import torch

class Branching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 4)

    def forward(self, x):
        if self.line(x).sum() > 0:
            return x.mean()
        return self.line(x).mean()

def branching():
    return Branching(), {"x": torch.ones(2, 4)}
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "profile_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A measured profile."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("BIREME_CACHE", str(cache))
        patch.setattr(profiler, "Effort", lambda: LITTLE)
        told = bireme_once(*with_sets(f"profile {KEYS} --batch 3 -b 1 --halves --json".split()))
        assert not told.err
        assert list(cache.rglob("*.json"))
    return told.document


def test_the_document_tells_what_every_unit_costs(document: dict[str, Any]) -> None:
    assert document["num_units"] == len(document["units"]) == 6
    assert document["num_operators"] > 40
    assert document["parameter_bytes"] == 4 * (32 * 16 + 8 * 16 + 2 * (12 * 16**2 + 13 * 16) + 2 * 16)
    for unit in document["units"]:
        assert isinstance(unit["name"], str)
        assert min(unit["forward_s"], unit["backward_s"]) > 0
        assert min(unit["parameter_bytes"], unit["saved_bytes"]) > 0
    boundary = 3 * 8 * 16 * 4
    assert [unit["boundary_bytes"] for unit in document["units"]] == [boundary] * 5 + [0]
    assert [unit["same_as"] for unit in document["units"]] == [None, None, None, 1, 2, None]


def test_the_document_s_own_figures_are_those_of_the_first_size(document: dict[str, Any]) -> None:
    for unit in document["units"]:
        assert [cost["micro_batch"] for cost in unit["costs"]] == [3, 1]
        first = unit["costs"][0]
        for key in ("forward_s", "backward_s", "saved_bytes", "boundary_bytes"):
            assert unit[key] == first[key]
        assert first["backward_input_s"] > 0
        assert first["recompute_backward_s"] > 0
    assert document["is_measured"] is True
    assert document["num_threads"] == num_cores(), "one process has all cores"


def test_the_table_is_readable(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = bireme(capsys, *with_sets(f"profile {KEYS} --batch 2 -b 4 --like a100".split()))
    assert (result.status, result.err) == (0, "")
    text = " ".join(result.out.split())
    for part in (
        "operators in 6 units of 4 kinds, 28.2 KiB of parameters",
        "seconds estimated for NVIDIA A100-SXM4-80GB",
        "A micro-batch of 2",
        "A micro-batch of 4",
        "unit forward backward weights saved sends",
        "layers.0.attention ×2",
        "all ×6",
    ):
        assert part in text
    assert max(map(len, result.out.splitlines())) <= 80
    assert "…" not in result.out


@pytest.mark.slow
def test_an_estimate_is_for_the_device_asked_for(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "box.json"
    file.write_text(json.dumps(DEVICE))
    words = with_sets(f"profile {KEYS} --batch 2 --json".split())
    own, known, laptop = (
        bireme(capsys, *words, "--like", name).document for name in (str(file), "a100", "laptop")
    )
    assert own["device"] == "a box under the desk"
    assert [found["device_kind"] for found in (own, known, laptop)] == ["cuda", "cuda", "cpu"]
    assert not any(found["is_measured"] for found in (own, known, laptop))
    saved = [[unit["saved_bytes"] for unit in found["units"]] for found in (own, known, laptop)]
    assert saved[0] == saved[1] == saved[2]


def test_the_optimizer_and_the_numbers_are_those_asked_for(capsys: Capture) -> None:
    words = f"profile {ESTIMATED} training.optimizer=sgd model.dtype=bfloat16 --json"
    found = bireme(capsys, *with_sets(words.split())).document
    assert found["optimizer"] == "sgd"
    assert all(unit["optimizer_bytes"] == 4 * unit["parameter_bytes"] for unit in found["units"])


def test_the_file_holds_the_profile_whole(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    result = bireme(capsys, *with_sets(f"profile {ESTIMATED} --output {path}".split()))
    assert f"Wrote {path}." in result.out
    found = load_profile(path)
    assert found.model == GPT
    assert stage_cost(found, 0, 6, 1).parameter_bytes == found.parameter_bytes
    before = path.read_bytes()
    assert bireme(capsys, *with_sets(f"profile {KEYS} --batch 0 -o {path}".split())).status == 2
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("model.source=gtp:layers=1", "no model source 'gtp:layers=1'"),
        ("model.source=gpt:layers=1", "gpt: lacks width"),
        ("model.source=hf:nowhere", "no folder nowhere"),
        ("model.source=hf:empty", "has no config.json"),
        (
            "model.source=python:profile_models:branching",
            "profile_models.py, line 10: Python there depends on the numbers",
        ),
        ("model.source=python:profile_models:nothing", "has no function 'nothing'"),
        (f"{ESTIMATED} --batch 0", "should be greater than or equal to 1"),
        (f"{ESTIMATED} data.length=0", "data.length is 0"),
        (f"{ESTIMATED} training.optimizer=adamm", "training.optimizer is"),
        (f"{ESTIMATED} model.dtype=float23", "model.dtype is"),
        (f"{ESTIMATED} model.sorce=x", "unknown key 'model.sorce'. Did you mean 'model.source'?"),
        (f"{KEYS} --like a1000x", "no device 'a1000x'"),
        (f"{KEYS} --like nowhere.json", "There is no file nowhere.json"),
        (f"{KEYS} --like misspelt.json", "unknown key 'byte_per_s'. Did you mean 'bytes_per_s'"),
        (f"{KEYS} --like slow.json", "bytes_per_s is 0; it must be greater than 0"),
        (f"{ESTIMATED} --output nowhere/p.json", "there is no folder nowhere"),
        (f"{ESTIMATED} --output empty", "it is a folder"),
        (f"{ESTIMATED} --fresh", "--like estimates and does not measure: leave out --fresh"),
        (f"{KEYS} cluster.device=tpu", "cluster.device is"),
        ("nowhere.toml", "There is no file nowhere.toml"),
        (GPT, f"Name the model in the key model.source: --set model.source={GPT}"),
        ("--optimizer sgd", "has no option --optimizer. Did you mean 'training.optimizer'"),
        (f"{KEYS} --warm", "No such option: --warm"),
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
    """Nothing is measured before they are found."""
    monkeypatch.setattr(captured_run, "profile", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    misspelt = {"byte_per_s" if key == "bytes_per_s" else key: value for key, value in DEVICE.items()}
    (tmp_path / "misspelt.json").write_text(json.dumps(misspelt))
    (tmp_path / "slow.json").write_text(json.dumps(DEVICE | {"bytes_per_s": 0}))
    result = bireme(capsys, *with_sets(["profile", *words.split()]))
    assert result.status == 2
    assert sentence in result.err
    assert result.err.count("\n") == 1
    assert not result.out


@pytest.mark.slow
def test_a_checkpoint_is_checked_before_anything_is_measured(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole it is profiled; with a tensor missing, or in another shape, it is one sentence."""
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    sizes = {"n_embd": 16, "n_head": 2, "n_layer": 1, "vocab_size": 32, "n_positions": 8}
    tokens = {"bos_token_id": 0, "eos_token_id": 1}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens))
    model.save_pretrained(tmp_path)
    words = with_sets(["profile", f"model.source=hf:{tmp_path}", "--like", "laptop", "--json"])
    assert bireme(capsys, *words).document["num_units"] == 4
    file = tmp_path / "model.safetensors"
    tensors = safetensors.load_file(file)
    name = next(key for key in tensors if key.endswith("h.0.mlp.c_fc.weight"))
    for damaged, sentence in (
        (
            {key: value for key, value in tensors.items() if key != name},
            "holds no tensor transformer.h.0.mlp",
        ),
        (tensors | {name: tensors[name][:4].clone()}, "with the shape (4, 64), and the model has (16, 64)"),
    ):
        safetensors.save_file(damaged, file, metadata={"format": "pt"})
        result = bireme(capsys, *words)
        assert result.status == 2
        assert sentence in result.err
        assert result.err.count("\n") == 1
        assert not result.out


@pytest.mark.slow
def test_a_run_file_says_what_is_profiled_at_the_sizes_that_its_plan_may_have(
    capsys: Capture, tmp_path: Path
) -> None:
    """Keys that are set on the command line come after those of the file."""
    path = tmp_path / "run.toml"
    path.write_text(f'model.source = "{GPT}"\ntraining.batch_size = 12\n')
    words = ["profile", str(path), "--like", "laptop", "--json"]
    found = bireme(capsys, *words).document
    assert [cost["micro_batch"] for cost in found["units"][0]["costs"]] == [1, 2, 4]
    other = bireme(capsys, *words, "--set", "plan.micro_batch=3", "--set", "model.freeze=tokens.*").document
    assert [cost["micro_batch"] for cost in other["units"][0]["costs"]] == [3]
    assert other["units"][0]["gradient_bytes"] < found["units"][0]["gradient_bytes"]


def blocks(language: str = "") -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / "profile.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_document_s_python_runs(capsys: Capture) -> None:
    (code,) = blocks("python")
    exec(compile(code, "profile.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) == 3


def test_the_document_explains_every_field() -> None:
    text = (Path(__file__).parents[2] / "docs" / "profile.md").read_text()
    names = {field.name for kind in (Profile, UnitProfile, UnitCost) for field in fields(kind)}
    assert {name for name in names - {"units", "costs", "micro_batch"} if f"`{name}`" not in text} == set()
    (file,) = blocks("json")
    assert json.loads(file) == DEVICE
