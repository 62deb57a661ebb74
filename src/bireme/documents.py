"""Reading the data files that are contracts: checked at the edge, and refused in one sentence.

A file's layout is a pydantic model with `extra="forbid"`. What does not fit it becomes one `BiremeError`
that names the file, the place, the value and the remedy.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bireme.errors import BiremeError, closest

__all__ = ["JsonLines", "read_json", "read_json_lines", "read_json_object", "read_toml", "validated"]

Model = TypeVar("Model", bound=BaseModel)


def read_json(path: Path, model: type[Model]) -> Model:
    """The JSON file at `path` as a `model`."""
    return validated(read_json_object(path), model, source=str(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """The one JSON object in the file at `path`, as it stands there."""
    text = _text(path)
    try:
        data = json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise BiremeError(
            f"{path} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}."
        ) from None
    except BiremeError as error:
        raise BiremeError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise BiremeError(f"{path} is not JSON that can be read: {error}.") from None
    if not isinstance(data, dict):
        raise BiremeError(f"{path} must hold one JSON object, not {_shown(data)}.")
    return data


def read_toml(path: Path, model: type[Model]) -> Model:
    """The TOML file at `path` as a `model`."""
    text = _text(path)
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise BiremeError(f"{path} is not TOML: {str(error).rstrip('.')}.") from None
    return validated(data, model, source=str(path))


@dataclass(frozen=True, slots=True)
class JsonLines:
    """The objects of a log by the numbers of their lines, and the lines that nobody can read."""

    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    damaged: list[int] = field(default_factory=list)
    """Without those that a crash leaves: a last line without an end, blocks that did not reach the disk."""


def read_json_lines(path: Path, *, start: str) -> JsonLines:
    """The log at `path`, an object a line, whatever a crash made of it.

    Lines end with a line feed and with nothing else. A line without one, at the end or right before a record
    of the kind `start`, is what a process left that was killed; it is in neither part of the result.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise BiremeError(f"{path} cannot be read: {error.strerror or error}.") from error
    found, unsure = JsonLines(), list[int]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _record(line)
        if record is None:
            if b"\0" not in line:
                unsure.append(number)
            continue
        killed = unsure[-1:] if record.get("kind") == start else []
        found.damaged.extend(one for one in unsure if one not in killed)
        unsure.clear()
        found.records[number] = record
    found.damaged.extend(unsure[:-1])
    return found


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise BiremeError(f"There is no file {path}.") from None
    except OSError as error:
        raise BiremeError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise BiremeError(f"{path} cannot be read: {error}.") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BiremeError(f"The key {twice!r} stands there twice. Leave out one of the two.")
    return found


def validated(data: Mapping[str, Any], model: type[Model], *, source: str) -> Model:
    """`data` as a `model`; `source` is what to call it in an error."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # A misspelt key is also a missing one: the unknown word is what the reader can find.
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        raise BiremeError(_sentence(first, model, source)) from None


def _sentence(error: ErrorDetails, model: type[BaseModel], source: str) -> str:
    # Tags of unions appear in the path in their own words; a reader of the file knows only keys and places.
    path = [part for part in error["loc"] if isinstance(part, int) or not part.startswith("<")]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    match error["type"]:
        case "missing":
            field = _table_at(path[:-1], model).model_fields.get(str(path[-1]))
            meaning = f" ({field.description})" if field is not None and field.description else ""
            return f"{source} lacks {place}{meaning}."
        case "extra_forbidden":
            known = _table_at(path[:-1], model).model_fields
            return f"{source} has an unknown key {place!r}. {closest(str(path[-1]), known)}"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{source}: {place} is {_shown(error['input'])}; it must be {message}."


def _table_at(path: Sequence[str | int], model: type[BaseModel]) -> type[BaseModel]:
    """The model of a table inside a document, as far as the path can be followed."""
    for key in (part for part in path if isinstance(part, str)):
        field = model.model_fields.get(key)
        inner = None if field is None else next(_models_in(field.annotation), None)
        if inner is None:
            break
        model = inner
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _shown(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
