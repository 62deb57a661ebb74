"""A rank's side of second copies: it gives its state to the keeper of its host, and reads it at a start."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.runtime.copies.keeper import NUM_SHARDS, KeeperAddress, KeptShard, newest_of, shards_at, talk_to
from bireme.runtime.copies.versions import CHUNK_BYTES, CopyVersion
from bireme.runtime.exchange.peer_connections import listed
from bireme.runtime.snapshot import NamedTensors, Snapshot
from bireme.sync.rounds.round_group import bytes_of

TENSORS, CLIP_SCALE = "tensors", "clip_scale"
"""In the words of a shard: its tensors in their order, and the factor of clipping."""


@dataclass(frozen=True, slots=True)
class CopyOrders:
    """Where ranks of a host give their copies in a start of the run, which began after `began` batches."""

    keeper: KeeperAddress
    start: str
    began: int


class Copier:
    """Gives versions of one rank's shard to its keeper, in a thread, one after the other. A run has
    `num_shards` of them.
    """

    def __init__(self, orders: CopyOrders, shard: int, num_shards: int, timeout_s: float) -> None:
        self._orders, self._shard, self._num_shards = orders, shard, num_shards
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self.newest: CopyVersion | None = None
        """The newest version that the keepers have whole of this shard."""
        self.failure = ""
        """Why the last version is not at its keepers yet."""
        self.sent_bytes = 0
        """Sent to other hosts so far."""

    @property
    def is_busy(self) -> bool:
        """Whether a version is on its way."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, snapshot: Snapshot, words: Mapping[str, Any], settled: CopyVersion | None) -> CopyVersion:
        """Begin to copy a snapshot, whose tensors do not change any more. All shards are whole in the
        `settled` version.
        """
        version = CopyVersion(self._orders.start, snapshot.num_trained)
        asked = {
            "do": "keep",
            "shard": self._shard,
            "version": version,
            "began": self._orders.began,
            "settled": settled,
            "bytes": sum(tensor.nbytes for tensor in snapshot.tensors.values()),
            "words": {
                **words,
                NUM_SHARDS: self._num_shards,
                TENSORS: listed(snapshot.tensors),
                CLIP_SCALE: snapshot.clip_scale,
            },
        }
        chunks = _chunks([bytes_of(tensor) for tensor in snapshot.tensors.values() if tensor.nbytes])
        self._thread = threading.Thread(
            target=self._copy, args=(version, asked, chunks), name="bireme copier", daemon=True
        )
        self._thread.start()
        return version

    def _copy(self, version: CopyVersion, asked: dict[str, Any], chunks: Iterator[list[memoryview]]) -> None:
        try:
            with talk_to(self._orders.keeper, self._timeout_s) as talk:
                talk.say(asked)
                talk.hear()
                for chunk in chunks:
                    talk.send(*chunk)
                talk.hear()
                # At the rate of a slow link the way to the next host takes as long as it takes.
                while "trouble" in (words := talk.hear(limit_s=_LONGEST_S)):
                    self.failure = words["trouble"]
                self.sent_bytes += words["sent_bytes"]
        except (OSError, BiremeError) as error:
            self.failure = str(error)
        else:
            self.newest, self.failure = version, ""


_LONGEST_S = 7 * 86400.0


def _chunks(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The bytes of all views one after the other, in chunks of one length but for the last."""
    chunk, room = list[memoryview](), CHUNK_BYTES
    for view in views:
        rest = view
        while rest:
            chunk.append(rest[:room])
            room -= len(chunk[-1])
            rest = rest[len(chunk[-1]) :]
            if not room:
                yield chunk
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk


# Starting from copies.


@dataclass(frozen=True, slots=True)
class CopySource:
    """A version that all ranks of a start of the run begin with, and the keepers that have its shards. A rank
    waits `timeout_s` for a keeper.
    """

    version: CopyVersion
    keepers: tuple[KeeperAddress, ...]
    timeout_s: float

    def nearest(self, own: KeeperAddress) -> "CopySource":
        """The same, with that keeper as the first to be asked."""
        return replace(self, keepers=tuple(sorted(self.keepers, key=lambda one: one != own)))

    def shards(self) -> dict[int, list[KeptShard]]:
        """Where each shard is. Raises a `BiremeError` if one cannot be reached any more."""
        found = shards_at(self.keepers, self.timeout_s, checks=False)
        whole = newest_of([one for one in found if one.version == self.version])
        if not whole:
            raise BiremeError(
                f"The second copies after step {self.version.step} are not all there any more: a host that "
                "had one is gone. The run goes on from older state if it is started again."
            )
        return whole

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of all shards by their names, each of which is read when it is asked for."""
        return _KeptTensors(self.shards(), self.timeout_s)


@dataclass(slots=True)
class _Place:
    """Where a tensor is: its type and shape, and its first byte in the shard."""

    shard: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


@dataclass(slots=True)
class _KeptTensors(NamedTensors):
    """Reads tensors from keepers, and compares each chunk with its digest."""

    shards: Mapping[int, Sequence[KeptShard]]
    timeout_s: float
    names: dict[str, _Place] = field(default_factory=dict)
    """Where each tensor is."""
    _last: tuple[int, int, bytes] = (-1, -1, b"")
    """The shard, the index and the bytes of the chunk that was read last: small tensors share one."""

    def __post_init__(self) -> None:
        for shard, (one, *_) in self.shards.items():
            begin = 0
            for name, dtype, shape in one.words[TENSORS]:
                place = _Place(shard, getattr(torch, dtype), tuple(shape), begin)
                self.names[name] = place
                begin += prod(place.shape) * place.dtype.itemsize

    def __getitem__(self, name: str) -> Tensor:
        place = self.names[name]
        num_bytes = prod(place.shape) * place.dtype.itemsize
        if not num_bytes:
            return torch.empty(place.shape, dtype=place.dtype)
        end, data = place.begin + num_bytes, bytearray(num_bytes)
        first = place.begin // CHUNK_BYTES
        for index, chunk in enumerate(self._read(place.shard, first, -(-end // CHUNK_BYTES)), first):
            begin = index * CHUNK_BYTES
            own = chunk[max(place.begin - begin, 0) : end - begin]
            at = max(begin - place.begin, 0)
            data[at : at + len(own)] = own
        return torch.frombuffer(data, dtype=place.dtype).reshape(place.shape)

    def _read(self, shard: int, first: int, end: int) -> Iterator[bytes]:
        """Chunks of a shard, from the first keeper that gives them."""
        if self._last[:2] == (shard, first):
            yield self._last[2]
            first += 1
        failure: Exception | None = None
        for one in self.shards[shard]:
            if first == end:
                return
            try:
                with talk_to(one.keeper, self.timeout_s) as talk:
                    talk.say(one.request(first, end))
                    while first < end:
                        chunk = one.checked(first, talk.chunk())
                        self._last = shard, first, chunk
                        first += 1
                        yield chunk
            except (OSError, BiremeError) as error:
                failure = error
        if first < end:
            raise BiremeError(f"A second copy cannot be read: {failure}") from failure
