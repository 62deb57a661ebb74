"""What there is to say about every key of a run file, read from the tables themselves.

Texts for people are made of it: the file of `bireme init` and the reference. So neither can differ from
what is accepted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from bireme.train.run_file.tables import Tables

__all__ = ["Key", "TableOfKeys", "tables_of_keys"]


@dataclass(frozen=True, slots=True)
class Key:
    """A key: what it means, which values it may have, what it is if it is left out.

    `choices` are the words it may be, where only some are right. `default` is None where it is then not
    set; `example` is a value for that case.
    """

    name: str
    meaning: str
    allowed: str
    choices: tuple[str, ...]
    default: Any
    example: Any


@dataclass(frozen=True, slots=True)
class TableOfKeys:
    """A table by its name in the file, what it is about, and its keys in the order of the file."""

    name: str
    meaning: str
    keys: tuple[Key, ...]


def tables_of_keys() -> tuple[TableOfKeys, ...]:
    """All tables, each nested table after its parent."""
    return tuple(_tables(Tables, ""))


def _tables(model: type[BaseModel], beginning: str) -> Iterator[TableOfKeys]:
    for name, field in model.model_fields.items():
        inner = _table_class(field.annotation)
        if inner is not None:
            yield TableOfKeys(f"{beginning}{name}", field.description or "", _keys(inner))
            yield from _tables(inner, f"{beginning}{name}.")


def _keys(model: type[BaseModel]) -> tuple[Key, ...]:
    whole = model.model_json_schema()
    schema, inner = whole["properties"], whole.get("$defs", {})
    return tuple(
        Key(
            name,
            field.description or "",
            _allowed(_not_null(schema[name]), inner),
            tuple(_not_null(schema[name]).get("enum", ())),
            field.default,
            field.examples[0] if field.examples else None,
        )
        for name, field in model.model_fields.items()
        if _table_class(field.annotation) is None
    )


def _table_class(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """What a key is where it is set at all."""
    found: dict[str, Any] = next(
        choice for choice in schema.get("anyOf", [schema]) if choice.get("type") != "null"
    )
    return found


def _allowed(schema: dict[str, Any], inner: dict[str, Any]) -> str:
    """Which values a key may have, in words, from its JSON schema; `inner` has those of tables in lists."""
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    match schema["type"]:
        case "boolean":
            return "true, false"
        case "integer":
            return f"whole number, {_range(schema)}"
        case "number":
            return f"number, {_range(schema)}"
        case "object":
            return "table of SERVER = source"
        case "array" if "prefixItems" not in schema:
            table = schema.get("items", {}).get("$ref")
            return (
                "list of texts" if table is None else f"list of {{{_keys_of(inner[table.split('/')[-1]])}}}"
            )
        case "array":
            places = schema["prefixItems"]
            return f"{len(places)} numbers, {_range(places[0])}"
    return "text"


def _keys_of(table: dict[str, Any]) -> str:
    """The keys of a table in a list, such as `source = text, weight = number`."""
    words = {"string": "text"}
    types = {name: _not_null(one)["type"] for name, one in table["properties"].items()}
    return ", ".join(f"{name} = {words.get(kind, kind)}" for name, kind in types.items())


def _range(schema: dict[str, Any]) -> str:
    if "minimum" in schema and "maximum" in schema:
        return f"{_number(schema['minimum'])} to {_number(schema['maximum'])}"
    least = f"from {_number(schema['minimum'])}" if "minimum" in schema else ""
    above = f"above {_number(schema['exclusiveMinimum'])}" if "exclusiveMinimum" in schema else ""
    most = f"to {_number(schema['maximum'])}" if "maximum" in schema else ""
    below = f"below {_number(schema['exclusiveMaximum'])}" if "exclusiveMaximum" in schema else ""
    return ", ".join(part for part in (least, above, most, below) if part)


def _number(value: float) -> str:
    powers = {2**power: f"2^{power}" for power in (24, 31, 63)}
    whole = int(value)
    return powers.get(whole, f"{whole:_}") if whole == value else f"{value:g}"
