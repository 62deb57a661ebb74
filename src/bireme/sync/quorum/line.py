"""A socket between two ranks of the same stage in different replicas, and the frames that go over it.

Every frame begins with a tag: the stamp of what it belongs to (epoch, batch, attempt), its kind and its
piece. A frame of an older stamp is read and dropped. One that nobody expects yet stays in the socket. So a
rank that was interrupted in the middle of an attempt begins the next one on the same lines.
"""

import select
import socket
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.wire.connection import (
    HEADER_BYTES,
    SKIP,
    Connection,
    FrameKind,
    Skip,
    frame_header,
    read_frame_header,
)

_TAG = Struct("<qqiBI")


class LineBroken(Exception):  # noqa: N818 (it is an event, which others act on)
    """The connection to a member broke: its process has ended, or has given up."""

    def __init__(self, member: int, reason: str) -> None:
        super().__init__(member, reason)
        self.member = member
        self.reason = reason

    def __str__(self) -> str:
        return f"The line to replica {self.member} broke: {self.reason}"


class Stamp(NamedTuple):
    """Which attempt to sum up which batch, in which epoch of the membership. A later one is greater."""

    epoch: int
    batch: int
    attempt: int


class Tag(NamedTuple):
    """Which frame."""

    stamp: Stamp
    kind: int
    piece: int


class PeerLine:
    """The line to one member. It belongs to one thread, and never blocks."""

    def __init__(self, member: int, made: socket.socket) -> None:
        self.member = member
        self.socket = made
        # Nothing is read ahead: a frame that waits stays in the socket, which wakes up who waits for it.
        self._connection = Connection(made, ahead_bytes=HEADER_BYTES)
        self._expected: dict[Tag, memoryview] = {}
        self._stamp = Stamp(-1, -1, -1)
        self._is_held = False
        """Whether the next frame belongs to something that has not begun here."""
        self._current: Tag | None = None
        """Of the expected frame that is being read."""

    def begin(self, stamp: Stamp) -> None:
        """Let go of all that belongs to older stamps. Memory that was given for them is free afterwards."""
        self._stamp = stamp
        self._is_held = False
        self._expected.clear()
        outgoing = self._connection.outgoing
        while outgoing and not outgoing[-1].is_begun:
            outgoing.pop()
        for frame in outgoing:
            frame.rest = [memoryview(bytes(view)) for view in frame.rest]
        self._current = None
        self._connection.skip_body()

    def send(self, tag: Tag, payload: memoryview) -> None:
        """Send a frame. The payload must stay as it is until the frame has gone, or until `begin`."""
        (epoch, batch, attempt), kind, piece = tag
        packed = _TAG.pack(epoch, batch, attempt, kind, piece)
        header = frame_header(FrameKind.EXCHANGE, payload.nbytes, packed)
        self._connection.send(memoryview(header), payload.cast("B"))

    def expect(self, tag: Tag, into: memoryview) -> None:
        """Have a frame written there; its size must be just that."""
        self._expected[tag] = into.cast("B")
        self._is_held = False

    @property
    def moved_s(self) -> float:
        """When bytes last moved."""
        return self._connection.moved_s

    @property
    def has_sent(self) -> bool:
        """Whether the kernel has taken all that was to be sent."""
        return not self._connection.outgoing

    @property
    def expects(self) -> bool:
        """Whether a frame is to come, or the rest of one."""
        return bool(self._expected) or self._connection.is_reading

    @property
    def events(self) -> int:
        """The events that a wait must wake up for."""
        reads = self.expects and not self._is_held
        return (select.POLLIN if reads else 0) | (0 if self.has_sent else select.POLLOUT)

    def move(self) -> list[Tag]:
        """Write what goes and read what has come; gives the expected frames that are there now.

        Raises `LineBroken` if the other end is gone.
        """
        arrived: list[Tag] = []
        self.move_out()
        try:
            while self.expects and not self._is_held:
                if self._connection.next_frame(self._place) is None:
                    break
                if self._current is not None:
                    arrived.append(self._current)
                    self._current = None
        except (OSError, BiremeError) as error:
            raise LineBroken(self.member, str(error) or type(error).__name__) from error
        return arrived

    def move_out(self) -> None:
        """Write what goes."""
        try:
            self._connection.write()
        except OSError as error:
            raise LineBroken(self.member, str(error) or type(error).__name__) from error

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()

    def _place(self, header: bytes) -> memoryview | Skip | None:
        """Where a frame goes: to its place, away if it is of an older stamp, nowhere until it is expected."""
        _, num_bytes, packed = read_frame_header(header, FrameKind.EXCHANGE)
        epoch, batch, attempt, kind, piece = _TAG.unpack_from(packed)
        tag = Tag(Stamp(epoch, batch, attempt), kind, piece)
        into = self._expected.pop(tag, None)
        if into is None:
            self._is_held = tag.stamp >= self._stamp
            return None if self._is_held else SKIP
        if len(into) != num_bytes - HEADER_BYTES:
            came = f"{num_bytes - HEADER_BYTES} bytes came instead of the {len(into)} expected"
            raise LineBroken(self.member, came)
        self._current = tag
        return into


# Digests of weights, by which replicas notice that they no longer have the same bits.
#
# Each member tells its last digest along with its contribution, so all members of a round and a stage know
# the same ones, and find the same members that differ: those that have other weights than most, or than the
# one that has trained for longest where neither side has more.

SLICE = 1 << 20
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number, so that no bit of what it multiplies is lost."""
_INTEGERS = {1: torch.uint8, 2: torch.int16}
"""What elements of so many bytes count as. Longer ones count as fours, so that no product is cut short."""


@dataclass(frozen=True, slots=True)
class Digest:
    """That of a rank's weights after `version` batches, on a device of some `kind`. Its replica trains since
    the batch `first`.
    """

    version: int
    value: int
    kind: int
    first: int


NO_DIGEST = Digest(-1, 0, 0, 0)


class OtherWeightsError(Exception):
    """This replica has other weights than the others: its life is over, and its next one takes theirs."""


@torch.no_grad()
def digest_of(tensors: Mapping[str, Tensor]) -> int:
    """64 bits, others wherever a single bit of a tensor is another one; the same on all devices.

    Each element counts as an integer of 32 bits at most, times an odd factor of its place; sums are modulo
    2^64, so their order changes nothing.
    """
    total = 0
    for name in sorted(tensors):
        flat = tensors[name].detach().reshape(-1)
        flat = flat.view(_INTEGERS.get(flat.itemsize, torch.int32))
        factors = torch.arange(1, min(flat.numel(), SLICE) + 1, device=flat.device)
        factors.mul_(_FACTOR).bitwise_or_(1)
        found = torch.zeros((), dtype=torch.int64, device=flat.device)
        for piece in torch.split(flat, SLICE) if flat.numel() else ():
            found = found * _FACTOR + (piece.to(torch.int64) * factors[: piece.numel()]).sum()
        total = _signed(total * _FACTOR + int(found))
    return total


def differing(digests: Mapping[int, Digest]) -> set[int]:
    """The members that differ from the others with digests of the same version on the same kind of device."""
    alike: dict[tuple[int, int], dict[int, Digest]] = defaultdict(dict)
    for member, one in digests.items():
        if one != NO_DIGEST:
            alike[one.version, one.kind][member] = one
    found = set[int]()
    for own in alike.values():
        equal: dict[int, set[int]] = defaultdict(set)
        for member in sorted(own):
            equal[own[member].value].add(member)
        leader = min(own, key=lambda member: (own[member].first, member))
        right = max(equal.values(), key=lambda members: (len(members), leader in members))
        found |= own.keys() - right
    return found


def check_same(digests: Mapping[int, Digest], me: int) -> None:
    """Raise `OtherWeightsError` if this member differs, and `LineBroken` of another one that does."""
    wrong = differing(digests)
    if me in wrong:
        others = _named(digests.keys() - wrong)
        raise OtherWeightsError(
            f"replica {me} has other weights than {others} after {digests[me].version} batches, and takes "
            "theirs."
        )
    if wrong:
        raise LineBroken(min(wrong), "it has other weights")


def _named(members: Collection[int]) -> str:
    numbers = " and ".join(map(str, sorted(members)))
    return f"replica{'s' if len(members) > 1 else ''} {numbers}"


def _signed(number: int) -> int:
    """Modulo 2^64, as a signed integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
