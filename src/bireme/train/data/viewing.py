"""What `bireme data` shows: the samples that a run would learn from, and what its loss counts of them."""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from bireme.report.data_table import DataView, ShownSample, ShownToken, SourceView
from bireme.train.data.documents import DocumentSamples
from bireme.train.data.mixture import MixedSamples, sources_of
from bireme.train.data.notes import data_notes
from bireme.train.data.prepare import Recognized, RunData
from bireme.train.data.samples import IGNORED, PackedSamples, Samples
from bireme.train.data.stream import StreamSamples
from bireme.train.data.tokenizer import Tokenizer

_MOST_IDS_OF_A_LETTER = 8
"""Bytes of a letter, and room for tokenizers that put marks between them."""


def view_of(data: RunData, tokenizer_name: str | None, length: int, num_shown: int) -> DataView:
    """All sources of a run's data, with the first samples of each."""
    mixed = data.training
    training = [one.samples for one in mixed.sources] if isinstance(mixed, MixedSamples) else [mixed]
    sources = tuple(
        _source(recognized, samples, data.tokenizer, num_shown)
        for recognized, samples in zip(data.recognized, training, strict=True)
    )
    held = data.evaluation
    return DataView(
        sources,
        tokenizer_name,
        length if data.is_text else None,
        None if held is None else sum(map(len, sources_of(held).values())),
        data_notes(data),
    )


def _source(
    recognized: Recognized, samples: Samples, tokenizer: Tokenizer | None, num_shown: int
) -> SourceView:
    tokens = targets = cut_off = padding = documents = None
    if isinstance(samples, DocumentSamples | PackedSamples):
        targets = sum(samples.num_targets())
        whole = len(samples) * samples.length
        tokens = samples.num_tokens if isinstance(samples, DocumentSamples) else whole
        padding = whole - tokens
        ends = samples.tokens.document_ends
        documents = None if ends is None else len(ends)
        cut_off = samples.num_cut_off if isinstance(samples, DocumentSamples) else None
    is_stream = isinstance(samples, StreamSamples)
    return SourceView(
        recognized.origin,
        recognized.what,
        recognized.columns,
        recognized.form,
        recognized.counted,
        documents,
        None if is_stream else len(samples),
        tokens,
        targets,
        cut_off,
        padding,
        tuple(_shown(samples, number, tokenizer) for number in range(min(num_shown, len(samples)))),
    )


def _shown(samples: Samples, number: int, tokenizer: Tokenizer | None) -> ShownSample:
    batch = {name: tensor[0] for name, tensor in samples.take([number], seeds=[number]).items()}
    tensors = tuple(
        f"{name}: {str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for name, one in batch.items()
    )
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if ids is None or labels is None or ids.ndim != 1 or labels.shape != ids.shape:
        return ShownSample(number, (), 0, tensors)
    learns = labels != IGNORED
    learns[0] = False  # nothing comes before it that it could be predicted from
    begins = torch.zeros_like(learns)
    if (positions := batch.get("position_ids")) is not None:
        begins[1:] = positions[1:] == 0
    size = _without_padding(samples, ids, learns)
    tokens = tuple(_tokens(ids[:size], learns[:size], begins[:size], tokenizer))
    return ShownSample(number, tokens, len(ids) - size, tensors)


def _without_padding(samples: Samples, ids: Tensor, learns: Tensor) -> int:
    """How many tokens there are before the padding at the end."""
    if isinstance(samples, DocumentSamples | StreamSamples):
        rest = learns | (ids != samples.padding)
        return int(rest.nonzero().max()) + 1 if rest.any() else 0
    return len(ids)


def _tokens(ids: Tensor, learns: Tensor, begins: Tensor, tokenizer: Tokenizer | None) -> Iterator[ShownToken]:
    """Each token with its text; tokens that make a letter only together are one."""
    rows = list(zip(ids.tolist(), learns.tolist(), begins.tolist(), strict=True))
    before: list[int] = []
    place = 0
    while place < len(rows):
        _, is_learned, is_first = rows[place]
        own: list[int] = []
        text = ""
        for number, counts, begin in islice(rows, place, place + _MOST_IDS_OF_A_LETTER):
            if own and (counts != is_learned or begin):
                break
            own.append(number)
            text = _text(before, own, tokenizer)
            if "\ufffd" not in text:
                break
        if "\ufffd" in text:
            own, text = own[:1], _text(before, own[:1], tokenizer)
        yield ShownToken(tuple(own), text, is_learned, is_first)
        before, place = own, place + len(own)


def _text(before: list[int], ids: list[int], tokenizer: Tokenizer | None) -> str:
    """The text of ids after others: alone, some tokenizers leave out a space at their front."""
    if tokenizer is None:
        return " ".join(map(str, ids))
    first = tokenizer.marked(before) if before else ""
    both = tokenizer.marked([*before, *ids])
    return both[len(first) :] if both.startswith(first) else tokenizer.marked(ids)
