"""From what a run asks for to its samples: opened, tokenised, split and checked.

It is called once ahead of the run, where it may take long and shows its progress, and again by every rank,
which then finds the tokens in the cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from bireme.train.data.checks import check_batch, check_inputs, check_token_ids, check_tokenizer
from bireme.train.data.corpus import Progress, tokenised
from bireme.train.data.own import OwnSamples
from bireme.train.data.samples import Samples, Split, packed, split_samples, split_tokens
from bireme.train.data.saved_rows import SavedRows
from bireme.train.data.source import Source, open_source
from bireme.train.data.text_files import TextFiles
from bireme.train.data.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from bireme.train.data.tokens import Tokens

__all__ = ["DataRequest", "ModelSide", "RunData", "prepare_data"]


@dataclass(frozen=True, slots=True)
class DataRequest:
    """What a run asks of its data.

    Samples of text have `length` tokens. For evaluation there is a source of its own, or else the last
    fraction of the one to train on, one batch at least; none if the fraction is 0. `dtype` is that of .bin
    files.
    """

    source: str = "stdlib"
    tokenizer: str = "auto"
    length: int = 128
    evaluation_fraction: float = 0.05
    evaluation_source: str | None = None
    text_column: str | None = None
    pattern: str = "*"
    dtype: str = "uint16"


@dataclass(frozen=True, slots=True)
class ModelSide:
    """What the data must fit: the model's example inputs, how many tokens it knows, where it lies.

    No inputs, and None, leave unchecked.
    """

    inputs: Mapping[str, Tensor]
    vocabulary: int | None = None
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class RunData:
    """The samples of a run. `tokenizer` is None where there is no text; so are the numbers of tokens.

    `num_skipped` counts files and rows that were left out, of both sources.
    """

    training: Samples
    evaluation: Samples | None
    tokenizer: Tokenizer | None
    num_tokens: int | None
    num_documents: int | None
    num_skipped: int


def prepare_data(
    request: DataRequest,
    model: ModelSide,
    batch_size: int,
    progress: Progress | None = None,
    *,
    what: str = "training",
) -> RunData:
    """The samples that a run asks for, of which a batch at least can be made, and which the model takes.

    `what` says what the data of its first source are for.
    """
    source = _opened(request, request.source)
    apart = None if request.evaluation_source is None else _opened(request, request.evaluation_source)
    tokenizer = _tokenizer(request, model, [source] if apart is None else [source, apart])
    opened = _in_tokens(source, tokenizer, model, progress)
    evaluation = None if apart is None else _in_tokens(apart, tokenizer, model, progress)
    split = _split(opened, evaluation, request, model, batch_size)
    for purpose, samples in ((what, split.training), ("evaluation", split.evaluation)):
        if samples is not None:
            check_batch(samples, batch_size, purpose)
            check_inputs(samples, model.inputs, purpose)
    tokens = opened if isinstance(opened, Tokens) else None
    ends = None if tokens is None else tokens.document_ends
    return RunData(
        training=split.training,
        evaluation=split.evaluation,
        tokenizer=tokenizer,
        num_tokens=None if tokens is None else len(tokens),
        num_documents=None if ends is None else len(ends),
        num_skipped=sum(one.num_skipped for one in (opened, evaluation) if isinstance(one, Tokens)),
    )


def _opened(request: DataRequest, text: str) -> Source:
    return open_source(text, pattern=request.pattern, text_column=request.text_column, dtype=request.dtype)


def _tokenizer(request: DataRequest, model: ModelSide, sources: list[Source]) -> Tokenizer | None:
    """Text needs one. Ids have been through one, and nobody says that it was bytes, which are the default."""
    holds_text = any(_holds_text(source) for source in sources)
    model_has_one = model.folder is not None and has_tokenizer(model.folder)
    is_bytes = request.tokenizer == "bytes" or (request.tokenizer == "auto" and not model_has_one)
    if is_bytes and not holds_text:
        return None
    tokenizer = load_tokenizer(
        request.tokenizer, model_folder=model.folder, model_vocabulary=model.vocabulary
    )
    if holds_text:
        check_tokenizer(tokenizer, model.vocabulary)
    return tokenizer


def _holds_text(source: Source) -> bool:
    return isinstance(source, TextFiles) or (isinstance(source, SavedRows) and not source.holds_ids)


def _in_tokens(
    source: Source, tokenizer: Tokenizer | None, model: ModelSide, progress: Progress | None
) -> Tokens | OwnSamples:
    if isinstance(source, OwnSamples):
        return source
    tokens = source if isinstance(source, Tokens) else tokenised(source, tokenizer, progress)
    if not _holds_text(source):
        check_token_ids(tokens, model.vocabulary)
    return tokens


def _split(
    source: Tokens | OwnSamples,
    apart: Tokens | OwnSamples | None,
    request: DataRequest,
    model: ModelSide,
    least: int,
) -> Split:
    fraction = request.evaluation_fraction
    if apart is not None:
        return Split(_samples(source, request, model), _samples(apart, request, model))
    if isinstance(source, Tokens):
        return split_tokens(source, request.length, fraction, least=least, vocabulary=model.vocabulary)
    return split_samples(source, fraction, least=least)


def _samples(source: Tokens | OwnSamples, request: DataRequest, model: ModelSide) -> Samples:
    if isinstance(source, Tokens):
        return packed(source, request.length, model.vocabulary)
    return source
