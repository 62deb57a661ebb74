"""From what a run asks for to its samples: opened, tokenized, split and checked.

It is called once before the run, where it may take long and shows its progress, and again by every rank,
which then finds the tokens in the cache.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from bireme.documents import read_dataclass
from bireme.errors import BiremeError, Progress
from bireme.files import write_text_atomically
from bireme.model.graph import Value, evaluate
from bireme.model.own_model import generators_restored
from bireme.train.data.documents import Cut, DocumentSamples, EvenPieces, HeldRows, StreamSamples, held_apart
from bireme.train.data.encoding import CORPUS, AnswerRows, kept_tokens, token_folder, tokenized
from bireme.train.data.hub import Content, SavedRows, is_hub
from bireme.train.data.mixture import MixedSamples, MixedSource, order_of, sources_of
from bireme.train.data.placing import SampleOrder
from bireme.train.data.samples import (
    SampleRange,
    Samples,
    Split,
    Tokens,
    split_samples,
)
from bireme.train.data.source import OwnSamples, Source, open_source
from bireme.train.data.text_files import TextFiles
from bireme.train.data.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from bireme.train.run_file.tables import Data

# What must hold between data and model before training starts; each check refuses with one sentence.
#
# A mistake found here costs seconds. The same one found by a device costs the run, and says much less.


def vocabulary_of(model: nn.Module) -> int | None:
    """The size of a model's vocabulary by its configuration; None if that has none."""
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        for name in ("vocab", "vocab_size"):
            size = getattr(part, name, None)
            if isinstance(size, int):
                return size
    return None


def check_tokenizer(tokenizer: Tokenizer, vocabulary: int | None) -> None:
    """Refuse a tokenizer that makes ids of ordinary text that the model does not have."""
    if vocabulary is not None and tokenizer.num_learned > vocabulary:
        raise BiremeError(
            f"The tokenizer has {tokenizer.num_tokens} tokens but the model {vocabulary}, so some ids "
            "are outside the model's vocabulary. Use the model's own tokenizer, or a "
            f"model with {tokenizer.num_learned} tokens or more."
        )


def _check_token_ids(tokens: Tokens, vocabulary: int | None) -> None:
    """All ids must be tokens of the model."""
    if vocabulary is None:
        return
    largest = tokens.largest_id()
    if largest >= vocabulary:
        raise BiremeError(
            f"{tokens.origin} holds the token id {largest}, but the model has {vocabulary} tokens, "
            f"0 to {vocabulary - 1}. Use data made with the model's tokenizer, and set the "
            "right data.dtype for a .bin file."
        )


def _check_batch(samples: Samples, batch_size: int, what: str) -> None:
    """There must be a batch of samples; `what` is what to call them."""
    if len(samples) < batch_size:
        raise BiremeError(
            f"The data for {what} has {len(samples)} samples, but a batch needs {batch_size}. Give "
            "more data, shorter samples or a smaller batch."
        )


def _check_inputs(samples: Samples, inputs: Mapping[str, Tensor], what: str) -> None:
    """A sample must hold what the model is called with: all names, with tensors of their kind.

    `inputs` are the model's example inputs. Sizes may differ from theirs; types and numbers of axes may not.
    """
    sample = samples.take([0])
    missing = [name for name in inputs if name not in sample]
    if missing:
        raise BiremeError(
            f"The samples for {what} lack {', '.join(missing)}: they hold {', '.join(sample)}, but the "
            f"model takes {', '.join(inputs)}. Name the tensors of a sample like the arguments of the "
            "model's forward."
        )
    for name, wanted in inputs.items():
        found = sample[name]
        if found.dtype != wanted.dtype:
            raise BiremeError(
                f"In the samples for {what}, {name} is {_short(found)}, but the model takes "
                f"{_short(wanted)}. Convert it: {name}.to({wanted.dtype})."
            )
        if found.ndim != wanted.ndim:
            raise BiremeError(
                f"In the samples for {what}, {name} is of shape {list(found.shape[1:])}, and the model "
                f"takes {list(wanted.shape[1:])}, or other sizes with the same number of axes."
            )


def check_sizes(samples: Samples, inputs: Sequence[Value], what: str, *, is_text: bool) -> None:
    """A sample must be as large as what the model was captured for; `inputs` are those of its graph.

    `is_text` says that the samples are cut from tokens, so that data.length is what makes them as they are.
    """
    sample = samples.take([0])
    for value in inputs:
        found = list(sample[value.name].shape[1:])
        wanted = [evaluate(length, 1) for length in value.shape[1:]]
        if found == wanted:
            continue
        remedy = "Cut or pad the samples, or give the model example inputs of that shape."
        if is_text and len(wanted) == 1:
            remedy = f"Set data.length to {wanted[0]}, or use a model for {found[0]}."
        raise BiremeError(
            f"In the samples for {what}, {value.name} is of shape {found}, and the model takes {wanted}. "
            f"{remedy}"
        )


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# Whether data are the data that a run was trained on: a digest of what its samples hold.
#
# It tells nothing of where the data lie or what their files are called, so data that were moved or copied are
# the same. Tokens are digested whole up to 64 million, and in blocks spread over them beyond. Of a stream its
# first sample is, of other samples some: the first, the last and others between them.

_NUM_READ, _NUM_MADE = 1024, 8
"""How many samples are looked at: of those that only have to be read, and of those that take work."""


def samples_digest(samples: Samples) -> str:
    """SHA-256, in hexadecimal digits, of how many samples there are and of what they hold."""
    match samples:
        case DocumentSamples(pieces=EvenPieces() as even):
            place = f"{even.length} {even.begin} {even.end}"
            return sha256(f"{place} {samples.tokens.digest()}".encode()).hexdigest()
        case SampleRange():
            part = f"{samples.begin} {samples.end} {samples_digest(samples.samples)}"
            return sha256(part.encode()).hexdigest()
        case MixedSamples():
            parts = [f"{one.weight} {samples_digest(one.samples)}" for one in samples.sources]
            return sha256("\n".join(parts).encode()).hexdigest()
        case StreamSamples():
            first = samples.take([0])["input_ids"].numpy().tobytes()
            return sha256(f"{samples.order}".encode() + first).hexdigest()
    words = sha256(str(len(samples)).encode())
    most = _NUM_READ if samples.is_quick or samples.is_columnar else _NUM_MADE
    with generators_restored():
        for number in _spread(len(samples), most):
            # A draw begins with the sample's seed, as it does in training.
            for name, tensor in sorted(samples.take([number], seeds=[number]).items()):
                words.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                words.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return words.hexdigest()


def is_repeatable(samples: Samples, digest: str) -> bool:
    """Whether samples that have just had this digest have it again: some draw their own numbers each time."""
    return samples_digest(samples) == digest


def _spread(count: int, most: int) -> Iterator[int]:
    """At most `most` numbers below `count`, with the first and the last."""
    if count <= most:
        yield from range(count)
        return
    yield from (place * (count - 1) // (most - 1) for place in range(most))


@dataclass(frozen=True, slots=True)
class ModelSide:
    """What the data must fit: the model's example inputs, how many tokens it knows, where it lies.

    No inputs, and None, leave unchecked. A model that `is_trained` starts from the weights in its folder.
    """

    inputs: Mapping[str, Tensor]
    vocabulary: int | None = None
    folder: Path | None = None
    is_trained: bool = False


class Counted(StrEnum):
    """The tokens that the loss is the mean of."""

    ALL = "all tokens"
    ANSWERS = "answers only"
    LABELED = "tokens whose label is not -100"
    OWN = "the model's own loss"


class RowForm(StrEnum):
    """How rows with answers become text."""

    TEMPLATE = "the tokenizer's chat template"
    HEADINGS = "plain headings"


@dataclass(frozen=True, slots=True)
class Recognized:
    """What a source was found to hold: what to call it, the columns that are read, and how it is learned."""

    origin: str
    what: str
    columns: tuple[str, ...]
    form: RowForm | None
    counted: Counted
    num_files: int | None


@dataclass(frozen=True, slots=True)
class EncodedSource:
    """Describes the tokens of a source, in `source.json` in their folder: a machine that has fetched the
    folder needs nothing else of the source.
    """

    holds_text: bool
    has_answers: bool
    recognized: Recognized

    @classmethod
    def at(cls, folder: Path) -> Self | None:
        """The source in a folder; None if the folder is no such source."""
        path = folder / _ABOUT
        is_one = path.is_file() and (folder / CORPUS).is_file()  # data of the user may have either name
        return read_dataclass(path, cls, number=1) if is_one else None

    def write(self, folder: Path) -> None:
        """Describe the tokens in a folder of the cache, for the machines that fetch them."""
        text = json.dumps({"format": 1, **asdict(self)}) + "\n"
        path = folder / _ABOUT
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_text_atomically(path, text)


_ABOUT = "source.json"


@dataclass(frozen=True, slots=True)
class _EncodedTokens:
    """A source of which this machine has fetched the tokens."""

    tokens: Tokens
    about: EncodedSource


@dataclass(frozen=True, slots=True)
class RunData:
    """The samples of a run.

    `is_text` says that they are cut from tokens. `tokenizer` is None where there is no text. The numbers of
    tokens and documents are None if they are unknown, as of a stream. `num_skipped` counts files and rows
    that were left out, of all sources. `held` is the corpus of the evaluation source. `recognized` lists what
    each source was found to hold; `encoded` has the files and folders that were made into tokens.
    """

    training: Samples
    evaluation: Samples | None
    tokenizer: Tokenizer | None
    num_tokens: int | None
    num_documents: int | None
    num_skipped: int
    is_text: bool
    held: Tokens | None = None
    recognized: tuple[Recognized, ...] = ()
    encoded: Mapping[str, tuple[Path, EncodedSource]] = field(default_factory=dict)

    def token_folders(self) -> dict[str, str]:
        """The folders with the tokens of files and folders, by the resolved paths of these. Other machines of
        the run fetch them instead, with their descriptions.
        """
        found = {}
        for path, (folder, source) in self.encoded.items():
            with suppress(BiremeError):  # a cache that cannot be written: the others make tokens themselves
                source.write(folder)
                found[path] = str(folder)
        return found

    @property
    def num_files(self) -> int | None:
        """The files of all sources; None if the number is not known."""
        counts = [one.num_files for one in self.recognized]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def loss_on(self) -> str:
        """Which tokens count in the loss, those of several sources one after the other."""
        return ", ".join(dict.fromkeys(one.counted for one in self.recognized))

    @property
    def has_answers(self) -> bool:
        """Whether some source holds conversations, or prompts with answers."""
        return any(one.counted is Counted.ANSWERS for one in self.recognized)

    def order(self, seed: int) -> SampleOrder:
        """The order in which a run goes through the samples to train on."""
        return order_of(self.training, seed)


def prepare_data(
    request: Data,
    model: ModelSide,
    batch_size: int,
    progress: Progress | None = None,
    *,
    what: str = "training",
    held_samples: int = 256,
    keeps_rest: bool = False,
) -> RunData:
    """The samples that `[data]` asks for, of which a batch at least can be made, and which the model takes.

    `what` is the use of the data of its first source. A stream has no last fraction: `held_samples` of its
    beginning are kept for evaluation. With `keeps_rest` the tokens at the end that fill no sample are one.
    """
    names = _names(request)
    sources = [_opened(request, name) for name in names]
    apart = None if request.evaluation_source is None else _opened(request, request.evaluation_source)
    everything = sources if apart is None else [*sources, apart]
    tokenizer = _tokenizer(request, model, everything)
    maker = _Maker(request, model, tokenizer, progress, held_samples, keeps_rest)
    made = [maker.made(source) for source in sources]
    held = None if apart is None else maker.made(apart)
    fraction = (request.evaluation_fraction or 0.0) if held is None else 0.0
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
            _check_batch(samples, batch_size, purpose)
            for one in sources_of(samples).values():
                _check_inputs(one, model.inputs, purpose)
    every = [*names, request.evaluation_source or ""], everything, made if held is None else [*made, held]
    corpora = [one.data for one in made if isinstance(one.data, Tokens)]
    ends = [one.document_ends for one in corpora if one.document_ends is not None]
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
        held=held.data if held is not None and isinstance(held.data, Tokens) else None,
        recognized=tuple(
            _recognized(name, source, maker.tokenizer) for name, source in zip(names, sources, strict=True)
        ),
        encoded=dict(filter(None, map(maker.encoded, *every))),
    )


def longest_row(request: Data, model: ModelSide, progress: Progress | None = None) -> int | None:
    """The tokens of the longest row in which only answers count, of all sources; None if there are others."""
    names = [*_names(request), request.evaluation_source]
    sources = [_opened(request, name) for name in names if name is not None]
    rows = [one for one in sources if isinstance(one, SavedRows) and one.has_answers and one.size is not None]
    if len(rows) < len(sources):
        return None
    tokenizer = _tokenizer(request, model, sources)
    found = [tokenized(one, tokenizer, progress).document_ends for one in rows]
    return max(int(np.diff(ends, prepend=0).max()) for ends in found if ends is not None)


def _names(request: Data) -> list[str]:
    """The sources to train on."""
    return [one.source for one in request.mixture or ()] or [request.source or ""]


def _mixed(request: Data, samples: Sequence[Samples]) -> MixedSamples:
    """The samples of all sources; either each of them has samples to evaluate with, or none."""
    both = zip(request.mixture or (), samples, strict=True)
    return MixedSamples(tuple(MixedSource(one.source, one.weight, own) for one, own in both))


def _opened(request: Data, text: str) -> Source | _EncodedTokens:
    folder = Path(text).expanduser()
    if (about := EncodedSource.at(folder)) is not None:
        if (tokens := kept_tokens(folder)) is None:
            raise BiremeError(
                f"The tokens in {folder} are damaged. Delete the folder and start the run again."
            )
        return _EncodedTokens(tokens, about)
    found = open_source(text, pattern=request.pattern, text_column=request.text_column, dtype=request.dtype)
    return replace(found, counts_all=request.loss_on == "all") if isinstance(found, SavedRows) else found


def _recognized(name: str, source: Source | _EncodedTokens, tokenizer: Tokenizer | None) -> Recognized:
    if isinstance(source, _EncodedTokens):
        return replace(source.about.recognized, origin=name)
    if not isinstance(source, SavedRows):
        what = "samples of a function" if isinstance(source, OwnSamples) else "token ids"
        what = "text" if isinstance(source, TextFiles) else what
        num_files = len(source.files) if isinstance(source, TextFiles) else int(isinstance(source, Tokens))
        counts = Counted.OWN if isinstance(source, OwnSamples) else Counted.ALL
        return Recognized(name, what, (), None, counts, num_files or None)
    what, form = source.content.value, None
    counts = Counted.LABELED if source.has_labels else Counted.ALL
    if source.has_answers:
        chat = AnswerRows(tokenizer, source).chat
        form = None if chat is None else RowForm.TEMPLATE if chat.is_template else RowForm.HEADINGS
        what = "instructions with answers" if source.is_alpaca else what
        counts = Counted.ALL if source.counts_all else Counted.ANSWERS
    return Recognized(name, what, source.columns, form, counts, source.num_files)


def _tokenizer(
    request: Data, model: ModelSide, sources: Sequence[Source | _EncodedTokens]
) -> Tokenizer | None:
    """Text needs one. Ids have been through one, which is unknown: bytes are only the default."""
    holds_text = any(_holds_text(source) for source in sources)
    model_has_one = model.folder is not None and has_tokenizer(model.folder)
    is_bytes = request.tokenizer == "bytes" or (request.tokenizer == "auto" and not model_has_one)
    if is_bytes and not holds_text:
        return None
    if is_bytes and request.tokenizer == "auto" and model.is_trained and model.folder is not None:
        raise BiremeError(
            f"The folder {model.folder} has weights and no tokenizer, so its model would read bytes, which "
            "it has not learned. Put the tokenizer's files there, or name its folder in data.tokenizer; "
            'data.tokenizer = "bytes" reads bytes even so.'
        )
    tokenizer = load_tokenizer(
        request.tokenizer, model_folder=model.folder, model_vocabulary=model.vocabulary
    )
    if holds_text:
        check_tokenizer(tokenizer, model.vocabulary)
    return tokenizer


def _holds_text(source: Source | _EncodedTokens) -> bool:
    match source:
        case _EncodedTokens():
            return source.about.holds_text
        case SavedRows():
            return source.content is not Content.IDS
    return isinstance(source, TextFiles)


def _has_answers(source: Source | _EncodedTokens) -> bool:
    about = source.about if isinstance(source, _EncodedTokens) else source
    return isinstance(about, SavedRows | EncodedSource) and about.has_answers


@dataclass(frozen=True, slots=True)
class _Made:
    """A source on its way to samples: as tokens, as a stream of rows, or as samples of the user's own."""

    data: Tokens | SavedRows | OwnSamples
    cut: Cut


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes samples of sources, all in the same way."""

    request: Data
    model: ModelSide
    tokenizer: Tokenizer | None
    progress: Progress | None
    held_samples: int
    keeps_rest: bool

    def encoded(
        self, name: str, source: Source | _EncodedTokens, made: _Made
    ) -> tuple[str, tuple[Path, EncodedSource]] | None:
        """The path of a file or folder that was made into tokens, with their folder and its description."""
        if is_hub(name) or not isinstance(source, TextFiles | SavedRows) or not isinstance(made.data, Tokens):
            return None
        about = EncodedSource(
            _holds_text(source), _has_answers(source), _recognized("", source, self.tokenizer)
        )
        return str(Path(name).expanduser().resolve()), (token_folder(source, self.tokenizer), about)

    def made(self, source: Source | _EncodedTokens) -> _Made:
        """A source with its tokens, if they can be had at once."""
        packing = self.request.packing or ("none" if _has_answers(source) else "stream")
        vocabulary = self.model.vocabulary
        cut = Cut(self.request.length, packing, self._padding, vocabulary, self.keeps_rest)
        if isinstance(source, OwnSamples) or (isinstance(source, SavedRows) and source.size is None):
            return _Made(source, cut)
        if isinstance(source, _EncodedTokens):
            return _Made(source.tokens, cut)
        tokens = source if isinstance(source, Tokens) else tokenized(source, self.tokenizer, self.progress)
        is_larger = self.tokenizer is not None and self.tokenizer.num_tokens > (vocabulary or 0)
        if tokens.partial is None and (is_larger or not _holds_text(source)):
            _check_token_ids(tokens, vocabulary)
        return _Made(tokens, cut)

    def split(self, made: _Made, fraction: float, *, least: int) -> Split:
        """Samples to train on and at least `least` others to evaluate with, none if the fraction is 0."""
        match made.data:
            case OwnSamples():
                return split_samples(made.data, fraction, least=least)
            case SavedRows():
                held = self._held(made.data, made.cut) if fraction else None
                stream = StreamSamples(
                    made.data,
                    self.tokenizer,
                    made.cut,
                    seed=self.request.seed,
                    shuffle_buffer=self.request.shuffle_buffer,
                    num_apart=0 if held is None else held.num_rows,
                )
                return Split(stream, None if held is None else OwnSamples(made.data.origin, held.samples))
        return made.cut.split(made.data, fraction, least=least)

    def all_to_evaluate(self, made: _Made) -> Samples:
        """Samples to evaluate with, of all that there is, or of the beginning of a stream."""
        if isinstance(made.data, SavedRows):
            return OwnSamples(made.data.origin, self._held(made.data, made.cut).samples)
        return self.split(made, 0.0, least=0).training

    def _held(self, rows: SavedRows, cut: Cut) -> HeldRows:
        return held_apart(rows, self.tokenizer, cut, self.held_samples)

    @property
    def _padding(self) -> int:
        """The end of text, as every model knows one; it does not count in the loss."""
        return (self.tokenizer.end_of_text or 0) if self.tokenizer is not None else 0


# The place of a resumed run in its streams: found by reading what came before, and skipping it.

_TOLD_EVERY_S = 5.0


def find_place(data: RunData, seed: int, num_taken: int, *, is_shown: bool) -> None:
    """Bring each stream to its next sample, after `num_taken` samples of the run; with `is_shown` report the
    progress.

    All ranks do it before they make their pipelines, because a rank does not wait long for another.
    """
    first = 0
    numbers = data.order(seed).numbers(num_taken, _NUM_NEXT)
    for samples in sources_of(data.training).values():
        own = numbers[(numbers >= first) & (numbers < first + len(samples))]
        if isinstance(samples, StreamSamples) and len(own):
            samples.seek(
                int(own[0]) - first, _Told(samples.origin, int(own[0]) - first) if is_shown else None
            )
        first += len(samples)


_NUM_NEXT = 1 << 14
"""Places to look at for the next sample of each source."""


class _Told:
    """Says now and then how many samples have been left out."""

    def __init__(self, origin: str, number: int) -> None:
        self._origin, self._number, self._told_s = origin, number, monotonic()

    def __call__(self, done: int) -> None:
        if monotonic() - self._told_s < _TOLD_EVERY_S:
            return
        self._told_s = monotonic()
        text = f"finding the place in {self._origin}: {done:,} of {self._number:,} samples read and left out"
        print(text, file=sys.stderr, flush=True)  # noqa: T201 (for people)
