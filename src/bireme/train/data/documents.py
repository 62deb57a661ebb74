"""Samples of tokens, of a corpus or a stream: cut without a gap, or with documents that stay apart.

Several documents share a sample only for a model that takes `position_ids`, which start again at 0 with each
document: by these the model keeps attention within it. The first token of a document is not predicted, as
nothing before it belongs to it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from random import Random
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bireme.errors import BiremeError
from bireme.train.data.encoding import encoded
from bireme.train.data.hub import Row, SavedRows
from bireme.train.data.placing import StreamOrder
from bireme.train.data.samples import (
    IGNORED,
    Batch,
    Names,
    Seeds,
    Split,
    Tokens,
    check_ids,
    document_end_near,
    only,
    targets,
)
from bireme.train.data.tokenizer import Ids, Tokenizer

# Which documents share a sample: the index of samples whose documents stay apart.
#
# Documents longer than a sample are cut into pieces as long as one; shorter ones are put together so that
# little is left empty. All of it is numbers in and numbers out, over arrays as long as there are documents.

Packing = Literal["stream", "documents", "none"]
"""How documents become samples: one after the other without a gap, several in each, one in each."""

Places = NDArray[np.int64]

Pieces = Sequence[Ids]
"""The pieces of a sample, as signed ids (see `Tokens`)."""


@dataclass(frozen=True, slots=True)
class _DocumentPieces:
    """Pieces of documents, each from the token `begins` up to but without `ends`, sample after sample.

    `sample_ends[s]` is the number of pieces up to and with the last one of sample s.
    """

    begins: Places
    ends: Places
    sample_ends: Places

    def __len__(self) -> int:
        return len(self.sample_ends)

    def of_sample(self, number: int) -> list[tuple[int, int]]:
        """The pieces of a sample."""
        first = int(self.sample_ends[number - 1]) if number else 0
        last = int(self.sample_ends[number])
        return list(zip(self.begins[first:last].tolist(), self.ends[first:last].tolist(), strict=True))

    @property
    def num_tokens(self) -> int:
        """The tokens of all samples."""
        return int((self.ends - self.begins).sum())


@dataclass(frozen=True, slots=True)
class EvenPieces:
    """Tokens from `begin` up to but without `end`, cut without a gap: a piece of `length` in each sample. The
    tokens left over at the end are a sample too if it `has_rest`.
    """

    begin: int
    end: int
    length: int
    has_rest: bool = False

    def __len__(self) -> int:
        num_tokens = max(self.end - self.begin, 0)
        return -(-num_tokens // self.length) if self.has_rest else num_tokens // self.length

    def of_sample(self, number: int) -> list[tuple[int, int]]:
        """The piece of a sample."""
        first = self.begin + number * self.length
        return [(first, min(first + self.length, self.end))]

    @property
    def num_tokens(self) -> int:
        """The tokens of all samples."""
        return min(len(self) * self.length, max(self.end - self.begin, 0))


def _cut_off(begins: Places, ends: Places, length: int) -> _DocumentPieces:
    """A sample for each document; what is longer than `length` is cut off."""
    return _DocumentPieces(begins, np.minimum(ends, begins + length), np.arange(1, len(ends) + 1))


def best_fit(begins: Places, ends: Places, length: int) -> _DocumentPieces:
    """Samples of at most `length` tokens, in each as many whole documents as fit.

    The longest piece comes first, and each goes where it leaves the least room. Pieces of one length are
    alike, so all of them are placed at once.
    """
    sizes = ends - begins
    counts = -(-sizes // length)
    of = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    piece_begins = begins[of] + number * length
    piece_ends = np.minimum(piece_begins + length, ends[of])
    bins = _bins(piece_ends - piece_begins, length)
    order = np.argsort(bins, kind="stable")
    return _DocumentPieces(piece_begins[order], piece_ends[order], np.cumsum(np.bincount(bins)))


def _bins(sizes: Places, length: int) -> Places:
    """For each piece the sample that it goes into."""
    bins = np.empty(len(sizes), np.int64)
    by_size = np.argsort(-sizes, kind="stable")
    distinct, firsts = np.unique(-sizes[by_size], return_index=True)
    bounds = [*firsts.tolist(), len(sizes)]
    room = _Room(length)
    num_bins = 0
    for place, negative in enumerate(distinct.tolist()):
        size, waiting = -negative, by_size[bounds[place] : bounds[place + 1]]
        while len(waiting) and (free := room.least(size)) is not None:
            taken = room.take(free, len(waiting))
            bins[waiting[: len(taken)]] = taken
            waiting = waiting[len(taken) :]
            room.put(free - size, taken)
        if len(waiting):
            each = length // size
            new = num_bins + np.arange(-(-len(waiting) // each))
            bins[waiting] = np.repeat(new, each)[: len(waiting)]
            num_bins += len(new)
            num_in_last = len(waiting) - (len(new) - 1) * each
            room.put(length - each * size, new[:-1])
            room.put(length - num_in_last * size, new[-1:])
    return bins


class _Room:
    """Samples by how many more tokens they take."""

    def __init__(self, length: int) -> None:
        self._samples: list[list[Places]] = [[] for _ in range(length + 1)]
        self._is_there = np.zeros(length + 1, np.bool_)

    def least(self, size: int) -> int | None:
        """The least room that `size` tokens fit into; None where they fit nowhere."""
        free = size + int(self._is_there[size:].argmax())
        return free if self._is_there[free] else None

    def take(self, free: int, most: int) -> Places:
        """Some samples with so much room, `most` at most."""
        there = self._samples[free].pop()
        if len(there) > most:
            self._samples[free].append(there[most:])
        self._is_there[free] = bool(self._samples[free])
        return there[:most]

    def put(self, free: int, samples: Places) -> None:
        """Have samples with so much room."""
        if len(samples) and free:
            self._samples[free].append(samples)
            self._is_there[free] = True


@dataclass(frozen=True, slots=True)
class DocumentSamples:
    """Samples of `length` tokens, in each the pieces that `pieces` names, then `padding` that does not count.

    A sample has `input_ids` and `labels`, which are the same ids in the same places: the model shifts them.
    Where a token does not count its label is -100. If it `is_shared` there are `position_ids` too. An id of
    `vocabulary` or more is an error, for it would read beyond the model's embedding; None leaves ids
    unchecked.
    """

    is_quick: ClassVar = True
    is_columnar: ClassVar = True

    tokens: Tokens
    length: int
    pieces: _DocumentPieces | EvenPieces
    padding: int
    is_shared: bool
    vocabulary: int | None = None
    num_tokens_given: int = 0
    """The tokens of the documents, with those that are cut off."""

    def __len__(self) -> int:
        return len(self.pieces)

    def take(self, numbers: Sequence[int], names: Names = None, seeds: Seeds = None) -> Batch:
        """The samples of these numbers, stacked. They draw nothing."""
        pieces = [self.pieces.of_sample(int(number)) for number in numbers]
        self.tokens.bring(place for own in pieces for place in own)
        rows = [[self._signed(begin, end) for begin, end in own] for own in pieces]
        self.tokens.let_go()
        batch = stacked(rows, self.length, self.padding, is_shared=self.is_shared)
        check_ids(batch["input_ids"].numpy(), numbers, self.vocabulary, self.tokens.origin)
        return only(batch, names)

    @property
    def longest(self) -> int:
        """The tokens of the longest piece in a sample."""
        if isinstance(self.pieces, EvenPieces):
            return self.length
        return int((self.pieces.ends - self.pieces.begins).max(initial=0))

    @property
    def num_cut_off(self) -> int | None:
        """How many documents lose what is beyond the length of a sample; None if they do not stay apart."""
        if isinstance(self.pieces, EvenPieces):
            return None
        if self.is_shared:
            return 0
        ends = np.asarray(self.tokens.document_ends, np.int64)
        return int((~np.isin(self.pieces.ends, ends)).sum())

    def num_targets(self) -> Iterator[int]:
        """For each sample the tokens that count and have one before them to be predicted from."""
        for number in range(len(self)):
            yield sum(targets(self.tokens, begin, end) for begin, end in self.pieces.of_sample(number))
        self.tokens.let_go()

    def _signed(self, begin: int, end: int) -> Ids:
        return np.asarray(self.tokens.ids[begin:end]).astype(np.int64)


def stacked(rows: Sequence[Pieces], length: int, padding: int, *, is_shared: bool) -> Batch:
    """Samples from the signed ids of their pieces (see `Tokens`)."""
    signed = np.full((len(rows), length), -1 - padding, np.int64)
    positions = np.zeros((len(rows), length), np.int64)
    for row, pieces in enumerate(rows):
        own = np.concatenate(pieces)
        signed[row, : len(own)] = own
        if is_shared:
            sizes = (*map(len, pieces), length - len(own))
            positions[row] = np.concatenate([np.arange(size) for size in sizes])
    ids = np.where(signed < 0, -1 - signed, signed)
    labels = np.where(signed < 0, IGNORED, signed)
    batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
    if not is_shared:
        return batch
    labels[positions == 0] = IGNORED
    return batch | {"position_ids": torch.from_numpy(positions)}


@dataclass(frozen=True, slots=True)
class Cut:
    """How documents become samples of `length` tokens, filled up with `padding`.

    With the packing `stream` they follow each other without a gap; if it `keeps_rest`, the tokens left over
    at the end of what is not to train on are a sample too. Otherwise those of a corpus, which are all there,
    stay apart: with `documents` several share a sample, with `none` each has its own and loses its end.
    """

    length: int
    packing: Packing
    padding: int
    vocabulary: int | None = None
    keeps_rest: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether several documents share a sample and do not see each other."""
        return self.packing == "documents"

    def of_stream(self, documents: Iterable[Ids]) -> Iterator[Pieces]:
        """Samples of documents as they come."""
        match self.packing:
            case "none":
                yield from ([document[: self.length]] for document in documents)
            case "documents":
                yield from self._next_fit(documents)
            case "stream":
                yield from self._without_gaps(documents)

    def stacked(self, samples: Sequence[Pieces]) -> Batch:
        """Samples as tensors."""
        return stacked(samples, self.length, self.padding, is_shared=self.is_shared)

    def _without_gaps(self, documents: Iterable[Ids]) -> Iterator[Pieces]:
        waiting: list[Ids] = []
        size = 0
        for document in documents:
            waiting.append(document)
            size += len(document)
            if size >= self.length:
                joined = np.concatenate(waiting)
                whole = size // self.length * self.length
                yield from ([piece] for piece in joined[:whole].reshape(-1, self.length))
                waiting, size = [joined[whole:]], size - whole

    def _next_fit(self, documents: Iterable[Ids]) -> Iterator[Pieces]:
        """Documents in their order; one that does not fit begins a sample."""
        sample: list[Ids] = []
        size = 0
        for document in documents:
            for begin in range(0, len(document), self.length):
                piece = document[begin : begin + self.length]
                if size + len(piece) > self.length:
                    yield sample
                    sample, size = [], 0
                sample.append(piece)
                size += len(piece)
        if sample:
            yield sample

    def samples(self, tokens: Tokens) -> DocumentSamples:
        """All documents of a corpus as samples."""
        return self._of(tokens, 0, len(tokens), has_rest=self.keeps_rest)

    def split(self, tokens: Tokens, fraction: float, *, least: int = 1) -> Split:
        """The last fraction of the documents apart, for evaluation: `least` samples at least, and nothing if
        the fraction is 0.
        """
        if not fraction:
            return Split(self.samples(tokens), None)
        cut = (
            self._cut(tokens, fraction, least)
            if self.packing == "none"
            else self._shared_cut(tokens, fraction, least)
        )
        return Split(self._of(tokens, 0, cut), self._of(tokens, cut, len(tokens), has_rest=self.keeps_rest))

    def _shared_cut(self, tokens: Tokens, fraction: float, least: int) -> int:
        """The token to cut at; inside a document where none ends near."""
        wanted = max(round(len(tokens) * fraction), least * self.length)
        if wanted > len(tokens) - self.length:
            raise self._too_few(tokens, least)
        return document_end_near(tokens, len(tokens) - wanted, self.length, least * self.length)

    def _cut(self, tokens: Tokens, fraction: float, least: int) -> int:
        """The token to cut at, with whole documents before and after it."""
        ends = self._ends(tokens)
        wanted = max(round(len(ends) * fraction), least)
        if wanted >= len(ends):
            raise self._too_few(tokens, least)
        return int(ends[len(ends) - wanted - 1])

    def _too_few(self, tokens: Tokens, least: int) -> BiremeError:
        known = "" if tokens.document_ends is None else f"{len(tokens.document_ends)} documents and "
        return BiremeError(
            f"{tokens.origin} has {known}{len(tokens)} tokens: too few for a sample of {self.length} to "
            f"train on and {least} to evaluate with. Give more text, a smaller batch or length, or 0 for the "
            "fraction to evaluate with."
        )

    def _of(self, tokens: Tokens, first: int, last: int, *, has_rest: bool = False) -> DocumentSamples:
        """The documents, and parts of them, between two tokens."""
        known = self.padding, self.is_shared, self.vocabulary, last - first
        if self.packing == "stream":
            even = EvenPieces(first, last, self.length, has_rest)
            return DocumentSamples(tokens, self.length, even, *known)
        ends = self._ends(tokens)
        begins = np.concatenate([[0], ends[:-1]])
        inside = (begins < last) & (ends > first)
        index = best_fit if self.is_shared else _cut_off
        pieces = index(np.maximum(begins[inside], first), np.minimum(ends[inside], last), self.length)
        return DocumentSamples(tokens, self.length, pieces, *known)

    def _ends(self, tokens: Tokens) -> Places:
        if tokens.document_ends is None:
            raise BiremeError(
                f"{tokens.origin} holds bare token ids, and nothing says where documents end, so they cannot "
                'be kept apart. Set data.packing to "stream".'
            )
        return np.asarray(tokens.document_ends, np.int64)


# Samples of a stream: rows that come one by one, shuffled within a bounded buffer, never all there.
#
# The same seed gives the same samples: each epoch reads the rows in their order, and mixes them in a buffer
# by draws from the seed and the epoch. So a run that resumes finds its place by reading and leaving out what
# came before, which takes time that grows with the place; `seek` does it, and tells how far it is.

_NUM_SAMPLES = 1 << 40
"""What a stream says that it has: more than any run reads."""

_HELD_AT_ONCE = 64
"""Rows to keep apart before looking whether they are enough."""

_TOLD_EVERY = 1 << 10

_KEPT_TOKENS = 1 << 21
"""Tokens of the last samples, which are kept."""


class StreamSamples:
    """Samples of a stream, by the number that they have in a run of `seed`.

    They are read in rising order. The last ones are kept, for a coordinator assigns samples anew that a
    replica had when it died. A number before them is found by reading from the beginning again. The first
    `num_apart` rows are left out of every epoch, for they are kept for evaluation.
    """

    is_quick = True
    is_columnar = False

    def __init__(
        self,
        rows: SavedRows,
        tokenizer: Tokenizer | None,
        cut: Cut,
        *,
        seed: int,
        shuffle_buffer: int,
        num_apart: int = 0,
    ) -> None:
        self.origin = rows.origin
        self.order = StreamOrder(_NUM_SAMPLES, seed, shuffle_buffer)
        self._rows, self._tokenizer, self._cut = rows, tokenizer, cut
        self._num_apart = num_apart
        self._next = 0
        self._samples = self._from_the_beginning()
        self._first: Pieces | None = None
        self._last = deque[Pieces](maxlen=max(_KEPT_TOKENS // cut.length, 1))

    @property
    def padding(self) -> int:
        """The id that fills samples up."""
        return self._cut.padding

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def take(self, numbers: Sequence[int], names: Names = None, seeds: Seeds = None) -> Batch:
        """The samples of these numbers, stacked. They draw nothing."""
        batch = self._cut.stacked([self._sample(int(number)) for number in numbers])
        check_ids(batch["input_ids"].numpy(), numbers, self._cut.vocabulary, self.origin)
        return only(batch, names)

    def seek(self, number: int, tell: Callable[[int], None] | None = None) -> None:
        """Read up to the sample of that number; `tell` hears now and then how many have been left out."""
        if number < self._next:
            self._next, self._samples = 0, self._from_the_beginning()
            self._last.clear()
        while self._next < number:
            self._read()
            if tell is not None and self._next % _TOLD_EVERY == 0:
                tell(self._next)

    def _sample(self, number: int) -> Pieces:
        if number == 0 and self._first is not None:
            return self._first  # it is looked at before the run begins
        if 0 < self._next - number <= len(self._last):
            return self._last[number - self._next]
        self.seek(number)
        sample = self._read()
        if number == 0:
            self._first = sample
        return sample

    def _read(self) -> Pieces:
        sample = next(self._samples)
        self._next += 1
        self._last.append(sample)
        return sample

    def _from_the_beginning(self) -> Iterator[Pieces]:
        return self._cut.of_stream(self._documents())

    def _documents(self) -> Iterator[Ids]:
        """The documents of one epoch after the other."""
        for epoch in count():
            has_any = False
            rows = replace(self._rows, rows=partial(self._shuffled, epoch))
            for document in _documents_of(rows, self._tokenizer):
                has_any = True
                yield document
            if not has_any:
                raise BiremeError(f"{self.origin} has no text in it, so there is nothing to train on.")

    def _shuffled(self, epoch: int) -> Iterator[tuple[int, Row]]:
        """The numbered rows of an epoch; each leaves the buffer at random, for one that comes."""
        draws = Random(f"{self.order.seed} {epoch}")
        rows = islice(iter(self._rows.rows()), self._num_apart, None)
        buffer = list(islice(rows, max(self.order.shuffle_buffer, 1)))
        for row in rows:
            place = draws.randrange(len(buffer))
            ready, buffer[place] = buffer[place], row
            yield ready
        if self.order.shuffle_buffer:
            draws.shuffle(buffer)
        yield from buffer


def _documents_of(rows: SavedRows, tokenizer: Tokenizer | None) -> Iterator[Ids]:
    """The signed ids of all documents that have any."""
    parts: list[Ids] = []
    for part in encoded(rows, tokenizer, lambda _place: None):
        parts.append(part.ids)
        if part.ends_document:
            document = parts[0] if len(parts) == 1 else np.concatenate(parts)
            parts = []
            if len(document):
                yield document


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Samples of the first `num_rows` rows of a stream."""

    samples: Batch
    num_rows: int


def held_apart(rows: SavedRows, tokenizer: Tokenizer | None, cut: Cut, num_samples: int) -> HeldRows:
    """The first rows of a stream, enough for `num_samples` samples to evaluate with."""
    stream = iter(rows.rows())
    held: list[tuple[int, Row]] = []
    apart = replace(rows, rows=lambda: held)
    while chunk := list(islice(stream, max(_HELD_AT_ONCE, len(held)))):
        held += chunk
        samples = list(cut.of_stream(_documents_of(apart, tokenizer)))
        if len(samples) >= num_samples:
            return HeldRows(cut.stacked(samples), len(held))
    raise BiremeError(
        f"{rows.origin} has {len(held)} rows, too few to hold out {num_samples} samples for evaluation. "
        "Give another source in data.evaluation_source, or set data.evaluation_fraction to 0."
    )
