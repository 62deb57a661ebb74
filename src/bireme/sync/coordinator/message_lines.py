"""Messages between ranks and the coordinator as lines of JSON."""

from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from bireme.errors import BiremeError
from bireme.sync.coordinator.messages import CoordinatorReply, Notice, Report

__all__ = ["decode", "encode"]

Message = TypeVar("Message", Report, Notice, CoordinatorReply)


def encode(message: Report | Notice | CoordinatorReply) -> bytes:
    """A message as one line of JSON, without its end. Fields that hold their default are left out."""
    return _adapter(cast("Hashable", type(message))).dump_json(message, exclude_defaults=True)


def decode(kind: type[Message], line: bytes) -> Message:
    """The message in a line that `encode` wrote."""
    try:
        return cast("Message", _adapter(cast("Hashable", kind)).validate_json(line))
    except ValidationError as error:
        raise BiremeError(
            f"A line between a rank and the coordinator is no {kind.__name__}: "
            f"{error.errors()[0]['msg']}. Use one version of Bireme on all machines."
        ) from None


@cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast("type[Any]", kind))
