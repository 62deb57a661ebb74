"""Run files as text: a complete one for the record of a run, and a template with all keys commented out.

What is written is read back as it was.
"""

import json
import re
from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from pydantic import BaseModel

from bireme.train.run_file.keys import Key, tables_of_keys
from bireme.train.run_file.tables import Tables

__all__ = ["commented_toml", "to_toml", "toml_value"]

WIDTH = 100

BARE = re.compile(r"[A-Za-z0-9_-]+")

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
    it needs another model or optimiser. Keys that are not set have an example there.
    """
    lines = [BEGINNING]
    for table in tables_of_keys():
        lines += [f"# {table.meaning}", f"[{table.name}]"]
        for key in table.keys:
            lines += ["", *_explained(key)]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


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
    return name if BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _assignment(name: str, value: Any) -> str:
    return f"# {name} is not set" if value is None else f"{name} = {toml_value(value)}"


def _explained(key: Key) -> Iterator[str]:
    choices = f" One of {', '.join(key.choices)}." if key.choices else ""
    meaning = f"{key.meaning}.{choices}"
    yield from wrap(meaning, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
    if key.default is None:
        yield "# Not set. For example:"
    yield f"#{key.name} = {toml_value(key.example if key.default is None else key.default)}"
