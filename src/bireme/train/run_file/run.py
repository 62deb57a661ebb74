"""`RunFile`: a whole run file, checked; how it is read together with `--set` options, and the paths in it.

The same object comes of a file, of settings alone and of Python. A few defaults follow from the model
(`defaults.py`).
"""

import datetime
import math
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import model_validator

from bireme.documents import read_toml, toml_value, validated
from bireme.errors import BiremeError, closest
from bireme.train.run_file.checks import check_together
from bireme.train.run_file.defaults import with_model_defaults
from bireme.train.run_file.tables import Tables
from bireme.train.run_file.text import advice, known_keys

# `--set table.key=value`: sets single keys of a document from the command line.
#
# A setting is checked by itself first, so that a mistake is told with the setting it is in, in the sentence
# that a file would get. Which tables and keys there are is read from the pydantic model of the document.


_INSTEAD = {
    ("training", "steps"): ("training", "epochs"),
    ("training", "epochs"): ("training", "steps"),
}
"""Keys of which a setting replaces the other one, in the document and in settings before it."""


def with_settings(data: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """`data`, tables of a run file, with each `table.key=value` of `texts` put in, in this order.

    A value is read as TOML has it, and is taken as a string where it is none. An empty one takes the key
    out of the document, so that its default holds.
    """
    merged = deepcopy(dict(data))
    for text in texts:
        path, value = _parsed(text)
        if value is None:
            _remove(merged, path)
            continue
        alone: dict[str, Any] = {}
        _put(alone, path, value)
        validated(alone, Tables, source=f"--set {text}", advise=advice)
        _put(merged, path, value)
        if path in _INSTEAD:
            _remove(merged, _INSTEAD[path])
    return merged


def _parsed(text: str) -> tuple[tuple[str, ...], Any]:
    """The keys that lead to a value, and the value; None takes the key out."""
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of the command line that are no text, which no file could hold
        raise BiremeError(f"--set {text!a} is not UTF-8. Give the value in UTF-8.") from None
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        missing = "key before the equals sign" if equals else "equals sign"
        raise BiremeError(
            f"--set {text} is not of the form table.key=value, such as {known_keys()[0]}=…. The "
            f"{missing} is missing."
        )
    path = tuple(name.split("."))
    _check_known(path, text)
    return path, _value(value) if value.strip() else None


def _value(text: str) -> Any:
    try:
        # In a table on one line a comment, a second value or a stray bracket is no TOML, but a string.
        found = tomllib.loads(f"table = {{ value = {text} }}")["table"]
    except (ValueError, RecursionError):
        return text
    value = found.get("value")
    is_date = isinstance(value, datetime.date | datetime.time)
    return text if len(found) > 1 or is_date else value


def _check_known(path: tuple[str, ...], text: str) -> None:
    name, names = ".".join(path), (*known_keys(), "format")
    if name in names:
        return
    within = [known for known in names if known.startswith(f"{name}.")]
    if within:
        raise BiremeError(f"--set {text} names a whole table. Set one of its keys, such as {within[0]}=….")
    raise BiremeError(f"--set {text} has an unknown key {name!r}. {advice(path) or _nearest(path, names)}")


def _nearest(path: tuple[str, ...], names: Sequence[str]) -> str:
    """A key of a like name in this table, else a table."""
    *table, _ = path
    beginning = "".join(f"{part}." for part in table)
    beside = [known for known in names if table and known.startswith(beginning)]
    if beside:
        return closest(".".join(path), beside)
    return closest(path[0], {known.split(".")[0] for known in names})


def _put(document: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        document = document.setdefault(key, {})
    document[path[-1]] = value


def _remove(document: dict[str, Any], path: tuple[str, ...]) -> None:
    for key in path[:-1]:
        document = document.get(key, {})
    document.pop(path[-1], None)


_ROUNDING = 1e-6
"""Steps that a number of epochs in decimals may be too large by."""


class RunFile(Tables):
    """What a run is to do. Its tables are attributes, their keys are attributes of theirs.

    To make one that contradicts itself is a `BiremeError`. `RunFile()` is the demonstration.
    """

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_together(self)
        return self

    def with_keys(self, table: str, **values: object) -> Self:
        """The run with other values of some keys of a table, which are not checked."""
        return self.model_copy(update={table: getattr(self, table).model_copy(update=values)})

    def counted(self, num_samples: int) -> "RunFile":
        """The run with the steps that its epochs over the samples take; itself if it has no epochs."""
        epochs, size = self.training.epochs, self.training.batch_size
        if epochs is None:
            return self
        steps = max(1, math.ceil(epochs * num_samples / size - _ROUNDING))
        found = self.with_keys("training", steps=steps, epochs=None)
        check_together(found)
        return found

    def has_copies(self, width: int) -> bool:
        """Whether a run of so many replicas has second copies. By default it has them if its replica may die,
        and no other replica has its state.
        """
        copies = self.memory.copies
        return bool(copies) if copies is not None else self.sync.mode == "quorum" and width == 1


def load_run_file(path: Path | None = None, sets: Sequence[str] = ()) -> RunFile:
    """The run file at `path`, or an empty one, with each `table.key=value` of `sets` in its place.

    The last of several settings of a key counts. Every mistake is one `BiremeError` that names the file or
    the setting it is in.
    """
    return _load(path, sets, RunFile, with_model_defaults)


def load_tables(path: Path | None, sets: Sequence[str]) -> Tables:
    """The same for a use of few keys: each is checked by itself alone, and may contradict another one."""
    return _load(path, sets, Tables, lambda tables: tables)


_Loaded = TypeVar("_Loaded", bound=Tables)


def _load(
    path: Path | None, sets: Sequence[str], kind: type[_Loaded], complete: Callable[[_Loaded], _Loaded]
) -> _Loaded:
    given = {}
    if path is not None:
        _check_name(path)
        # Keys that the file leaves out must stay out: some defaults give way to other keys.
        given = read_toml(path, Tables, advice).model_dump(exclude_unset=True, exclude_none=True)
    merged = with_settings(given, sets)
    try:
        return complete(validated(merged, kind, source="The run"))
    except BiremeError as error:
        settings = " ".join(f"--set {text}" for text in sets)
        sources = [source for source in (str(path) if path is not None else "", settings) if source]
        raise BiremeError(f"{' with '.join(sources)}: {error}") from None


def _check_name(path: Path) -> None:
    """Refuse what people may give in place of a run file."""
    if path.suffix in (".yaml", ".yml", ".json"):
        raise BiremeError(
            f"{path} is not a run file: run files are TOML. `bireme init {path.stem}.toml` writes one. "
            "To train by a configuration of axolotl or LLaMA-Factory, put --from before its name."
        )
    if path.is_dir():
        raise BiremeError(
            f"{path} is a folder, not a run file. Name a .toml file, or continue the run that has this "
            f"folder with `bireme resume {path}`."
        )
    if not path.exists():
        if re.match(r"(gpt|hf|python):|.*\.py:", str(path)):
            raise BiremeError(
                f"{path} is a model, not a run file. Name the model in the key model.source: --set "
                f"model.source={shlex.quote(str(path))}"
            )
        raise BiremeError(f"There is no file {path}. `bireme init {path}` writes a run file.")


# The keys of a run file that name files and folders: made absolute, and kept short in a run's own folder.
#
# A run that was begun must find what it began with wherever `bireme resume` is called. So its `run.toml` has
# absolute paths, and for what lies in its own folder paths within that, which stay right when it is moved.


_PLAIN = re.compile(r"()(.+)()", re.DOTALL)
_FOLDER = re.compile(r"(hf:)(.*)()", re.DOTALL)
_FUNCTION = re.compile(r"((?:python:)?)(.+\.py)(:\w+)")
_DATASET = re.compile(r"(hf:)([^,]+)(.*)")
_FILE = re.compile(r"()(?!stdlib\Z|(?:python:)?[A-Za-z_][\w.]*:\w+\Z)(.+)()", re.DOTALL)
_TOKENIZER = re.compile(r"()(?!(?:bytes|auto)\Z)(.+)()", re.DOTALL)

Place = Callable[[tuple[str, str], str], str | None]
"""Gives a new path for the path of a key; None leaves it as it is."""

DATA_SOURCE = ("data", "source")
PROFILES = ("plan", "profiles")

KEYS = {
    ("model", "source"): (_FOLDER, _FUNCTION),
    ("model", "weights"): (_PLAIN,),
    ("model", "loss"): (_FUNCTION,),
    DATA_SOURCE: (_FUNCTION, _DATASET, _FILE),
    ("data", "evaluation_source"): (_FUNCTION, _DATASET, _FILE),
    ("data", "tokenizer"): (_TOKENIZER,),
    ("plan", "file"): (_PLAIN,),
    ("memory", "disk"): (_PLAIN,),
    ("cluster", "source"): (_PLAIN,),
    ("log", "folder"): (_PLAIN,),
}
"""Each key that may name a path, and the forms of a value with a path: what is before it, the path, what is
after it. The first form that fits counts.
"""

HERE = "./"

MADE = ("log", "folder")
"""It need not be there. Of the others, what is not there is left as it was written: it may be no path."""


def with_absolute_paths(run: RunFile, base: Path) -> RunFile:
    """The run with the paths absolute that were written in the folder `base`."""

    def placed(key: tuple[str, str], text: str) -> str | None:
        found = _plainest(base.absolute() / Path(text).expanduser())
        return str(found) if key == MADE or found.exists() else None

    return _with_places(run, placed)


def _with_places(run: RunFile, placed: Place) -> RunFile:
    """The run with each path as `placed` has it, those of mixtures, private data and profiles too."""

    def source(text: str) -> str:
        return _placed(DATA_SOURCE, text, placed) or text

    data, profiles = run.data, run.plan.profiles
    if data.mixture is not None:
        mixture = (one.model_copy(update={"source": source(one.source)}) for one in data.mixture)
        run = run.with_keys("data", mixture=tuple(mixture))
    if data.private is not None:
        run = run.with_keys("data", private={server: source(one) for server, one in data.private.items()})
    if profiles is not None:
        named = (text.partition("=") for text in profiles)
        found = tuple(f"{name}={placed(PROFILES, file) or file}" for name, _, file in named)
        run = run.with_keys("plan", profiles=found)
    return _with_paths(run, placed)


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

    public = run.with_keys("data", private=None)
    _with_places(public, note)
    return tuple(found)


def with_paths_of_machine(run: RunFile, here: Mapping[str, str]) -> RunFile:
    """The run with other paths for the files and folders that this machine has elsewhere."""
    return _with_places(run, lambda key, text: here.get(text) if key in _READ_BY_ALL else None)


def _with_paths(run: RunFile, placed: Place) -> RunFile:
    """The run with each path as `placed` has it, or as it was where that is None."""
    for name, key in KEYS:
        text = getattr(getattr(run, name), key)
        found = None if text is None else _placed((name, key), text, placed)
        if found is not None:
            run = run.with_keys(name, **{key: found})
    return run


def _placed(key: tuple[str, str], text: str, placed: Place) -> str | None:
    """A value with its path as `placed` has it; None if it has none, or that is to stay."""
    found = next(filter(None, (form.fullmatch(text) for form in KEYS[key])), None)
    path = None if found is None else placed(key, found[2])
    return None if found is None or path is None else f"{found[1]}{path}{found[3]}"
