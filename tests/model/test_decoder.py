"""Decoders of transformers in parts: the tokens of transformers' own `generate`, by a cache in each part."""

import copy
import importlib
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bireme.model.convert import named_tensors
from bireme.model.decoder import DecoderLayers, decoder_of, state_graph
from tests.support.extent import TRY_ALL

pytestmark = pytest.mark.slow

transformers: Any = pytest.importorskip("transformers")

LAYERS, COUNT = 3, 12
LAYER, TABLE = re.compile(r"\.(?:h|layers)\.(\d+)\."), re.compile(r"\.(?:wte|embed_tokens|embed_in)\.")
CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "pad_token_id": 5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen3": {},
    "GPT2": {"n_embd": 16, "n_layer": LAYERS, "n_head": 2, "n_positions": 64},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 8, "initializer_range": 0.1},
    "Mixtral": {"num_local_experts": 2},
}
MORE: dict[str, dict[str, Any]] = {
    "GPTNeoX": {},
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6},
    "OPT": {"word_embed_proj_dim": 8, "ffn_dim": 32},
    "Phi3": {},
    "Qwen3Moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
}
if TRY_ALL:
    FAMILIES |= MORE


def made(family: str, **sizes: Any) -> Any:
    """A model of a family, with weights from a seed."""
    kind = getattr(transformers, f"{family}LMHeadModel", None) or getattr(
        transformers, f"{family}ForCausalLM"
    )
    config = getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES.get(family, {}) | sizes))
    torch.manual_seed(0)
    return kind(config).eval()


def empty(model: Any) -> Any:
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


def parts(
    model: Any, cuts: Sequence[int], *, room: float = 1e9
) -> tuple[list[DecoderLayers], list[set[str]]]:
    """The parts of a model, and the names of the weights that each has asked for."""
    tensors, found, asked = dict(named_tensors(model)), [], []
    for begin, end in zip((0, *cuts), (*cuts, LAYERS), strict=True):
        own = set[str]()

        def weights(names: Sequence[str], own: set[str] = own) -> dict[str, Tensor]:
            own.update(names)
            return {name: tensors[name].detach() for name in names}

        decoder = decoder_of(empty(model))
        assert decoder is not None
        states = state_graph(empty(model))
        found.append(DecoderLayers(decoder, range(begin, end), states, weights, device=CPU, room=room))
        asked.append(own)
    return found, asked


def greedy(line: Sequence[DecoderLayers], first: Sequence[int]) -> list[int]:
    ids, fresh = list(first), list(first)
    for _ in range(COUNT):
        state = None
        for part in line:
            state = part(torch.tensor([fresh]), state, begins=len(fresh) == len(ids))
        assert state is not None
        fresh = [int(state.argmax())]
        ids += fresh
    return ids[len(first) :]


def reference(model: Any, first: Sequence[int]) -> list[int]:
    given = torch.tensor([first])
    ids = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=COUNT, do_sample=False, eos_token_id=None
    )
    found: list[int] = ids[0, len(first) :].tolist()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_write_what_the_whole_writes(family: str) -> None:
    model = made(family)
    first = [5, 9, 5, 30, 7, 12, 55, 2]  # with padding's id, which is no padding here
    wanted = reference(model, first)
    assert len(set(wanted)) > 2
    for cuts in ((), (1, 2)):
        line, asked = parts(model, cuts)
        assert greedy(line, first) == wanted, cuts
        assert greedy(line, first) == wanted, "a new text begins with an empty cache"
        for place, own in enumerate(asked):
            layers = {int(found[1]) for name in own if (found := LAYER.search(name))}
            assert layers == {*range((0, *cuts)[place], (*cuts, LAYERS)[place])}
            has_table = any(TABLE.search(name) for name in own)
            assert has_table == (place == 0) or place == len(cuts), "the head may be the embedding"


def test_layers_that_have_no_room_are_read_for_each_token() -> None:
    model = made("Llama")
    states = state_graph(empty(model))
    decoder = decoder_of(empty(model))
    assert decoder is not None
    sizes = decoder.sizes(states)
    assert sizes[1] < sizes[2] < sizes[0], "the first has the embedding, which is the head of the last"
    first = [3, 1, 4]
    for room, num_read in ((sizes[0], [0, 1]), (0, [1, 2])):
        line, _ = parts(model, (1,), room=room)
        assert [part.num_read for part in line] == num_read
        assert greedy(line, first) == reference(model, first)


def test_a_model_that_cannot_be_cut_writes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model with states of another kind; in one whose layers are given the embedding as well."""
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=LAYERS, state_size=4)
    ).eval()
    found = decoder_of(empty(mamba))
    assert found is not None
    assert found.layers is None
    first = [3, 1, 4, 9]
    assert greedy(parts(mamba, ())[0], first) == reference(mamba, first)

    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    rotary: Any = llama.LlamaRotaryEmbedding

    class Around(rotary):  # type: ignore[misc]  # it is imported by name
        def forward(self, x: Tensor, position_ids: Tensor) -> Any:
            cos, sin = super().forward(x, position_ids)
            return cos + x.mean() * 0, sin

    monkeypatch.setattr(llama, "LlamaRotaryEmbedding", Around)
    found = decoder_of(empty(made("Llama")))
    assert found is not None
    assert found.layers is None


def test_models_without_a_cache_of_this_kind_are_not_taken() -> None:
    class Plain(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids

    assert decoder_of(Plain()) is None
    with torch.device("meta"):
        encoder = transformers.T5ForConditionalGeneration(transformers.T5Config(d_model=16, d_kv=4, d_ff=16))
    assert decoder_of(encoder) is None
