"""Messages between CUDA devices over NCCL.

NCCL knows no tags: what two ranks of one communicator exchange is matched by order, and it is done in order,
so that a receive posted early delays everything after it. Therefore each channel, one direction over
one border, has a process group of its two ranks to itself.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from bireme.runtime.peers import PeerLost
from bireme.runtime.transport import Channel
from bireme.schedule.instruction import Message
from bireme.sync.group import Pending

__all__ = ["NcclTransport"]


class NcclTransport:
    """The transport of this process over NCCL. All processes of the pipeline must make theirs together.

    `pipeline` are these processes, by their rank in it. Waiting puts the wait into the current stream and
    returns, so an error shows later; that a message never comes, or with another size, only NCCL's own
    watchdog finds.
    """

    is_host = False

    def __init__(self, pipeline: Sequence[int], rank_of_stage: Sequence[int], device: torch.device) -> None:
        own = dist.get_rank()
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        self._peers: dict[Channel, int] = {}
        hello = torch.zeros(1, dtype=torch.uint8, device=device)
        for channel in _channels(rank_of_stage):
            source = pipeline[rank_of_stage[channel.to_stage + (-1 if channel.forward else 1)]]
            target = pipeline[rank_of_stage[channel.to_stage]]
            if own not in (source, target):
                continue
            group = dist.new_group(sorted((source, target)), backend="nccl", use_local_synchronization=True)
            peer = dist.get_group_rank(group, target if own == source else source)
            # The first message of a communicator blocks both ranks until it is set up. All get through that
            # here, in one common order of the channels; amid a program they could wait in a circle.
            begin = group.send if own == source else group.recv
            begin([hello], peer, 0).wait()
            self._groups[channel] = group
            self._peers[channel] = peer
        torch.cuda.synchronize(device)

    def send(self, key: Message, to: int, payload: Tensor, num_bytes: int | None = None) -> Pending:
        """Begin to send, after the work already in the current stream; always the whole payload."""
        channel = Channel(key.forward, key.to_stage)
        try:
            work = self._groups[channel].send([payload], self._peers[channel], 0)
        except RuntimeError as error:
            raise PeerLost(to, str(error)) from error
        return _NcclPending(work, to, payload)

    def receive(self, key: Message, source: int, payload: Tensor) -> Pending:
        """Begin to receive."""
        channel = Channel(key.forward, key.to_stage)
        try:
            work = self._groups[channel].recv([payload], self._peers[channel], 0)
        except RuntimeError as error:
            raise PeerLost(source, str(error)) from error
        return _NcclPending(work, source, payload)

    def close(self) -> None:
        """Give the communicators back."""
        for group in self._groups.values():
            with suppress(ValueError):  # torch.distributed has ended as a whole
                dist.destroy_process_group(group)
        self._groups.clear()

    def abort(self) -> None:
        """Stop what is under way on all channels."""
        for group in tuple(self._groups.values()):
            group.abort()


class _NcclPending:
    """A send or receive under way; keeps the payload alive."""

    __slots__ = ("_payload", "_peer", "_work")

    def __init__(self, work: dist.Work, peer: int, payload: Tensor) -> None:
        self._work = work
        self._peer = peer
        self._payload = payload

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerLost(self._peer, str(error)) from error


def _channels(rank_of_stage: Sequence[int]) -> Iterator[Channel]:
    """Every direction over every border between two ranks."""
    for stage in range(1, len(rank_of_stage)):
        if rank_of_stage[stage - 1] != rank_of_stage[stage]:
            yield Channel(True, stage)
            yield Channel(False, stage - 1)
