"""What joins the ranks of a run: messages between two of them, sums over groups of them.

The engine knows ranks through this alone, so the same engine runs on processes and, in tests, on threads.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bireme.cluster.machine import num_cores
from bireme.errors import BiremeError
from bireme.runtime.nccl_transport import NcclTransport
from bireme.runtime.peer_sockets import meet
from bireme.runtime.socket_sums import SocketSums
from bireme.runtime.socket_transport import SocketTransport
from bireme.runtime.transport import Transport
from bireme.runtime.world import World
from bireme.schedule.instruction import Instruction, Message
from bireme.sync.group import DistGroup, MessageGroup, OwnedGroup, Pending, SingleRankGroup, Sums

__all__ = ["DistFabric", "Fabric", "PipelineFabric", "SingleRankFabric", "fabric_of", "teller"]

AWAKE_S = 0.5e-3
"""How long a rank with cores of its own stays awake when it waits for a message. Where processors sleep
deeply, as virtual ones do, waking up takes longer than most messages between two ranks of one machine."""


def fabric_of(world: "World | Fabric | None", num_ranks: int, device: torch.device) -> "Fabric":
    """The fabric of a world, or the one given; of one process alone where nothing is given.

    It is for a pipeline of so many ranks, on devices of that type.
    """
    if isinstance(world, World):
        if world.device.type == "cuda" and device.type != "cuda":
            raise BiremeError(
                f"The world has the backend nccl, which carries messages between CUDA devices, and the "
                f"pipeline is on {device}. Give it device=world.device, or open the world with backend gloo."
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

    def transport(self, ranks: Sequence[int], rank_of_stage: Sequence[int], /) -> Transport:
        """Messages between some ranks, which are called 0, 1, 2, … in this order there; this one is of them.

        `rank_of_stage` says, in these numbers, between which of them there are borders.
        """

    def sums(self, transport: Transport, /) -> Sums | None:
        """Sums of a few numbers over all ranks, made over a transport that joins them, by the ranks' own
        threads; None where only a group's background can.
        """

    def everyone(self) -> MessageGroup:
        """All ranks, for what their own threads do together."""

    def group(self, ranks: Sequence[int]) -> OwnedGroup | None:
        """A new group of some ranks, which another thread may have; None if this one is not of them."""


class DistFabric:
    """The fabric of processes that an open world has joined."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def rank(self) -> int:
        """This process."""
        return self._world.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self._world.size

    def transport(self, ranks: Sequence[int], rank_of_stage: Sequence[int], /) -> Transport:
        """Messages between some processes; aborted as soon as another one has failed.

        With the backend nccl they go between CUDA devices over NCCL, else over sockets of their own.
        """
        world = self._world
        transport: Transport
        if world.device.type == "cuda":
            transport = NcclTransport(ranks, rank_of_stage, world.device)
        else:
            place = ranks.index(world.rank)
            # Counted in the store: a world may see many fabrics, and each meeting needs a name of its own.
            number = world.store.add(f"meetings of {world.rank}", 1)
            neighbours = neighbours_of(place, rank_of_stage)
            if len(ranks) == world.size:  # so that it can carry their sums, which rank 0 makes
                neighbours |= set(range(1, world.size)) if place == 0 else {0}
            lines = meet(
                world.store,
                f"meeting {number}",
                rank=place,
                ranks=ranks,
                neighbours=neighbours,
                timeout_s=world.timeout_s,
            )
            has_own_cores = world.num_local * torch.get_num_threads() <= num_cores()
            awake_s = AWAKE_S if has_own_cores else 0.0
            transport = SocketTransport(lines, timeout_s=world.timeout_s, awake_s=awake_s)
        world.watch.abort_on_failure(transport)
        return transport

    def sums(self, transport: Transport, /) -> Sums | None:
        """Over sockets between CPUs."""
        if not isinstance(transport, SocketTransport):
            return None
        return SocketSums(transport, self.rank, self.size)

    def everyone(self) -> MessageGroup:
        """The group that torch.distributed makes of all processes when they join."""
        everyone = dist.group.WORLD
        assert everyone is not None, "a world that is open has joined it"
        return self._watched(everyone)

    def group(self, ranks: Sequence[int]) -> OwnedGroup | None:
        """A new group of some processes; None if this one is not of them."""
        made = dist.new_group(list(ranks))
        return self._watched(made) if self.rank in ranks else None

    def _watched(self, made: dist.ProcessGroup) -> DistGroup:
        group = DistGroup(made)
        self._world.watch.abort_on_failure(group)
        return group


def neighbours_of(rank: int, rank_of_stage: Sequence[int]) -> set[int]:
    """The ranks that a rank has borders with."""
    pairs = [pair for pair in pairwise(rank_of_stage) if rank in pair]
    return {other for pair in pairs for other in pair} - {rank}


class SingleRankFabric:
    """The fabric of one process, which has nobody to talk to."""

    rank = 0
    size = 1

    def transport(self, _ranks: Sequence[int], _rank_of_stage: Sequence[int], /) -> Transport:
        """Nothing ever goes over it."""
        return _Nowhere()

    def sums(self, _transport: Transport, /) -> Sums:
        """This process alone."""
        return SingleRankGroup()

    def everyone(self) -> MessageGroup:
        """This process alone."""
        return SingleRankGroup()

    def group(self, _ranks: Sequence[int]) -> OwnedGroup:
        """This process alone."""
        return SingleRankGroup()


class PipelineFabric:
    """A fabric as one pipeline uses it: what was made through it is given back together."""

    def __init__(self, fabric: Fabric) -> None:
        self.rank = fabric.rank
        self.size = fabric.size
        self.sums = fabric.sums
        self.everyone = fabric.everyone
        self._fabric = fabric
        self._transports: list[Transport] = []
        self._groups: list[OwnedGroup] = []

    def transport(self, ranks: Sequence[int], rank_of_stage: Sequence[int], /) -> Transport:
        """Messages between some ranks."""
        made = self._fabric.transport(ranks, rank_of_stage)
        self._transports.append(made)
        return made

    def group(self, ranks: Sequence[int]) -> OwnedGroup | None:
        """A new group of some ranks; None if this one is not of them."""
        made = self._fabric.group(ranks)
        if made is not None:
            self._groups.append(made)
        return made

    def abort_groups(self) -> None:
        """Free whoever waits in a group for ranks that may never come."""
        for group in self._groups:
            group.abort()

    def close(self) -> None:
        """Give all back. Nobody waits here any more."""
        for transport in self._transports:
            transport.close()
        for group in self._groups:
            group.close()
        self._transports.clear()
        self._groups.clear()


class _Nowhere:
    """A transport between no ranks."""

    is_host = False

    def send(self, key: Message, to: int, payload: Tensor, num_bytes: int | None = None) -> Pending:
        raise RuntimeError(f"There is no rank {to} to send the {key} to.")

    def receive(self, key: Message, source: int, payload: Tensor) -> Pending:
        raise RuntimeError(f"There is no rank {source} for the {key} to come from.")

    def close(self) -> None:
        """There is nothing to close."""

    def abort(self) -> None:
        """Nobody waits."""
