"""A server: a machine with devices, and the links within it and out of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from bireme.cluster.device import Device
from bireme.cluster.links import Bridge, Card, Mesh, check_name
from bireme.errors import BiremeError

__all__ = ["Server", "device_names"]

WORDS = {"cuda": "gpu", "cpu": "cpu", "emulated": "emulated"}


def device_names(devices: Sequence[Device]) -> tuple[str, ...]:
    """What the devices of a server are called in it: gpu0, gpu1, cpu0, each kind with its own numbers."""
    seen = dict.fromkeys(WORDS, 0)
    names = []
    for device in devices:
        names.append(f"{WORDS[device.kind]}{seen[device.kind]}")
        seen[device.kind] += 1
    return tuple(names)


@dataclass(frozen=True, slots=True)
class Server:
    """A machine with devices: each on at most one bridge and one card, each two in at most one mesh.

    `num_cores` are the cores that its processor devices share; with 0 each has those that it says.
    `host_memory_bytes` and `disk_bytes` are what its devices can page to, and `disk_bytes_per_s` is how fast
    the disk reads and writes; what is 0 is not known.
    """

    name: str
    devices: tuple[Device, ...]
    bridges: tuple[Bridge, ...] = ()
    meshes: tuple[Mesh, ...] = ()
    cards: tuple[Card, ...] = ()
    num_cores: int = 0
    host_memory_bytes: int = 0
    disk_bytes: int = 0
    disk_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        check_name(self.name, "server")
        if not self.devices:
            raise BiremeError(f"{self.name} has no devices; a server has at least one.")
        for name, device in zip(self.device_names, self.devices, strict=True):
            if device.memory_bytes <= 0:
                raise BiremeError(
                    f"{self.name}/{name} has memory_bytes = {device.memory_bytes}; without it no "
                    "plan can be checked."
                )
        self._check_links()

    @property
    def device_names(self) -> tuple[str, ...]:
        """What its devices are called."""
        return device_names(self.devices)

    def _check_links(self) -> None:
        names: set[str] = set()
        groups: tuple[Bridge | Mesh | Card, ...] = (*self.bridges, *self.meshes, *self.cards)
        for group in groups:
            if group.name in names:
                raise BiremeError(f"{self.name} has two links named {group.name!r}. Rename one of them.")
            names.add(group.name)
            outside = [place for place in group.devices if not 0 <= place < len(self.devices)]
            if outside:
                raise BiremeError(
                    f"{group.name} of {self.name} joins device {outside[0]}; there are 0 to "
                    f"{len(self.devices) - 1}."
                )
        for kind, exclusive in (("bridges", self.bridges), ("cards", self.cards)):
            taken: set[int] = set()
            for group in exclusive:
                if twice := sorted(taken.intersection(group.devices)):
                    raise BiremeError(
                        f"{self.name}/{self.device_names[twice[0]]} is on two {kind}, so the path "
                        "of its bytes is ambiguous. Leave it on one."
                    )
                taken.update(group.devices)
        for one, other in combinations(self.meshes, 2):
            both = sorted(set(one.devices).intersection(other.devices))
            if len(both) > 1:
                first, second = (self.device_names[place] for place in both[:2])
                raise BiremeError(
                    f"{first} and {second} of {self.name} meet in two meshes, so the path of their bytes "
                    "is ambiguous. Leave them in one."
                )
