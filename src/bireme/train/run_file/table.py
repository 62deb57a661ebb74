"""What all tables of a run file have in common: how they are checked, and the types that several need.

A key whose values are words takes them in any letters, and by the names that other programs give them.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from bireme.documents import refused
from bireme.errors import BiremeError

OTHER_WORDS: Mapping[str, str] = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "pipedream-2bw": "2bw",
    "one-f-one-b": "1f1b",
    "interleaved-1f1b": "interleaved",
    "zbh1": "zb-h1",
    "zb-v": "zbv",
}
"""What other programs write for words of ours."""


Found = TypeVar("Found")


def parsed(value: str, parse: Callable[[str], Found]) -> Found:
    """The value as `parse` reads it. A `BiremeError` of it is shown with the name of the key."""
    try:
        return parse(value)
    except BiremeError as error:
        raise refused(str(error)) from None


def _filled(value: str) -> str:
    if not value.strip():
        raise ValueError("a text that is not empty")
    return value


def listed(what: str) -> BeforeValidator:
    """Takes a list with something in it; pydantic tells of any other value that it must be `what`."""

    def taken(value: Any) -> Any:
        if not isinstance(value, list | tuple) or not value:
            raise ValueError(what)
        return tuple(value)

    return BeforeValidator(taken)


def _alone(value: Any) -> Any:
    """One text stands for a list of one."""
    return (value,) if isinstance(value, str) else value


Text = Annotated[str, AfterValidator(_filled)]
Texts = Annotated[tuple[Text, ...], listed('texts such as ["a", "b"]'), BeforeValidator(_alone)]
Devices = Annotated[int, Field(ge=1, le=4096)]
Samples = Annotated[int, Field(ge=1, le=10**9)]
Steps = Annotated[int, Field(ge=1, le=10**9)]
StepsOrNever = Annotated[int, Field(ge=0, le=10**9)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]


class Table(BaseModel):
    """A table of keys: unknown ones are refused, values must be of just their type; it is frozen. The string
    below a key is its description.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _in_our_words(cls, data: Any) -> Any:
        if not isinstance(data, dict | cls):
            raise ValueError("a table of keys")  # noqa: TRY004 (pydantic takes a ValueError alone)
        if not isinstance(data, dict):
            return data
        return {
            key: _our_word(cls.model_fields[key].annotation, value) if key in cls.model_fields else value
            for key, value in data.items()
        }


def _our_word(annotation: Any, value: Any) -> Any:
    """The word of a choice that a value stands for; the value itself where it is none."""
    if get_origin(annotation) is not Literal or not isinstance(value, str):
        return value
    plain = value.strip().lower().replace("_", "-")
    word = OTHER_WORDS.get(plain, plain)
    return next((known for known in get_args(annotation) if word == str(known).replace("_", "-")), value)


def given(table: Table) -> list[str]:
    """The keys of a table that have another value than their default."""
    usual = type(table)()
    return [name for name in type(table).model_fields if getattr(table, name) != getattr(usual, name)]


def giving_way(data: Any, key: str, other: str) -> Any:
    """Without the default of `key` where `other`, which says it in another way, is given."""
    if isinstance(data, dict) and data.get(other) is not None and key not in data:
        return data | {key: None}
    return data
