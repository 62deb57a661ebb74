"""Which documents share a sample: the index of samples whose documents stay apart.

Documents longer than a sample are cut into pieces as long as one; shorter ones are put together so that
little is left empty. All of it is numbers in and numbers out, over arrays as long as there are documents.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["DocumentPieces", "Packing", "Places", "best_fit", "cut_off"]

Packing = Literal["stream", "documents", "none"]
"""How documents become samples: one after the other without a gap, several in each, one in each."""

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DocumentPieces:
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


def cut_off(begins: Places, ends: Places, length: int) -> DocumentPieces:
    """A sample for each document; what is longer than `length` is cut off."""
    return DocumentPieces(begins, np.minimum(ends, begins + length), np.arange(1, len(ends) + 1))


def best_fit(begins: Places, ends: Places, length: int) -> DocumentPieces:
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
    return DocumentPieces(piece_begins[order], piece_ends[order], np.cumsum(np.bincount(bins)))


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
