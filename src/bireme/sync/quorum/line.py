"""A socket between two ranks of the same stage in different replicas, and the frames that go over it.

Every frame begins with a tag: the stamp of what it belongs to (epoch, batch, attempt), its kind and its
piece. A frame of an older stamp is read and dropped. One that nobody expects yet stays in the socket. So a
rank that was interrupted in the middle of an attempt begins the next one on the same lines.
"""

import select
import socket
import time
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

_HEADER = Struct("<4sBxxxqqiIQ")
_MAGIC = b"BQ01"


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


class _Frame:
    """A frame to send, and what the kernel has not taken of it."""

    __slots__ = ("is_begun", "rest")

    def __init__(self, views: list[memoryview]) -> None:
        self.rest = views
        self.is_begun = False

    def take(self, num_bytes: int) -> None:
        """The kernel has taken so many bytes."""
        self.is_begun = True
        while self.rest and num_bytes >= len(self.rest[0]):
            num_bytes -= len(self.rest.pop(0))
        if num_bytes:
            self.rest[0] = self.rest[0][num_bytes:]

    def keep(self) -> None:
        """Hold copies of what is left: the memory it lies in is about to be used for something else."""
        self.rest = [memoryview(bytes(view)) for view in self.rest]


class PeerLine:
    """The line to one member. It belongs to one thread, and never blocks."""

    def __init__(self, member: int, made: socket.socket) -> None:
        made.setblocking(False)
        self.member = member
        self.socket = made
        self.moved_s = time.monotonic()
        """When bytes last moved."""
        self._frames: deque[_Frame] = deque()
        self._expected: dict[Tag, memoryview] = {}
        self._stamp = Stamp(-1, -1, -1)
        self._header = bytearray(_HEADER.size)
        self._num_header = 0
        self._tag: Tag | None = None
        """Of the frame that is being read, once its header is there."""
        self._into: memoryview | None = None
        """Where its bytes go; None drops them."""
        self._missing = 0
        self._is_held = False
        """Whether the frame that begins belongs to something that has not begun here."""

    def begin(self, stamp: Stamp) -> None:
        """Let go of all that belongs to older stamps. Memory that was given for them is free afterwards."""
        self._stamp = stamp
        self._expected.clear()
        while self._frames and not self._frames[-1].is_begun:
            self._frames.pop()
        for frame in self._frames:
            frame.keep()
        if self._tag is not None and not self._is_held:
            self._into = None
        self._look_at_held()

    def send(self, tag: Tag, payload: memoryview) -> None:
        """Send a frame. The payload must stay as it is until the frame has gone, or until `begin`."""
        (epoch, batch, attempt), kind, piece = tag
        header = _HEADER.pack(_MAGIC, kind, epoch, batch, attempt, piece, payload.nbytes)
        self._frames.append(_Frame([memoryview(header), payload.cast("B")]))

    def expect(self, tag: Tag, into: memoryview) -> None:
        """Have a frame written there; its size must be just that."""
        self._expected[tag] = into.cast("B")
        self._look_at_held()

    @property
    def has_sent(self) -> bool:
        """Whether the kernel has taken all that was to be sent."""
        return not self._frames

    @property
    def expects(self) -> bool:
        """Whether a frame is to come, or the rest of one."""
        return bool(self._expected) or (self._tag is not None and not self._is_held)

    @property
    def events(self) -> int:
        """What a wait must wake up for."""
        reads = self.expects and not self._is_held
        return (select.POLLIN if reads else 0) | (select.POLLOUT if self._frames else 0)

    def move(self) -> list[Tag]:
        """Write what goes and read what has come; gives the expected frames that are there now.

        Raises `LineBroken` where the other end is gone.
        """
        try:
            self._write()
            return self._read()
        except OSError as error:
            raise LineBroken(self.member, str(error) or type(error).__name__) from error

    def move_out(self) -> None:
        """Write what goes."""
        try:
            self._write()
        except OSError as error:
            raise LineBroken(self.member, str(error) or type(error).__name__) from error

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _write(self) -> None:
        while self._frames:
            frame = self._frames[0]
            try:
                num_bytes = self.socket.sendmsg(frame.rest)
            except BlockingIOError:
                return
            self.moved_s = time.monotonic()
            frame.take(num_bytes)
            if frame.rest:
                return
            self._frames.popleft()

    def _read(self) -> list[Tag]:
        arrived: list[Tag] = []
        while self.expects and not self._is_held:
            if self._tag is None and not self._read_header():
                break
            if self._is_held or not self._read_payload():
                break
            assert self._tag is not None, "its header was read"
            if self._into is not None:
                arrived.append(self._tag)
            self._tag = self._into = None
        return arrived

    def _read_header(self) -> bool:
        while self._num_header < _HEADER.size:
            num_bytes = self._receive(memoryview(self._header)[self._num_header :])
            if not num_bytes:
                return False
            self._num_header += num_bytes
        self._num_header = 0
        magic, kind, epoch, batch, attempt, piece, size = _HEADER.unpack(self._header)
        if magic != _MAGIC:
            raise ConnectionError("what came is no frame of this version of Bireme")
        self._tag, self._missing = Tag(Stamp(epoch, batch, attempt), kind, piece), size
        self._is_held = True
        self._look_at_held()
        return True

    def _look_at_held(self) -> None:
        """Decide where the frame that begins goes, if that can be said."""
        if not self._is_held:
            return
        assert self._tag is not None, "what is held has a tag"
        into = self._expected.pop(self._tag, None)
        if into is None and self._tag.stamp >= self._stamp:
            return
        if into is not None and len(into) != self._missing:
            raise LineBroken(self.member, f"{self._missing} bytes came where {len(into)} were expected")
        self._into, self._is_held = into, False

    def _read_payload(self) -> bool:
        while self._missing:
            if self._into is None:
                num_bytes = self._receive(memoryview(bytearray(min(self._missing, 1 << 16))))
            else:
                num_bytes = self._receive(self._into[len(self._into) - self._missing :])
            if not num_bytes:
                return False
            self._missing -= num_bytes
        return True

    def _receive(self, view: memoryview) -> int:
        try:
            num_bytes = self.socket.recv_into(view)
        except BlockingIOError:
            return 0
        if not num_bytes:
            raise ConnectionResetError("the connection was closed")
        self.moved_s = time.monotonic()
        return num_bytes


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
