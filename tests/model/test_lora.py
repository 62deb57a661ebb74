"""An adapter of the peft library in a model on the meta device: names, first weights, mistakes."""

import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.model.capture import Captures, capture
from bireme.model.part import LoraPart, TrainedPart
from bireme.model.sources import ModelSource, load_source
from bireme.model.stage import StageFunction
from bireme.model.units import units_of
from bireme.train.model import RunModel
from bireme.train.run_file import load_run_file
from tests.support.graphs import captured_once, remember_captures
from tests.support.tiny_llama import save_config, save_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("peft") is None, reason="needs the extra: install bireme[lora]"),
]

GPT = "gpt:layers=1,width=8,heads=1,vocab=32,context=8"


@pytest.fixture(autouse=True)
def _models_of_runs_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Captures.__init__.__kwdefaults__
    assert settings is not None
    monkeypatch.setitem(settings, "front_end", settings["front_end"])
    remember_captures()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "llama", num_hidden_layers=1)


def adapted(folder: Path, lora: LoraPart, **more: Any) -> ModelSource:
    return load_source(f"hf:{folder}", batch=2, length=8, part=TrainedPart(lora=lora), **more)


def test_only_the_adapter_learns_and_it_computes_in_the_model_s_numbers(llama: Path) -> None:
    source = adapted(llama, LoraPart(4), dtype="bfloat16")
    make = partial(capture, source.model, source.example_inputs)
    graph = captured_once("an adapter of a tiny llama in bfloat16", make, is_kept=True)
    learning = {state.name for state in graph.parameters if state.trainable}
    assert graph.any_batch
    assert len(learning) == 2 * 7  # A and B of seven linear layers
    assert source.adapter is not None
    assert learning == {state.name for state in graph.parameters} - source.adapter.base_names.keys()
    assert {state.dtype for state in graph.parameters} == {"bfloat16"}


def test_a_run_begins_as_the_model_in_the_folder_whichever_rank_makes_the_adapter(llama: Path) -> None:
    run = load_run_file(None, [f"model.source=hf:{llama}", "data.length=8", "model.lora.rank=4"])
    model = RunModel.of(run, 2)
    graph = model.evaluation.graph(2)
    model.check_weights(graph)
    states = [state.name for state in (*graph.parameters, *graph.buffers)]
    given = model.weights(graph)
    weights = given(states)
    again = given(states[::-1][::2])
    assert all(torch.equal(weights[name], tensor) for name, tensor in again.items())
    own = {name: tensor for name, tensor in weights.items() if ".lora_" in name}
    assert all(bool((tensor != 0).any()) == (".lora_A." in name) for name, tensor in own.items())
    transformers: Any = pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(llama).eval()
    inputs = model.source.example_inputs
    whole = StageFunction(graph, units_of(graph), outputs=("logits",))
    with torch.no_grad():
        logits: Tensor = whole(weights, weights, inputs)["logits"]
        torch.testing.assert_close(logits, base(**inputs).logits)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (
            ("q_prj",),
            "has 'q_prj', but no module has this name or a name that ends so. Did you mean 'q_proj'?",
        ),
        (("input_layernorm",), "No adapter can be added to LlamaForCausalLM: Target module LlamaRMSNorm"),
    ],
)
def test_targets_that_cannot_be_are_refused(targets: tuple[str, ...], said: str, llama: Path) -> None:
    with pytest.raises(BiremeError) as caught:
        adapted(llama, LoraPart(4, targets=targets))
    assert said in str(caught.value)


def test_a_model_that_is_not_of_transformers_gets_one_too() -> None:
    source = load_source(GPT, part=TrainedPart(lora=LoraPart(2, targets=("query_key_value",))))
    learning = [name for name, parameter in source.model.named_parameters() if parameter.requires_grad]
    wrapped = "layers.0.attention.query_key_value"
    assert learning == [f"{wrapped}.lora_A.default.weight", f"{wrapped}.lora_B.default.weight"]


def test_without_peft_it_says_what_to_install(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        BiremeError, match=r'model\.lora needs the peft package.*pip install "bireme\[lora\]"'
    ):
        adapted(llama, LoraPart(4))


def test_an_adapter_of_weights_that_nobody_keeps_is_refused(tmp_path: Path) -> None:
    folder = save_config(tmp_path / "llama", num_hidden_layers=1)
    run = load_run_file(None, [f"model.source=hf:{folder}", "data.length=8", "model.lora.rank=4"])
    model = RunModel.of(run, 2)
    with pytest.raises(
        BiremeError, match=r"starts from new ones, made from a seed\. Set model\.lora\.merge = true"
    ):
        model.check_weights(model.training.graph(2))
    merging = run.model.model_copy(update={"lora": run.model.lora.model_copy(update={"merge": True})})
    replace(model, run=run.model_copy(update={"model": merging})).check_weights(model.training.graph(2))


@torch.no_grad()
def test_an_adapter_of_dora_and_rslora_is_the_same_in_peft_and_merged(llama: Path, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    transformers: Any = pytest.importorskip("transformers")
    keys = ["rank=4", "use_dora=true", "use_rslora=true"]
    asked = [f"model.source=hf:{llama}", "data.length=8", *(f"model.lora.{key}" for key in keys)]
    model = RunModel.of(load_run_file(None, asked), 2)
    graph, adapter = model.evaluation.graph(2), model.source.adapter
    assert adapter is not None
    weights = dict(model.weights(graph)([state.name for state in (*graph.parameters, *graph.buffers)]))
    learned = {state.name for state in model.training.graph(2).parameters if state.trainable}
    draws = torch.Generator().manual_seed(0)
    for name in sorted(learned):
        weights[name] += 0.2 * torch.randn(weights[name].shape, generator=draws)
    whole = StageFunction(graph, units_of(graph), outputs=("logits",))
    ids = model.source.example_inputs["input_ids"]
    trained = whole(weights, weights, model.source.example_inputs)["logits"]

    adapter.save({name: weights[name] for name in learned}, tmp_path, base=str(llama))
    base = transformers.AutoModelForCausalLM.from_pretrained(llama).eval()
    assert not torch.allclose(base(ids).logits, trained, atol=1e-3)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    torch.testing.assert_close(loaded(ids).logits, trained)

    merged = adapter.merged(weights)
    plain = transformers.AutoModelForCausalLM.from_pretrained(llama).eval()
    plain.load_state_dict({name: merged[name] for name in merged}, strict=False)
    torch.testing.assert_close(plain(ids).logits, trained)


def test_dora_is_for_linear_layers() -> None:
    with pytest.raises(BiremeError, match="use_dora is for linear layers, and tokens is a _Embedding"):
        load_source(GPT, part=TrainedPart(lora=LoraPart(2, targets=("tokens",), use_dora=True)))


def test_a_shared_weight_gets_no_adapter_added(tmp_path: Path) -> None:
    folder = save_config(tmp_path / "llama", tie_word_embeddings=True)
    source = adapted(folder, LoraPart(2, targets=("lm_head",)), device="cpu")
    weights = dict(source.model.named_parameters())
    assert source.adapter is not None
    with pytest.raises(BiremeError, match=r"lm_head\.weight is shared with another module"):
        source.adapter.merged(weights)
