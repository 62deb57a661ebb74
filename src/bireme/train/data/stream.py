"""Samples of a stream: rows that come one by one, shuffled within a bounded buffer, never all there.

The same seed gives the same samples: each epoch reads the rows in their order, and mixes them in a buffer by
draws from the seed and the epoch. So a run that resumes finds its place by reading and leaving out what came
before, which takes time that grows with the place; `seek` does it, and tells how far it is.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from random import Random

import numpy as np

from bireme.errors import BiremeError
from bireme.train.data.documents import Cut, Pieces
from bireme.train.data.encoding import encoded
from bireme.train.data.hub import Row, SavedRows
from bireme.train.data.placing import StreamOrder
from bireme.train.data.samples import Batch, check_ids, only
from bireme.train.data.tokenizer import Ids, Tokenizer

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

    def take(
        self, numbers: Sequence[int], names: Sequence[str] | None = None, seeds: Sequence[int] | None = None
    ) -> Batch:
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
    """The first rows of a stream that make so many samples, to evaluate with."""
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
