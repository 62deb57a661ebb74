"""Flows between ranks, timed: how late a message is, how fast flows go alone and at once, what a sum takes.

Every function is called by all ranks of the world at the same time, with the same arguments, and gives the
same on all. Messages go over torch.distributed, as gradients do: between CPUs over gloo, between CUDA
devices over NCCL.
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bireme.cluster.probed import Flow
from bireme.devices import synchronize
from bireme.runtime.world import World

__all__ = ["ProbeMember", "all_reduce_s", "latency_s", "message_bytes", "rates"]

SMALL_BYTES = 64
FIRST_BYTES = 32 * 1024
MOST_BYTES = 64 * 2**20
NUM_UNDER_WAY = 2
"""Messages of a flow under way at once, so that the next one does not wait for the last one's way back."""


@dataclass(slots=True)
class ProbeMember:
    """What one rank needs to take part: the world, and a group in which all agree on numbers on the CPU."""

    world: World
    agreeing: dist.ProcessGroup

    @staticmethod
    def of(world: World) -> "ProbeMember":
        """All ranks make one together."""
        made = dist.new_group(list(range(world.size)), backend="gloo")
        assert made is not None
        return ProbeMember(world, made)

    def everyone(self, numbers: Sequence[float]) -> list[float]:
        """The sums of all ranks' numbers; each is known to one rank, and zero elsewhere."""
        told = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(told, group=self.agreeing)
        return [float(one) for one in told]

    def together(self) -> None:
        """Return when all ranks have come here."""
        dist.barrier(group=self.agreeing)

    def buffer(self, num_bytes: int) -> Tensor:
        """Memory on this rank's device."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.world.device)

    def settle(self) -> None:
        """Wait until the device has done what it was given."""
        synchronize(self.world.device)


def latency_s(line: ProbeMember, pair: Flow, *, rounds: int) -> float:
    """Half of what a small message takes there and back, the median."""
    source, destination = pair
    rank = line.world.rank
    seconds = []
    line.together()
    if rank in pair:
        small = line.buffer(SMALL_BYTES)
        other = destination if rank == source else source
        for _ in range(rounds + 1):
            begin_s = time.perf_counter()
            if rank == source:
                dist.send(small, other)
                dist.recv(small, other)
                line.settle()
            else:
                dist.recv(small, other)
                line.settle()
                dist.send(small, other)
            seconds.append(time.perf_counter() - begin_s)
    own = statistics.median(seconds[1:]) / 2 if rank == source else 0.0
    return line.everyone([own])[0]


def message_bytes(line: ProbeMember, flow: Flow, late_s: float, *, least_s: float) -> int:
    """How large messages must be to take some time and be much longer under way than they are late."""
    num_bytes = FIRST_BYTES
    while True:
        taken_s = num_bytes / rates(line, [flow], [num_bytes], seconds=0.0)[0]
        if taken_s >= max(least_s, 4 * late_s) or num_bytes >= MOST_BYTES:
            return num_bytes
        num_bytes *= 2 if taken_s * 8 > least_s else 4


def rates(line: ProbeMember, flows: Sequence[Flow], sizes: Sequence[int], *, seconds: float) -> list[float]:
    """The bytes a second of flows that all go at once for so long, each in messages of its size.

    A rank may have several. The receiver counts, from its first message to its last.
    """
    rank = line.world.rank
    line.together()
    ends_s = time.perf_counter() + seconds
    own_rates = [0.0] * len(flows)

    def work(number: int) -> None:
        source, destination = flows[number]
        if source == rank:
            _send(line, destination, sizes[number], ends_s)
        else:
            own_rates[number] = _receive(line, source, sizes[number])

    own = [number for number, flow in enumerate(flows) if rank in flow]
    with ThreadPoolExecutor(max(len(own), 1), thread_name_prefix="bireme-flow") as threads:
        for done in [threads.submit(work, number) for number in own]:
            done.result()
    return line.everyone(own_rates)


LEAST_MESSAGES = 3
LAST = 1


def _send(line: ProbeMember, destination: int, num_bytes: int, ends_s: float) -> None:
    """The near end of a flow. The first byte of a message tells whether it is the last."""
    spare = [line.buffer(num_bytes) for _ in range(NUM_UNDER_WAY)]
    under_way: deque[tuple[dist.Work, Tensor]] = deque()
    num_sent, is_last = 0, False
    while not is_last:
        if not spare:
            work, message = under_way.popleft()
            work.wait()
            spare.append(message)
        message = spare.pop()
        is_last = num_sent >= LEAST_MESSAGES and time.perf_counter() >= ends_s
        message[0] = LAST if is_last else 0
        begun = dist.isend(message, destination)
        assert begun is not None
        under_way.append((begun, message))
        num_sent += 1
    for work, _message in under_way:
        work.wait()
    line.settle()


def _receive(line: ProbeMember, source: int, num_bytes: int) -> float:
    """The far end: the bytes a second that came."""
    message = line.buffer(num_bytes)
    come_s: list[float] = []
    while not come_s or int(message[0]) != LAST:
        dist.recv(message, source)
        line.settle()
        come_s.append(time.perf_counter())
    return (len(come_s) - 1) * num_bytes / (come_s[-1] - come_s[0])


def all_reduce_s(line: ProbeMember, num_ranks: int, num_bytes: int, *, rounds: int) -> float:
    """What a sum over the first ranks takes, the median; the group must be made by all."""
    group = dist.new_group(list(range(num_ranks)))
    seconds = []
    line.together()
    if line.world.rank < num_ranks:
        numbers = torch.zeros(num_bytes // 4, device=line.world.device)
        for _ in range(rounds + 1):
            begin_s = time.perf_counter()
            dist.all_reduce(numbers, group=group)
            line.settle()
            seconds.append(time.perf_counter() - begin_s)
    own = statistics.median(seconds[1:]) if line.world.rank == 0 else 0.0
    return line.everyone([own])[0]
