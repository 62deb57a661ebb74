"""Reading the data files that are contracts: checked at the edge, and refused in one sentence.

A file's layout is a pydantic model with `extra="forbid"`. What does not fit it becomes one `BiremeError`
that names the file, the place, the value and the remedy.
"""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bireme.errors import BiremeError, closest

__all__ = ["Advise", "read_json", "read_json_object", "read_toml", "validated"]

Model = TypeVar("Model", bound=BaseModel)

Advise = Callable[[Sequence[str]], str]
"""Gives a hint for the path of a key that is not known; nothing if it has none."""


def _no_advice(_path: Sequence[str]) -> str:
    return ""


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


def read_toml(path: Path, model: type[Model], advise: Advise = _no_advice) -> Model:
    """The TOML file at `path` as a `model`."""
    text = _text(path)
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise BiremeError(f"{path} is not TOML: {str(error).rstrip('.')}.") from None
    return validated(data, model, source=str(path), advise=advise)


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


def validated(
    data: Mapping[str, Any], model: type[Model], *, source: str, advise: Advise = _no_advice
) -> Model:
    """`data` as a `model`; `source` is what to call it in an error. `advise` is asked about unknown keys."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # A misspelt key is also a missing one: the unknown word is what the reader can find.
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        raise BiremeError(_sentence(first, model, source, advise)) from None


def _sentence(error: ErrorDetails, model: type[BaseModel], source: str, advise: Advise) -> str:
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
            words = [str(part) for part in path]
            return f"{source} has an unknown key {place!r}. {advise(words) or closest(words[-1], known)}"
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
