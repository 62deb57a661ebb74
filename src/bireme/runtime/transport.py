"""How a message gets from one rank to another: the contract that every transport keeps, and its words.

A message is one piece of memory, made by a `WireFormat`. Messages of different borders or directions never
mix, even between the same two ranks: each pair (direction, stage) is a channel of its own. Within a channel
messages are received in the order they were sent.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from bireme.errors import BiremeError
from bireme.schedule.instruction import Message
from bireme.sync.group import AbortedError, Pending

__all__ = [
    "AbortedError",
    "Channel",
    "Pending",
    "Transport",
    "nothing_came",
    "nothing_taken",
]


class Channel(NamedTuple):
    """One direction over one border."""

    forward: bool
    to_stage: int


class Transport(Protocol):
    """Point-to-point messages of one rank with the others of its pipeline.

    Ranks are places in the pipeline. `payload` is contiguous, of uint8, in the memory that the transport is
    for, and must stay alive, a sent one also unchanged, until `wait` of what is returned has returned. Stages
    that share a rank need no transport, and none sends to its own rank.

    A payload begins with the header that names its message. On the host a payload to receive into begins with
    the header expected. Where another message comes in its place, that one's header is there afterwards and
    the rest is undefined, so whoever takes a message apart must compare. Only if it is a shorter message, as
    its header says, all of it is there.
    """

    @property
    def is_host(self) -> bool:
        """Whether payloads lie in host memory, or else on the device."""

    def send(self, key: Message, to: int, payload: Tensor, num_bytes: int | None = None) -> Pending:
        """Begin to send. To wait is to know that the payload may be used for something else.

        A message of `num_bytes`, as its header says, ends before the payload does. The receiver has room for
        the payload, and what comes after the end may be sent or not.
        """

    def receive(self, key: Message, source: int, payload: Tensor) -> Pending:
        """Begin to receive into the payload, which must have the message's size. To wait is to have it."""

    def close(self) -> None:
        """Let go of the transport. Every send and receive has been waited for."""

    def abort(self) -> None:
        """Give up: whoever waits here, in any thread, or on a rank for this one, is told at once."""


def nothing_came(key: Message, source: int, payload: Tensor, waited_s: float) -> BiremeError:
    """The error of a receive for which nothing moved for too long."""
    return BiremeError(
        f"The {key} ({payload.numel()} bytes) did not arrive from rank {source} within {waited_s:g} s. That "
        "rank may have died or hang, or its batch has other shapes, so that its message has another "
        "size. See what it says; give all ranks the same batches; raise the timeout if a step can take that "
        "long."
    )


def nothing_taken(key: Message, to: int, payload: Tensor, waited_s: float) -> BiremeError:
    """The error of a send for which nothing moved for too long."""
    return BiremeError(
        f"Rank {to} did not take the {key} ({payload.numel()} bytes) within {waited_s:g} s. That rank may be "
        "gone, or stuck, or was given a batch of other shapes, so that it waits for a message of another "
        "size. See what it says; give all ranks the same batches; raise the timeout if a step can take that "
        "long."
    )
