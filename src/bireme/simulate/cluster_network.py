"""The network of a cluster as a program's ranks meet it: which wires the messages between them share."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from bireme.cluster.cluster import Cluster
from bireme.cluster.routes import Lane
from bireme.errors import BiremeError
from bireme.schedule.program import Program
from bireme.simulate.network import Network, Path, Wire
from bireme.simulate.simulator import pairs_that_talk

__all__ = ["cluster_network"]


def cluster_network(
    cluster: Cluster,
    program: Program,
    devices: Sequence[int],
    *,
    replicas: Mapping[int, Sequence[int]] | None = None,
) -> Network:
    """The wires between a program's ranks, of which rank r runs on device `devices[r]`.

    `replicas[r]` are the devices that hold rank r's stages in all replicas of the pipeline, its own among
    them. They sync gradients in a ring, in the order of their numbers, which keeps each server's devices
    together. Messages of the other replicas are not in this network.
    """
    if len(devices) != program.num_ranks:
        raise BiremeError(
            f"{len(devices)} devices are given for {program.num_ranks} ranks; give one for each rank."
        )
    for device in (*devices, *(one for ring in (replicas or {}).values() for one in ring)):
        if not 0 <= device < cluster.num_devices:
            raise BiremeError(
                f"There is no device {device} in the cluster; they are 0 to {cluster.num_devices - 1}."
            )
    wires = _Wires()
    paths = {
        (a, b): Path(wires.of(cluster.path(devices[a], devices[b])), cluster.latency(devices[a], devices[b]))
        for a, b in sorted(pairs_that_talk(program))
    }
    sync_paths = {
        rank: _ring(cluster, sorted(set(ring)), rank, wires) for rank, ring in (replicas or {}).items()
    }
    return Network(tuple(wires.wires), paths, sync_paths)


class _Wires:
    """A wire for each lane, numbered as they come up."""

    def __init__(self) -> None:
        self.wires: list[Wire] = []
        self._number: dict[str, int] = {}

    def of(self, lanes: Sequence[Lane]) -> tuple[int, ...]:
        for lane in lanes:
            if lane.name not in self._number:
                self._number[lane.name] = self.add(Wire(lane.name, lane.bytes_per_s))
        return tuple(self._number[lane.name] for lane in lanes)

    def add(self, wire: Wire) -> int:
        self.wires.append(wire)
        return len(self.wires) - 1


def _ring(cluster: Cluster, ring: Sequence[int], rank: int, wires: _Wires) -> Path:
    """All that a ring crosses, and a wire of its own as slow as the lane that the ring crosses most often."""
    hops = [(a, b) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True) if a != b]
    crossed = Counter(lane for a, b in hops for lane in cluster.path(a, b))
    slowest = min((lane.bytes_per_s / times for lane, times in crossed.items()), default=math.inf)
    own = wires.add(Wire(f"ring of rank {rank}", slowest))
    latency_s = 2 * (len(ring) - 1) * max((cluster.latency(a, b) for a, b in hops), default=0.0)
    return Path((own, *wires.of(tuple(crossed))), latency_s)
