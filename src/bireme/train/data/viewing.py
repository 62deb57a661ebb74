"""What people see of the data: samples, token by token, and sentences on what is lost."""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from bireme.bounds import counted
from bireme.report.data_table import DataView, ShownSample, ShownToken, SourceView
from bireme.train.data.documents import DocumentSamples, EvenPieces, StreamSamples
from bireme.train.data.hub import Content
from bireme.train.data.mixture import MixedSamples, sources_of
from bireme.train.data.prepare import Recognized, RowForm, RunData
from bireme.train.data.samples import IGNORED, Samples, Tokens
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
    if isinstance(samples, DocumentSamples):
        targets = sum(samples.num_targets())
        tokens = samples.pieces.num_tokens
        padding = len(samples) * samples.length - tokens
        ends = samples.tokens.document_ends
        documents = None if ends is None else len(ends)
        cut_off = samples.num_cut_off
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
    is_even = isinstance(samples, DocumentSamples) and isinstance(samples.pieces, EvenPieces)
    if isinstance(samples, DocumentSamples | StreamSamples) and not is_even:
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


# Sentences for the log of a run, and below its samples.

_BUILT_IN = "stdlib"
"""The source whose files the user has not chosen: those that are left out need no sentence."""

_MOST_PADDING = 0.5
"""Share of padding in samples above which packing is suggested."""


def data_notes(data: RunData) -> tuple[str, ...]:
    """A sentence for each thing that loses data, or time: files and rows that are no text, documents cut off,
    samples in which nothing counts, or with more padding than tokens.
    """
    padded = (note for one in sources_of(data.training).values() for note in _padding(one))
    held = () if data.held is None else _unread(data.held)
    plain = (
        f"{one.origin} holds conversations, and the tokenizer has no chat template: messages get plain "
        "headings, such as ### Response:. A tokenizer with a template can be named in data.tokenizer."
        for one in data.recognized
        if one.form is RowForm.HEADINGS and one.what == Content.CHATS
    )
    return (*plain, *sample_notes(data.training), *padded, *held)


def sample_notes(samples: Samples) -> tuple[str, ...]:
    """A sentence for each thing that loses some of the data that samples are made of."""
    return tuple(note for one in sources_of(samples).values() for note in _losses(one))


def _losses(samples: Samples) -> Iterator[str]:
    if not isinstance(samples, DocumentSamples):
        return
    yield from _unread(samples.tokens)
    if samples.num_cut_off:
        yield (
            f"{samples.num_cut_off} of {len(samples)} documents of {samples.tokens.origin} are longer than "
            f"data.length = {samples.length} and lose their ends."
        )
    if samples.tokens.has_uncounted and (num_idle := sum(not count for count in samples.num_targets())):
        yield (
            f"{num_idle} of {len(samples)} samples of {samples.tokens.origin} hold no answer, or no other "
            "token that counts in the loss, and have weight zero. A larger data.length may leave fewer."
        )


def _unread(tokens: Tokens) -> Iterator[str]:
    """A sentence on files that are not text, wholly or in part, and on rows without text."""
    if tokens.origin == _BUILT_IN or not (tokens.num_unread or tokens.num_replaced):
        return
    named = _names(tokens.unread, tokens.num_unread)
    if named.startswith(("row ", "line ")):
        yield f"Left out of {tokens.origin}: {counted(tokens.num_unread, 'row')} without text, {named}."
        return
    lost = []
    if tokens.num_unread:
        count = counted(tokens.num_unread, "file")
        are = "is" if tokens.num_unread == 1 else "are"
        lost.append(f"Left out of {tokens.origin}: {count} that {are} not text in UTF-8, {named}.")
    if tokens.num_replaced:
        count = counted(tokens.num_replaced, "file")
        among = f"Replaced by U+FFFD in {count} of {tokens.origin}: bytes that are not UTF-8, in"
        lost.append(f"{among} {_names(tokens.replaced, tokens.num_replaced)}.")
    yield f"{' '.join(lost)} Convert them to UTF-8, or choose the files to read with data.pattern."


def _names(first: Sequence[str], count: int) -> str:
    """The first few names of that count, and how many more there are."""
    return ", ".join(first) + (f" and {count - len(first)} more" if count > len(first) else "")


def _padding(samples: Samples) -> Iterator[str]:
    """A sentence on samples of one document each that are mostly padding."""
    if not isinstance(samples, DocumentSamples) or samples.is_shared or not len(samples):
        return
    each = samples.pieces.num_tokens / len(samples)
    share = 1 - each / samples.length
    if share <= _MOST_PADDING:
        return
    longest = -(-samples.longest // 8) * 8
    shorter = f", or data.length = {longest}, which is enough for all" if longest < samples.length else ""
    yield (
        f"{share:.0%} of the samples of {samples.tokens.origin} is padding: a document has "
        f"{each:.0f} tokens in the mean, and data.length is {samples.length}. "
        f'Set data.packing = "documents", which puts several into a sample{shorter}.'
    )
