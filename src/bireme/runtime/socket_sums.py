"""Sums of a few numbers over the ranks of a socket transport, made by the ranks' own threads.

Rank 0 adds up what the others send and tells them. In a pipeline it is the last to end a batch and the first
to begin one, so the others' numbers have come when it needs them, and its answer is there when they do. It
adds up while it waits for anything at all, so no order of instructions makes ranks wait in a circle.
"""

from functools import cache

import torch
from torch import Tensor

from bireme.runtime.socket_transport import SocketPending, SocketTransport
from bireme.runtime.tensor_spec import TensorSpec
from bireme.runtime.wire import Arrival, WireFormat
from bireme.schedule.instruction import Message
from bireme.sync.group import Pending

__all__ = ["SocketSums"]

NO_STAGE = -1
"""Where a message about a micro-batch has its stage."""
NUMBERS = "numbers"
HOST = torch.device("cpu")


class _Numbers(Message):
    """The key of the numbers of one sum; `forward` is the way to rank 0."""

    def __str__(self) -> str:
        """Such as `part of sum 3`."""
        return f"{'part' if self.forward else 'result'} of sum {self.batch}"


class SocketSums:
    """A group that sums float64 numbers on the CPU; all ranks make the same sums in the same order."""

    def __init__(self, transport: SocketTransport, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._transport = transport
        self._num_begun = 0
        self._open: list[_Sum] = []
        self._sent: list[Pending] = []
        if rank == 0:
            transport.on_arrival = self._add_up

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Begin to replace the tensor, in place, by its sum over the ranks, added in their order."""
        number, self._num_begun = self._num_begun, self._num_begun + 1
        up, down = (_Numbers(forward, NO_STAGE, number, None, None) for forward in (True, False))
        self.settle()
        if self.rank:
            self._send(up, 0, tensor)
            return self._expect(down, 0, tensor)
        parts = [self._expect(up, peer, tensor) for peer in range(1, self.size)]
        self._open.append(_Sum(self, tensor, down, parts))
        return self._open[-1]

    def settle(self) -> None:
        """Wait until what was sent is in the kernel's hands."""
        for sent in self._sent:
            sent.wait()
        self._sent.clear()

    def _send(self, key: Message, to: int, tensor: Tensor) -> None:
        parcel = _format(tensor).parcel(HOST)
        parcel.address(key)
        parcel.pack({NUMBERS: tensor})
        self._sent.append(self._transport.send(key, to, parcel.message))

    def _expect(self, key: Message, source: int, tensor: Tensor) -> "_Part":
        arrival = _format(tensor).arrival(key, HOST)
        return _Part(arrival, tensor, self._transport.receive(key, source, arrival.message))

    def finish(self) -> None:
        """Tell every sum that can be told, for good."""
        self._add_up()
        self.settle()

    def _add_up(self) -> None:
        """Tell the others every sum whose parts have come."""
        for one in [one for one in self._open if one.is_ready()]:
            self._open.remove(one)
            for part in one.parts:
                one.tensor += part.numbers()
            for peer in range(1, self.size):
                self._send(one.answer, peer, one.tensor)


class _Part:
    """Numbers from another rank: its part of a sum, or the sum, which `wait` puts into the tensor."""

    __slots__ = ("_arrival", "_tensor", "pending")

    def __init__(self, arrival: Arrival, tensor: Tensor, pending: SocketPending) -> None:
        self._arrival = arrival
        self._tensor = tensor
        self.pending = pending

    def numbers(self) -> Tensor:
        """Those that have come."""
        return self._arrival.unpack(HOST)[NUMBERS]

    def wait(self) -> None:
        """Return when the tensor is the sum."""
        self.pending.wait()
        self._tensor.copy_(self.numbers())


class _Sum:
    """A sum that rank 0 makes."""

    __slots__ = ("_sums", "answer", "parts", "tensor")

    def __init__(self, sums: SocketSums, tensor: Tensor, answer: Message, parts: list[_Part]) -> None:
        self._sums = sums
        self.tensor = tensor
        self.answer = answer
        self.parts = parts

    def is_ready(self) -> bool:
        return all(part.pending.is_done() for part in self.parts)

    def wait(self) -> None:
        """Return when the tensor is the sum."""
        for part in self.parts:
            part.pending.wait()
        self._sums.finish()


@cache
def _format_of(shape: tuple[int, ...], dtype: torch.dtype) -> WireFormat:
    return WireFormat([TensorSpec(NUMBERS, shape, dtype)])


def _format(tensor: Tensor) -> WireFormat:
    return _format_of(tuple(tensor.shape), tensor.dtype)
