"""`--set table.key=value`: sets single keys of a document from the command line.

A setting is checked by itself first, so that a mistake is told with the setting it is in, in the sentence
that a file would get. Which tables and keys there are is read from the pydantic model of the document.
"""

import datetime
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from bireme.documents import Advise, validated
from bireme.errors import BiremeError, closest

__all__ = ["with_settings"]


def with_settings(
    data: Mapping[str, Any], texts: Sequence[str], model: type[BaseModel], advise: Advise
) -> dict[str, Any]:
    """`data`, a document that fits `model`, with each `table.key=value` of `texts` put in, in this order.

    A value is read as TOML has it, and is taken as a string where it is none. An empty one takes the key
    out of the document, so that its default holds. `advise` is asked about keys that are not known.
    """
    merged: dict[str, Any] = {key: _copied(value) for key, value in data.items()}
    for text in texts:
        setting = _parsed(text, model, advise)
        if setting.is_removal:
            _remove(merged, setting.path)
            continue
        alone: dict[str, Any] = {}
        _put(alone, setting.path, setting.value)
        validated(alone, model, source=f"--set {text}")
        _put(merged, setting.path, setting.value)
    return merged


@dataclass(frozen=True, slots=True)
class _Setting:
    """The keys that lead to a value, and the value; with `is_removal` there is none."""

    path: tuple[str, ...]
    value: Any
    is_removal: bool


def _parsed(text: str, model: type[BaseModel], advise: Advise) -> _Setting:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of the command line that are no text, which no file could hold
        raise BiremeError(f"--set {text!a} is not UTF-8. Give the value in UTF-8.") from None
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        missing = "key before the equals sign" if equals else "equals sign"
        raise BiremeError(
            f"--set {text} is not of the form table.key=value, such as {_key_names(model)[0]}=…. The "
            f"{missing} is missing."
        )
    path = tuple(name.split("."))
    _check_known(path, model, text, advise)
    return _Setting(path, _value(value), is_removal=not value.strip())


def _value(text: str) -> Any:
    try:
        # In a table on one line a comment, a second value or a stray bracket is no TOML, but a string.
        found = tomllib.loads(f"table = {{ value = {text} }}")["table"]
    except (ValueError, RecursionError):
        return text
    value = found.get("value")
    is_date = isinstance(value, datetime.date | datetime.time)
    return text if len(found) > 1 or is_date else value


def _check_known(path: tuple[str, ...], model: type[BaseModel], text: str, advise: Advise) -> None:
    name, names = ".".join(path), _key_names(model)
    if name in names:
        return
    within = [known for known in names if known.startswith(f"{name}.")]
    if within:
        raise BiremeError(f"--set {text} names a whole table. Set one of its keys, such as {within[0]}=….")
    raise BiremeError(f"--set {text} has an unknown key {name!r}. {advise(path) or _nearest(path, names)}")


def _nearest(path: tuple[str, ...], names: Sequence[str]) -> str:
    """A key of a like name in this table, else a table."""
    *table, _ = path
    beginning = "".join(f"{part}." for part in table)
    beside = [known for known in names if table and known.startswith(beginning)]
    if beside:
        return closest(".".join(path), beside)
    return closest(path[0], {known.split(".")[0] for known in names})


def _key_names(model: type[BaseModel]) -> list[str]:
    """All keys that can be set, as they are written: `table.key`; those without a table last."""
    return sorted(_walk(model, ""), key=lambda name: "." not in name)


def _walk(model: type[BaseModel], beginning: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _walk(inner, f"{beginning}{name}.")
        else:
            yield f"{beginning}{name}"


def _copied(value: Any) -> Any:
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _put(document: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        document = document.setdefault(key, {})
    document[path[-1]] = value


def _remove(document: dict[str, Any], path: tuple[str, ...]) -> None:
    for key in path[:-1]:
        document = document.get(key, {})
    document.pop(path[-1], None)
