"""Samples: what a batch is stacked from. Tokens are cut into samples of one length, without a gap.

Samples have numbers from 0 on, and a number always means the same sample. What is kept for evaluation is the
last part, and no token of it is trained on.
"""

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bireme.errors import BiremeError
from bireme.pieces import PieceFile
from bireme.runtime.microbatches import Rows
from bireme.train.fetched import bring

# Tokens of a corpus in one long array, which lies on disk and is read where it is needed.

IGNORED = -100
"""A label that does not count in the loss."""

_IntArray = NDArray[np.integer[Any]]

CHECKED_AT_ONCE = 1 << 20
MOST_CHECKED = 1 << 26
"""Ids of a longer array are looked at in places that are spread over it."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids of all documents, one after the other.

    `document_ends` are where documents end, where that is known: the number of tokens up to and with the last
    of each. Where `has_uncounted` is set, a negative number n stands for the id -1-n of a token that is read
    but does not count in the loss. `origin` is what to call it all in a message; `num_skipped` says how many
    files or rows were left out, of which `num_unread` hold no text; `unread` names the first few of these. Of
    `num_replaced` files bytes that are not UTF-8 were replaced; `replaced` names the first few of them. Of a
    `partial` file, `read` or `bring` fetches ids before they are looked at in `ids`.
    """

    origin: str
    ids: _IntArray
    document_ends: NDArray[np.int64] | None = None
    has_uncounted: bool = False
    num_skipped: int = 0
    num_unread: int = 0
    unread: tuple[str, ...] = ()
    num_replaced: int = 0
    replaced: tuple[str, ...] = ()
    partial: Path | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def bring(self, places: Iterable[tuple[int, int]]) -> None:
        """Fetch the ids between these places, if the file of the ids is partial."""
        if self.partial is not None and isinstance(self.ids, np.memmap):
            first, size = self.ids.offset, self.ids.itemsize
            bring(self.partial, [(first + size * begin, first + size * end) for begin, end in places])

    def read(self, begin: int, end: int) -> _IntArray:
        """The ids from one place up to but without another; they are fetched if need be."""
        self.bring([(begin, end)])
        return self.ids[begin:end]

    def largest_id(self) -> int:
        """The largest id there is; of very long arrays, the largest in many places of it."""
        largest = -1
        for begin, end in _looked_at(len(self.ids)):
            ids = self.read(begin, end)
            low = -1 - int(ids.min()) if self.has_uncounted else -1
            largest = max(largest, int(ids.max()), low)
        self.let_go()
        return largest

    def digest(self) -> str:
        """SHA-256 of the ids, whatever type they are kept in, and of where documents end.

        Of very long arrays the blocks are read that `largest_id` looks at: the first, the last and others
        between them, 64 million ids in all.
        """
        words = sha256(f"{len(self.ids)} {self.has_uncounted}".encode())
        for begin, end in _looked_at(len(self.ids)):
            words.update(self.read(begin, end).astype("<i4").tobytes())
        if self.document_ends is not None:
            for begin, end in _looked_at(len(self.document_ends)):
                words.update(self.document_ends[begin:end].astype("<i8").tobytes())
        self.let_go()
        return words.hexdigest()

    def let_go(self) -> None:
        """Let the system have back the pages of the file that were read: they would count as this process's
        memory, more with every batch, until all of the file does.
        """
        mapped = getattr(self.ids, "_mmap", None)
        if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)


def _looked_at(length: int) -> Iterator[tuple[int, int]]:
    """An array in blocks, or blocks spread over a very long one; its last one is always among them."""
    num_blocks = -(-length // CHECKED_AT_ONCE)
    step = max(num_blocks * CHECKED_AT_ONCE // MOST_CHECKED, 1)
    for block in {*range(0, num_blocks, step), num_blocks - 1} if num_blocks else ():
        yield block * CHECKED_AT_ONCE, min((block + 1) * CHECKED_AT_ONCE, length)


def load_tokens(path: Path, dtype: str = "uint16") -> Tokens:
    """The token ids in a .npy file, or the bare ones of this type in any other, mapped and not read."""
    try:
        has_header = path.suffix == ".npy"
        ids = np.load(path, mmap_mode="r", allow_pickle=False) if has_header else _raw(path, dtype)
    except (OSError, ValueError) as error:
        raise BiremeError(f"The tokens in {path} cannot be read: {str(error).rstrip('.')}.") from error
    if ids.dtype.kind not in "ui":
        raise BiremeError(
            f"{path} holds numbers of type {ids.dtype}; token ids must be whole numbers, such as uint16 or "
            "uint32."
        )
    if ids.ndim != 1:
        raise BiremeError(
            f"{path} holds an array of shape {list(ids.shape)}; tokens must be one-dimensional. Save it with "
            "array.reshape(-1)."
        )
    if not len(ids):
        raise BiremeError(f"{path} holds no tokens, so there is nothing to train on.")
    found = Tokens(str(path), ids, partial=path if PieceFile.at(path) is not None else None)
    if ids.dtype.kind == "i" and found.partial is None:  # else the machine that has it whole has looked
        smallest = min(int(ids[begin:end].min()) for begin, end in _looked_at(len(ids)))
        if smallest < 0:
            raise BiremeError(f"{path} holds the negative id {smallest}; ids start at 0.")
    return found


def _raw(path: Path, dtype: str) -> _IntArray:
    num_bytes = path.stat().st_size
    if not num_bytes:
        return np.zeros(0, dtype)
    if num_bytes % np.dtype(dtype).itemsize:
        raise BiremeError(
            f"{path} has {num_bytes} bytes, not a whole number of {dtype} tokens. Set data.dtype to the type "
            "it was written with."
        )
    return np.memmap(path, dtype, mode="r")


Batch = dict[str, Tensor]


Names = Sequence[str] | None
"""The tensors of samples that are wanted; None stands for all."""

Seeds = Sequence[int] | None
"""What the random draws of each sample begin with, if that is asked for."""


class Samples(Protocol):
    """Numbered samples. All have tensors of the same names, types and shapes."""

    @property
    def is_quick(self) -> bool:
        """Whether samples only have to be read: no work for other processes."""

    @property
    def is_columnar(self) -> bool:
        """Whether some tensors of a sample can be had without the work that the others take."""

    def __len__(self) -> int:
        """How many samples there are."""

    def take(self, numbers: Sequence[int], names: Names = None, seeds: Seeds = None) -> Batch:
        """The samples of these numbers, stacked: the first axis of each tensor is the samples.

        With `names` there are these tensors alone. With `seeds` the random draws of each sample begin with
        its own; that sets the generators of the process.
        """


def targets(tokens: Tokens, begin: int, end: int) -> int:
    """The tokens of a piece of text that count in the loss: the first one is predicted from nothing."""
    if not tokens.has_uncounted:
        return max(end - begin - 1, 0)
    return int(np.count_nonzero(tokens.read(begin + 1, end) >= 0))


def check_ids(ids: NDArray[np.int64], numbers: Sequence[int], vocabulary: int | None, origin: str) -> None:
    """Refuse ids that the model does not have, in the rows of these samples."""
    if vocabulary is None or not ids.size or (ids.max() < vocabulary and ids.min() >= 0):
        return
    wrong = ((ids >= vocabulary) | (ids < 0)).any(axis=1).argmax()
    worst = ids[wrong].max() if ids[wrong].max() >= vocabulary else ids[wrong].min()
    raise BiremeError(
        f"Sample {numbers[int(wrong)]} of {origin} has the token id {worst}, and the "
        f"model has {vocabulary} tokens, from 0 to {vocabulary - 1}. Use the model's own "
        "tokenizer, and the dtype that the tokens were written with."
    )


@dataclass(frozen=True, slots=True)
class SampleRange:
    """The samples `begin` up to but without `end` of others, numbered from 0."""

    samples: Samples
    begin: int
    end: int

    @property
    def is_quick(self) -> bool:
        """As the others are."""
        return self.samples.is_quick

    @property
    def is_columnar(self) -> bool:
        """As the others are."""
        return self.samples.is_columnar

    def __len__(self) -> int:
        return self.end - self.begin

    def take(self, numbers: Sequence[int], names: Names = None, seeds: Seeds = None) -> Batch:
        """The samples of these numbers, stacked."""
        return self.samples.take([self.begin + int(number) for number in numbers], names, seeds)


@dataclass(frozen=True, slots=True)
class Split:
    """Samples to train on, and others to evaluate with; None where there are to be none."""

    training: Samples
    evaluation: Samples | None


def gathered(parts: Sequence[tuple[NDArray[np.int64], Batch]]) -> Batch:
    """One batch of several, each with the places that its samples have in it."""
    back = torch.from_numpy(np.argsort(np.concatenate([places for places, _ in parts])))
    return {name: torch.cat([batch[name] for _, batch in parts])[back] for name in parts[0][1]}


def chosen(values: Sequence[int] | None, places: NDArray[np.int64]) -> list[int] | None:
    """The values at these places, such as seeds, if there are any."""
    return None if values is None else [values[place] for place in places.tolist()]


def only(batch: Batch, names: Names) -> Batch:
    """The tensors of these names of a batch; all where there are no names."""
    if names is None:
        return batch
    missing = [name for name in names if name not in batch]
    if missing:
        raise BiremeError(f"The samples hold {', '.join(batch)}, and not {', '.join(missing)}.")
    return {name: batch[name] for name in names}


def take_rows(
    samples: Samples, numbers: Sequence[int], wanted: Sequence[Rows], seeds: Seeds = None
) -> Mapping[Rows | None, Batch]:
    """What is wanted of a batch of the samples of these numbers. No sample is made twice."""
    if samples.is_columnar:
        return {one: samples.take(numbers[one.begin : one.end], one.names) for one in wanted}
    if not wanted:
        return {}
    begin, end = min(one.begin for one in wanted), max(one.end for one in wanted)
    names = tuple(dict.fromkeys(name for one in wanted for name in one.names))
    made = samples.take(numbers[begin:end], names, None if seeds is None else seeds[begin:end])
    return {
        one: {name: made[name][one.begin - begin : one.end - begin] for name in one.names} for one in wanted
    }


def split_samples(samples: Samples, fraction: float, *, least: int = 1) -> Split:
    """The last fraction of samples apart, for evaluation; `least` of them, and none if the fraction is 0."""
    if not fraction:
        return Split(samples, None)
    num_apart = max(round(len(samples) * fraction), least)
    if num_apart >= len(samples):
        raise BiremeError(
            f"There are {len(samples)} samples, too few to hold out {num_apart} of them for evaluation. Give "
            "more, or 0 for the fraction."
        )
    cut = len(samples) - num_apart
    return Split(SampleRange(samples, 0, cut), SampleRange(samples, cut, len(samples)))


def document_end_near(tokens: Tokens, cut: int, least_ahead: int, least_behind: int) -> int:
    """The end of a document nearest to a cut, unless it halves or doubles the part after it."""
    ends = tokens.document_ends
    if ends is None or not len(ends):
        return cut
    place = int(np.searchsorted(ends, cut))
    near = [int(ends[neighbor]) for neighbor in (place - 1, place) if 0 <= neighbor < len(ends)]
    best = min(near, key=lambda end: abs(end - cut))
    behind, wanted = len(tokens) - best, len(tokens) - cut
    fits = wanted <= 2 * behind and behind <= 2 * wanted
    return best if fits and behind >= least_behind and best >= least_ahead else cut
