"""The devices of a cluster as the placement of operators sees them: a `Fleet`.

There all accelerators are equal, all CPUs are, and every output goes by way of the host's memory at one price
for its bytes. A cluster whose devices differ in what counts is refused; of links that differ the slowest
represents all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bireme.cluster.cluster import Cluster, PlacedDevice
from bireme.cluster.device import KNOWN, Device
from bireme.cluster.symmetry import Symmetry
from bireme.errors import BiremeError

__all__ = ["MS", "Fleet", "fleet_of"]

MS = 1e3
"""Milliseconds in a second."""

STANDS_IN = {"cuda": KNOWN["a100"], "emulated": KNOWN["laptop"], "cpu": KNOWN["laptop"]}
"""Whose figures tell how the seconds of a unit divide, where those of the devices are not known."""


@dataclass(frozen=True, slots=True)
class _Way:
    """What one end of a way between two devices pays: this share of the time a message takes."""

    bytes_per_s: float
    latency_s: float
    share: float

    def cost_ms(self, num_bytes: float) -> float:
        return self.share * (num_bytes / self.bytes_per_s + self.latency_s) * MS


@dataclass(frozen=True, slots=True)
class Fleet:
    """Devices by name, the accelerators first and then the CPUs; `typical` is one of the accelerators.

    The speeds are relative to where the model was profiled.
    """

    names: tuple[str, ...]
    num_accelerators: int
    accelerator_bytes: int
    accelerator_speed: float
    cpu_speed: float
    typical: Device
    ways: tuple[_Way, ...]

    @property
    def num_cpus(self) -> int:
        """How many of the devices are CPUs that go with accelerators."""
        return len(self.names) - self.num_accelerators

    def cost_ms(self, num_bytes: float) -> float:
        """What moving so many bytes costs each accelerator that sends or receives them, in milliseconds.

        Between two accelerators each end pays half of the time that the message takes from one to the other.
        So it counts once in all: a sample that passes by is as late as the link makes it, and the loads of
        the two together hold what the link carries. An accelerator that talks to a CPU pays all of it, as the
        CPU pays nothing. One price has to serve for both, and for all pairs of devices: the highest.
        """
        return max((way.cost_ms(num_bytes) for way in self.ways), default=0.0)


def fleet_of(cluster: Cluster, names: Sequence[str] = ()) -> Fleet:
    """The fleet of a cluster, or of those of its devices that are named.

    CUDA devices and emulated ones are accelerators; where there are any, processors are CPUs. Where there are
    only processors, those are the accelerators: each has its memory and pays for its messages.
    """
    placed = cluster.devices()
    chosen = [placed[cluster.number_of(name)] for name in dict.fromkeys(names)] or list(placed)
    accelerators = [one for one in chosen if one.device.kind != "cpu"]
    cpus = [one for one in chosen if one.device.kind == "cpu"]
    if not accelerators:
        accelerators, cpus = cpus, []
    _check_equal(accelerators, "accelerators")
    _check_equal(cpus, "CPUs")
    typical = accelerators[0].device
    figures = typical.bytes_per_s, typical.float32_flops_per_s, typical.bfloat16_flops_per_s
    return Fleet(
        names=tuple(one.name for one in (*accelerators, *cpus)),
        num_accelerators=len(accelerators),
        accelerator_bytes=typical.memory_bytes,
        accelerator_speed=typical.speed,
        cpu_speed=cpus[0].device.speed if cpus else typical.speed,
        typical=typical if all(figures) else STANDS_IN[typical.kind],
        ways=_ways(cluster, accelerators, cpus),
    )


def _check_equal(devices: Sequence[PlacedDevice], what: str) -> None:
    """Refuse devices of which one is faster or, among accelerators, has more memory."""
    for other in devices[1:]:
        first = devices[0]
        is_as_fast = first.device.speed == other.device.speed
        is_as_large = what == "CPUs" or first.device.memory_bytes == other.device.memory_bytes
        if not (is_as_fast and is_as_large):
            raise BiremeError(
                f"{first.name} ({_words(first.device)}) and {other.name} ({_words(other.device)}) differ, "
                f"and placing operators treats all {what} for equal. Use bireme plan, which handles unequal "
                "devices, or name only devices that are equal."
            )


def _words(device: Device) -> str:
    return f"speed {device.speed:g}, {device.memory_bytes:,} bytes"


def _ways(
    cluster: Cluster, accelerators: Sequence[PlacedDevice], cpus: Sequence[PlacedDevice]
) -> tuple[_Way, ...]:
    """All ways that may turn out the dearest, each once."""
    of_accelerators = [cluster.number_of(one.name) for one in accelerators]
    of_cpus = [cluster.number_of(one.name) for one in cpus]
    sources = of_accelerators
    if len(of_accelerators) + len(of_cpus) == cluster.num_devices:
        # Where all devices are in use, one of several that can stand for each other meets all ways there are.
        alike = Symmetry(cluster).classes()
        sources = sorted({group[0] for group in alike}.intersection(of_accelerators))
    ways: set[_Way] = set()
    for number in sources:
        for others, share in ((of_accelerators, 0.5), (of_cpus, 1.0)):
            for other in others:
                if other != number:
                    for ends in ((number, other), (other, number)):
                        ways.add(_Way(cluster.bandwidth(*ends), cluster.latency(*ends), share))
    return tuple(sorted(ways, key=lambda way: (way.bytes_per_s, way.latency_s, way.share)))
