"""Reading the data files that are contracts: checked at the edge, and refused in one sentence.

A file holds either a frozen dataclass, field by field and a number `format`, or what a pydantic
model describes where people write in other words than the program thinks. Unknown keys are refused. What does
not fit becomes one `BiremeError` that names the file, the place, the value and the remedy.
"""

import json
import math
import re
import tomllib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

from annotated_types import DocInfo
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import PydanticCustomError

from bireme.errors import BiremeError, closest, system_errors
from bireme.files import read_text

Model = TypeVar("Model", bound=BaseModel)
_Noun = TypeVar("_Noun")

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, val_json_bytes="base64")
"""How a dataclass is read; the dataclasses within it are read in the same way."""


def read_dataclass(path: Path, kind: type[_Noun], *, number: int) -> _Noun:
    """The dataclass in a JSON file of that format number."""
    return as_dataclass(read_json_object(path), kind, number=number, source=str(path))


def get_ready(*kinds: type) -> None:
    """Build what checks documents of these dataclasses, which takes long: copies of this process have it."""
    for kind in kinds:
        _document(cast("Hashable", kind))


def as_dataclass(data: Mapping[str, Any], kind: type[_Noun], *, number: int, source: str) -> _Noun:
    """The dataclass that a JSON object holds, apart from its `format`; `source` is what to call it in an
    error.
    """
    rest = dict(data)
    if "format" not in rest:
        raise BiremeError(f"{source} lacks format, which must be {number}. Is it the right file?")
    found = rest.pop("format")
    if type(found) is not int or found != number:
        raise BiremeError(f"{source}: format is {shown(found)}; it must be {number}.")
    try:
        # From JSON, as lists and words become tuples and enums there although nothing else is converted.
        document = _document(cast("Hashable", kind)).model_validate_json(json.dumps({"noun": rest}))
    except ValidationError as error:
        raise BiremeError(_sentence(error, kind, source, is_within=True)) from None
    except BiremeError as error:
        raise BiremeError(f"{source}: {error}") from None
    noun: _Noun = document.noun
    return noun


@cache
def _document(kind: Hashable) -> Any:
    return create_model("Document", __config__=_STRICT, noun=(cast("Any", kind), ...))


Advise = Callable[[Sequence[str]], str]
"""Gives a hint for the path of a key that is not known; nothing if it has none."""


def _no_advice(_path: Sequence[str]) -> str:
    return ""


def plain(value: Any) -> Any:
    """A value as JSON can have it: null stands for a number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [*map(plain, value)] if isinstance(value, list | tuple) else value


_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case tuple() | list():
            return f"[{', '.join(map(toml_value, value))}]"
        case BaseModel():
            return toml_value(value.model_dump(exclude_none=True))
        case dict():
            return f"{{{', '.join(f'{_key(key)} = {toml_value(inner)}' for key, inner in value.items())}}}"
    # JSON writes strings as TOML reads them, but for one letter.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    """A key as TOML writes it: with quotes where it has other letters than a plain one."""
    return name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def read_json(path: Path, model: type[Model]) -> Model:
    """The JSON file at `path` as a `model`."""
    return validated(read_json_object(path), model, source=str(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """The one JSON object in the file at `path`, as it is written there."""
    text = read_text(path)
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
        raise BiremeError(f"{path} must hold one JSON object, not {shown(data)}.")
    return data


def read_toml(path: Path, model: type[Model], advise: Advise = _no_advice) -> Model:
    """The TOML file at `path` as a `model`."""
    return as_toml(read_text(path), model, str(path), advise)


def as_toml(text: str, model: type[Model], source: str, advise: Advise = _no_advice) -> Model:
    """TOML as a `model`; `source` is what to call it in an error."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise BiremeError(f"{source} is not TOML: {str(error).rstrip('.')}.") from None
    return validated(data, model, source=source, advise=advise)


@dataclass(frozen=True, slots=True)
class _JsonLines:
    """The objects of a log by the numbers of their lines, and the lines that nobody can read."""

    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    damaged: list[int] = field(default_factory=list)
    """Without those that a crash leaves: a last line without an end, blocks that did not reach the disk."""


def read_json_lines(path: Path, *, start: str) -> _JsonLines:
    """The log at `path`, an object a line, whatever a crash made of it.

    Lines end with a line feed and with nothing else. A line without one, at the end or right before a record
    of the kind `start`, is what a process left that was killed; it is in neither part of the result.
    """
    with system_errors(f"{path} cannot be read"):
        lines = path.read_bytes().split(b"\n")
    found, unsure = _JsonLines(), list[int]()
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


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BiremeError(f"The key {twice!r} is there twice. Leave out one of the two.")
    return found


def validated(
    data: Mapping[str, Any], model: type[Model], *, source: str, advise: Advise = _no_advice
) -> Model:
    """`data` as a `model`; `source` is what to call it in an error. `advise` is asked about unknown keys."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise BiremeError(_sentence(error, model, source, advise=advise)) from None


def _sentence(
    found: ValidationError,
    kind: type[Any],
    source: str,
    *,
    is_within: bool = False,
    advise: Advise = _no_advice,
) -> str:
    """The first thing that is wrong."""
    # A misspelt key is also a missing one: the unknown word is what the reader can find.
    error = min(found.errors(), key=lambda one: one["type"] not in _UNKNOWN)
    # Tags of unions appear in the path in their own words; a reader of the file knows only keys and places.
    whole = error["loc"][1:] if is_within else error["loc"]
    path = [part for part in whole if isinstance(part, int) or not part.startswith("<")]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    if error["type"] == "missing":
        meaning = _meaning(_table_at(path[:-1], kind), str(path[-1]))
        return f"{source} lacks {place}{f' ({meaning})' if meaning else ''}."
    if error["type"] == _REFUSED:
        return f"{source}: {place}: {error['msg']}"
    if error["type"] in _UNKNOWN:
        known = _types(_table_at(path[:-1], kind))
        hint = advise([str(part) for part in path]) or closest(str(path[-1]), known)
        return f"{source} has an unknown key {place!r}. {hint}"
    expected = re.sub(r"^(?:Value error, |\w+ should be )", "be ", error["msg"])
    expected = re.sub(r"^\w+ should ", "", expected)
    return f"{source}: {place} is {shown(error['input'])}; it must {expected}."


def refused(sentence: str) -> PydanticCustomError:
    """What a validator raises to refuse a value with a sentence of its own."""
    return PydanticCustomError(_REFUSED, "{sentence}", {"sentence": sentence})


_REFUSED = "refused"

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""What an unknown key is called, in a model and in a dataclass."""


def _table_at(path: Sequence[str | int], table: type[Any]) -> type[Any]:
    """The table inside a document, as far as the path can be followed."""
    for key in (part for part in path if isinstance(part, str)):
        inner = next(_tables_in(_types(table).get(key)), None)
        if inner is None:
            break
        table = inner
    return table


def _tables_in(annotation: Any) -> Iterator[type[Any]]:
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        yield annotation
    for part in get_args(annotation):
        yield from _tables_in(part)


def _types(table: type[Any]) -> dict[str, Any]:
    """The keys of a table and the types of their values."""
    if issubclass(table, BaseModel):
        return {name: field.annotation for name, field in table.model_fields.items()}
    return get_type_hints(table, include_extras=True)


def _meaning(table: type[Any], key: str) -> str:
    """What a key means, where that is said."""
    if issubclass(table, BaseModel):
        return (table.model_fields[key].description if key in table.model_fields else None) or ""
    words = (part for part in get_args(_types(table).get(key)) if isinstance(part, DocInfo))
    return next((word.documentation for word in words), "")


def shown(value: object) -> str:
    """A value as a file has it, cut off where it is long."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
