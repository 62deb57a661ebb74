"""Verbs whose options are described in their docstrings, as commands for typer.

A docstring has sections after its text: `Arguments:`, `Options:`, and panels of options under their titles. A
line of a section describes a parameter of the function: its name; in brackets, the words of the command line
if they differ from the name, and the name of the value; and the help text.

    Options:
        time_limit (SECONDS): Time limit of the search.
        output (--output, -o FILE.json): Write the plan to a file.

Parameters that several verbs share are described once, in the docstring of `options`. What a parameter's type
has besides, `Annotated[int, {"min": 1}]`, goes to typer as it is; `words` stand for `{}` in the help text.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, get_args, get_origin

import typer

from bireme.cli import options

_SECTION = re.compile(r"^(\S.*):$", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+)(?: \((.+?)\))?: ((?:.|\n(?:     |\n))+)", re.MULTILINE)
_WORDS = re.compile(r"((?:-\S+(?:, |$| ))*)(.*)")


@dataclass(frozen=True, slots=True)
class Described:
    """The description of a parameter: its `words` on the command line, and the name of its `value` there."""

    section: str
    words: tuple[str, ...]
    value: str | None
    text: str

    def info(self, *, words: object = "", **more: Any) -> Any:
        """The same for typer."""
        about = {"help": self.text.replace("{}", str(words)), "metavar": self.value, **more}
        if self.section == "Arguments":
            return typer.Argument(**about)
        panel = None if self.section == "Options" else self.section
        return typer.Option(*self.words, rich_help_panel=panel, **about)


@cache
def described(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with the descriptions of its parameters in their types, where typer looks for them."""
    text, found = read(verb.__doc__ or "")
    known = read(options.__doc__ or "")[1] | found
    parameters = inspect.signature(verb, eval_str=True).parameters
    assert found.keys() <= parameters.keys(), "each line of a section is about a parameter"
    verb.__annotations__ = {name: _type_of(one, known) for name, one in parameters.items()}
    verb.__doc__ = text
    return verb


def _type_of(parameter: inspect.Parameter, known: dict[str, Described]) -> Any:
    if parameter.annotation is typer.Context:
        return parameter.annotation
    kind, more = parameter.annotation, dict[str, Any]()
    if get_origin(kind) is Annotated:
        kind, more = get_args(kind)
    found = known[parameter.name]
    if parameter.default is False:  # of a flag the help would name a value, and typer would add --no-NAME
        found = replace(found, words=found.words or (f"--{parameter.name.replace('_', '-')}",), value="")
    return Annotated[kind, found.info(**more)]


def read(docstring: str) -> tuple[str, dict[str, Described]]:
    """The text of a docstring before its sections, and the parameters that these describe."""
    text, *parts = _SECTION.split(inspect.cleandoc(docstring))
    sections = zip(parts[::2], parts[1::2], strict=True)
    return text.strip(), {name: one for title, body in sections for name, one in _entries(title, body)}


def _entries(section: str, body: str) -> Iterator[tuple[str, Described]]:
    for name, inside, text in _ENTRY.findall(body):
        split = _WORDS.fullmatch(inside)
        assert split is not None, "any text is words and a value"
        words = tuple(split[1].replace(",", " ").split())
        yield name, Described(section, words, split[2] or None, " ".join(text.split()))
