"""Samples in which documents stay apart: one in each, or several that do not see each other.

Several share a sample only for a model that takes `position_ids`, which start again at 0 with each document:
by these the model keeps attention within it. The first token of a document is not predicted, as nothing
before it belongs to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bireme.errors import BiremeError
from bireme.train.data.packing import DocumentPieces, Places, best_fit, cut_off
from bireme.train.data.samples import Batch, Split, check_fraction, check_ids, document_end_near, only
from bireme.train.data.tokenizer import Ids
from bireme.train.data.tokens import IGNORED, Tokens

__all__ = ["Cut", "DocumentSamples", "stacked"]


@dataclass(frozen=True, slots=True)
class DocumentSamples:
    """Samples of `length` tokens, in each the pieces that `pieces` names, then `padding` that does not count.

    A sample has `input_ids` and `labels`, and `position_ids` where `is_shared`.
    """

    tokens: Tokens
    length: int
    pieces: DocumentPieces
    padding: int
    is_shared: bool
    vocabulary: int | None = None
    num_tokens_given: int = 0
    """The tokens of the documents, with those that are cut off."""

    @property
    def is_quick(self) -> bool:
        """Tokens are only read."""
        return True

    @property
    def is_columnar(self) -> bool:
        """Ids are read for the rest too, and not kept."""
        return True

    def __len__(self) -> int:
        return len(self.pieces)

    def take(
        self, numbers: Sequence[int], names: Sequence[str] | None = None, seeds: Sequence[int] | None = None
    ) -> Batch:
        """The samples of these numbers, stacked. They draw nothing."""
        rows = [
            [self._signed(begin, end) for begin, end in self.pieces.of_sample(int(number))]
            for number in numbers
        ]
        self.tokens.let_go()
        batch = stacked(rows, self.length, self.padding, is_shared=self.is_shared)
        check_ids(batch["input_ids"].numpy(), numbers, self.vocabulary, self.tokens.origin)
        return only(batch, names)

    @property
    def num_tokens(self) -> int:
        """The tokens of all samples, without padding."""
        return int((self.pieces.ends - self.pieces.begins).sum())

    @property
    def longest(self) -> int:
        """The tokens of the longest piece of a document in a sample."""
        return int((self.pieces.ends - self.pieces.begins).max(initial=0))

    @property
    def num_cut_off(self) -> int:
        """How many documents lose what is beyond the length of a sample."""
        if self.is_shared:
            return 0
        ends = np.asarray(self.tokens.document_ends, np.int64)
        return int((~np.isin(self.pieces.ends, ends)).sum())

    def num_without_targets(self) -> int:
        """How many samples hold no token that counts and has one before it to be predicted from."""
        counted = 0
        for number in range(len(self)):
            pieces = self.pieces.of_sample(number)
            counted += any((self.tokens.ids[begin + 1 : end] >= 0).any() for begin, end in pieces)
        self.tokens.let_go()
        return len(self) - counted

    def _signed(self, begin: int, end: int) -> Ids:
        return np.asarray(self.tokens.ids[begin:end]).astype(np.int64)


def stacked(rows: Sequence[Sequence[Ids]], length: int, padding: int, *, is_shared: bool) -> Batch:
    """Samples from the signed ids of their pieces (see `Tokens`)."""
    signed = np.full((len(rows), length), -1 - padding, np.int64)
    positions = np.zeros((len(rows), length), np.int64)
    starts = np.zeros((len(rows), length), np.bool_)
    for row, pieces in enumerate(rows):
        place = 0
        for piece in pieces:
            signed[row, place : place + len(piece)] = piece
            starts[row, place] = True
            positions[row, place : place + len(piece)] = np.arange(len(piece))
            place += len(piece)
        positions[row, place:] = np.arange(length - place)
    ids = np.where(signed < 0, -1 - signed, signed)
    labels = np.where((signed < 0) | (starts & is_shared), IGNORED, signed)
    batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
    return batch | ({"position_ids": torch.from_numpy(positions)} if is_shared else {})


@dataclass(frozen=True, slots=True)
class Cut:
    """How documents become samples of `length` tokens, filled up with `padding`.

    With `is_shared` several share a sample, else each has its own and loses what is longer.
    """

    length: int
    padding: int
    is_shared: bool
    vocabulary: int | None = None

    def samples(self, tokens: Tokens) -> DocumentSamples:
        """All documents of a corpus as samples."""
        return self._of(tokens, 0, len(tokens))

    def split(self, tokens: Tokens, fraction: float, *, least: int = 1) -> Split:
        """The last fraction of the documents apart, for evaluation: `least` samples at least, and nothing if
        the fraction is 0.
        """
        check_fraction(fraction)
        if not fraction:
            return Split(self.samples(tokens), None)
        cut = (
            self._shared_cut(tokens, fraction, least)
            if self.is_shared
            else self._cut(tokens, fraction, least)
        )
        return Split(self._of(tokens, 0, cut), self._of(tokens, cut, len(tokens)))

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
        return BiremeError(
            f"{tokens.origin} has {len(self._ends(tokens))} documents and {len(tokens)} tokens: too few "
            f"for a sample to train on and {least} to evaluate with. Give more text, a smaller batch or "
            "length, or 0 for the fraction to evaluate with."
        )

    def _of(self, tokens: Tokens, first: int, last: int) -> DocumentSamples:
        """The documents, and parts of them, between two tokens."""
        ends = self._ends(tokens)
        begins = np.concatenate([[0], ends[:-1]])
        inside = (begins < last) & (ends > first)
        index = best_fit if self.is_shared else cut_off
        pieces = index(np.maximum(begins[inside], first), np.minimum(ends[inside], last), self.length)
        return DocumentSamples(
            tokens, self.length, pieces, self.padding, self.is_shared, self.vocabulary, last - first
        )

    def _ends(self, tokens: Tokens) -> Places:
        if tokens.document_ends is None:
            raise BiremeError(
                f"{tokens.origin} holds bare token ids, and nothing says where documents end, so they cannot "
                'be kept apart. Set data.packing to "stream".'
            )
        return np.asarray(tokens.document_ends, np.int64)
