"""What a device can page to: its share of the host and of the disk, and how fast its chunks travel.

What a cluster does not give is taken from makers' figures, of which 80 % arrive:

* A GPU exchanges with its host over its PCIe bridge. Without one it has the PCIe 3.0 × 16 that every card of
  the last ten years has at least: 16 lanes of 8 GT/s, 128 in 130 bits data, are 15.75 GB/s each way.
* A processor device and its host are the same memory, and a copy crosses it three times: it is read, its
  place is read, and that is written. A channel of DDR4-3200 carries 3,200 million times 8 bytes a second.
* A disk reads and writes 3.3 GB/s, the slower of the two figures that Samsung announced the 970 EVO Plus
  with, an NVMe disk on PCIe 3.0 × 4. When its cache is full it writes about half of that.
"""

from collections.abc import Collection
from dataclasses import dataclass

from bireme.cluster.cluster import Cluster

_ATTAINED = 0.8
PCIE_BYTES_PER_S = 15.75e9 * _ATTAINED
_CROSSINGS = 3
_COPY_BYTES_PER_S = 25.6e9 * _ATTAINED / _CROSSINGS
_DISK_BYTES_PER_S = 3.3e9 * _ATTAINED


@dataclass(frozen=True, slots=True)
class _TierShare:
    """What one of the devices in use gets of its server; bytes are None where the cluster does not say, and
    what copies and chunks take of themselves is 0 then.
    """

    host_bytes: int | None
    disk_bytes: int | None
    host_bytes_per_s: float
    disk_bytes_per_s: float
    copy_s: float = 0.0
    chunk_s: float = 0.0


def tier_share(cluster: Cluster, device: int, used: Collection[int]) -> _TierShare:
    """The share of a device where those devices are used, all of which page."""
    placed = cluster.devices()
    server, own = cluster.servers[placed[device].server], placed[device].device
    sharers = sum(placed[one].server == placed[device].server for one in used)
    return _TierShare(
        host_bytes=server.host_memory_bytes // sharers if server.host_memory_bytes else None,
        disk_bytes=server.disk_bytes // sharers if server.disk_bytes else None,
        host_bytes_per_s=_host_bytes_per_s(cluster, device, used),
        disk_bytes_per_s=(server.disk_bytes_per_s or _DISK_BYTES_PER_S) / sharers,
        copy_s=own.copy_s,
        chunk_s=own.chunk_s,
    )


def _host_bytes_per_s(cluster: Cluster, device: int, used: Collection[int]) -> float:
    own = cluster.devices()[device]
    if own.device.host_bytes_per_s:
        return own.device.host_bytes_per_s
    if own.device.kind != "cuda":
        return own.device.bytes_per_s / _CROSSINGS or _COPY_BYTES_PER_S
    places = {cluster.devices()[one].place for one in used if cluster.devices()[one].server == own.server}
    for bridge in cluster.servers[own.server].bridges:
        if own.place in bridge.devices:
            slower = min(bridge.link.bytes_per_s, bridge.link.into_bytes_per_s)
            return slower / len(places.intersection(bridge.devices))
    return PCIE_BYTES_PER_S
