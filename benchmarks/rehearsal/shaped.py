"""The engine's fabric with a cluster's links between its ranks: what is sent is late as it would be there.

Bytes really go over the machine's own sockets, few of them; the lanes are charged with what the profile
says that a message or a sum has. A message sets out when it is sent and its receive is posted, as between
CUDA devices and in the simulator.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from benchmarks.rehearsal.lanes import Channel, SharedLanes
from bireme.cluster.cluster import Cluster
from bireme.plan.plan import Plan
from bireme.runtime.fabric import Fabric
from bireme.runtime.stage_messages import Transport
from bireme.schedule.instruction import Message
from bireme.schedule.routes import Routes
from bireme.simulate.costs import Costs
from bireme.simulate.links import cluster_network
from bireme.simulate.network import Network
from bireme.sync.group import MessageGroup, OwnedGroup, Pending, Sums, Waiting
from bireme.wire.connection import Bell

__all__ = ["ShapedFabric", "Wiring", "rings_of", "wiring_of"]


@dataclass(frozen=True, slots=True)
class Wiring:
    """The channels of a plan on a cluster. Ranks are assigned replica by replica, as in the engine.

    `messages[a, b]` is the channel from rank a to rank b, `sums[r]` that of the sums over all ranks with the
    stages of rank r, which is the first of them.
    """

    bytes_per_s: tuple[float, ...]
    channels: tuple[Channel, ...]
    messages: dict[tuple[int, int], int]
    sums: dict[int, int]


def wiring_of(cluster: Cluster, plan: Plan, devices: Sequence[Sequence[int]]) -> Wiring:
    """The wiring where rank r of replica k runs on device `devices[r][k]`."""
    program = plan.program(1)
    number: dict[str, int] = {}
    bytes_per_s: list[float] = []
    channels: list[Channel] = []
    messages: dict[tuple[int, int], int] = {}
    sums: dict[int, int] = {}

    def lanes_of(network: Network, wires: Sequence[int]) -> tuple[int, ...]:
        for wire in (network.wires[one] for one in wires):
            if wire.name not in number:
                number[wire.name] = len(bytes_per_s)
                bytes_per_s.append(wire.bytes_per_s)
        return tuple(number[network.wires[one].name] for one in wires)

    rings = rings_of(plan, devices)
    for replica in range(plan.width):
        network = cluster_network(cluster, program, [row[replica] for row in devices], replicas=rings)
        first = replica * program.num_ranks
        for (a, b), path in network.paths.items():
            messages[first + a, first + b] = len(channels)
            channels.append(Channel(lanes_of(network, path.wires), path.latency_s))
        if replica == 0:
            for rank, path in network.sync_paths.items():
                sums[rank] = len(channels)
                # A ring that crosses a lane several times is as slow as a lane of its own.
                own = (len(bytes_per_s),)
                bytes_per_s.append(1 / network.seconds(path, 1.0) if path.wires else math.inf)
                lanes = lanes_of(network, path.wires)
                num = len(rings[rank])
                channels.append(Channel(lanes + own, path.latency_s, num, num))
    return Wiring(tuple(bytes_per_s), tuple(channels), messages, sums)


def rings_of(plan: Plan, devices: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """The devices that sum gradients with each other, by the first rank of each group."""
    routes = plan.source.routes
    groups = {
        ranks[0]: tuple(devices[rank % routes.num_ranks][rank // routes.num_ranks] for rank in ranks)
        for ranks in routes.alike(plan.width)
    }
    return {first: ring for first, ring in groups.items() if len(ring) > 1}


class ShapedFabric:
    """The fabric of one pipeline, as one rank sees it. `costs` say what its messages and sums weigh.

    `num_elements` of each stage are really summed up, whatever its gradients weigh.
    """

    def __init__(
        self,
        fabric: Fabric,
        plan: Plan,
        wiring: Wiring,
        costs: Costs,
        lanes: SharedLanes,
        num_elements: Sequence[int],
    ) -> None:
        self._fabric = fabric
        self._wiring = wiring
        self._costs = costs
        self._num_elements = num_elements
        self._lanes = lanes
        self._routes = plan.source.routes
        self._summed = [ranks for ranks in self._routes.alike(plan.width) if len(ranks) > 1]
        self._num_asked: dict[tuple[int, ...], int] = {}

    @property
    def rank(self) -> int:
        """This process."""
        return self._fabric.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self._fabric.size

    def transport(self, ranks: Sequence[int], routes: Routes, /) -> Transport:
        """Messages between the ranks of a pipeline, through the lanes."""
        inner = self._fabric.transport(ranks, routes)
        into, out = self._channels_of(ranks)
        return _ShapedTransport(inner, self._lanes, into, out, self._costs.message_of)

    def sums(self, transport: Transport, /) -> Sums | None:
        """Sums of a few numbers over all ranks, which are not late."""
        assert isinstance(transport, _ShapedTransport)
        return self._fabric.sums(transport.inner)

    def everyone(self) -> MessageGroup:
        """All ranks, whose few numbers are not late."""
        return self._fabric.everyone()

    def group(self, ranks: Sequence[int], *, on_host: bool = False) -> OwnedGroup | None:
        """Sums over some ranks. Those over replicas go through the lanes, the few numbers of others not."""
        key = tuple(ranks)
        turn = self._num_asked[key] = self._num_asked.get(key, 0) + 1
        inner = self._fabric.group(ranks, on_host=on_host)
        if inner is None or key not in self._summed or turn > 1:
            return inner
        pipeline_rank = ranks[0]
        stages = self._routes.stages_of(pipeline_rank)
        num_bytes = sum(self._costs.reduce_bytes[stage] for stage in stages)
        num_elements = sum(self._num_elements[stage] for stage in stages)
        channel = self._wiring.sums[pipeline_rank]
        return _ShapedGroup(inner, self._lanes, channel, num_bytes / num_elements)

    def _channels_of(self, ranks: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
        """Those into this rank and out of it, by the other end's place among the ranks."""
        place = {rank: number for number, rank in enumerate(ranks)}
        into = {place[a]: one for (a, b), one in self._wiring.messages.items() if b == self.rank}
        out = {place[b]: one for (a, b), one in self._wiring.messages.items() if a == self.rank}
        return into, out


class _Late:
    """Something under way that is there when the lanes say so."""

    __slots__ = ("_channel", "_inner", "_key", "_lanes")

    def __init__(self, inner: Pending, lanes: SharedLanes, channel: int, key: Hashable) -> None:
        self._inner = inner
        self._lanes = lanes
        self._channel = channel
        self._key = key

    def wait(self) -> None:
        self._inner.wait()
        self._lanes.wait(self._channel, self._key)


class _ShapedTransport:
    """Messages of one rank. What is sent is gone when the machine has it, as over sockets."""

    def __init__(
        self,
        inner: Transport,
        lanes: SharedLanes,
        into: dict[int, int],
        out: dict[int, int],
        num_bytes: Callable[[Message], float],
    ) -> None:
        self.inner = inner
        self.is_host = inner.is_host
        self._lanes = lanes
        self._into = into
        self._out = out
        self._num_bytes = num_bytes

    def send(self, key: Message, to: int, payload: Tensor, num_bytes: int | None = None) -> Pending:
        """Begin to send."""
        self._lanes.ready(self._out[to], tuple(key), self._num_bytes(key))
        return self.inner.send(key, to, payload, num_bytes)

    def receive(self, key: Message, source: int, payload: Tensor) -> Pending:
        """Begin to receive."""
        channel = self._into[source]
        pending = self.inner.receive(key, source, payload)
        self._lanes.ready(channel, tuple(key), self._num_bytes(key))
        return _Late(pending, self._lanes, channel, tuple(key))

    def close(self) -> None:
        """Let go of the transport."""
        self.inner.close()

    def abort(self) -> None:
        """Give up."""
        self.inner.abort()


class _ShapedGroup:
    """Sums over the replicas of a rank; a real element weighs `element_bytes`."""

    def __init__(self, inner: OwnedGroup, lanes: SharedLanes, channel: int, element_bytes: float) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self._inner = inner
        self._lanes = lanes
        self._channel = channel
        self._element_bytes = element_bytes
        self._num_sums = 0

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Begin to sum. What says who has a gradient weighs nothing, but is late all the same."""
        num_bytes = self._element_bytes * tensor.numel() if tensor.is_floating_point() else 0.0
        key, self._num_sums = self._num_sums, self._num_sums + 1
        self._lanes.ready(self._channel, key, num_bytes)
        return _Late(self._inner.all_reduce(tensor), self._lanes, self._channel, key)

    def gather(self, tensor: Tensor, into: Sequence[Tensor]) -> Pending:
        """Begin to gather; nothing that counts goes this way."""
        return self._inner.gather(tensor, into)

    def exchange(
        self, given: Tensor, lengths: Sequence[int], taken: Tensor, taken_lengths: Sequence[int]
    ) -> Waiting:
        """Begin to send every member its part; what replicas share of an optimizer is not shaped."""
        return self._inner.exchange(given, lengths, taken, taken_lengths)

    def copy_from(self, tensor: Tensor, source: int) -> Pending:
        """Begin to fill the tensor with that of the member `source`, which is not shaped either."""
        return self._inner.copy_from(tensor, source)

    def go_on(self, bell: Bell) -> None:
        """Move what has begun."""
        self._inner.go_on(bell)

    def abort(self) -> None:
        """Give up."""
        self._inner.abort()

    def close(self) -> None:
        """Give the group back."""
        self._inner.close()
