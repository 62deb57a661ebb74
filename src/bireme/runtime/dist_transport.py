"""Messages over a gloo process group of torch.distributed, and the choice between that and NCCL.

Gloo matches messages by tags. The tag holds the message's size, because a message shorter than its receive
buffer would complete without a word and leave old bytes behind it, and a longer one would end the process:
messages of other sizes must not meet. A timeout breaks all connections of its group, for good.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from bireme.runtime.nccl_transport import NcclTransport
from bireme.runtime.peers import PeerLost
from bireme.runtime.transport import (
    DEFAULT_TIMEOUT_S,
    AbortedError,
    Pending,
    Transport,
    nothing_came,
    nothing_taken,
)
from bireme.schedule.instruction import Message

__all__ = ["DistTransport", "open_transport", "tag_of"]

NUM_CHANNEL_BITS = 10
SIZE_MODULUS = 2**21 - 9
"""A prime: two sizes have one tag only if they differ by a multiple of 128 MiB less 576 bytes."""
UNUSED_TAG = 2**31 - 1


def open_transport(
    pipeline: Sequence[int],
    rank_of_stage: Sequence[int],
    *,
    device: torch.device,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Transport:
    """This process's transport, over groups of its own.

    `pipeline` are the processes of its replica, by their rank in the pipeline; all of them must call this at
    the same point, and no others need to. NCCL is taken for CUDA devices where the job's process group has
    it, gloo otherwise.
    """
    if device.type == "cuda" and "nccl" in dist.get_backend_config():
        return NcclTransport(pipeline, rank_of_stage, device)
    group = dist.new_group(
        sorted(pipeline),
        backend="gloo",
        timeout=timedelta(seconds=timeout_s),
        use_local_synchronization=True,
    )
    return DistTransport(pipeline, group, timeout_s=timeout_s)


def tag_of(key: Message, num_bytes: int) -> int:
    """The tag of messages of one size on one channel. Gloo takes tags from 0 to 2³¹ − 1."""
    channel = (2 * key.to_stage + key.forward) % (1 << NUM_CHANNEL_BITS)
    return num_bytes // 64 % SIZE_MODULUS << NUM_CHANNEL_BITS | channel


class DistTransport:
    """The transport over gloo. `global_ranks` are the processes of the pipeline, by their rank in it.

    `group` has them all, and nobody else uses it, for a failure here breaks it. Tensors on CUDA devices go
    through pinned host memory: sending one waits for it.
    """

    def __init__(
        self, global_ranks: Sequence[int], group: dist.ProcessGroup, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self._group = group
        self._peers = [dist.get_group_rank(group, rank) for rank in global_ranks]
        self._timeout_s = timeout_s
        self._limit = timedelta(seconds=timeout_s)
        self._failure: Exception | None = None

    def send(self, key: Message, to: int, payload: Tensor) -> Pending:
        """Begin to send."""
        if payload.is_cuda:
            payload = _pinned(payload).copy_(payload)
        pending = _GlooPending(self, key, to, payload, is_send=True)
        try:
            # What dist.isend does, less its checks and its translation of ranks, each time again.
            pending.work = self._group.send([payload], self._peers[to], tag_of(key, payload.numel()))
        except RuntimeError as error:
            raise self._translated(error, pending) from error
        return pending

    def receive(self, key: Message, source: int, payload: Tensor) -> Pending:
        """Begin to receive."""
        host = _pinned(payload) if payload.is_cuda else payload
        pending = _GlooPending(self, key, source, host, is_send=False)
        try:
            pending.work = self._group.recv([host], self._peers[source], tag_of(key, payload.numel()))
        except RuntimeError as error:
            raise self._translated(error, pending) from error
        return _StagedReceive(pending, host, payload) if payload.is_cuda else pending

    def close(self) -> None:
        """Nothing is held that others do not hold: who made the process group destroys it."""

    def abort(self) -> None:
        """Break all connections of the group.

        Gloo has no call for that (its `abort` leaves waits waiting), but a timeout does it, and a receive of
        what is never sent times out at once.
        """
        if self._failure is None:
            self._failure = AbortedError("This rank has given its transport up.")
        size = self._group.size()
        if size > 1:
            other = (self._group.rank() + 1) % size
            with suppress(RuntimeError):
                never = torch.empty(1, dtype=torch.uint8)
                self._group.recv([never], other, UNUSED_TAG).wait(timedelta(milliseconds=1))

    def _translated(self, error: RuntimeError, pending: "_GlooPending") -> Exception:
        """What an error of gloo means. Where this rank itself broke the connections, that is the reason."""
        if self._failure is not None:
            return self._failure
        text = str(error)
        if "Timed out" not in text:
            return PeerLost(pending.peer, text)
        words = nothing_taken if pending.is_send else nothing_came
        self._failure = words(pending.key, pending.peer, pending.payload, self._timeout_s)
        return self._failure


class _GlooPending:
    """A send or receive under way; keeps the payload alive."""

    __slots__ = ("_transport", "is_send", "key", "payload", "peer", "work")

    work: dist.Work

    def __init__(
        self, transport: DistTransport, key: Message, peer: int, payload: Tensor, *, is_send: bool
    ) -> None:
        self._transport = transport
        self.key = key
        self.peer = peer
        self.payload = payload
        self.is_send = is_send

    def wait(self) -> None:
        try:
            self.work.wait(self._transport._limit)
        except RuntimeError as error:
            raise self._transport._translated(error, self) from error


class _StagedReceive:
    """A receive into host memory, for a tensor on a CUDA device."""

    __slots__ = ("_host", "_payload", "_pending")

    def __init__(self, pending: Pending, host: Tensor, payload: Tensor) -> None:
        self._pending = pending
        self._host = host
        self._payload = payload

    def wait(self) -> None:
        self._pending.wait()
        # Torch's allocator of pinned memory knows of the copy, and does not give the memory away before it.
        self._payload.copy_(self._host, non_blocking=True)


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.numel(), dtype=torch.uint8, pin_memory=True)
