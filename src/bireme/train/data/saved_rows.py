"""Rows of a folder that the `datasets` package saved: text, or token ids that somebody made before.

The folder is read with that package, row by row, from where it lies; nothing is downloaded.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bireme.errors import BiremeError, closest
from bireme.train.data.text_files import PIECE_BYTES, Passage
from bireme.train.data.tokens import IGNORED

__all__ = ["IdRow", "SavedRows", "is_saved_folder", "saved_rows"]

IDS, LABELS = "input_ids", "labels"
TRAINING = "train"
NUM_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class IdRow:
    """The token ids of one document, and for each whether it counts in the loss."""

    ids: NDArray[np.int64]
    counts: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SavedRows:
    """A saved dataset, one document a row, in the column of that name.

    Where `holds_ids` is set the column holds token ids, else text. Where `has_labels` is set, ids count in
    the loss if the labels beside them are not -100.
    """

    origin: str
    dataset: Any
    column: str
    holds_ids: bool
    has_labels: bool
    identity: str

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self.dataset)

    def passages(self, skip: Callable[[str], None]) -> Iterator[Passage]:
        """The text of all rows; `skip` is told of rows without any."""
        for number, row in self._rows():
            text = row[self.column]
            if not isinstance(text, str):
                skip(f"row {number} of {self.origin}")
                continue
            for begin in range(0, max(len(text), 1), PIECE_BYTES):
                piece = text[begin : begin + PIECE_BYTES]
                ends = begin + PIECE_BYTES >= len(text)
                yield Passage(piece, int(ends), ends_document=ends)

    def id_rows(self) -> Iterator[IdRow]:
        """The token ids of all rows."""
        for number, row in self._rows():
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

    def _counts(self, row: Mapping[str, Any], ids: NDArray[np.int64], number: int) -> NDArray[np.bool_]:
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

    def _rows(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for begin in range(0, len(self.dataset), NUM_ROWS_AT_ONCE):
            columns = self.dataset[begin : begin + NUM_ROWS_AT_ONCE]
            for place, cells in enumerate(zip(*columns.values(), strict=True), begin):
                yield place, dict(zip(columns, cells, strict=True))


def is_saved_folder(folder: Path) -> bool:
    """Whether `datasets` saved something here: one dataset, or several under names."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def saved_rows(folder: Path, column: str | None = None) -> SavedRows:
    """The dataset in a folder, or the one named train where there are several.

    `column` is the one with the text or the ids. Without it, input_ids is taken if there is one, else text,
    else the only column that holds strings.
    """
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise BiremeError(
            f"The folder {folder} was saved by the datasets package, which cannot be imported ({error}); "
            "install bireme[hf]."
        ) from error
    try:
        dataset: Any = datasets.load_from_disk(str(folder))
    except Exception as error:  # what is wrong with its files comes as whatever their reader stumbles over
        raise BiremeError(
            f"The dataset in {folder} cannot be read: {type(error).__name__}: {error}."
        ) from error
    if isinstance(dataset, dict):
        if TRAINING not in dataset:
            raise BiremeError(
                f"{folder} holds the datasets {', '.join(sorted(dataset))} and none named train. Name "
                f"the folder of one of them, such as {folder / sorted(dataset)[0]}."
            )
        dataset = dataset[TRAINING]
    dataset = dataset.with_format(None)
    columns = list(dataset.column_names)
    chosen = column or _likely_column(folder, dataset, columns)
    if chosen not in columns:
        raise BiremeError(f"The dataset in {folder} has no column {chosen!r}. {closest(chosen, columns)}")
    holds_ids = getattr(dataset.features[chosen], "dtype", None) not in STRINGS
    has_labels = holds_ids and chosen == IDS and LABELS in columns
    dataset = dataset.select_columns([chosen, LABELS] if has_labels else [chosen])
    if not len(dataset):
        raise BiremeError(f"The dataset in {folder} has no rows, so there is nothing to train on.")
    return SavedRows(str(folder), dataset, chosen, holds_ids, has_labels, _identity(folder, chosen))


STRINGS = ("string", "large_string")


def _likely_column(folder: Path, dataset: Any, columns: list[str]) -> str:
    for name in (IDS, "text"):
        if name in columns:
            return name
    strings = [name for name in columns if getattr(dataset.features[name], "dtype", None) in STRINGS]
    if len(strings) == 1:
        return strings[0]
    raise BiremeError(
        f"The dataset in {folder} has the columns {', '.join(columns)}; none is named text or input_ids. "
        "Say which holds the text: text_column."
    )


def _identity(folder: Path, column: str) -> str:
    words = sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        status = path.stat()
        words.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="replace"))
    return f"rows {column} {words.hexdigest()}"
