"""Datasets of the `datasets` library, by the name they have on the Hugging Face Hub or by a folder.

`hf:NAME` is a dataset of the Hub, `hf:FOLDER` a folder of Parquet, JSON or CSV files, or one that the library
saved, `hf:FILE` such a file; further options follow after commas: `hf:NAME,split=test,config=en,
column=text,streaming=true`. With a name the network is needed once; the library keeps what it has loaded.
Code that lies with a dataset is never run.
"""

import csv
import gzip
import importlib
import json
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
from numpy.typing import NDArray

from bireme.errors import BiremeError, closest, system_errors
from bireme.model.sources import offline
from bireme.train.data.samples import IGNORED
from bireme.train.data.text_files import PIECE_BYTES, Named, Passage
from bireme.user_code import optional_package, reason_of

# Rows of a dataset: text, token ids that were made before, or conversations and prompts with answers.
#
# They come from the `datasets` library, which `hub.py` calls, in a folder or over the network one by one; or
# from a file of JSON lines, which is read here. Only the columns that are learned are read.

IDS, _LABELS = "input_ids", "labels"
_IS_GOOD = "label"
"""Whether the answer of a row is a good one, in preferences without pairs."""
_CHATS = ("messages", "conversations")
_LIKELY = (IDS, "text", *_CHATS)
"""Columns to take if none is named, the likeliest first."""

ALPACA = ("instruction", "output", "input", "system")
"""The columns of Alpaca's format; a dataset may lack the last two."""

PAIRS = (("prompt", "completion"), ALPACA[:2])
"""Columns of a prompt and of its answer. They come before the others, but for token ids."""

_NUM_ROWS_AT_ONCE = 256
_STRINGS = ("string", "large_string")
_REMEDY = "Correct the line, or take it out; if the file is one list of rows, name it .json."

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

    `rows` gives all rows from the first on, each with its number, each time that it is called. The numbers
    are those of lines, from 1, if `counts_lines`. `size` is how many there are, None for a stream, whose end
    is unknown. `num_files` is None if the library does not say which files it reads. With `counts_all` all
    tokens of conversations count in the loss.
    """

    origin: str
    rows: Callable[[], Iterable[tuple[int, Row]]]
    size: int | None
    columns: tuple[str, ...]
    content: Content
    identity: str
    num_files: int | None = None
    counts_lines: bool = False
    counts_all: bool = False

    def name_of(self, number: int) -> str:
        """What to call the row of this number in a message."""
        return f"{'line' if self.counts_lines else 'row'} {number} of {self.origin}"

    @property
    def is_alpaca(self) -> bool:
        """Whether each row is an instruction with its answer."""
        return self.columns[0] == ALPACA[0] and self.content is Content.PAIRS

    @property
    def column(self) -> str:
        """The column with the text or the token ids."""
        return self.columns[0]

    @property
    def has_labels(self) -> bool:
        """Whether ids count in the loss only if the labels beside them are not -100."""
        return self.content is Content.IDS and _LABELS in self.columns[1:]

    def passages(self, skip: Named) -> Iterator[Passage]:
        """The text of all rows; `skip` is told of rows without any."""
        for number, row in self.rows():
            text = row[self.column]
            if not isinstance(text, str):
                skip(self.name_of(number))
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
        for number, row in self.rows():
            try:
                ids = np.asarray(row[self.column], np.int64)
            except (TypeError, ValueError, OverflowError):
                ids = np.full(1, -1)
            if ids.ndim != 1 or (ids < 0).any():
                raise BiremeError(
                    f"In {self.name_of(number)} the column {self.column!r} holds no list of token ids. Ids "
                    "are whole numbers from 0 on."
                )
            yield IdRow(ids, self._counts(row, ids, number))

    def _counts(self, row: Row, ids: NDArray[np.int64], number: int) -> NDArray[np.bool_]:
        if not self.has_labels:
            return np.ones(len(ids), np.bool_)
        labels = np.asarray(row[_LABELS])
        if labels.shape != ids.shape or ((labels != ids) & (labels != IGNORED)).any():
            raise BiremeError(
                f"In {self.name_of(number)} the labels are not the input_ids themselves or -100. "
                "Tokens are packed, and the model shifts them; for other labels write a function that "
                "returns samples."
            )
        counts: NDArray[np.bool_] = labels != IGNORED
        return counts


def _rows_of_dataset(
    dataset: Any, origin: str, identity: str, column: str | None = None, *, is_stream: bool = False
) -> SavedRows:
    """The rows of a dataset that the library has opened.

    `column` is the one with the text, the ids or the conversations. Without it, input_ids is taken if there
    is one, else a prompt with its answer, else text, else messages, else the only column that holds strings.
    """
    if not is_stream:
        dataset = dataset.with_format(None)
    rows = enumerate(dataset) if is_stream else _sliced(dataset, 1)
    first: Row | None = next((row for _, row in rows), None)
    columns = list(dataset.column_names or first or ())
    features = dataset.features
    types = None if features is None else {name: getattr(features[name], "dtype", None) for name in columns}
    names, content = _layout(origin, columns, column, first, types)
    dataset = dataset.select_columns(list(names))
    return SavedRows(
        origin,
        partial(enumerate, dataset) if is_stream else partial(_sliced, dataset),
        None if is_stream else len(dataset),
        names,
        content,
        f"rows {' '.join(names)} {identity}",
    )


def rows_of_json_lines(path: Path, column: str | None = None) -> SavedRows:
    """The rows of a file with a JSON object in each line; empty lines are passed over."""
    with system_errors(f"{path} cannot be read"):
        status = path.stat()
        first = _first_values(path)
        with path.open("rb") as file:
            size = sum(1 for line in file if line.strip())
    columns, content = _layout(str(path), list(first or ()), column, first, None)
    if columns[:2] == ALPACA[:2]:
        columns = ALPACA  # of those that a row may lack the first row says nothing
    identity = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    return SavedRows(
        str(path),
        partial(_json_lines, path, columns),
        size,
        columns,
        content,
        f"lines {' '.join(columns)} {identity}",
        num_files=1,
        counts_lines=True,
    )


def _first_values(path: Path) -> Row | None:
    """The first value of each column that is not null, in the first rows; None if there are no rows."""
    found: dict[str, Any] | None = None
    for _, row in islice(_json_lines(path), _NUM_ROWS_AT_ONCE):
        new = {name: value for name, value in row.items() if found is None or found.get(name) is None}
        found = {**(found or {}), **new}
    return found


def _json_lines(path: Path, columns: Iterable[str] | None = None) -> Iterator[tuple[int, Row]]:
    """The number of each line, and its object: whole, or these columns with None for a missing key."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                why = getattr(error, "msg", None) or str(error)
                raise BiremeError(
                    f"{path}, line {number}, is not JSON: {why.rstrip('.')}. {_REMEDY}"
                ) from None
            if not isinstance(found, dict):
                raise BiremeError(
                    f"{path}, line {number}, holds a {type(found).__name__} and not a JSON object, such as "
                    '{"text": "…"}. ' + _REMEDY
                )
            yield number, found if columns is None else {name: found.get(name) for name in columns}


def _layout(
    origin: str,
    columns: list[str],
    asked: str | None,
    first: Row | None,
    types: Mapping[str, str | None] | None,
) -> tuple[tuple[str, ...], Content]:
    """The columns of a dataset that are learned, and what they hold.

    `types` are those that a dataset has for its columns; without them the first row shows it.
    """

    def is_text(name: str) -> bool:
        return isinstance(first and first.get(name), str) if types is None else types[name] in _STRINGS

    pair = None if asked or IDS in columns else next((one for one in PAIRS if set(one) <= set(columns)), None)
    chosen = asked or (pair[0] if pair else _likely_column(origin, columns, is_text))
    if chosen not in columns:
        raise BiremeError(f"The dataset in {origin} has no column {chosen!r}. {closest(chosen, columns)}")
    if first is None:
        raise BiremeError(f"The dataset in {origin} has no rows, so there is nothing to train on.")
    if (pair or chosen in _CHATS) and str(first.get(_IS_GOOD)) in ("True", "False"):
        raise BiremeError(
            f"The dataset in {origin} has a column {_IS_GOOD!r} that tells good answers from bad ones, and "
            "Bireme would learn both. Keep the rows whose answers are good, without that column."
        )
    if pair is not None and is_text(pair[0]):
        further = [name for name in ALPACA[2:] if name in columns and pair[0] == ALPACA[0]]
        return (*pair, *further), Content.PAIRS
    if is_text(chosen):
        return (chosen,), Content.TEXT
    cell = first[chosen]
    if pair or chosen in _CHATS or (isinstance(cell, list) and cell and isinstance(cell[0], Mapping)):
        return pair or (chosen,), Content.CHATS
    has_labels = chosen == IDS and _LABELS in columns
    return (chosen, _LABELS) if has_labels else (chosen,), Content.IDS


def _sliced(dataset: Any, most: int | None = None) -> Iterator[tuple[int, Row]]:
    """The numbered rows of a dataset that lies here, read by the many."""
    end = len(dataset) if most is None else min(most, len(dataset))
    for begin in range(0, end, _NUM_ROWS_AT_ONCE):
        columns = dataset[begin : min(begin + _NUM_ROWS_AT_ONCE, end)]
        for number, cells in enumerate(zip(*columns.values(), strict=True), begin):
            yield number, dict(zip(columns, cells, strict=True))


def _likely_column(origin: str, columns: list[str], is_text: Callable[[str], bool]) -> str:
    for name in _LIKELY:
        if name in columns:
            return name
    strings = [name for name in columns if is_text(name)]
    if len(strings) == 1:
        return strings[0]
    if not columns:
        raise BiremeError(f"The dataset in {origin} has no rows, so there is nothing to train on.")
    raise BiremeError(
        f"The dataset in {origin} has the columns {', '.join(columns)}; none is named "
        f"{' or '.join(_LIKELY)}, and there is no prompt with its completion. Rename the columns of a "
        "question and its answer to prompt and completion, or name that of a text in data.text_column."
    )


_PREFIX = "hf:"
_OPTIONS = ("split", "config", "column", "revision", "streaming")
_TRAINING = "train"
_READERS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".arrow": "arrow",
    ".txt": "text",
}
"""What reads a single file, by its ending."""


def ending(path: Path) -> str:
    """The ending of a file's name without that of its compression: the library unpacks such files."""
    return Path(path.name.removesuffix(".gz")).suffix


_UNREACHED = (
    "ConnectionError",
    "ConnectError",
    "ConnectTimeout",
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
)
"""Errors, by name, of a Hub that was not reached: the library and those beneath it have their own."""


def is_hub(text: str) -> bool:
    """Whether a source is written like a dataset of the library."""
    return text.startswith(_PREFIX)


def is_saved_folder(folder: Path) -> bool:
    """Whether the library saved something here: one dataset, or several under names."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def library_rows(text: str, column: str | None = None, files: Sequence[Path] = ()) -> SavedRows:
    """The rows of a dataset, from a source that begins with hf:, or the path of a file or folder.

    Of a folder only `files` are read, if there are any.
    """
    asked = _asked(text)
    column = asked.column or column
    datasets = optional_package("datasets", "hf", text)
    path = Path(asked.name).expanduser()
    if path.is_dir() and is_saved_folder(path):
        return _saved(datasets, asked, path, column)
    if path.exists():
        return _opened(datasets, asked, path, column, files)
    words = asked.name.split("/")
    if len(words) > 2 or not all(one and one[0] not in ".~" for one in words):
        raise BiremeError(
            f"There is no file or folder {asked.name} to take a dataset from, and a name on the Hugging "
            "Face Hub is like imdb or owner/name."
        )
    return _opened(datasets, asked, None, column)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A source, read: `text` is how it was written."""

    text: str
    name: str
    streaming: bool
    split: str | None = None
    config: str | None = None
    column: str | None = None
    revision: str | None = None


def _asked(text: str) -> _Asked:
    name, *parts = text.removeprefix(_PREFIX).split(",") if is_hub(text) else (text,)
    given: dict[str, str] = {}
    for part in parts:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise BiremeError(
                f"{text} has {part!r}, which is not of the form key=value, such as split=train."
            )
        if key not in _OPTIONS:
            raise BiremeError(f"{text} has an unknown key {key!r}. {closest(key, _OPTIONS)}")
        if key in given:
            raise BiremeError(f"{text} has the key {key!r} twice. Leave one of them out.")
        given[key] = value
    streaming = given.pop("streaming", "false")
    if streaming not in ("true", "false"):
        raise BiremeError(f"{text} has streaming={streaming}; streaming must be true or false.")
    if not name.strip():
        raise BiremeError(f"{text} names no dataset. Write it like hf:owner/name,split=train.")
    return _Asked(text, name.strip(), streaming == "true", **given)


def _saved(datasets: Any, asked: _Asked, folder: Path, column: str | None) -> SavedRows:
    """A folder that the library saved, read from where it lies."""
    for option, value in (("config", asked.config), ("revision", asked.revision)):
        if value is not None:
            raise BiremeError(
                f"{asked.text} has {option}={value}, which a saved folder does not have. Leave it out."
            )
    try:
        dataset: Any = datasets.load_from_disk(str(folder))
    except Exception as error:  # what is wrong with its files comes as whatever their reader stumbles over
        raise BiremeError(f"The dataset in {folder} cannot be read: {reason_of(error)}.") from error
    if isinstance(dataset, dict):
        dataset = _one_of(dataset, str(folder), asked.split)
    elif asked.split is not None:
        raise BiremeError(
            f"{asked.text} has split={asked.split}, and {folder} holds one dataset. Leave it out."
        )
    if asked.streaming:
        return _rows_of_dataset(
            dataset.to_iterable_dataset(), str(folder), asked.text, column, is_stream=True
        )
    identity = f"{asked.split} {_identity(path for path in folder.rglob('*') if path.is_file())}"
    return _rows_of_dataset(dataset, str(folder), identity, column)


def _opened(
    datasets: Any, asked: _Asked, path: Path | None, column: str | None, files: Sequence[Path] = ()
) -> SavedRows:
    """What the library loads: of the Hub, of a folder of files, or one file."""
    words: dict[str, Any] = {"name": asked.config, "split": asked.split, "revision": asked.revision}
    where = asked.name
    if path is not None:
        where = str(path.resolve())
        if path.is_file():
            if ending(path) not in _READERS:
                raise BiremeError(
                    f"{path} cannot be read as rows: its name ends with none of {', '.join(_READERS)}."
                )
            files = (path.resolve(),)
        if files:
            where, words["data_files"] = _READERS[ending(files[0])], [str(one) for one in files]
        tables = [one for one in files or sorted(path.rglob("*")) if ending(one) in _READERS]
        if {ending(one) for one in tables} == {".csv"}:
            # Else an answer of digits would be a number, and the answer NA a row without an answer.
            words |= {"keep_default_na": False, "features": _texts(datasets, tables[0])}
    datasets.disable_progress_bars()
    try:
        with _as_the_network_is(datasets):
            dataset: Any = datasets.load_dataset(where, streaming=asked.streaming, **words)
        if isinstance(dataset, dict):
            dataset = _one_of(dataset, asked.name, None)
        if asked.streaming:
            return _rows_of_dataset(dataset, asked.name, asked.text, column, is_stream=True)
    except BiremeError:
        raise
    except Exception as error:  # of the network, of the Hub, of files: each comes as something else
        raise _failure(asked, path, error) from error
    kept = [Path(one["filename"]) for one in dataset.cache_files]
    return _rows_of_dataset(dataset, asked.name, f"{asked.split} {len(dataset)} {_identity(kept)}", column)


def _texts(datasets: Any, path: Path) -> Any:
    """All columns of a CSV file as texts; None if two have one name."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with suppress(ValueError, csv.Error), opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        names = next(csv.reader(file), [])
        if len(set(names)) == len(names) > 0:
            return datasets.Features(dict.fromkeys(names, datasets.Value("string")))
    return None


def _as_the_network_is(datasets: Any) -> AbstractContextManager[None]:
    """Where the Hub has no address here, have the library look at what it keeps: it would try for long."""
    hub: Any = importlib.import_module("huggingface_hub.constants")
    is_reached = bool(getproxies())  # which then finds the address
    with suppress(OSError):
        is_reached = is_reached or bool(socket.getaddrinfo(urlsplit(hub.ENDPOINT).hostname, 443))
    return nullcontext() if is_reached else offline(datasets.config)


def _one_of(found: dict[str, Any], origin: str, split: str | None) -> Any:
    """The split that was asked for, else the one to train on."""
    names = sorted(found)
    if (split or _TRAINING) not in found:
        raise BiremeError(
            f"{origin} holds the datasets {', '.join(names)} and none named {split or _TRAINING}. Say which "
            f"to take: {_PREFIX}{origin},split={names[0]}."
        )
    return found[split or _TRAINING]


def _identity(paths: "Iterator[Path] | list[Path]") -> str:
    words = sha256()
    for path in sorted(paths):
        status = path.stat()
        words.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="replace"))
    return words.hexdigest()


def _failure(asked: _Asked, path: Path | None, error: BaseException) -> BiremeError:
    if path is not None:
        if path.suffix == ".jsonl":
            deque(_json_lines(path), maxlen=0)  # raises what is wrong in a line
        return BiremeError(f"The dataset in {path} cannot be read: {reason_of(error)}.")
    chain: BaseException | None = error
    while chain is not None:
        if type(chain).__name__ in _UNREACHED:
            return BiremeError(
                f"The dataset {asked.name} has not been loaded on this machine before, and the Hugging "
                f"Face Hub cannot be reached ({type(chain).__name__}). Run once where there is a network, "
                "or name a folder that has its files: hf:FOLDER."
            )
        chain = chain.__cause__ or chain.__context__
    return BiremeError(f"The dataset {asked.name} cannot be loaded: {reason_of(error)}.")
