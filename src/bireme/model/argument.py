"""What an operator can be given: plain values, lists, references to other values, and torch's own words.

A file says a reference as `{"reference": name}` and a token as `{"token": kind, "name": name}`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypeAliasType

__all__ = ["Argument", "Reference", "Token", "references"]


@dataclass(frozen=True, slots=True)
class Reference:
    """An argument that is the value, parameter, buffer, constant or input of that name."""

    name: Annotated[str, Field(alias="reference")]


@dataclass(frozen=True, slots=True)
class Token:
    """An argument that is one of torch's own words (`dtype`, `layout`, `memory_format`, `device`), a number
    that is not finite (`float`), a `slice`, or a `length` that depends on the batch size."""

    kind: Annotated[str, Field(alias="token")]
    name: str = ""


def _form(plain: Any) -> str | None:
    """Which of the forms of an argument a file has."""
    if isinstance(plain, dict):
        return next((f"<{key}>" for key in ("reference", "token") if key in plain), None)
    return "<list>" if isinstance(plain, list | tuple) else "<value>"


if TYPE_CHECKING:
    Argument = bool | int | float | str | Reference | Token | tuple["Argument", ...] | None
else:
    Argument = TypeAliasType(
        "Argument",
        Annotated[
            Annotated[bool | int | float | str | None, Tag("<value>")]
            | Annotated[Reference, Tag("<reference>")]
            | Annotated[Token, Tag("<token>")]
            | Annotated[tuple["Argument", ...], Tag("<list>")],
            Discriminator(
                _form,
                custom_error_type="argument",
                custom_error_message="a value, a list, a reference or a token",
            ),
        ],
    )
"""What an operator can be given; to pydantic also how a file says it."""


def references(argument: Argument) -> Iterator[str]:
    """The names of everything an argument refers to."""
    if isinstance(argument, Reference):
        yield argument.name
    elif isinstance(argument, tuple):
        for part in argument:
            yield from references(part)
