"""Samples: tokens cut without a gap, and a part kept for evaluation that is never trained on."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from bireme.errors import BiremeError
from bireme.train.data.documents import Cut, DocumentSamples, EvenPieces
from bireme.train.data.samples import SampleRange, Samples, Split, Tokens, load_tokens, split_samples


def tokens_of(num_tokens: int, ends: list[int] | None = None) -> Tokens:
    known = None if ends is None else np.array(ends, np.int64)
    return Tokens("a corpus", np.arange(num_tokens, dtype=np.uint16), known)


def packed(tokens: Tokens, length: int, vocabulary: int | None = None) -> DocumentSamples:
    return Cut(length, "stream", 0, vocabulary).samples(tokens)


def split_tokens(tokens: Tokens, length: int, fraction: float, least: int = 1) -> Split:
    return Cut(length, "stream", 0).split(tokens, fraction, least=least)


def pieces_of(samples: Samples | None) -> EvenPieces:
    assert isinstance(samples, DocumentSamples)
    assert isinstance(samples.pieces, EvenPieces)
    return samples.pieces


def all_of(samples: Samples) -> Tensor:
    return samples.take(range(len(samples)))["input_ids"]


@given(st.integers(2, 300), st.integers(2, 20))
def test_samples_are_the_tokens_in_order_without_a_gap(num_tokens: int, length: int) -> None:
    samples = packed(tokens_of(num_tokens), length)
    ids = all_of(samples)
    assert ids.shape == (num_tokens // length, length)
    assert ids.flatten().tolist() == list(range(num_tokens // length * length))


def test_labels_are_the_same_ids_and_another_tensor() -> None:
    batch = packed(tokens_of(20), 4).take([3, 0])
    assert batch["input_ids"].tolist() == [[12, 13, 14, 15], [0, 1, 2, 3]]
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    batch["labels"][0] = 7
    assert batch["input_ids"][0, 0] == 12


def test_a_token_that_does_not_count_is_read_but_not_learned() -> None:
    tokens = Tokens("rows", np.array([5, -1 - 6, 7, -1 - 0], np.int32), has_uncounted=True)
    batch = packed(tokens, 4, vocabulary=8).take([0])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0]]
    assert batch["labels"].tolist() == [[5, -100, 7, -100]]
    assert tokens.largest_id() == 7


@given(st.integers(20, 400), st.floats(0.01, 0.9), st.integers(2, 8), st.data())
def test_training_and_evaluation_never_share_a_token(
    num_tokens: int, fraction: float, length: int, data: st.DataObject
) -> None:
    ends = sorted(data.draw(st.sets(st.integers(1, num_tokens - 1))) | {num_tokens})
    assume(num_tokens - max(round(num_tokens * fraction), length) >= length)
    tokens = tokens_of(num_tokens, ends if data.draw(st.booleans()) else None)
    split = split_tokens(tokens, length, fraction)
    training, evaluation = split.training, split.evaluation
    assert evaluation is not None
    assert len(training) >= 1
    assert len(evaluation) >= 1
    assert all_of(training).max() < all_of(evaluation).min()
    learned, held = pieces_of(training), pieces_of(evaluation)
    assert (learned.end, held.end) == (held.begin, num_tokens)
    wanted = max(num_tokens * fraction, length)
    assert 0.4 * wanted <= num_tokens - held.begin <= 2.1 * wanted + 1


def test_the_cut_is_where_a_document_ends_nearby() -> None:
    evaluation = split_tokens(tokens_of(1000, [300, 880, 1000]), 10, 0.1).evaluation
    assert pieces_of(evaluation).begin == 880


def test_the_cut_goes_through_a_document_that_is_very_long() -> None:
    evaluation = split_tokens(tokens_of(1000, [300, 1000]), 10, 0.1).evaluation
    assert pieces_of(evaluation).begin == 900


def test_what_is_kept_for_evaluation_is_enough_for_a_batch() -> None:
    split = split_tokens(tokens_of(1000, [905, 1000]), 10, 0.05, least=10)
    assert split.evaluation is not None
    assert (len(split.training), len(split.evaluation)) == (90, 10)
    split = split_samples(packed(tokens_of(1000), 10), 0.05, least=10)
    assert split.evaluation is not None
    assert (len(split.training), len(split.evaluation)) == (90, 10)


def test_no_fraction_is_no_evaluation() -> None:
    assert split_tokens(tokens_of(100), 10, 0.0).evaluation is None
    assert split_samples(packed(tokens_of(100), 10), 0.0).evaluation is None


def test_too_little_text_for_both_is_refused() -> None:
    with pytest.raises(BiremeError, match="too few for a sample of 60 to train on and 1 to evaluate"):
        split_tokens(tokens_of(100), 60, 0.1)
    with pytest.raises(BiremeError, match="too few to hold out"):
        split_samples(packed(tokens_of(10), 10), 0.5)


def test_the_last_samples_are_apart() -> None:
    split = split_samples(packed(tokens_of(100), 10), 0.3)
    assert isinstance(split.training, SampleRange)
    assert split.evaluation is not None
    assert (len(split.training), len(split.evaluation)) == (7, 3)
    assert split.evaluation.take([0])["input_ids"][0, 0] == 70
    assert split.training.is_quick


def test_an_id_beyond_the_vocabulary_names_its_sample() -> None:
    samples = packed(tokens_of(100), 10, vocabulary=55)
    assert len(samples.take([0, 4])["labels"]) == 2
    with pytest.raises(BiremeError, match=r"Sample 5 of a corpus has the token id 59.*55 tokens"):
        samples.take([0, 5])


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="needs Linux's account of memory")
def test_what_was_read_of_a_file_is_not_kept_in_memory(tmp_path: Path) -> None:
    """A process grew by the tokens that it had read until it held the whole file: 30 MB in the demonstration,
    which no prediction knew of.
    """
    path = tmp_path / "tokens.bin"
    np.zeros(2**21, np.uint16).tofile(path)
    tokens = load_tokens(path)
    samples = packed(tokens, 128)
    for first in range(0, len(samples), 64):
        samples.take(range(first, min(first + 64, len(samples))))
    entry = Path("/proc/self/smaps").read_text(encoding="utf-8").partition(str(path))[2]
    resident = next(line for line in entry.splitlines() if line.startswith("Rss:"))
    assert int(resident.split()[1]) < 64
    assert samples.take([0])["input_ids"].sum() == 0
