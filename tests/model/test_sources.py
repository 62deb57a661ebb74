"""A model's source is one line of text: it gives a model that can be captured, or one clear sentence."""

import json
import math
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bireme.errors import BiremeError
from bireme.model.capture import capture
from bireme.model.gpt import GPT, GPTConfig
from bireme.model.graph import Graph
from bireme.model.sources import ModelSource, load_source

SMALL = "gpt:layers=1,width=32,heads=4,vocab=64,context=16"
NEEDS_TRANSFORMERS = "transformers is an optional dependency"

DECODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
ENCODER = {key: value for key, value in DECODER.items() if key != "num_key_value_heads"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": (
        "gpt2",
        {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16},
    ),
    "LlamaForCausalLM": ("llama", DECODER),
    "Qwen3ForCausalLM": ("qwen3", {**DECODER, "head_dim": 8}),
    "BertForMaskedLM": ("bert", ENCODER),
    "BertForSequenceClassification": ("bert", {**ENCODER, "id2label": {"0": "a", "1": "b", "2": "c"}}),
    "T5ForConditionalGeneration": (
        "t5",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 1,
            "num_heads": 4,
            "vocab_size": 64,
            "decoder_start_token_id": 0,
        },
    ),
    "ViTForImageClassification": ("vit", {**ENCODER, "image_size": 16, "patch_size": 8}),
    "ResNetForImageClassification": (
        "resnet",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    ),
    "MixtralForCausalLM": ("mixtral", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def folder_of(path: Path, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def folder_of_family(path: Path, architecture: str) -> Path:
    model_type, sizes = FAMILIES[architecture]
    return folder_of(path, model_type=model_type, architectures=[architecture], **sizes)


def captured(source: ModelSource) -> Graph:
    return capture(source.model, source.example_inputs)


def shapes_of(source: ModelSource) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in source.example_inputs.items()}


def on_meta(source: ModelSource) -> bool:
    tensors = [*source.model.parameters(), *source.model.buffers()]
    return all(tensor.device.type == "meta" for tensor in tensors)


def has_loss(graph: Graph) -> bool:
    return "loss" in {output.name for output in graph.outputs}


@cache
def small_graph() -> Graph:
    source = load_source(SMALL, batch=2)
    graph = captured(source)
    assert on_meta(source)
    return graph


@pytest.mark.slow
def test_the_built_in_gpt_is_captured_without_a_weight_in_memory() -> None:
    source, graph = load_source(SMALL, batch=2), small_graph()
    assert on_meta(source)
    assert shapes_of(source) == {"input_ids": [2, 16], "labels": [2, 16]}
    assert has_loss(graph)
    assert graph.any_batch


@pytest.mark.slow
def test_a_tied_gpt_has_one_table_for_the_embedding_and_the_head() -> None:
    tied = small_graph()
    untied = captured(load_source(f"{SMALL},tied=false", batch=2))
    (shared,) = (p for p in tied.parameters if p.aliases)
    assert (shared.name, shared.aliases) == ("tokens.weight", ("head.weight",))
    assert untied.parameter_bytes - tied.parameter_bytes == 4 * 64 * 32


def test_a_new_gpt_finds_every_token_equally_likely() -> None:
    torch.manual_seed(0)
    source = load_source(SMALL, batch=4, device="cpu")
    assert source.model(**source.example_inputs)["loss"].item() == pytest.approx(math.log(64), rel=0.05)


def test_a_gpt_never_looks_ahead() -> None:
    torch.manual_seed(0)
    source = load_source(SMALL, device="cpu", training=False)
    ids = source.example_inputs["input_ids"]
    changed = ids.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 64
    before, after = source.model(ids)["logits"], source.model(changed)["logits"]
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_a_gpts_loss_is_that_of_the_next_token_where_its_label_counts() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=1, width=8, heads=2, vocab=5, context=4)).double()
    ids = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    labels = ids.clone()
    labels[1, 2:] = -100
    result = model(ids, labels)
    likelihood = result["logits"].log_softmax(-1)
    wanted = [likelihood[0, place, ids[0, place + 1]] for place in range(3)] + [likelihood[1, 0, 3]]
    assert torch.allclose(result["loss"], -torch.stack(wanted).mean())


def test_dropout_acts_in_training_only() -> None:
    for training in (True, False):
        source = load_source(f"{SMALL},dropout=0.5", device="cpu", training=training)
        losses = {source.model(**source.example_inputs)["loss"].item() for _ in range(2)}
        assert source.model.training is training
        assert len(losses) == 1 + training


def test_a_gpt_refuses_more_tokens_than_its_context() -> None:
    model = load_source(SMALL, device="cpu").model
    with pytest.raises(BiremeError, match=r"17 tokens.*looks at 16"):
        model(torch.zeros(1, 17, dtype=torch.long))


def test_the_same_source_always_has_the_same_inputs() -> None:
    first, second = (load_source(SMALL, batch=3, device="cpu").example_inputs for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no model source ''.*gpt:.*hf:FOLDER.*python:"),
        ("gpt", "no model source 'gpt'"),
        ("keras:model", "no model source 'keras:model'"),
        ("gpt:", "lacks layers, width, heads, vocab, context"),
        ("gpt:layers=2,width=32,heads=4,vocab=64", "lacks context.*Write it as in gpt:layers="),
        (f"{SMALL},drop=0.1", "unknown key 'drop'. Did you mean 'dropout'"),
        (f"{SMALL},layers=3", "'layers' twice"),
        (f"{SMALL},tied", "'tied', which is not of the form key=value"),
        (f"{SMALL},tied=yes", "tied=yes; tied must be true or false"),
        (f"{SMALL},dropout=high", "dropout=high; dropout must be a number"),
        (f"{SMALL},dropout=1.5", "dropout is 1.5"),
        ("gpt:layers=2.5,width=32,heads=4,vocab=64,context=16", "layers=2.5; layers must be a whole number"),
        ("gpt:layers=0,width=32,heads=4,vocab=64,context=16", "layers is 0; it must be at least 1"),
        ("gpt:layers=999999999,width=32,heads=4,vocab=64,context=16", "and at most 1,000"),
        (f"gpt:layers=1,width=32,heads=4,vocab=64,context={10**12}", "and at most 16,777,216"),
        ("missing/own.py:make", "no file missing/own.py"),
        ("gpt:layers=2,width=30,heads=4,vocab=64,context=16", "width is 30 and its heads are 4.*such as 32"),
        ("hf:no/such/folder", "no folder no/such/folder"),
        ("python:", "names no function"),
        ("python:math", "names no function"),
        ("python:no_such_module:make", "no Python module no_such_module"),
        ("python:math:sqrd", "math has no function 'sqrd'. Did you mean 'sqrt'"),
        ("python:math:pi", "math:pi is a float, not a function"),
    ],
)
def test_a_wrong_source_is_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(BiremeError, match=sentence):
        load_source(text)


@pytest.mark.parametrize(
    "options",
    [{"batch": 0}, {"length": 0}, {"batch": 10**9}, {"length": 10**9}, {"device": "abacus"}],
)
def test_a_wrong_option_is_refused_in_a_sentence(options: dict[str, Any]) -> None:
    with pytest.raises(BiremeError, match=str(next(iter(options.values())))):
        load_source(SMALL, **options)


MODULE = """
import torch

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))

    def forward(self, x, y):
        return ((x * self.weight).sum(-1) - y).square().mean()

def by_name():
    return Line(), {"x": torch.randn(4, 3), "y": torch.randn(4)}

def by_place():
    return Line(), (torch.randn(4, 3), torch.randn(4))

def module_alone(): return Line()
def nothing(): return None
def no_tensors(): return Line(), {"x": 1, "y": 2}
def too_many(): return Line(), (torch.randn(4, 3),) * 3
def fails(): raise ValueError("the dog ate it")
def leaves(): raise SystemExit(7)
def reads_numbers(): return torch.linspace(0, 1, 3)[1].item()
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"module_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.slow
@pytest.mark.parametrize("function", ["by_name", "by_place"])
@pytest.mark.parametrize("batch", [2, 7])
def test_a_function_brings_its_own_model_and_inputs(own_module: str, function: str, batch: int) -> None:
    source = load_source(f"python:{own_module}:{function}", batch=batch)
    assert on_meta(source)
    assert shapes_of(source) == {"x": [batch, 3], "y": [batch]}
    assert has_loss(captured(source))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("by_nam", "Did you mean 'by_name'"),
        ("module_alone", "Line without inputs.*Return \\(module, example inputs\\)"),
        ("nothing", "returns nothing. It must return a torch.nn.Module"),
        ("no_tensors", "tensors whose first axis is the batch"),
        ("too_many", "tensors whose first axis is the batch"),
        ("fails", "fails: ValueError: the dog ate it"),
        ("leaves", "fails: SystemExit: 7"),
        ("reads_numbers", "returns a float. It must return a torch.nn.Module"),
    ],
)
def test_a_function_that_gives_no_model_is_refused(own_module: str, function: str, sentence: str) -> None:
    with pytest.raises(BiremeError, match=sentence):
        load_source(f"python:{own_module}:{function}")


def test_a_module_that_lacks_something_itself_is_not_called_missing(own_module: str) -> None:
    with pytest.raises(BiremeError, match=r"broken cannot be imported: .*no_such_dependency"):
        load_source(f"python:{own_module}_broken:make")


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
def test_any_transformers_model_is_captured_from_its_config_alone(tmp_path: Path, architecture: str) -> None:
    pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    source = load_source(f"hf:{folder_of_family(tmp_path, architecture)}", batch=2)
    assert type(source.model).__name__ == architecture
    assert on_meta(source)
    assert all(shape[0] == 2 for shape in shapes_of(source).values())
    assert has_loss(captured(source))
    assert source.folder is None


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_inputs_made_for_a_transformers_model_give_a_loss(tmp_path: Path, architecture: str) -> None:
    pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    torch.manual_seed(0)
    folder = folder_of_family(tmp_path, architecture)
    source = load_source(f"hf:{folder}", batch=2, device="cpu")
    counts = [buffer for name, buffer in source.model.named_buffers() if name.endswith("num_batches_tracked")]
    assert not any(counts), "making inputs must not train the model"
    assert torch.isfinite(source.model(**source.example_inputs).loss)


@pytest.mark.slow
def test_labels_look_as_the_model_needs_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)

    def shapes(architecture: str) -> dict[str, list[int]]:
        return shapes_of(load_source(f"hf:{folder_of_family(tmp_path, architecture)}", batch=2, length=8))

    tokens = [2, 8]
    assert shapes("LlamaForCausalLM") == {"input_ids": tokens, "labels": tokens}
    assert shapes("BertForSequenceClassification") == {
        "input_ids": tokens,
        "attention_mask": tokens,
        "labels": [2],
    }
    assert shapes("T5ForConditionalGeneration") == {
        "input_ids": tokens,
        "attention_mask": tokens,
        "decoder_input_ids": tokens,
        "labels": tokens,
    }
    assert shapes("ViTForImageClassification") == {"pixel_values": [2, 3, 16, 16], "labels": [2]}


@pytest.mark.slow
def test_a_decoder_reads_its_labels_one_place_late(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    folder = folder_of_family(tmp_path, "T5ForConditionalGeneration")
    inputs = load_source(f"hf:{folder}", device="cpu").example_inputs
    assert torch.equal(inputs["decoder_input_ids"][:, 1:], inputs["labels"][:, :-1])
    assert inputs["decoder_input_ids"][0, 0] == 0


@pytest.mark.slow
def test_a_config_without_architectures_gets_the_model_of_the_likeliest_task(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    source = load_source(f"hf:{folder_of(tmp_path, model_type='bert', **ENCODER)}")
    assert type(source.model).__name__ == "BertForMaskedLM"


@pytest.mark.slow
def test_a_folder_with_weights_is_remembered(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    folder = folder_of_family(tmp_path, "LlamaForCausalLM")
    (folder / "model.safetensors").touch()
    assert load_source(f"hf:{folder}").folder == folder


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BiremeError, match=r"has no config.json"):
        load_source(f"hf:{tmp_path}")


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(BiremeError, match=r"config\.json"):
        load_source(f"hf:{tmp_path}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, "has no model_type"),
        ({"model_type": "abacus"}, "model_type 'abacus', which transformers .* does not know"),
        (
            {"model_type": "abacus", "auto_map": {"AutoConfig": "a.B"}},
            "Bireme never runs code from there",
        ),
        ({"model_type": "llama", "hidden_size": "wide"}, "No model can be made from .*hidden_size"),
        ({"model_type": "dpr"}, "transformers has no model with a loss for the model_type 'dpr'"),
    ],
)
def test_a_config_of_no_known_model_is_refused(tmp_path: Path, config: dict[str, Any], sentence: str) -> None:
    pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    with pytest.raises(BiremeError, match=sentence):
        load_source(f"hf:{folder_of(tmp_path, **config)}")


@pytest.mark.slow
def test_sequences_longer_than_the_model_takes_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    with pytest.raises(BiremeError, match="64 tokens do not fit: the model takes 32"):
        load_source(f"hf:{folder_of_family(tmp_path, 'LlamaForCausalLM')}", length=64)


@pytest.mark.slow
def test_a_model_that_no_inputs_can_be_made_for_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    folder = folder_of(tmp_path, model_type="bert", architectures=["BertForMultipleChoice"], **ENCODER)
    with pytest.raises(BiremeError, match=r"does not take the inputs made for it.*file.py:function"):
        load_source(f"hf:{folder}", batch=2)


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BiremeError, match=r'pip install "bireme\[hf\]"'):
        load_source(f"hf:{folder_of_family(tmp_path, 'LlamaForCausalLM')}")
