"""Run files as text: a complete one for the record of a run, a template, and what other programs call keys.

What is written is read back as it was.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from textwrap import wrap
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bireme.documents import toml_value
from bireme.train.run_file.tables import Tables

# What there is to say about every key of a run file, read from the tables themselves.
#
# Texts for people are made of it: the file of `bireme init` and the reference. So neither can differ from
# what is accepted.


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


def tables_of_keys(model: type[BaseModel] = Tables, beginning: str = "") -> Iterator[TableOfKeys]:
    """All tables, each nested table after its parent."""
    for name, field in model.model_fields.items():
        inner = _table_class(field.annotation)
        if inner is not None:
            yield TableOfKeys(f"{beginning}{name}", _described(field), _keys(inner))
            yield from tables_of_keys(inner, f"{beginning}{name}.")


@cache
def known_keys() -> tuple[str, ...]:
    """All keys of a run file as `table.key`, in the order of the file."""
    return tuple(f"{table.name}.{key.name}" for table in tables_of_keys() for key in table.keys)


@cache
def _keys(model: type[BaseModel]) -> tuple[Key, ...]:
    whole = model.model_json_schema()
    schema, inner = whole["properties"], whole.get("$defs", {})
    return tuple(
        Key(
            name,
            _described(field).removesuffix("."),
            _allowed(_not_null(schema[name]), inner),
            tuple(_not_null(schema[name]).get("enum", ())),
            field.default,
            field.examples[0] if field.examples else None,
        )
        for name, field in model.model_fields.items()
        if _table_class(field.annotation) is None
    )


def _described(field: FieldInfo) -> str:
    """The description of a key or a table, on one line."""
    return " ".join((field.description or "").split())


def _table_class(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a key that is set; a single word that it may be is a list of one choice."""
    found: dict[str, Any] = next(
        choice for choice in schema.get("anyOf", [schema]) if choice.get("type") != "null"
    )
    return found | {"enum": [found["const"]]} if "const" in found else found


def _allowed(schema: dict[str, Any], inner: dict[str, Any]) -> str:
    """Which values a key may have, in words, from its JSON schema; `inner` has those of tables in lists."""
    if choices := schema.get("enum"):
        return ", ".join(map(str, choices))
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


WIDTH = 100


COMPLETE = """\
# A run of Bireme, with the value of every key. `bireme train` with this file repeats the run.
format = 1
"""

BEGINNING = """\
# A run file for `bireme train`. Every key is commented out and shows its default, so the unchanged file
# is the demonstration: a small GPT learns the sources of Python's standard library, byte by byte.
# To set a key, remove the # before it (not before its explanation) and change the value.
# On the command line use --set training.steps=1000. docs/run-file.md lists all keys in tables.
format = 1
"""


def to_toml(run: Tables) -> str:
    """A complete run file: every key with its value; those that are not set are named in a comment."""
    lines = [COMPLETE]
    for table in tables_of_keys():
        values: BaseModel = run
        for name in table.name.split("."):
            values = getattr(values, name)
        lines.append(f"[{table.name}]")
        lines += [_assignment(key.name, getattr(values, key.name)) for key in table.keys]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def commented_toml() -> str:
    """A run file that says nothing, with every key in a comment: its meaning, its words, its default.

    A line that begins with a # and a letter is a key. Without the # it is right as it is, except where
    it needs another model or optimizer. Keys that are not set have an example there.
    """
    lines = [BEGINNING]
    for table in tables_of_keys():
        lines += [f"# {table.meaning}", f"[{table.name}]"]
        for key in table.keys:
            lines += ["", *_explained(key)]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _assignment(name: str, value: Any) -> str:
    return f"# {name} is not set" if value is None else f"{name} = {toml_value(value)}"


def _explained(key: Key) -> Iterator[str]:
    choices = f" One of {', '.join(key.choices)}." if key.choices else ""
    meaning = f"{key.meaning}.{choices}"
    yield from wrap(meaning, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
    if key.default is None:
        yield "# Not set. For example:"
    yield f"#{key.name} = {toml_value(key.example if key.default is None else key.default)}"


# The reference of the run file, `docs/run-file.md`, made from the tables themselves.


def reference_markdown() -> str:
    """All of `docs/run-file.md`."""
    lines = [_resource("reference.md")]
    for table in tables_of_keys():
        lines += [f"## [{table.name}]", "", table.meaning, "", "| key | default | allowed | meaning |"]
        lines += ["|---|---|---|---|", *map(_row, table.keys), *_more(table.name), ""]
    return "\n".join(lines[:-1]) + "\n"


def _row(key: Key) -> str:
    default = "not set" if key.default is None else f"`{toml_value(key.default)}`"
    cells = (f"`{key.name}`", default, key.allowed, key.meaning)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _more(table: str) -> Iterator[str]:
    """Where to read on about a table."""
    further = {
        "data": "[data.md](data.md) explains sources, mixtures, conversations and packing, "
        "[private-data.md](private-data.md) private samples.",
        "plan": "[plan.md](plan.md) explains planning, [schedules.md](schedules.md) the schedules.",
        "balance": "[balance.md](balance.md) explains shares.",
        "links": "[slow-links.md](slow-links.md) explains codecs, [security.md](security.md) encryption.",
        "memory": "[offloading.md](offloading.md) explains offloading and shared optimizers.",
        "cluster": "[cluster.md](cluster.md) explains cluster files.",
        "elastic": "[machines.md](machines.md#phases) explains phases.",
        "sync": "[averaging.md](averaging.md) explains the modes, [replicas.md](replicas.md) quorum, "
        "[slow-links.md](slow-links.md) codecs of sums.",
    }
    if table in further:
        yield from ("", further[table])


# What other programs call the keys of a run file, and which key means the same here.
#
# It is asked only about names that are no keys. Answers are hints for people; nothing is renamed for them.


def entries_in(name: str) -> list[str]:
    """The entries of a text file beside this one: a line each, with the lines below it that are indented."""
    return [entry for entry in re.split(r"\n(?=\S)", _resource(name)) if entry[0] != "#"]


def _resource(name: str) -> str:
    return files("bireme.train.run_file").joinpath(name).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Synonyms:
    """Names that mean the same as some keys, or as none, and a sentence on them, empty if there is none."""

    names: tuple[str, ...]
    keys: tuple[str, ...]
    more: str


def synonyms() -> list[Synonyms]:
    """All of them."""
    return [*map(_read, entries_in("other_names.txt"))]


def _read(entry: str) -> Synonyms:
    words, _, more = entry.partition("|")
    keys, _, names = words.partition(":")
    return Synonyms(tuple(names.split()), tuple(keys.split()), " ".join(more.split()))


def advice(path: Sequence[str]) -> str:
    """A hint for a key that is not known: by its name elsewhere, or in another table; empty if there is none.

    `path` is the table, if it is in one, and the name.
    """
    words = [part.lower().replace("-", "_") for part in path if not part.isdigit()]
    for name in (".".join(words), words[-1], words[0]):
        if name in _by_name():
            known = _by_name()[name]
            return " ".join(filter(None, (_asked(known.keys), known.more)))
    return _asked([known for known in known_keys() if known.rpartition(".")[2] == words[-1]])


def _asked(keys: Sequence[str]) -> str:
    return f"Did you mean {' or '.join(map(repr, keys))}?" if keys else ""


@cache
def _by_name() -> dict[str, Synonyms]:
    return {name: one for one in synonyms() for name in one.names}
