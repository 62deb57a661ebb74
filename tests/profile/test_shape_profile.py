"""The profile of a shape is that of the captured model: weights to the value, bytes within bounds."""

import json
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from bireme.cluster.catalogue import catalogue, device_named
from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.shapes import built_in_shapes, shape_of
from bireme.profile.profile import Profile
from bireme.profile.shape_profile import QUANTIZED_BYTES, RANK, TrainedShare, profile_of_shape
from bireme.profile.stages import stage_cost
from tests.support.estimates import estimated_once
from tests.support.extent import TRY_ALL
from tests.support.graphs import captured_once

A100 = catalogue()["a100"]
LENGTH, SIZES = 256, (1, 2)

SMALL = {
    "vocab_size": 640,
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
GPT2 = {
    "vocab_size": 640,
    "n_embd": 96,
    "n_head": 6,
    "n_layer": 2,
    "n_positions": 512,
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 1),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "model_type": "llama"},
    "qwen3": {**SMALL, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {**SMALL, "model_type": "gemma2", "head_dim": 16, "tie_word_embeddings": True},
    "gpt2": {**GPT2, "model_type": "gpt2"},
    "mixtral": {**SMALL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **SMALL,
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    },
    "gpt_oss": {
        **SMALL,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs the extra: install bireme[hf]"
)


def folder_of(family: str, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    return folder


@cache
def captured_profile(family: str, trained: TrainedShare) -> Profile:
    from bireme.model.capture import capture
    from bireme.model.part import WHOLE, LoraPart, TrainedPart
    from bireme.model.sources import load_source

    def graph_of() -> Graph:
        part = WHOLE if trained is TrainedShare.FULL else TrainedPart(lora=LoraPart(RANK))
        with TemporaryDirectory() as folder:
            text = f"hf:{folder_of(family, Path(folder))}"
            source = load_source(text, batch=2, length=LENGTH, dtype="bfloat16", part=part)
            if shape_of(folder).is_mixture:  # on meta its tokens are counted as only GPUs can count them
                source.model.to_empty(device="cpu")
            return capture(source.model, source.example_inputs)

    graph = captured_once(f"{CONFIGS[family]} {LENGTH} {trained} {RANK}", graph_of, is_kept=True)
    return estimated_once(graph, device_named("a100"), SIZES, halves=True)


CASES = [
    *((family, TrainedShare.FULL) for family in CONFIGS if TRY_ALL or family not in ("qwen3_moe", "gpt_oss")),
    ("llama", TrainedShare.LORA),
]


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize(("family", "trained"), CASES)
def test_the_bytes_of_a_shape_are_those_of_the_captured_model(
    family: str, trained: TrainedShare, tmp_path: Path
) -> None:
    real = captured_profile(family, trained)
    found = profile_of_shape(shape_of(str(folder_of(family, tmp_path))), A100, 0.5, LENGTH, SIZES, trained)
    assert found.parameter_bytes == real.parameter_bytes - _adapter_bytes(real, trained)
    for one, other in zip(real.units, found.units, strict=True):
        assert (other.parameter_bytes, other.gradient_bytes) == (one.parameter_bytes, one.gradient_bytes)
        assert other.frozen_bytes == one.frozen_bytes
        assert other.optimizer_bytes == pytest.approx(one.optimizer_bytes, abs=4 * 14), (
            "and the steps of Adam"
        )
        assert [kept.parameter_bytes for kept in other.tied] == [
            kept.parameter_bytes for kept in one.tied if kept.parameter_bytes or kept.frozen_bytes
        ]
        for size in SIZES:
            exact, own = one.at(size), other.at(size)
            assert (own.boundary_bytes, own.back_bytes) == (exact.boundary_bytes, exact.back_bytes)
            if other is not found.units[0]:  # which keeps numbers of tokens alone
                is_first_adapter = trained is TrainedShare.LORA and other is found.units[1]
                assert own.saved_bytes == pytest.approx(
                    exact.saved_bytes, rel=0.3 if is_first_adapter else 0.05
                )
                assert own.workspace_bytes == pytest.approx(exact.workspace_bytes, rel=0.25)


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("trained", [TrainedShare.FULL, TrainedShare.LORA])
@pytest.mark.parametrize(
    "length", [128, LENGTH]
)  # it keeps the gradient of the scores, or that of the weight
def test_the_head_of_a_large_vocabulary_is_fused_with_its_loss(
    length: int, trained: TrainedShare, tmp_path: Path
) -> None:
    from bireme.model.capture import capture
    from bireme.model.fused_loss import fused
    from bireme.model.part import WHOLE, LoraPart, TrainedPart
    from bireme.model.sources import load_source

    def graph_of() -> Graph:
        part = WHOLE if trained is TrainedShare.FULL else TrainedPart(lora=LoraPart(RANK))
        source = load_source(f"hf:{tmp_path}", batch=2, length=length, dtype="bfloat16", part=part)
        return capture(source.model, source.example_inputs)

    config = {**CONFIGS["llama"], "vocab_size": 8192, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    graph = captured_once(f"{config} {length} {trained} {RANK}", graph_of, is_kept=True)
    real = estimated_once(fused(graph).graph, device_named("a100"), (1,), halves=True).units[-1].at(1)
    shape = shape_of(str(tmp_path))
    own = profile_of_shape(shape, A100, 0.5, length, (1,), trained).units[-1].at(1)
    assert own.saved_bytes == pytest.approx(real.saved_bytes, rel=0.01)
    assert own.workspace_bytes == pytest.approx(real.workspace_bytes, rel=0.01)
    assert own.waiting_bytes == real.waiting_bytes
    assert own.halves_workspace_bytes == pytest.approx(real.halves_workspace_bytes, rel=0.05)


def _adapter_bytes(real: Profile, trained: TrainedShare) -> int:
    return 0 if trained is TrainedShare.FULL else sum(unit.parameter_bytes for unit in real.units)


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_whole_model_needs_what_its_capture_needs(family: str, tmp_path: Path) -> None:
    real = captured_profile(family, TrainedShare.FULL)
    found = profile_of_shape(shape_of(str(folder_of(family, tmp_path))), A100, 0.5, LENGTH, SIZES)
    exact, own = (stage_cost(one, 0, len(one.units), 2) for one in (real, found))
    assert own.peak_bytes() == pytest.approx(exact.peak_bytes(), rel=0.02)
    assert own.waiting_bytes == pytest.approx(exact.waiting_bytes, rel=0.1)


# Without torch and transformers.


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b", 7_241_732_096),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-8b", 8_190_735_360),
        ("gemma-2-9b", 9_241_705_984),
        ("phi-3-mini", 3_821_079_552),
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
    ],
)
def test_built_in_shapes_have_the_parameters_of_the_published_models(name: str, num_parameters: int) -> None:
    assert shape_of(name).num_parameters == num_parameters


@pytest.mark.parametrize("name", built_in_shapes())
def test_the_units_of_every_shape_have_all_its_parameters_and_operations(name: str) -> None:
    shape = shape_of(name)
    found = profile_of_shape(shape, A100, 0.5, 1024, (1,))
    tied = shape.vocab * shape.width if shape.tied else 0
    assert sum(unit.parameter_bytes for unit in found.units) == 2 * (shape.num_parameters + tied)
    # Six operations a weight and token, and attention: 12 for each layer, token, key and unit of width.
    mapped = shape.num_active - shape.embedding_parameters + tied
    operations = 6 * mapped + 12 * shape.layers * 1024 * shape.query_width
    took_s = sum(cost.forward_s + cost.backward_s for unit in found.units for cost in unit.costs)
    least_s = 1024 * operations / (0.5 * A100.rate("bfloat16"))
    assert 0.95 * least_s <= took_s
    # Small ones wait for their operators to start, and mixtures for the weights of all experts.
    if shape.num_parameters > 3e9 and not shape.is_mixture:
        assert took_s <= 1.1 * least_s


def test_a_mixture_has_the_memory_of_all_experts_and_the_work_of_the_active_ones() -> None:
    shape = shape_of("mixtral-8x7b")
    alone = replace(shape, name="two experts", experts=2)
    found, two = (profile_of_shape(one, A100, 0.5, 4096, (4,)) for one in (shape, alone))
    took_s, two_s = (sum(unit.costs[0].forward_s for unit in one.units) for one in (found, two))
    assert took_s == pytest.approx(two_s, rel=0.01)
    assert found.parameter_bytes == 2 * shape.num_parameters > 3.5 * two.parameter_bytes
    assert shape.num_active == pytest.approx(alone.num_parameters, rel=0.001)  # but for the router
    lora = profile_of_shape(shape, A100, 0.5, 4096, (4,), TrainedShare.LORA)
    assert [unit.parameter_bytes for unit in lora.units if "experts" in unit.name] == [0] * shape.layers
    short = profile_of_shape(shape, A100, 0.5, 16, (1,))
    experts = short.units[2]
    read_s = experts.parameter_bytes / A100.memory_bytes_per_s
    assert experts.costs[0].forward_s > read_s, "few tokens wait for the weights of all experts"


def test_adapters_train_a_small_part_and_four_bits_hold_the_rest() -> None:
    shape = shape_of("llama-3-8b")
    full, lora, qlora = (profile_of_shape(shape, A100, 0.5, 1024, (1,), one) for one in TrainedShare)
    learning = [sum(unit.parameter_bytes for unit in one.units) // 2 for one in (full, lora, qlora)]
    assert learning == [shape.num_parameters, 41_943_040, 41_943_040]  # rank 16, as peft prints it
    frozen = [sum(unit.frozen_bytes for unit in one.units) for one in (lora, qlora)]
    assert frozen[0] == 2 * shape.num_parameters
    assert pytest.approx(4.127, abs=1e-3) == QUANTIZED_BYTES * 8
    assert 0.3 < frozen[1] / frozen[0] < 0.4
    backward = [sum(unit.costs[0].backward_s for unit in one.units) for one in (full, lora)]
    assert backward[1] < 0.65 * backward[0], "no gradients of frozen weights"


def test_a_slower_device_and_a_lower_share_take_longer() -> None:
    shape = shape_of("gpt2-xl")

    def seconds(word: str, share: float) -> float:
        found = profile_of_shape(shape, catalogue()[word], share, 1024, (1,))
        return sum(unit.costs[0].forward_s for unit in found.units)

    assert seconds("a100", 0.25) > 1.9 * seconds("a100", 0.5)
    assert seconds("t4", 0.5) > 10 * seconds("a100", 0.5), "it has no bfloat16"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "llama-3-9b",
            "There is no model 'llama-3-9b': neither a folder nor a built-in shape. Did you mean 'llama-3-",
        ),
        ("empty", "has no config.json. Name a folder of a transformers model."),
        ("t5", "has model_type 't5', whose sizes are not known here. Known are: llama, "),
        ("list", "has model_type ['llama'], whose sizes are not known here."),
        ("short", "lacks num_hidden_layers. Add it, or name a built-in shape."),
        ("words", "has layers = 'two'; it must be a whole number."),
        ("none", "The layers of none is 0; it must be 1 to 16,777,216."),
        ("broken", "config.json"),
        ("some", "has experts in some layers only, which is not counted here."),
        ("many", "sends a token through 9 of 8 experts; it must be 1 to all."),
    ],
)
def test_what_is_no_shape_is_refused_in_one_sentence(
    text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = {
        "t5": json.dumps({"model_type": "t5"}),
        "list": json.dumps({"model_type": ["llama"]}),
        "short": json.dumps({"model_type": "llama", "hidden_size": 8}),
        "words": json.dumps({**CONFIGS["llama"], "num_hidden_layers": "two"}),
        "none": json.dumps({**CONFIGS["llama"], "num_hidden_layers": 0}),
        "broken": "{",
        "some": json.dumps({**CONFIGS["qwen3_moe"], "mlp_only_layers": [0]}),
        "many": json.dumps({**CONFIGS["qwen3_moe"], "num_experts_per_tok": 9}),
    }
    monkeypatch.chdir(tmp_path)
    for name in (*configs, "empty"):
        (tmp_path / name).mkdir()
    for name, config in configs.items():
        (tmp_path / name / "config.json").write_text(config)
    with pytest.raises(BiremeError) as refused:
        shape_of(text)
    assert sentence in str(refused.value)
