"""Rows of a dataset of the `datasets` library: text, token ids that somebody made before, or conversations.

What is read of a row is one column, and the labels of token ids. Where the rows come from is for
`hub.py`; here they may lie in a folder or come over the network one by one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bireme.errors import BiremeError, closest
from bireme.train.data.text_files import PIECE_BYTES, Passage
from bireme.train.data.tokens import IGNORED

__all__ = ["Content", "IdRow", "Row", "SavedRows", "rows_of_dataset"]

IDS, LABELS = "input_ids", "labels"
LIKELY = (IDS, "text", "messages")
"""Columns to take if none is named, the likeliest first."""

NUM_ROWS_AT_ONCE = 256
STRINGS = ("string", "large_string")

Row = Mapping[str, Any]


class Content(StrEnum):
    """What a column holds."""

    TEXT = "text"
    IDS = "token ids"
    CHATS = "conversations"


@dataclass(frozen=True, slots=True)
class IdRow:
    """The token ids of one document, and for each whether it counts in the loss."""

    ids: NDArray[np.int64]
    counts: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SavedRows:
    """A dataset, one document a row, in the column of that name.

    `rows` gives all rows from the first on, each time that it is called. `size` is how many there are, None
    for a stream, whose end nobody knows. Where `has_labels` is set, ids count in the loss if the labels
    beside them are not -100.
    """

    origin: str
    rows: Callable[[], Iterable[Row]]
    size: int | None
    column: str
    content: Content
    has_labels: bool
    identity: str

    @property
    def holds_ids(self) -> bool:
        """Whether there are token ids, so that no tokenizer is needed."""
        return self.content is Content.IDS

    def passages(self, skip: Callable[[str], None]) -> Iterator[Passage]:
        """The text of all rows; `skip` is told of rows without any."""
        for number, row in enumerate(self.rows()):
            text = row[self.column]
            if not isinstance(text, str):
                skip(f"row {number} of {self.origin}")
                continue
            for begin in range(0, max(len(text), 1), PIECE_BYTES):
                piece = text[begin : begin + PIECE_BYTES]
                ends = begin + PIECE_BYTES >= len(text)
                yield Passage(piece, int(ends), ends_document=ends)

    def chats(self, skip: Callable[[str], None]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """The messages of all rows, and what to call the row; `skip` is told of rows without any."""
        for number, row in enumerate(self.rows()):
            messages = row[self.column]
            place = f"row {number} of {self.origin}"
            if not messages:
                skip(place)
                continue
            if not all(isinstance(one, Mapping) and {"role", "content"} <= set(one) for one in messages):
                raise BiremeError(
                    f"In {place} the column {self.column!r} is not a list of messages. A message is a role "
                    'and a content, such as {"role": "user", "content": "Hello"}.'
                )
            # A dataset has every key in every message, and None where a message lacks it.
            yield place, [{key: value for key, value in one.items() if value is not None} for one in messages]

    def id_rows(self) -> Iterator[IdRow]:
        """The token ids of all rows."""
        for number, row in enumerate(self.rows()):
            try:
                ids = np.asarray(row[self.column], np.int64)
            except (TypeError, ValueError, OverflowError):
                ids = np.full(1, -1)
            if ids.ndim != 1 or (ids < 0).any():
                raise BiremeError(
                    f"Row {number} of {self.origin} has no list of token ids in its column "
                    f"{self.column!r}. Ids are whole numbers from 0 on."
                )
            yield IdRow(ids, self._counts(row, ids, number))

    def _counts(self, row: Row, ids: NDArray[np.int64], number: int) -> NDArray[np.bool_]:
        if not self.has_labels:
            return np.ones(len(ids), np.bool_)
        labels = np.asarray(row[LABELS])
        if labels.shape != ids.shape or ((labels != ids) & (labels != IGNORED)).any():
            raise BiremeError(
                f"In row {number} of {self.origin} the labels are not the input_ids themselves or -100. "
                "Tokens are packed, and the model shifts them; for other labels write a function that "
                "returns samples."
            )
        counts: NDArray[np.bool_] = labels != IGNORED
        return counts


def rows_of_dataset(
    dataset: Any, origin: str, identity: str, column: str | None = None, *, is_stream: bool = False
) -> SavedRows:
    """The rows of a dataset that the library has opened.

    `column` is the one with the text, the ids or the conversations. Without it, input_ids is taken if there
    is one, else text, else messages, else the only column that holds strings.
    """
    if not is_stream:
        dataset = dataset.with_format(None)
    first: Row | None = next(iter(dataset if is_stream else _sliced(dataset, 1)), None)
    columns = list(dataset.column_names or first or ())
    chosen = column or _likely_column(origin, dataset, columns, first)
    if chosen not in columns:
        raise BiremeError(f"The dataset in {origin} has no column {chosen!r}. {closest(chosen, columns)}")
    if first is None:
        raise BiremeError(f"The dataset in {origin} has no rows, so there is nothing to train on.")
    content = _content(dataset, chosen, first)
    has_labels = content is Content.IDS and chosen == IDS and LABELS in columns
    dataset = dataset.select_columns([chosen, LABELS] if has_labels else [chosen])
    return SavedRows(
        origin,
        (lambda: dataset) if is_stream else partial(_sliced, dataset),
        None if is_stream else len(dataset),
        chosen,
        content,
        has_labels,
        f"rows {chosen} {identity}",
    )


def _sliced(dataset: Any, most: int | None = None) -> Iterator[Row]:
    """The rows of a dataset that lies here, read by the many."""
    end = len(dataset) if most is None else min(most, len(dataset))
    for begin in range(0, end, NUM_ROWS_AT_ONCE):
        columns = dataset[begin : min(begin + NUM_ROWS_AT_ONCE, end)]
        for cells in zip(*columns.values(), strict=True):
            yield dict(zip(columns, cells, strict=True))


def _is_text(dataset: Any, name: str, first: Row | None) -> bool:
    """By the dataset's own word; a stream may have none, and shows it in its first row."""
    if dataset.features is not None:
        return getattr(dataset.features[name], "dtype", None) in STRINGS
    return first is not None and isinstance(first[name], str)


def _content(dataset: Any, column: str, first: Row) -> Content:
    if _is_text(dataset, column, first):
        return Content.TEXT
    cell = first[column]
    return Content.CHATS if isinstance(cell, list) and cell and isinstance(cell[0], Mapping) else Content.IDS


def _likely_column(origin: str, dataset: Any, columns: list[str], first: Row | None) -> str:
    for name in LIKELY:
        if name in columns:
            return name
    strings = [name for name in columns if _is_text(dataset, name, first)]
    if len(strings) == 1:
        return strings[0]
    raise BiremeError(
        f"The dataset in {origin} has the columns {', '.join(columns)}; none is named {' or '.join(LIKELY)}. "
        "Say which holds the text: text_column."
    )
