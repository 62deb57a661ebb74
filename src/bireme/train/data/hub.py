"""Datasets of the `datasets` library, by the name they have on the Hugging Face Hub or by a folder.

`hf:NAME` is a dataset of the Hub, `hf:FOLDER` a folder of Parquet, JSON or CSV files, or one that the library
saved, `hf:FILE` such a file; further options follow after commas: `hf:NAME,split=test,config=en,
column=text,streaming=true`. With a name the network is needed once; the library keeps what it has loaded.
Code that lies with a dataset is never run.
"""

import importlib
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from bireme.errors import BiremeError, closest
from bireme.train.data.saved_rows import SavedRows, broken_line, rows_of_dataset

__all__ = ["is_hub", "is_saved_folder", "library_rows"]

PREFIX = "hf:"
OPTIONS = ("split", "config", "column", "revision", "streaming")
TRAINING = "train"
READERS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".arrow": "arrow",
    ".txt": "text",
}
"""What reads a single file, by its ending."""

UNREACHED = (
    "ConnectionError",
    "ConnectError",
    "ConnectTimeout",
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
)
"""Errors, by name, that tell of a Hub that was not reached: the library and what it rests on have their "
"own."""


def is_hub(text: str) -> bool:
    """Whether a source is written like a dataset of the library."""
    return text.startswith(PREFIX)


def is_saved_folder(folder: Path) -> bool:
    """Whether the library saved something here: one dataset, or several under names."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def library_rows(text: str, column: str | None = None, files: Sequence[Path] = ()) -> SavedRows:
    """The rows of a dataset, from a source that begins with hf:, or the path of a file or folder.

    Of a folder only `files` are read, if there are any.
    """
    asked = _asked(text)
    column = asked.column or column
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise BiremeError(
            f"{text} is read by the datasets package, which cannot be imported ({error}); install bireme[hf]."
        ) from error
    path = Path(asked.name).expanduser()
    if path.is_dir() and is_saved_folder(path):
        return _saved(datasets, asked, path, column)
    if path.exists():
        return _opened(datasets, asked, path, column, files)
    if not _is_name(asked.name):
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
    split: str | None
    config: str | None
    column: str | None
    revision: str | None
    streaming: bool


def _asked(text: str) -> _Asked:
    name, *parts = text.removeprefix(PREFIX).split(",") if is_hub(text) else (text,)
    given: dict[str, str] = {}
    for part in parts:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise BiremeError(
                f"{text} has {part!r}, which is not of the form key=value, such as split=train."
            )
        if key not in OPTIONS:
            raise BiremeError(f"{text} has an unknown key {key!r}. {closest(key, OPTIONS)}")
        if key in given:
            raise BiremeError(f"{text} has the key {key!r} twice. Leave one of them out.")
        given[key] = value
    streaming = given.pop("streaming", "false")
    if streaming not in ("true", "false"):
        raise BiremeError(f"{text} has streaming={streaming}; streaming must be true or false.")
    if not name.strip():
        raise BiremeError(f"{text} names no dataset. Write it like hf:owner/name,split=train.")
    return _Asked(
        text,
        name.strip(),
        given.get("split"),
        given.get("config"),
        given.get("column"),
        given.get("revision"),
        streaming == "true",
    )


def _is_name(text: str) -> bool:
    parts = text.split("/")
    return len(parts) <= 2 and all(part and part[0] not in ".~" for part in parts)


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
        raise BiremeError(f"The dataset in {folder} cannot be read: {_reason(error)}.") from error
    if isinstance(dataset, dict):
        dataset = _one_of(dataset, str(folder), asked.split)
    elif asked.split is not None:
        raise BiremeError(
            f"{asked.text} has split={asked.split}, and {folder} holds one dataset. Leave it out."
        )
    if asked.streaming:
        return rows_of_dataset(dataset.to_iterable_dataset(), str(folder), asked.text, column, is_stream=True)
    identity = f"{asked.split} {_identity(path for path in folder.rglob('*') if path.is_file())}"
    return rows_of_dataset(dataset, str(folder), identity, column)


def _opened(
    datasets: Any, asked: _Asked, path: Path | None, column: str | None, files: Sequence[Path] = ()
) -> SavedRows:
    """What the library loads: of the Hub, of a folder of files, or one file."""
    words: dict[str, Any] = {"name": asked.config, "split": asked.split, "revision": asked.revision}
    where = asked.name
    if path is not None:
        where = str(path.resolve())
        if path.is_file():
            if path.suffix not in READERS:
                raise BiremeError(
                    f"{path} cannot be read as rows: its name ends with none of {', '.join(READERS)}."
                )
            where, words["data_files"] = READERS[path.suffix], where
        elif files:
            where, words["data_files"] = READERS[files[0].suffix], [str(one) for one in files]
    datasets.disable_progress_bars()
    try:
        with _as_the_network_is(datasets):
            dataset: Any = datasets.load_dataset(where, streaming=asked.streaming, **words)
        if isinstance(dataset, dict):
            dataset = _one_of(dataset, asked.name, None)
        if asked.streaming:
            return rows_of_dataset(dataset, asked.name, asked.text, column, is_stream=True)
    except BiremeError:
        raise
    except Exception as error:  # of the network, of the Hub, of files: each comes as something else
        raise _failure(asked, path, error) from error
    kept = [Path(one["filename"]) for one in dataset.cache_files]
    return rows_of_dataset(dataset, asked.name, f"{asked.split} {len(dataset)} {_identity(kept)}", column)


@contextmanager
def _as_the_network_is(datasets: Any) -> Iterator[None]:
    """Where the Hub has no address here, have the library look at what it keeps: it would try for long."""
    hub: Any = importlib.import_module("huggingface_hub.constants")
    is_reached = bool(getproxies())  # which then finds the address
    with suppress(OSError):
        is_reached = is_reached or bool(socket.getaddrinfo(urlsplit(hub.ENDPOINT).hostname, 443))
    before = hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    try:
        if not is_reached:
            hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        yield
    finally:
        hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _one_of(found: dict[str, Any], origin: str, split: str | None) -> Any:
    """The split that was asked for, else the one to train on."""
    names = sorted(found)
    if (split or TRAINING) not in found:
        raise BiremeError(
            f"{origin} holds the datasets {', '.join(names)} and none named {split or TRAINING}. Say which "
            f"to take: {PREFIX}{origin},split={names[0]}."
        )
    return found[split or TRAINING]


def _identity(paths: "Iterator[Path] | list[Path]") -> str:
    words = sha256()
    for path in sorted(paths):
        status = path.stat()
        words.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="replace"))
    return words.hexdigest()


def _failure(asked: _Asked, path: Path | None, error: BaseException) -> BiremeError:
    if path is not None:
        wrong = broken_line(path) if path.suffix == ".jsonl" else None
        return wrong or BiremeError(f"The dataset in {path} cannot be read: {_reason(error)}.")
    chain: BaseException | None = error
    while chain is not None:
        if type(chain).__name__ in UNREACHED:
            return BiremeError(
                f"The dataset {asked.name} has not been loaded on this machine before, and the Hugging "
                f"Face Hub cannot be reached ({type(chain).__name__}). Run once where there is a network, "
                "or name a folder that has its files: hf:FOLDER."
            )
        chain = chain.__cause__ or chain.__context__
    return BiremeError(f"The dataset {asked.name} cannot be loaded: {_reason(error)}.")


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
