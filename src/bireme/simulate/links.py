"""Links in a few numbers: the networks that a command line can describe."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from bireme.cluster.cluster import Cluster, Lane, Link, Overlap
from bireme.errors import BiremeError
from bireme.schedule.program import Program
from bireme.simulate.network import Network, Path, Wire
from bireme.simulate.simulator import pairs_that_talk

# Gradient sums over replicas go around a ring.


def ring_share(width: int) -> float:
    """How many times its own gradients each of so many replicas sends on."""
    return 2 * (width - 1) / width


def hops(ring: Sequence[int]) -> list[tuple[int, int]]:
    """From each device to the next one, and from the last to the first."""
    return [(a, b) for a, b in zip(ring, [*ring[1:], *ring[:1]], strict=True) if a != b]


# The network of a cluster as a program's ranks meet it: which wires the messages between them share.


def cluster_network(
    cluster: Cluster,
    program: Program,
    devices: Sequence[int],
    *,
    replicas: Mapping[int, Sequence[int]] | None = None,
    most_overlap: Overlap = Overlap.FULL,
) -> Network:
    """The wires between a program's ranks, of which rank r runs on device `devices[r]`.

    `replicas[r]` are the devices that hold rank r's stages in all replicas of the pipeline, its own among
    them; for a stage on several ranks those of all. They sync gradients in a ring, in the order of their
    numbers, which keeps each server's devices together. Messages of the other replicas are not in this
    network. No message overlaps with more than `most_overlap`, which is what the program that sends it can
    do.
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
        (a, b): Path(
            wires.of(cluster.path(devices[a], devices[b])),
            cluster.latency(devices[a], devices[b]),
            Overlap.least((cluster.overlap(devices[a], devices[b]), most_overlap)),
            curved=cluster.curved(devices[a], devices[b]),
        )
        for a, b in sorted(pairs_that_talk(program))
    }
    sync_paths = {}
    for rank, ring in (replicas or {}).items():
        lanes = ring_lanes(cluster.path, ring)
        loads = tuple(map(float, lanes.values()))
        late_s, curved = ring_latency_s(cluster, ring), ring_curved(cluster, ring)
        sync_paths[rank] = Path(
            wires.of(tuple(lanes)), late_s, loads=loads, curved=curved, parts=ring_parts(ring)
        )
    rings = [*(replicas or {}).values()]
    agreeing = {*devices, *(device for ring in rings for device in ring)}
    return Network(tuple(wires.wires), paths, sync_paths, agreement_s(cluster, agreeing))


class _Wires:
    """A wire for each lane, numbered as they come up."""

    def __init__(self) -> None:
        self.wires: list[Wire] = []
        self._number: dict[str, int] = {}

    def of(self, lanes: Sequence[Lane]) -> tuple[int, ...]:
        for lane in lanes:
            if lane.name not in self._number:
                self._number[lane.name] = len(self.wires)
                self.wires.append(Wire(lane.name, lane.bytes_per_s))
        return tuple(self._number[lane.name] for lane in lanes)


def ring_lanes(path: Callable[[int, int], Sequence[Lane]], devices: Sequence[int]) -> Counter[Lane]:
    """How often a ring over these devices crosses each lane; it goes in the order of their numbers."""
    return Counter(lane for hop in hops(sorted(set(devices))) for lane in path(*hop))


# Latency of what several ranks do together, whatever the bytes: messages that wait for each other.


def ring_latency_s(
    cluster: Cluster, devices: Collection[int], *, is_direct: bool = False, in_round: bool = False
) -> float:
    """The latency of a sum over these devices. In a ring 2 (n - 1) messages follow each other: over NCCL,
    which joins CUDA devices, in a round, and where some of several servers have several members, because a
    ring crosses each server's card once. All others, and those that are `is_direct`, send parts to their
    owners, and then the sums of parts to all. Two members exchange what they have, except over NCCL.
    """
    ring = sorted(set(devices))
    if len(ring) == 1:
        return 0.0
    servers = {cluster.devices()[device].server for device in ring}
    is_nccl = not in_round and _over_nccl(cluster, ring)
    is_ring = is_nccl or in_round or 1 < len(servers) < len(ring)
    num_messages = 2 * (len(ring) - 1) if is_ring and not is_direct else 2
    if len(ring) == 2 and not is_nccl:
        num_messages = 1
    return num_messages * max(cluster.latency(*hop) for hop in hops(ring))


def _over_nccl(cluster: Cluster, devices: Collection[int]) -> bool:
    placed = cluster.devices()
    return all(placed[device].device.kind == "cuda" for device in devices)


def agreement_s(cluster: Cluster, devices: Collection[int]) -> float:
    """The latency of the agreement on a batch, for which each rank sends its numbers to all others."""
    return round_trip_s(cluster, devices) / 2


def round_trip_s(cluster: Cluster, devices: Collection[int]) -> float:
    """The latency of a message there and back on the slowest way between two of these devices."""
    placed = cluster.devices()
    of_servers = {placed[device].server: device for device in sorted(devices, reverse=True)}
    ends = list(of_servers.values()) if len(of_servers) > 1 else sorted(devices)

    def farthest(here: int) -> int:
        return max(ends, key=lambda there: cluster.latency(here, there))

    if not ends:
        return 0.0
    # All ways meet at a switch, so the device that is farthest from any is an end of the slowest way.
    end = farthest(ends[0])
    return 2 * cluster.latency(end, farthest(end))


def ring_parts(devices: Sequence[int]) -> int:
    """In how many messages each hop of a sum over these devices sends its bytes."""
    return 2 * max(len(set(devices)) - 1, 1)


def ring_curved(cluster: Cluster, devices: Sequence[int]) -> tuple[Link, ...]:
    """The links of a ring over these devices on which small messages are slower."""
    found = (cluster.curved(*hop) for hop in hops(sorted(set(devices))))
    return tuple(dict.fromkeys(link for links in found for link in links))


_SLOWEST = 1e-3
"""Bytes a second."""
_LONGEST = 1e9
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Links:
    """Equal links: a cable for each two ranks that talk or, with `ranks_per_server`, a card per server.

    Servers hold consecutive ranks. All ranks of a server share its card to talk to other servers, and
    inside a server messages take no time. `overlap` says which end computes while a message crosses.
    """

    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    full_duplex: bool = True
    ranks_per_server: int | None = None
    overlap: Overlap = Overlap.FULL

    def __post_init__(self) -> None:
        if not self.bytes_per_s >= _SLOWEST:
            raise BiremeError(f"link_bytes_per_s is {self.bytes_per_s}; it must be {_SLOWEST} or more.")
        if not 0 <= self.latency_s <= _LONGEST:
            raise BiremeError(f"link_latency_s is {self.latency_s}; it must be 0 to {_LONGEST}.")
        if self.ranks_per_server is not None and self.ranks_per_server < 1:
            raise BiremeError(f"ranks_per_server is {self.ranks_per_server}; a server has at least one rank.")

    def network(self, program: Program) -> Network:
        """The network that joins a program's ranks."""
        per_server, num_ranks = self.ranks_per_server, program.num_ranks
        network = Network.dedicated(
            pairs_that_talk(program),
            bytes_per_s=self.bytes_per_s,
            latency_s=self.latency_s,
            full_duplex=self.full_duplex,
            overlap=self.overlap,
            servers=[rank // per_server for rank in range(num_ranks)] if per_server else (),
        )
        return replace(network, agree_s=2 * self.latency_s if num_ranks > (per_server or 1) else 0.0)
