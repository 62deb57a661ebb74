"""The copies of one shard: its whole versions, and the version that comes in, chunk by chunk.

A *shard* is what one rank saves. A version counts as whole once all of its chunks are there and each has the
digest that was announced with it. The oldest version has its chunks as they are. Each later version has only
what differs from the version before it: nothing if a chunk is the same, the difference if that is shorter.
The difference is an exclusive or, so it can be undone exactly.

    whole versions                          coming in
    ┌────────────┐   ┌──────────────────┐   ┌──────────────────┐
    │ 40: chunks │ ◀─│ 44: differences  │ ◀─│ 49: differences  │
    └────────────┘   └──────────────────┘   └──────────────────┘

All shards of a run go back to the same version. So a version stays until a later version is *settled*: whole
in every shard. The ranks agree on that before the next version begins, so two versions are kept, and one that
comes in. Nothing here knows torch, sockets or threads.
"""

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct
from struct import error as StructError  # noqa: N812 (an exception, in the name of one)
from typing import Any, NamedTuple

import numpy as np

from bireme.errors import BiremeError

CHUNK_BYTES = 1 << 20
"""Of a shard that are coded, sent and checked together."""
DIGEST_BYTES = 16
_WORD = 4
"""Bytes of most elements. Bytes of the same weight are compressed together: those of high weight agree."""
_SAMPLE_BYTES, _LEAST_GAIN = 4096, 0.9
"""A plane of bytes is compressed if its beginning becomes at most that part of its length."""
_PLANE = Struct("<BI")


class _Coding(IntEnum):
    """How a chunk is coded, the first byte of its message."""

    SAME = 0
    WHOLE = 1
    DIFFERENCE = 2


def digest_of(chunk: bytes | bytearray | memoryview) -> bytes:
    """The digest of a chunk."""
    return hashlib.blake2b(chunk, digest_size=DIGEST_BYTES).digest()


def whole_message(chunk: bytes) -> bytes:
    """The message for a chunk as it is."""
    return bytes([_Coding.WHOLE]) + chunk


def coded(chunk: bytes, before: bytes | None) -> bytes:
    """The message for a chunk; `before` is the chunk in the version before, None if it has none there."""
    if before is None or len(before) != len(chunk):
        return whole_message(chunk)
    if chunk == before:
        return bytes([_Coding.SAME])
    changed = np.frombuffer(chunk, np.uint8) ^ np.frombuffer(before, np.uint8)
    even = len(changed) // _WORD * _WORD
    parts = [bytes([_Coding.DIFFERENCE])]
    for plane in (*changed[:even].reshape(-1, _WORD).T, changed[even:]):
        data = plane.tobytes()
        sample = data[:_SAMPLE_BYTES]
        is_compressed = len(zlib.compress(sample, 1)) < _LEAST_GAIN * len(sample)
        data = zlib.compress(data, 1) if is_compressed else data
        parts += [_PLANE.pack(is_compressed, len(data)), data]
    message = b"".join(parts)
    return message if len(message) <= len(chunk) else whole_message(chunk)


def decoded(message: bytes, before: bytes | None) -> bytes:
    """The chunk of a message. Raises a `BiremeError` if the message does not fit the chunk before it."""
    kind = message[0] if message else -1
    if kind == _Coding.WHOLE:
        return message[1:]
    if before is not None and kind == _Coding.SAME:
        return before
    if before is None or kind != _Coding.DIFFERENCE:
        raise BiremeError("A chunk of a second copy is a difference from a chunk that is missing.")
    even = len(before) // _WORD * _WORD
    changed = np.empty(len(before), np.uint8)
    place = 1
    try:
        for plane in (*changed[:even].reshape(-1, _WORD).T, changed[even:]):
            is_compressed, num_bytes = _PLANE.unpack_from(message, place)
            place += _PLANE.size
            data = message[place : place + num_bytes]
            plane[:] = np.frombuffer(zlib.decompress(data) if is_compressed else data, np.uint8)
            place += num_bytes
    except (ValueError, zlib.error, StructError) as error:
        raise BiremeError(f"A chunk of a second copy cannot be decoded: {error}.") from error
    return (changed ^ np.frombuffer(before, np.uint8)).tobytes()


class CopyVersion(NamedTuple):
    """The state after `step` batches, in the `start` of the run with that name. Later starts have greater
    names: two starts may come to different states after the same number of batches. In texts it is a list.
    """

    start: str
    step: int


@dataclass(slots=True)
class ShardVersion:
    """One version of a shard: the `words` that describe its tensors, and for each chunk its message and its
    digest; None for a chunk that has not come. Messages are differences from the version `before`.
    """

    version: CopyVersion
    words: Mapping[str, Any]
    num_bytes: int
    before: CopyVersion | None = None
    messages: list[bytes | None] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        num = -(-self.num_bytes // CHUNK_BYTES)
        self.messages, self.digests = [None] * num, [b""] * num

    def length(self, index: int) -> int:
        """The bytes of a chunk."""
        return min(CHUNK_BYTES, self.num_bytes - index * CHUNK_BYTES)


class ShardCopies:
    """The copies of one shard in one process. One thread at a time may call it."""

    def __init__(self) -> None:
        self.versions: list[ShardVersion] = []
        """The whole versions, oldest first."""
        self._next: ShardVersion | None = None
        self._start = ""
        """The latest start of the run that was heard of."""

    @property
    def newest(self) -> CopyVersion | None:
        """The newest whole version."""
        return self.versions[-1].version if self.versions else None

    def begin(
        self,
        version: CopyVersion,
        words: Mapping[str, Any],
        num_bytes: int,
        *,
        began: int,
        settled: CopyVersion | None,
    ) -> ShardVersion:
        """Begin a version, in place of one that is not whole. Its start of the run began after `began`
        batches, so later versions of other starts are of states that the run has left. Versions before the
        `settled` one are given up. Raises a `BiremeError` if a later start of the run was heard of.
        """
        if version.start < self._start:
            raise BiremeError(f"The second copy after step {version.step} is of a start that is over.")
        self._start = version.start
        while self.versions and _is_left(self.versions[-1].version, version, began):
            self.versions.pop()
        held = [one.version for one in self.versions]
        if settled in held:
            for _ in range(held.index(settled)):
                self._drop_oldest()
        self._next = ShardVersion(version, words, num_bytes, self.newest)
        return self._next

    def code(self, coming: ShardVersion, index: int, chunk: bytes) -> None:
        """Take a chunk of a version that comes in."""
        self._check(coming, index, len(chunk))
        coming.messages[index] = coded(chunk, self._before(index))
        coming.digests[index] = digest_of(chunk)

    def put(self, coming: ShardVersion, index: int, digest: bytes, message: bytes) -> None:
        """Take a chunk of a version that comes in, as another process has coded it from the same version
        before. Raises a `BiremeError` if the chunk does not have that digest.
        """
        chunk = decoded(message, self._before(index))
        self._check(coming, index, len(chunk))
        if digest_of(chunk) != digest:
            raise BiremeError(
                f"Chunk {index} of the second copy after step {coming.version.step} is not as it was sent."
            )
        coming.messages[index], coming.digests[index] = message, digest

    def finish(self, coming: ShardVersion) -> None:
        """A version that comes in is whole. Raises a `BiremeError` if a chunk of it is missing."""
        if coming is not self._next or None in coming.messages:
            raise BiremeError(
                f"The second copy after step {coming.version.step} is not whole: a chunk is missing, or a "
                "later version has replaced it."
            )
        self.versions.append(coming)
        self._next = None

    def find(self, version: CopyVersion) -> ShardVersion | None:
        """A whole version, if it is here."""
        return next((one for one in self.versions if one.version == version), None)

    def chunk(self, version: CopyVersion, index: int) -> bytes:
        """A chunk of a whole version, as it is."""
        found: bytes | None = None
        for one in self.versions:
            message = one.messages[index] if index < len(one.messages) else None
            found = None if message is None else decoded(message, found)
            if one.version == version and found is not None:
                return found
        raise BiremeError(f"The second copy after step {version.step} is here no more.")

    def is_intact(self, version: CopyVersion) -> bool:
        """Whether each chunk of a whole version still has its digest."""
        one = self.find(version)
        if one is None:
            return False
        try:
            return all(digest_of(self.chunk(version, at)) == own for at, own in enumerate(one.digests))
        except BiremeError:
            return False

    def _check(self, coming: ShardVersion, index: int, num_bytes: int) -> None:
        if coming is not self._next:
            raise BiremeError(
                f"The second copy after step {coming.version.step} was replaced by a later one."
            )
        if not 0 <= index < len(coming.messages) or num_bytes != coming.length(index):
            raise BiremeError(
                f"A chunk of {num_bytes} bytes at place {index} is not of the second copy after step "
                f"{coming.version.step}, which has {coming.num_bytes} bytes."
            )

    def _before(self, index: int) -> bytes | None:
        """The chunk in the newest whole version."""
        if not self.versions or index >= len(self.versions[-1].messages):
            return None
        return self.chunk(self.versions[-1].version, index)

    def _drop_oldest(self) -> None:
        """Give up the oldest version. The next one has its chunks as they are from now on."""
        second = self.versions[1]
        for index in range(len(second.messages)):
            second.messages[index] = whole_message(self.chunk(second.version, index))
        second.before = None
        self.versions.pop(0)


def _is_left(held: CopyVersion, coming: CopyVersion, began: int) -> bool:
    """Whether the run has left the state of a version that is held."""
    return (held.start != coming.start and held.step > began) or held.step >= coming.step


def newest_common(
    held: Iterable[tuple[int, CopyVersion]], counts: Mapping[CopyVersion, int]
) -> CopyVersion | None:
    """The newest version of which every shard is `held` whole by some process; None if there is none.
    `counts` are how many shards each version has.
    """
    found: dict[CopyVersion, set[int]] = {}
    for shard, version in held:
        found.setdefault(version, set()).add(shard)
    whole = (version for version, own in found.items() if len(own) == counts[version])
    return max(whole, default=None)
