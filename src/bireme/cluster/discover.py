"""This machine as a cluster of one server: what can be known without measuring anything."""

from dataclasses import dataclass

from bireme.cluster.cluster import Cluster
from bireme.cluster.device import Device
from bireme.cluster.links import Card, Link
from bireme.cluster.machine import host_name, memory_bytes, network_cards, num_cores, processor_name
from bireme.cluster.nvml import find_cuda_devices
from bireme.cluster.server import Server
from bireme.errors import BiremeError

__all__ = ["Discovery", "discover"]

MOST_CPUS = 1024


@dataclass(frozen=True, slots=True)
class Discovery:
    """What was found, and in sentences what could not be."""

    cluster: Cluster
    notes: tuple[str, ...]


def discover(cpus: int | None = None) -> Discovery:
    """The devices and links of this machine.

    The processor is cut into so many devices, each with its share of cores and memory. Unless a number is
    given it is one device where there is no CUDA device, and none where there is.
    """
    if cpus is not None and not 0 <= cpus <= MOST_CPUS:
        raise BiremeError(f"The CPU cannot be divided into {cpus} devices; it can be 0 to {MOST_CPUS}.")
    cuda = find_cuda_devices()
    notes = [cuda.note] if cuda.note else []
    parts = (0 if cuda.devices else 1) if cpus is None else cpus
    if not cuda.devices and not parts:
        raise BiremeError("There is no CUDA device here, so the CPU must be at least one device.")
    devices = (*cuda.devices, *_processor(parts))
    cards, own = network_cards(), list[Card]()
    if cards:
        first = cards[0]
        everyone = tuple(range(len(devices)))
        own.append(Card(first.name, everyone, Link(first.bytes_per_s, 0.0, first.full_duplex)))
        if len(cards) > 1:
            others = ", ".join(card.name for card in cards[1:])
            notes.append(
                f"All devices are put on the fastest network card, {first.name}; there is also {others}."
            )
    else:
        notes.append(
            "No network card reports its speed. Add a [[server.card]] to join this server to others."
        )
    if parts > 1:
        notes.append("The bandwidth between the CPU's devices is unknown; it counts as unlimited.")
    shared = num_cores() if parts > num_cores() else 0
    host_bytes = memory_bytes() if cuda.devices else 0
    server = Server(host_name(), devices, cuda.bridges, cuda.meshes, tuple(own), shared, host_bytes)
    if cuda.bridges or own:
        notes.append("Bandwidths are the hardware's rated figures; latencies are unknown.")
    return Discovery(Cluster((server,)), tuple(notes))


def _processor(parts: int) -> tuple[Device, ...]:
    if not parts:
        return ()
    cores, name = num_cores(), processor_name()
    share = Device(name, "cpu", memory_bytes() // parts, num_cores=max(1, cores // parts))
    return (share,) * parts
