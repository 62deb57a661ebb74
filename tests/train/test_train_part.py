"""Runs that train a part: an adapter comes out that peft loads, and a folder to which it was added."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bireme.model.graph_file import load_graph
from bireme.model.stage import stage_function
from bireme.model.units import units_of
from bireme.train.checkpoint.checkpoint import newest_good
from tests.support.command import bireme
from tests.support.tiny_llama import save_llama
from tests.support.tiny_tokenizer import save_tokenizer
from tests.support.training import losses, settings, write_run

pytestmark = pytest.mark.slow


@torch.no_grad()
def test_an_adapter_of_two_ranks_has_the_same_logits_in_peft_and_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft: Any = pytest.importorskip("peft")
    transformers: Any = pytest.importorskip("transformers")
    base, tokenizer = save_llama(tmp_path / "llama"), save_tokenizer(tmp_path / "tokenizer")
    path, run = write_run(tmp_path, "2bw-fresh", model=f"hf:{base}"), tmp_path / "runs" / "run"
    lora = settings(model__lora__rank=4, model__lora__dropout=0.1, log__sample_tokens=3)
    more = settings(data__tokenizer=tokenizer, training__steps=8, training__weight_decay=0.1)
    result = bireme(capsys, "train", str(path), "--json", *lora, *more)
    assert result.status == 0, result.err
    assert result.document["sample"]
    curve = losses(run)
    assert curve[8] < curve[1]

    adapter = run / "model"
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    assert config["base_model_name_or_path"] == str(base)
    assert len(load_file(adapter / "adapter_model.safetensors")) == 2 * 2 * 7

    ids = torch.randint(300, (2, 32), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "labels": ids}
    trained = _pipeline_logits(run, inputs)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    assert not torch.allclose(plain(ids).logits, trained, atol=1e-3)
    loaded = peft.PeftModel.from_pretrained(plain, adapter).eval()
    torch.testing.assert_close(loaded(ids).logits, trained, rtol=0, atol=0)

    merged = tmp_path / "merged"
    assert bireme(capsys, "export", str(run), "--to", str(merged), "--merged").status == 0
    whole = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()
    torch.testing.assert_close(whole(ids).logits, trained)


def _pipeline_logits(run: Path, inputs: dict[str, Tensor]) -> Tensor:
    """What the stages of a run make of its newest checkpoint."""
    checkpoint = newest_good(run / "checkpoints")
    assert checkpoint is not None
    saved = checkpoint.snapshot().tensors
    graph = load_graph(run / "evaluation-graph.json")
    whole = stage_function(graph, units_of(graph), outputs=("logits",))
    weights = {name: saved[f"weights/{name}"] for name in whole.parameters}
    buffers = {name: saved[f"buffers/{name}"] for name in whole.buffers}
    return whole(weights, buffers, inputs)["logits"]


def test_a_run_without_an_adapter_has_nothing_to_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("run.toml", "plan.json", "graph.json"):
        (run / name).touch()
    result = bireme(capsys, "export", str(run), "--to", str(tmp_path / "to"), "--merged")
    assert result.status == 2
    assert "has trained no adapter, so there is nothing to merge. Leave out --merged." in result.err
