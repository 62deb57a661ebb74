"""The keys of a run file that name files and folders: made absolute, and kept short in a run's own folder.

A run that was begun must find what it began with wherever `bireme resume` is called. So its `run.toml` has
absolute paths, and for what lies in its own folder paths within that, which stay right when it is moved.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from bireme.train.run_file.run import RunFile
from bireme.train.run_file.text import toml_value


class _Place(NamedTuple):
    """A value with a path in it, in three parts."""

    before: str
    path: str
    after: str


FUNCTION = re.compile(r"((?:python:)?)(.+\.py)(:\w+)")
DATASET = re.compile(r"(hf:)([^,]+)(.*)")
MODULE = re.compile(r"(?:python:)?[A-Za-z_][\w.]*:\w+")


def _plain(text: str) -> _Place:
    return _Place("", text, "")


def _of_model(text: str) -> _Place | None:
    return _Place("hf:", text.removeprefix("hf:"), "") if text.startswith("hf:") else _of_function(text)


def _of_function(text: str) -> _Place | None:
    found = FUNCTION.fullmatch(text)
    return None if found is None else _Place(found[1], found[2], found[3])


def _of_data(text: str) -> _Place | None:
    found = FUNCTION.fullmatch(text) or DATASET.fullmatch(text)
    if found is not None:
        return _Place(found[1], found[2], found[3])
    return None if text == "stdlib" or MODULE.fullmatch(text) else _plain(text)


def _of_tokenizer(text: str) -> _Place | None:
    return None if text in ("bytes", "auto") else _plain(text)


DATA_SOURCE = ("data", "source")
PROFILES = ("plan", "profiles")

KEYS: dict[tuple[str, str], Callable[[str], _Place | None]] = {
    ("model", "source"): _of_model,
    ("model", "weights"): _plain,
    ("model", "loss"): _of_function,
    DATA_SOURCE: _of_data,
    ("data", "evaluation_source"): _of_data,
    ("data", "tokenizer"): _of_tokenizer,
    ("plan", "file"): _plain,
    ("memory", "disk"): _plain,
    ("cluster", "source"): _plain,
    ("log", "folder"): _plain,
}
"""Each key that may name a path, and how to find it in the value."""

HERE = "./"

MADE = ("log", "folder")
"""It need not be there. Of the others, what is not there is left as it was written: it may be no path."""


def with_absolute_paths(run: RunFile, base: Path) -> RunFile:
    """The run with the paths absolute that were written in the folder `base`."""

    def placed(key: tuple[str, str], text: str) -> str | None:
        found = _plainest(base.absolute() / Path(text).expanduser())
        return str(found) if key == MADE or found.exists() else None

    return _with_places(run, placed)


def _with_places(run: RunFile, placed: Callable[[tuple[str, str], str], str | None]) -> RunFile:
    """The run with each path as `placed` has it, those of mixtures, private data and profiles too."""

    def source(text: str) -> str:
        return _placed(DATA_SOURCE, text, placed) or text

    data, profiles = run.data, run.plan.profiles
    if data.mixture is not None:
        mixture = (one.model_copy(update={"source": source(one.source)}) for one in data.mixture)
        run = _with(run, "data", mixture=tuple(mixture))
    if data.private is not None:
        run = _with(run, "data", private={server: source(one) for server, one in data.private.items()})
    if profiles is not None:
        named = (text.partition("=") for text in profiles)
        found = tuple(f"{name}={placed(PROFILES, file) or file}" for name, _, file in named)
        run = _with(run, "plan", profiles=found)
    return _with_paths(run, placed)


def _with(run: RunFile, table: str, **values: object) -> RunFile:
    """The run with other values of some keys of a table."""
    return run.model_copy(update={table: getattr(run, table).model_copy(update=values)})


def _plainest(path: Path) -> Path:
    """The path without `..`, unless that leads elsewhere, as it does after a link to a folder."""
    plain = Path(os.path.normpath(path))
    return plain if plain.resolve() == path.resolve() else path


def with_paths_within(run: RunFile, folder: Path) -> RunFile:
    """The run with paths that begin with `./` for what lies in `folder`, which is its own."""
    inside = folder.resolve()

    def placed(key: tuple[str, str], text: str) -> str | None:
        path = Path(text)
        is_inside = key != MADE and path.is_absolute() and path.resolve().is_relative_to(inside)
        return f"{HERE}{path.resolve().relative_to(inside).as_posix()}" if is_inside else None

    return _with_paths(run, placed)


def settings_within(run: RunFile, folder: Path) -> list[str]:
    """A `table.key=value` for each path that is one within `folder`, where this run file lies."""

    def placed(_key: tuple[str, str], text: str) -> str | None:
        found = folder.absolute() / text
        return str(found) if text.startswith(HERE) and found.exists() else None

    changed = _with_paths(run, placed)
    return [
        f"{table}.{key}={toml_value(value)}"
        for table, key in KEYS
        if (value := getattr(getattr(changed, table), key)) != getattr(getattr(run, table), key)
    ]


_READ_BY_ALL = tuple(key for key in KEYS if key[0] in ("model", "data"))


def paths_for_all(run: RunFile) -> tuple[str, ...]:
    """The files and folders that all machines of a run read, if they are here: model, data and code, but not
    `data.private`.
    """
    found = dict[str, None]()

    def note(key: tuple[str, str], text: str) -> None:
        if key in _READ_BY_ALL and Path(text).is_absolute() and Path(text).exists():
            found[text] = None

    public = _with(run, "data", private=None)
    _with_places(public, note)
    return tuple(found)


def with_paths_of_machine(run: RunFile, here: Mapping[str, str]) -> RunFile:
    """The run with other paths for the files and folders that this machine has elsewhere."""
    return _with_places(run, lambda key, text: here.get(text) if key in _READ_BY_ALL else None)


def _with_paths(run: RunFile, placed: Callable[[tuple[str, str], str], str | None]) -> RunFile:
    """The run with each path as `placed` has it, or as it was where that is None."""
    for name, key in KEYS:
        text = getattr(getattr(run, name), key)
        found = None if text is None else _placed((name, key), text, placed)
        if found is not None:
            run = _with(run, name, **{key: found})
    return run


def _placed(
    key: tuple[str, str], text: str, placed: Callable[[tuple[str, str], str], str | None]
) -> str | None:
    """A value with its path as `placed` has it; None if it has none, or that is to stay."""
    place = KEYS[key](text)
    path = None if place is None else placed(key, place.path)
    return None if place is None or path is None else f"{place.before}{path}{place.after}"
