"""Unmodified models of many families, cut into stages, compute what they compute whole: to the last bit.

Each model is tiny and comes from its configuration. In float64, except where a family's own operators have
no float64.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch

from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.model.stage import StageFunction
from bireme.model.torch_private import as_in_capture
from bireme.model.units import Unit, units_of
from tests.support.extent import TRY_ALL
from tests.support.graphs import captured_once

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra: install bireme[hf]"),
]

TEXT = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SMALL, **TEXT, "num_key_value_heads": 2, "max_position_embeddings": 32}


@dataclass(frozen=True, slots=True)
class Family:
    """A model, what it is called with, and the units it must have."""

    config: str
    model: str
    settings: dict[str, Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    num_units: int
    dtype: torch.dtype = torch.float64

    def build(self) -> torch.nn.Module:
        transformers: Any = import_module("transformers")  # it takes seconds: when a model is made
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings)
        model: torch.nn.Module = getattr(transformers, self.model)(config)
        return model.to(self.dtype)


def tokens() -> torch.Tensor:
    return torch.randint(3, 64, (3, 16), generator=torch.Generator().manual_seed(1))


def language() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(), "labels": tokens()}


def masked_language() -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 16, dtype=torch.long)
    mask[1, 11:] = 0
    return {**language(), "attention_mask": mask}


def translation() -> dict[str, torch.Tensor]:
    short = tokens()[:, :12].contiguous()
    return {"input_ids": tokens(), "decoder_input_ids": short, "labels": short.clone()}


def images(size: int) -> Callable[[], dict[str, torch.Tensor]]:
    def made() -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(2)
        pixels = torch.randn(3, 3, size, size, dtype=torch.float64, generator=generator)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 4, 2])}

    return made


FAMILIES = {
    "gpt2": Family(
        "GPT2Config",
        "GPT2LMHeadModel",
        {**TEXT, "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16},
        language,
        6,
    ),
    "llama": Family("LlamaConfig", "LlamaForCausalLM", GROUPED, language, 6),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}, language, 6),
    "bert": Family(
        "BertConfig", "BertForMaskedLM", {**SMALL, **TEXT, "max_position_embeddings": 32}, masked_language, 7
    ),
    "t5": Family(
        "T5Config",
        "T5ForConditionalGeneration",
        {**TEXT, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        translation,
        13,
    ),
    "vit": Family(
        "ViTConfig",
        "ViTForImageClassification",
        {**SMALL, "image_size": 16, "patch_size": 8, "num_labels": 5},
        images(16),
        6,
    ),
    "resnet": Family(
        "ResNetConfig",
        "ResNetForImageClassification",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [2, 2],
            "num_labels": 5,
            "layer_type": "basic",
        },
        images(32),
        6,
    ),
    "mixtral": Family(
        "MixtralConfig",
        "MixtralForCausalLM",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        language,
        6,
        torch.float32,
    ),
}


QUICK = ("gpt2", "llama", "resnet", "t5")
"""Those that are tried by default: tied weights, grouped queries, buffers, and two streams at a boundary."""


def whole(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    torch.manual_seed(7)
    loss: torch.Tensor = model(**inputs, **extra).loss
    return loss


def in_stages(
    graph: Graph, units: tuple[Unit, ...], count: int, model: torch.nn.Module, inputs: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The loss of so many stages, one after the other."""
    bounds = [round(i * len(units) / count) for i in range(count + 1)]
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    flowing = dict(inputs)
    torch.manual_seed(7)
    for begin, end in pairwise(bounds):
        flowing |= StageFunction(graph, units[begin:end])(parameters, buffers, flowing)
    return flowing["loss"]


@pytest.fixture(scope="module", params=sorted(FAMILIES if TRY_ALL else QUICK))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def graph_of(family: Family, *, training: bool = True) -> Graph:
    """Captured once for all workers."""
    inputs = family.inputs()
    given = {name: tensor.shape for name, tensor in inputs.items()}
    said = (family.config, family.model, family.settings, family.dtype, given, training)
    return captured_once(repr(said), lambda: capture(family.build(), inputs, training=training), is_kept=True)


@pytest.fixture(scope="module")
def captured(family: Family) -> Graph:
    return graph_of(family)


def test_it_is_cut_into_its_natural_pieces(family: Family, captured: Graph) -> None:
    units = units_of(captured)
    assert len(units) == family.num_units
    assert captured.any_batch


def test_stages_in_a_row_are_the_model_to_the_last_bit(family: Family, captured: Graph) -> None:
    """Loss, every gradient and every buffer, in training mode with its dropout.

    Some attention asks whether it is being exported, and then takes another way to the same numbers; so the
    model is told that it is.
    """
    model, inputs = family.build(), family.inputs()
    counts = [1, 2, 3, 5] if TRY_ALL else [1, 3]
    twins = [copy.deepcopy(model) for _ in counts]
    with as_in_capture():
        expected = whole(model, inputs)
    torch.autograd.backward(expected)
    for count, twin in zip(counts, twins, strict=True):
        found = in_stages(captured, units_of(captured), count, twin, inputs)
        torch.autograd.backward(found)
        assert torch.equal(found, expected), count
        for (name, one), (_, other) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            if one.grad is None or other.grad is None:
                assert one.grad is other.grad, (count, name)
            else:
                assert torch.equal(one.grad, other.grad), (count, name)
        for (name, here), (_, there) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
            assert torch.equal(here, there), (count, name)


def test_the_stages_are_the_model_as_it_runs_by_itself(family: Family, captured: Graph) -> None:
    """But for the order of some sums, where attention takes another way than in the graph."""
    model, inputs = family.build(), family.inputs()
    twin = copy.deepcopy(model)
    expected = whole(model, inputs)
    torch.autograd.backward(expected)
    found = in_stages(captured, units_of(captured), 3, twin, inputs)
    torch.autograd.backward(found)
    tolerance = 1e-13 if family.dtype is torch.float64 else 1e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", sorted(FAMILIES) if TRY_ALL else ["gpt2", "resnet"])
def test_evaluation_is_a_graph_of_its_own(name: str) -> None:
    """Where dropout ends, and where buffers are read that training writes."""
    family = FAMILIES[name]
    model, inputs = family.build().eval(), family.inputs()
    graph = graph_of(family, training=False)
    with torch.no_grad(), as_in_capture():
        expected = whole(model, inputs)
        found = in_stages(graph, units_of(graph), 3, copy.deepcopy(model), inputs)
    assert torch.equal(found, expected)


def test_another_batch_size_needs_no_other_graph(family: Family, captured: Graph) -> None:
    model = family.build()
    inputs = {key: torch.cat([value, value])[:5] for key, value in family.inputs().items()}
    twin = copy.deepcopy(model)
    with as_in_capture():
        expected = whole(model, inputs)
    found = in_stages(captured, units_of(captured), 2, twin, inputs)
    assert torch.equal(found, expected)


def test_equal_layers_are_equal_units() -> None:
    """A layer is two units, one tensor crosses between them, and the next layer is the same again."""
    for name in ("llama", "qwen3", "mixtral") if TRY_ALL else ("llama",):
        settings = {**FAMILIES[name].settings, "num_hidden_layers": 3}
        family = Family(FAMILIES[name].config, FAMILIES[name].model, settings, language, 8, torch.float32)
        units = units_of(graph_of(family))
        assert len(units) == 8
        assert all(len(unit.sends) == 1 for unit in units[:-1])
        assert len({unit.structure for unit in units}) == 4


def test_a_tied_weight_is_one_parameter_in_two_places() -> None:
    family = FAMILIES["gpt2"]
    graph = graph_of(family)
    units = units_of(graph)
    tied = [parameter for parameter in graph.parameters if parameter.aliases]
    assert [parameter.aliases for parameter in tied] == [("lm_head.weight",)]
    assert tied[0].name in units[0].parameters
    assert tied[0].name in units[-1].parameters
    names = {name for name, _ in family.build().named_parameters()}
    assert {parameter.name for parameter in graph.parameters} == names


def test_what_an_encoder_hands_to_a_decoder_passes_through_what_does_not_use_it() -> None:
    units = units_of(graph_of(FAMILIES["t5"]))
    feed_forward = [unit for unit in units if unit.name.startswith("decoder") and "Dense" in unit.name]
    passing = set(feed_forward[0].receives) & set(feed_forward[0].sends)
    assert len(passing) == 2
    assert len(feed_forward[0].receives) == 3
