"""Rows of a dataset: text, token ids that somebody made before, or conversations and prompts with answers.

They come from the `datasets` library, which `hub.py` calls, in a folder or over the network one by one; or
from a file of JSON lines, which is read here. Only the columns that are learned are read.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bireme.errors import BiremeError, closest
from bireme.train.data.text_files import PIECE_BYTES, Passage
from bireme.train.data.tokens import IGNORED

__all__ = [
    "ALPACA",
    "Content",
    "IdRow",
    "Row",
    "SavedRows",
    "broken_line",
    "rows_of_dataset",
    "rows_of_json_lines",
]

IDS, LABELS = "input_ids", "labels"
LIKELY = (IDS, "text", "messages", "conversations")
"""Columns to take if none is named, the likeliest first."""

ALPACA = ("instruction", "output", "input", "system")
"""The columns of Alpaca's format; a dataset may lack the last two."""

PAIRS = (("prompt", "completion"), ALPACA[:2])
"""Columns of a prompt and of its answer. They come before the others, but for token ids."""

NUM_ROWS_AT_ONCE = 256
STRINGS = ("string", "large_string")

Row = Mapping[str, Any]


class Content(StrEnum):
    """What a column holds."""

    TEXT = "text"
    IDS = "token ids"
    CHATS = "conversations"
    PAIRS = "prompts with answers"


@dataclass(frozen=True, slots=True)
class IdRow:
    """The token ids of one document, and for each whether it counts in the loss."""

    ids: NDArray[np.int64]
    counts: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SavedRows:
    """A dataset, one document a row, in these columns; text and ids are in the first.

    `rows` gives all rows from the first on, each time that it is called. `size` is how many there are, None
    for a stream, whose end nobody knows. Where `has_labels` is set, ids count in the loss if the labels
    beside them are not -100. `num_files` is None if the library does not say which files it reads.
    """

    origin: str
    rows: Callable[[], Iterable[Row]]
    size: int | None
    columns: tuple[str, ...]
    content: Content
    has_labels: bool
    identity: str
    num_files: int | None = None

    @property
    def column(self) -> str:
        """The column with the text or the token ids."""
        return self.columns[0]

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

    @property
    def has_answers(self) -> bool:
        """Whether only answers count in the loss."""
        return self.content in (Content.CHATS, Content.PAIRS)

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
    is one, else a prompt with its answer, else text, else messages, else the only column that holds strings.
    """
    if not is_stream:
        dataset = dataset.with_format(None)
    first: Row | None = next(iter(dataset if is_stream else _sliced(dataset, 1)), None)
    columns = list(dataset.column_names or first or ())
    features = dataset.features
    types = None if features is None else {name: getattr(features[name], "dtype", None) for name in columns}
    found = _layout(origin, columns, column, first, types)
    dataset = dataset.select_columns(list(found.columns))
    return SavedRows(
        origin,
        (lambda: dataset) if is_stream else partial(_sliced, dataset),
        None if is_stream else len(dataset),
        found.columns,
        found.content,
        found.has_labels,
        f"rows {' '.join(found.columns)} {identity}",
    )


def rows_of_json_lines(path: Path, column: str | None = None) -> SavedRows:
    """The rows of a file with a JSON object in each line; empty lines are passed over."""
    try:
        status = path.stat()
        first = next(_json_lines(path), None)
        with path.open("rb") as file:
            size = sum(1 for line in file if line.strip())
    except OSError as error:
        raise BiremeError(f"{path} cannot be read: {error.strerror or error}.") from error
    found = _layout(str(path), list(first or ()), column, first, None)
    # Of the columns that a row may lack the first row says nothing.
    columns = ALPACA if found.columns[: len(ALPACA[:2])] == ALPACA[:2] else found.columns
    identity = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    return SavedRows(
        str(path),
        partial(_json_lines, path, columns),
        size,
        columns,
        found.content,
        found.has_labels,
        f"lines {' '.join(columns)} {identity}",
        num_files=1,
    )


def broken_line(path: Path) -> BiremeError | None:
    """The mistake in the first line of a file that holds no JSON object; None if all lines hold one."""
    try:
        for _ in _json_lines(path):
            pass
    except BiremeError as error:
        return error
    return None


def _json_lines(path: Path, columns: Iterable[str] | None = None) -> Iterator[Row]:
    """The objects of all lines; of these columns, None where an object has no such key, or whole."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                why = getattr(error, "msg", None) or str(error)
                raise BiremeError(
                    f"{path}, line {number}, is not JSON: {why.rstrip('.')}. Correct the line, or take it "
                    "out."
                ) from None
            if not isinstance(found, dict):
                raise BiremeError(
                    f"{path}, line {number}, holds a {type(found).__name__} and not a JSON object, such as "
                    '{"text": "…"}. Correct the line, or take it out.'
                )
            yield found if columns is None else {name: found.get(name) for name in columns}


@dataclass(frozen=True, slots=True)
class _Layout:
    """The columns of a dataset that are learned, and what they hold."""

    columns: tuple[str, ...]
    content: Content
    has_labels: bool


def _layout(
    origin: str,
    columns: list[str],
    asked: str | None,
    first: Row | None,
    types: Mapping[str, str | None] | None,
) -> _Layout:
    """`types` are those that a dataset has for its columns; without them the first row shows it."""

    def is_text(name: str) -> bool:
        return isinstance(first and first.get(name), str) if types is None else types[name] in STRINGS

    pair = None if asked or IDS in columns else next((one for one in PAIRS if set(one) <= set(columns)), None)
    chosen = asked or (pair[0] if pair else _likely_column(origin, columns, is_text))
    if chosen not in columns:
        raise BiremeError(f"The dataset in {origin} has no column {chosen!r}. {closest(chosen, columns)}")
    if first is None:
        raise BiremeError(f"The dataset in {origin} has no rows, so there is nothing to train on.")
    if pair is not None and is_text(pair[0]):
        further = [name for name in ALPACA[2:] if name in columns and pair[0] == ALPACA[0]]
        return _Layout((*pair, *further), Content.PAIRS, has_labels=False)
    cell = first[chosen]
    if isinstance(cell, list) and cell and isinstance(cell[0], Mapping):
        return _Layout(pair or (chosen,), Content.CHATS, has_labels=False)
    if is_text(chosen):
        return _Layout((chosen,), Content.TEXT, has_labels=False)
    has_labels = chosen == IDS and LABELS in columns
    return _Layout((chosen, LABELS) if has_labels else (chosen,), Content.IDS, has_labels)


def _sliced(dataset: Any, most: int | None = None) -> Iterator[Row]:
    """The rows of a dataset that lies here, read by the many."""
    end = len(dataset) if most is None else min(most, len(dataset))
    for begin in range(0, end, NUM_ROWS_AT_ONCE):
        columns = dataset[begin : min(begin + NUM_ROWS_AT_ONCE, end)]
        for cells in zip(*columns.values(), strict=True):
            yield dict(zip(columns, cells, strict=True))


def _likely_column(origin: str, columns: list[str], is_text: Callable[[str], bool]) -> str:
    for name in LIKELY:
        if name in columns:
            return name
    strings = [name for name in columns if is_text(name)]
    if len(strings) == 1:
        return strings[0]
    if not columns:
        raise BiremeError(f"The dataset in {origin} has no rows, so there is nothing to train on.")
    raise BiremeError(
        f"The dataset in {origin} has the columns {', '.join(columns)}; none is named "
        f"{' or '.join(LIKELY)}, and there is no prompt with its completion. Say which holds the text: "
        "text_column."
    )
