"""From what a run asks for to its samples: opened, tokenised, split and checked.

It is called once before the run, where it may take long and shows its progress, and again by every rank,
which then finds the tokens in the cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from torch import Tensor

from bireme.train.data.chat import AnswerRows
from bireme.train.data.checks import check_batch, check_inputs, check_token_ids, check_tokenizer
from bireme.train.data.corpus import Progress, tokenised
from bireme.train.data.documents import Cut
from bireme.train.data.mixture import MixedSamples, MixedSource, order_of, sources_of
from bireme.train.data.order import SampleOrder
from bireme.train.data.own import OwnSamples
from bireme.train.data.packing import Packing
from bireme.train.data.samples import Samples, Split, split_samples, split_tokens
from bireme.train.data.saved_rows import SavedRows
from bireme.train.data.source import Source, open_source
from bireme.train.data.stream import HeldRows, StreamCut, StreamSamples, held_apart
from bireme.train.data.text_files import TextFiles
from bireme.train.data.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from bireme.train.data.tokens import Tokens

__all__ = ["Counted", "DataRequest", "ModelSide", "RunData", "prepare_data"]


@dataclass(frozen=True, slots=True)
class DataRequest:
    """What a run asks of its data.

    `mixture` are several sources with their weights, in the place of `source`. Samples of text have `length`
    tokens. For evaluation there is a source of its own, or else the last fraction of each one to train on;
    none if the fraction is 0. A stream has no last fraction: `evaluation_samples` of its beginning are kept
    apart. `dtype` is that of .bin files. Without `packing` conversations have a sample each, and all else is
    a stream.
    """

    source: str = "stdlib"
    tokenizer: str = "auto"
    length: int = 128
    evaluation_fraction: float = 0.05
    evaluation_source: str | None = None
    text_column: str | None = None
    pattern: str = "*"
    dtype: str = "uint16"
    mixture: tuple[tuple[str, float], ...] = ()
    packing: Packing | None = None
    evaluation_samples: int = 256
    seed: int = 0
    shuffle_buffer: int = 1000
    keeps_rest: bool = False


@dataclass(frozen=True, slots=True)
class ModelSide:
    """What the data must fit: the model's example inputs, how many tokens it knows, where it lies.

    No inputs, and None, leave unchecked.
    """

    inputs: Mapping[str, Tensor]
    vocabulary: int | None = None
    folder: Path | None = None


class Counted(StrEnum):
    """The tokens that the loss is the mean of."""

    ALL = "all tokens"
    ANSWERS = "answers only"
    LABELED = "tokens whose label is not -100"
    OWN = "the model's own loss"


@dataclass(frozen=True, slots=True)
class RunData:
    """The samples of a run.

    `is_text` says that they are cut from tokens. `tokenizer` is None where there is no text. The numbers of
    tokens, documents and files are None where nobody knows them, as of a stream. `num_skipped` counts files
    and rows that were left out, of all sources. `held` is the corpus of the evaluation source. `counted` has
    the tokens that count in the loss of each source.
    """

    training: Samples
    evaluation: Samples | None
    tokenizer: Tokenizer | None
    num_tokens: int | None
    num_documents: int | None
    num_skipped: int
    is_text: bool
    num_files: int | None = None
    held: Tokens | None = None
    counted: tuple["Counted", ...] = ()
    uses_template: bool = False
    """Whether conversations are among the data, which a chat template made text of."""

    @property
    def loss_on(self) -> str:
        """Which tokens count in the loss, those of several sources one after the other."""
        return ", ".join(dict.fromkeys(self.counted))

    @property
    def has_answers(self) -> bool:
        """Whether some source holds conversations, or prompts with answers."""
        return Counted.ANSWERS in self.counted

    def order(self, seed: int) -> SampleOrder:
        """The order in which a run goes through the samples to train on."""
        return order_of(self.training, seed)


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
    names = [name for name, _ in request.mixture] or [request.source]
    sources = [_opened(request, name) for name in names]
    apart = None if request.evaluation_source is None else _opened(request, request.evaluation_source)
    everything = sources if apart is None else [*sources, apart]
    maker = _Maker(request, model, _tokenizer(request, model, everything), progress)
    made = [maker.made(source) for source in sources]
    held = None if apart is None else maker.made(apart)
    fraction = request.evaluation_fraction if held is None else 0.0
    splits = [maker.split(one, fraction, least=-(-batch_size // len(made))) for one in made]
    training, evaluation = splits[0].training, splits[0].evaluation
    if request.mixture:
        training = _mixed(request, [split.training for split in splits])
        held_back = [split.evaluation for split in splits if split.evaluation is not None]
        evaluation = _mixed(request, held_back) if held_back else None
    if held is not None:
        evaluation = maker.all_to_evaluate(held)
    for purpose, samples in ((what, training), ("evaluation", evaluation)):
        if samples is not None:
            check_batch(samples, batch_size, purpose)
            for one in sources_of(samples).values():
                check_inputs(one, model.inputs, purpose)
    corpora = [one.data for one in made if isinstance(one.data, Tokens)]
    ends = [one.document_ends for one in corpora if one.document_ends is not None]
    files = [_num_files(source) for source in sources]
    return RunData(
        training=training,
        evaluation=evaluation,
        tokenizer=maker.tokenizer,
        num_tokens=sum(map(len, corpora)) if len(corpora) == len(made) else None,
        num_documents=sum(map(len, ends)) if len(ends) == len(made) else None,
        num_skipped=sum(
            one.data.num_skipped for one in (*made, held) if one and isinstance(one.data, Tokens)
        ),
        is_text=not any(isinstance(one.data, OwnSamples) for one in made),
        num_files=None if None in files else sum(one or 0 for one in files),
        held=held.data if held is not None and isinstance(held.data, Tokens) else None,
        counted=tuple(_counted(source) for source in sources),
        uses_template=any(_uses_template(source, maker.tokenizer) for source in sources),
    )


def _mixed(request: DataRequest, samples: Sequence[Samples]) -> MixedSamples:
    """The samples of all sources; either each of them has samples to evaluate with, or none."""
    return MixedSamples(
        tuple(
            MixedSource(name, weight, one)
            for (name, weight), one in zip(request.mixture, samples, strict=True)
        )
    )


def _opened(request: DataRequest, text: str) -> Source:
    return open_source(text, pattern=request.pattern, text_column=request.text_column, dtype=request.dtype)


def _num_files(source: Source) -> int | None:
    match source:
        case TextFiles():
            return len(source.files)
        case SavedRows():
            return source.num_files
    return 1 if isinstance(source, Tokens) else None


def _counted(source: Source) -> Counted:
    if isinstance(source, OwnSamples):
        return Counted.OWN
    if isinstance(source, SavedRows) and source.has_answers:
        return Counted.ANSWERS
    return Counted.LABELED if isinstance(source, SavedRows) and source.has_labels else Counted.ALL


def _uses_template(source: Source, tokenizer: Tokenizer | None) -> bool:
    if not isinstance(source, SavedRows) or not source.has_answers:
        return False
    return AnswerRows(tokenizer, source).uses_template


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


@dataclass(frozen=True, slots=True)
class _Made:
    """A source on its way to samples: as tokens, as a stream of rows, or as samples of the user's own."""

    data: Tokens | SavedRows | OwnSamples
    packing: Packing


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes samples of sources, all in the same way."""

    request: DataRequest
    model: ModelSide
    tokenizer: Tokenizer | None
    progress: Progress | None

    def made(self, source: Source) -> _Made:
        """A source with its tokens, if they can be had at once."""
        has_answers = isinstance(source, SavedRows) and source.has_answers
        packing = self.request.packing or ("none" if has_answers else "stream")
        if isinstance(source, OwnSamples) or (isinstance(source, SavedRows) and source.size is None):
            return _Made(source, packing)
        tokens = source if isinstance(source, Tokens) else tokenised(source, self.tokenizer, self.progress)
        if not _holds_text(source):
            check_token_ids(tokens, self.model.vocabulary)
        return _Made(tokens, packing)

    def split(self, made: _Made, fraction: float, *, least: int) -> Split:
        """Samples to train on and others to evaluate with: `least` at least, and none if the fraction is "
        "0."""
        match made.data:
            case OwnSamples():
                return split_samples(made.data, fraction, least=least)
            case SavedRows():
                held = self._held(made.data, made.packing) if fraction else None
                stream = self._stream(made.data, made.packing, 0 if held is None else held.num_rows)
                return Split(stream, None if held is None else OwnSamples(made.data.origin, held.samples))
        if made.packing == "stream":
            padding = self._padding if self.request.keeps_rest else None
            vocabulary, length = self.model.vocabulary, self.request.length
            return split_tokens(
                made.data, length, fraction, least=least, vocabulary=vocabulary, padding=padding
            )
        return self._cut(made.packing).split(made.data, fraction, least=least)

    def all_to_evaluate(self, made: _Made) -> Samples:
        """Samples to evaluate with, of all that there is, or of the beginning of a stream."""
        if isinstance(made.data, SavedRows):
            return OwnSamples(made.data.origin, self._held(made.data, made.packing).samples)
        return self.split(made, 0.0, least=0).training

    def _held(self, rows: SavedRows, packing: Packing) -> HeldRows:
        return held_apart(rows, self.tokenizer, self._stream_cut(packing), self.request.evaluation_samples)

    def _stream(self, rows: SavedRows, packing: Packing, num_apart: int) -> StreamSamples:
        return StreamSamples(
            rows,
            self.tokenizer,
            self._stream_cut(packing),
            seed=self.request.seed,
            shuffle_buffer=self.request.shuffle_buffer,
            num_apart=num_apart,
        )

    def _stream_cut(self, packing: Packing) -> StreamCut:
        return StreamCut(self.request.length, packing, self._padding, self.model.vocabulary)

    def _cut(self, packing: Packing) -> Cut:
        return Cut(self.request.length, self._padding, packing == "documents", self.model.vocabulary)

    @property
    def _padding(self) -> int:
        """The end of text, as every model knows one; it does not count in the loss."""
        return (self.tokenizer.end_of_text or 0) if self.tokenizer is not None else 0
