"""Devices in a fixed order, one per stage, and the links between neighbours."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bireme.errors import BiremeError

__all__ = ["DeviceRow", "DeviceSlot", "RowLink"]


@dataclass(frozen=True, slots=True)
class DeviceSlot:
    """The device of one stage: `speed` divides the chain's seconds, 0.5 is half as fast."""

    name: str
    speed: float = 1.0
    memory_bytes: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.speed < math.inf or not self.memory_bytes > 0:
            raise BiremeError(
                f"Device {self.name} has speed {self.speed} and {self.memory_bytes} bytes; both must be more "
                "than 0."
            )


@dataclass(frozen=True, slots=True)
class RowLink:
    """The way between two neighbours; without `full_duplex` both directions take turns."""

    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    full_duplex: bool = True

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not 0 <= self.latency_s < math.inf:
            raise BiremeError(
                f"A link has {self.bytes_per_s} bytes/s and a latency of {self.latency_s} s; it needs more "
                "than 0 bytes/s, and 0 s or more."
            )


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """The seats in the order of the stages; `links[s]` joins seat s to seat s + 1.

    Where messages `overlap` with computing, a link only limits the pace; else a stage waits while
    what it needs comes in, as the simulator has it.
    """

    seats: tuple[DeviceSlot, ...]
    links: tuple[RowLink, ...]
    overlap: bool = True

    def __post_init__(self) -> None:
        if not self.seats or len(self.links) != len(self.seats) - 1:
            raise BiremeError(
                f"A line of {len(self.seats)} devices has one link fewer than devices, not {len(self.links)}."
            )

    @staticmethod
    def equal(
        num_stages: int,
        *,
        memory_bytes: float = math.inf,
        link: RowLink | None = None,
        speeds: Sequence[float] = (),
        overlap: bool = True,
    ) -> "DeviceRow":
        """Devices that differ by nothing, or by their speed alone."""
        given = tuple(speeds) or (1.0,) * num_stages
        if num_stages < 1 or len(given) != num_stages:
            raise BiremeError(
                f"A line has a device or more, and as many speeds, not {num_stages} and {len(given)}."
            )
        seats = tuple(DeviceSlot(f"device {s}", speed, memory_bytes) for s, speed in enumerate(given))
        return DeviceRow(seats, (link or RowLink(),) * (num_stages - 1), overlap)

    @property
    def num_stages(self) -> int:
        """How many stages it has seats for."""
        return len(self.seats)
