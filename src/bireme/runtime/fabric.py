"""What joins the ranks of a run: messages between two of them, sums over groups of them.

The engine knows ranks through this alone, so the same engine runs on processes and, in tests, on threads.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from math import inf
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bireme.cluster.machine import num_cores
from bireme.errors import BiremeError
from bireme.runtime.board import PeerLost
from bireme.runtime.line_group import GroupLines, LineGroup
from bireme.runtime.message_format import TensorSpec, WireFormat
from bireme.runtime.socket_transport import SocketTransport, hosts_met, meet, met
from bireme.runtime.stage_messages import Channel, Transport
from bireme.runtime.world import World
from bireme.schedule.instruction import Instruction, Message
from bireme.schedule.routes import Routes
from bireme.sync.group import (
    DistGroup,
    MessageGroup,
    OwnedGroup,
    Pending,
    SingleRankGroup,
    Sums,
    Waiting,
    add_in_order,
)

# Messages between CUDA devices over NCCL.
#
# NCCL knows no tags: what two ranks of one communicator exchange is matched by order, and it is done in
# order, so that a receive posted early delays everything after it. Therefore each channel, one direction over
# one boundary between two ranks, has a process group of these ranks to itself.


class NcclTransport:
    """The transport of this process over NCCL. All processes of the pipeline must make theirs together.

    `pipeline` are these processes, by their rank in it. Waiting puts the wait into the current stream and
    returns, so an error shows later; that a message never comes, or with another size, only NCCL's own
    watchdog finds.
    """

    is_host = False

    def __init__(self, pipeline: Sequence[int], routes: Routes, device: torch.device) -> None:
        self._pipeline, own = tuple(pipeline), dist.get_rank()
        self._groups: dict[tuple[Channel, int], tuple[dist.ProcessGroup, int]] = {}
        """By channel and the other rank's place in the pipeline; with its number in the group."""
        hello = torch.zeros(1, dtype=torch.uint8, device=device)
        for channel, *ends in _channels(routes):
            source, target = (pipeline[end] for end in ends)
            if own not in (source, target):
                continue
            other = ends[1] if own == source else ends[0]
            group = dist.new_group(sorted((source, target)), backend="nccl", use_local_synchronization=True)
            peer = dist.get_group_rank(group, target if own == source else source)
            # The first message of a communicator blocks both ranks until it is set up. All get through that
            # here, in one common order of the channels; amid a program they could wait in a circle.
            begin = group.send if own == source else group.recv
            begin([hello], peer, 0).wait()
            self._groups[channel, other] = group, peer
        torch.cuda.synchronize(device)

    def send(self, key: Message, to: int, payload: Tensor, num_bytes: int | None = None) -> Pending:
        """Begin to send, after the work already in the current stream; always the whole payload."""
        group, peer = self._groups[Channel(key.forward, key.to_stage), to]
        return _waiting(group.send, peer, self._pipeline[to], payload)

    def receive(self, key: Message, source: int, payload: Tensor) -> Pending:
        """Begin to receive."""
        group, peer = self._groups[Channel(key.forward, key.to_stage), source]
        return _waiting(group.recv, peer, self._pipeline[source], payload)

    def close(self) -> None:
        """Give the communicators back."""
        for group, _ in self._groups.values():
            with suppress(ValueError):  # torch.distributed has ended as a whole
                dist.destroy_process_group(group)
        self._groups.clear()

    def abort(self) -> None:
        """Stop what is under way on all channels."""
        for group, _ in tuple(self._groups.values()):
            group.abort()


def _waiting(
    begin: Callable[[list[Tensor], int, int], dist.Work], peer: int, other: int, payload: Tensor
) -> Pending:
    """A send or receive, which has begun; keeps the payload alive."""

    def lost(error: RuntimeError) -> PeerLost:
        return PeerLost(other, str(error))

    try:
        work = begin([payload], peer, 0)
    except RuntimeError as error:
        raise lost(error) from error

    def wait(_payload: Tensor = payload) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise lost(error) from error

    return Waiting(wait)


def _channels(routes: Routes) -> Iterator[tuple[Channel, int, int]]:
    """Every direction over every boundary between two ranks, with the sending and the receiving rank."""
    for stage, before, after in routes.hops():
        yield Channel(True, stage), before, after
        yield Channel(False, stage - 1), after, before


# Sums of a few numbers over the ranks of a socket transport, made by the ranks' own threads.
#
# Each rank sends its numbers to all others at once, and adds up what comes from them. So no rank waits for
# another one to answer, and no order of instructions makes ranks wait in a circle.

_NO_STAGE = -1
"""Where a message about a micro-batch has its stage."""
_NUMBERS = "numbers"
HOST = torch.device("cpu")


class _Numbers(Message):
    """The key of one rank's numbers of a sum."""

    def __str__(self) -> str:
        """Such as `part of sum 3`."""
        return f"part of sum {self.batch}"


class SocketSums:
    """A group that sums numbers on the CPU over a transport that joins all its ranks, which make the same
    sums in the same order.
    """

    def __init__(self, transport: SocketTransport, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._transport = transport
        self._num_begun = 0

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Begin to replace the tensor, in place, by its sum over the ranks, added in their order."""
        number, self._num_begun = self._num_begun, self._num_begun + 1
        key, numbers = _Numbers(True, _NO_STAGE, number, None, None), _format(tensor.shape, tensor.dtype)
        own = numbers.parcel(HOST)
        own.address(key)
        own.pack({_NUMBERS: tensor})
        others = {peer: numbers.arrival(key, HOST) for peer in range(self.size) if peer != self.rank}
        under_way = [self._transport.send(key, peer, own.message) for peer in others]
        under_way += [self._transport.receive(key, peer, one.message) for peer, one in others.items()]

        def wait() -> None:
            for one in under_way:
                one.wait()
            add_in_order(tensor, self.rank, [one.unpack(HOST)[_NUMBERS] for one in others.values()])

        return Waiting(wait)


@cache
def _format(shape: torch.Size, dtype: torch.dtype) -> WireFormat:
    return WireFormat([TensorSpec(_NUMBERS, tuple(shape), dtype)])


_AWAKE_S = 0.5e-3
"""How long a rank with cores of its own stays awake when it waits for a message. Where processors sleep
deeply, as virtual ones do, waking up takes longer than most messages between two ranks of one machine."""


def fabric_of(world: "World | Fabric | None", num_ranks: int, device: torch.device) -> "Fabric":
    """The fabric of a world, or the one given; of one process alone where nothing is given.

    It is for a pipeline of that many ranks, on devices of that type.
    """
    if isinstance(world, World):
        if world.backend == "nccl" and device.type != "cuda":
            raise BiremeError(
                f"The world has the backend nccl, which carries messages between CUDA devices, and the "
                f"pipeline is on {device}. Give its settings device=world.device, or open the world with "
                "backend gloo."
            )
        return DistFabric(world)
    if world is not None:
        return world
    if num_ranks > 1:
        raise BiremeError(
            f"The plan is for {num_ranks} processes. Start them with bireme.launch or torchrun, and give the "
            "pipeline the open World."
        )
    return SingleRankFabric()


def teller(world: "World | Fabric | None") -> Callable[[Instruction], None]:
    """Tells a world's watch what this rank is doing, for when it has to be told why it does not go on."""
    if not isinstance(world, World):
        return lambda _step: None
    watch = world.watch

    def tell(step: Instruction) -> None:
        watch.doing = step

    return tell


class Fabric(Protocol):
    """One rank's view of it. Groups must be made by all ranks, the same ones in the same order."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """How many there are."""

    def transport(self, ranks: Sequence[int], routes: Routes, /) -> Transport:
        """Messages between some ranks, which are called 0, 1, 2, … in this order there; this one is of them.

        `routes` give, in these numbers, the ranks between which there are boundaries.
        """

    def sums(self, transport: Transport, /) -> Sums | None:
        """Sums of a few numbers over all ranks, made over a transport that joins them, by the ranks' own
        threads; None where only a group's background can.
        """

    def everyone(self) -> MessageGroup:
        """All ranks, for what their own threads do together."""

    def group(self, ranks: Sequence[int], *, on_host: bool = False) -> OwnedGroup | None:
        """A new group of some ranks, which another thread may have; None if this one is not of them. One that
        is `on_host` is for tensors there, and moves no others as fast as it could.
        """


class DistFabric:
    """The fabric of processes that an open world has joined. `wait_s` is how long a message over sockets may
    take, by default the world's timeout.
    """

    def __init__(self, world: World, *, wait_s: float | None = None) -> None:
        self._world = world
        self._wait_s = world.timeout_s if wait_s is None else wait_s
        self.rank, self.size = world.rank, world.size

    def transport(self, ranks: Sequence[int], routes: Routes, /) -> Transport:
        """Messages between some processes; aborted as soon as another one has failed.

        With the backend nccl they go between CUDA devices over NCCL, else over sockets of their own: from
        and to an accelerator through pinned host memory, so devices of all kinds may be mixed.
        """
        world = self._world
        transport: Transport
        if world.backend == "nccl":
            transport = NcclTransport(ranks, routes, world.device)
        else:
            place = ranks.index(world.rank)
            neighbors = neighbors_of(place, routes)
            if len(ranks) == world.size:  # so that it can carry their sums
                neighbors = {*range(world.size)} - {place}
            # Counted in the store: a world may see many fabrics, and each meeting needs a name of its own.
            lines = meet(
                world.store,
                f"meeting {world.store.add(f'meetings of {world.rank}', 1)}",
                rank=place,
                ranks=ranks,
                neighbors=neighbors,
                timeout_s=world.timeout_s,
            )
            has_own_cores = world.num_local * torch.get_num_threads() <= num_cores()
            awake_s = _AWAKE_S if has_own_cores else 0.0
            transport = SocketTransport(lines, timeout_s=self._wait_s, awake_s=awake_s, ranks=ranks)
        world.watch.abort_on_failure(transport)
        return transport

    def sums(self, transport: Transport, /) -> Sums | None:
        """Over sockets between CPUs."""
        if not isinstance(transport, SocketTransport):
            return None
        return SocketSums(transport, self.rank, self.size)

    def everyone(self) -> MessageGroup:
        """A group of all processes."""
        return self._line_group(range(self.size), self.rank)

    def group(self, ranks: Sequence[int], *, on_host: bool = False) -> OwnedGroup | None:
        """A new group of some processes; None if this one is not of them. With the backend nccl it is one of
        torch.distributed unless it is `on_host`; all others go over sockets of their own.
        """
        world = self._world
        of_torch = dist.new_group(list(ranks)) if world.backend == "nccl" and not on_host else None
        if self.rank not in ranks:
            return None
        if of_torch is None:
            return self._line_group(ranks, ranks.index(self.rank))
        group = DistGroup(of_torch, world.device)
        world.watch.abort_on_failure(group)
        return group

    def _line_group(self, ranks: Sequence[int], place: int) -> LineGroup:
        """A group of these ranks, of which this is the one at that place, over sockets of its own."""
        world = self._world
        kept = world.group_lines.setdefault(tuple(ranks), deque())
        while True:
            is_new = not kept
            lines = self._lines_among(ranks, place) if is_new else kept.popleft()
            group = LineGroup(place, ranks, lines, timeout_s=world.timeout_s, keep=kept.append)
            world.watch.abort_on_failure(group)
            if is_new or group.has_all():
                return group

    def _lines_among(self, ranks: Sequence[int], place: int) -> GroupLines:
        """New lines to the others of these ranks, of which this is the one at that place. To meet takes some
        messages to and from each of them, one after the other.
        """
        world, words = self._world, "-".join(map(str, ranks))
        name = f"group {words} {world.store.add(f'group {words} of {world.rank}', 1)}"
        others = [one for one in range(len(ranks)) if one != place]
        sockets, _ = met(world.store, name, place, ranks, others, world.timeout_s)
        hosts = hosts_met(world.store, name, ranks)
        return GroupLines({peer: one for (peer, _), one in sockets.items()}, hosts)


def neighbors_of(rank: int, routes: Routes) -> set[int]:
    """The ranks that a rank has boundaries with."""
    pairs = [pair for _, *pair in routes.hops() if rank in pair]
    return {other for pair in pairs for other in pair} - {rank}


class SingleRankFabric:
    """The fabric of one process, which has nobody to talk to."""

    rank = 0
    size = 1

    def transport(self, _ranks: Sequence[int], _routes: Routes, /) -> Transport:
        """Nothing ever goes over it."""
        return SocketTransport({}, timeout_s=inf)

    def sums(self, _transport: Transport, /) -> Sums:
        """This process alone."""
        return SingleRankGroup()

    def everyone(self) -> MessageGroup:
        """This process alone."""
        return SingleRankGroup()

    def group(self, _ranks: Sequence[int], *, on_host: bool = False) -> OwnedGroup:
        """This process alone."""
        del on_host
        return SingleRankGroup()


class PipelineFabric:
    """A fabric as one pipeline uses it: what was made through it is given back together."""

    def __init__(self, fabric: Fabric) -> None:
        self.rank = fabric.rank
        self.size = fabric.size
        self.sums = fabric.sums
        self._fabric = fabric
        self._transports: list[Transport] = []
        self._groups: list[OwnedGroup] = []
        self._of_threads: list[OwnedGroup] = []
        """Those that ranks' own threads wait in, which no other thread aborts."""

    def transport(self, ranks: Sequence[int], routes: Routes, /) -> Transport:
        """Messages between some ranks."""
        made = self._fabric.transport(ranks, routes)
        self._transports.append(made)
        return made

    def everyone(self) -> MessageGroup:
        """All ranks."""
        made = self._fabric.everyone()
        self._of_threads.append(made)
        return made

    def group(self, ranks: Sequence[int], *, on_host: bool = False) -> OwnedGroup | None:
        """A new group of some ranks; None if this one is not of them."""
        made = self._fabric.group(ranks, on_host=on_host)
        if made is not None:
            self._groups.append(made)
        return made

    def abort_groups(self) -> None:
        """Free whoever waits in a group for ranks that may never come."""
        for group in self._groups:
            group.abort()

    def close(self) -> None:
        """Give all back. No thread waits here any more."""
        for transport in self._transports:
            transport.close()
        for group in (*self._groups, *self._of_threads):
            group.close()
        self._transports.clear()
        self._groups.clear()
        self._of_threads.clear()
