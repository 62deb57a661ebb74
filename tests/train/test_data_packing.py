"""Documents that share a sample: all of their tokens are there once, and none sees another's."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import BiremeError
from bireme.model.capture import Captures
from bireme.model.sources import load_source
from bireme.train.data.documents import Cut, best_fit
from bireme.train.data.samples import Tokens
from bireme.train.model import check_documents_apart, with_positions

GPT = "gpt:layers=2,width=16,heads=2,vocab=64,context=16"
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def corpus(sizes: list[int]) -> Tokens:
    return Tokens("corpus", np.arange(sum(sizes), dtype=np.uint16) % 64, np.cumsum(sizes))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(2, 16))
def test_every_token_is_in_one_sample_and_short_documents_are_whole(sizes: list[int], length: int) -> None:
    ends = np.cumsum(sizes)
    begins = ends - np.array(sizes)
    pieces = best_fit(begins, ends, length)
    samples = [pieces.of_sample(number) for number in range(len(pieces))]
    assert all(0 < sum(end - begin for begin, end in sample) <= length for sample in samples)
    found = sorted(piece for sample in samples for piece in sample)
    assert [token for begin, end in found for token in range(begin, end)] == list(range(ends[-1]))
    whole = set(found)
    assert all(
        (begin, end) in whole
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
        if end - begin <= length
    )
    room = sorted(length - sum(end - begin for begin, end in sample) for sample in samples)
    assert len(samples) < 2 or room[-1] + room[-2] < length, "two samples that are half empty would be one"


def llama(folder: Path) -> str:
    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(**TINY, intermediate_size=32, max_position_embeddings=16)
    config.save_pretrained(str(folder))
    return f"hf:{folder}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_logits_of_a_packed_document_are_those_of_it_alone(kind: str, tmp_path: Path) -> None:
    text = GPT if kind == "gpt" else llama(tmp_path)
    torch.manual_seed(0)
    model = load_source(text, length=16, device="cpu", training=False).model.double()
    extra = {} if kind == "gpt" else {"use_cache": False}  # as it is captured
    batch = Cut(16, "documents", 0).samples(corpus([7, 9, 5, 8])).take([0, 1])
    with torch.no_grad():
        given = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
        packed = model(**given, **extra)["logits"]
        for row, positions in enumerate(batch["position_ids"]):
            starts = [*torch.nonzero(positions == 0).flatten().tolist(), 16]
            for begin, end in pairwise(starts):
                alone = model(input_ids=batch["input_ids"][row : row + 1, begin:end])["logits"]
                torch.testing.assert_close(packed[row, begin:end], alone[0], rtol=1e-9, atol=1e-9)
                assert batch["labels"][row, begin] == -100, "nothing before it tells the first token"


def test_what_is_left_of_a_sample_does_not_count() -> None:
    batch = Cut(16, "documents", 63).samples(corpus([9, 10])).take([0, 1])
    for row, size in enumerate((10, 9)):
        assert batch["input_ids"][row, size:].tolist() == [63] * (16 - size)
        assert (batch["labels"][row] == -100).tolist() == [True, *[False] * (size - 1), *[True] * (16 - size)]


@pytest.mark.slow
def test_models_that_keep_documents_apart_are_told_from_those_that_do_not(tmp_path: Path) -> None:
    def checked(text: str) -> None:
        source = with_positions(load_source(text, length=16))
        captures = Captures(source.model, source.example_inputs, name=text)
        check_documents_apart(captures.graph(2), text)

    checked(GPT)
    checked(llama(tmp_path / "llama"))
    transformers: Any = pytest.importorskip("transformers")
    transformers.OPTConfig(**TINY, ffn_dim=32, word_embed_proj_dim=16).save_pretrained(str(tmp_path / "opt"))
    with pytest.raises(BiremeError, match="one document of a sample looks at another"):
        checked(f"hf:{tmp_path / 'opt'}")
    transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=64).save_pretrained(
        str(tmp_path / "mamba")
    )
    with pytest.raises(BiremeError, match="takes no position_ids"):
        checked(f"hf:{tmp_path / 'mamba'}")


def test_bare_tokens_have_no_documents_to_keep_apart() -> None:
    with pytest.raises(BiremeError, match="nothing says where documents end"):
        Cut(16, "documents", 0).samples(Tokens("bare.npy", np.arange(100, dtype=np.uint16)))
