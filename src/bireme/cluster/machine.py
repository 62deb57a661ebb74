"""What the operating system says about this machine: its processor, memory and network cards."""

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

from bireme.cluster.catalogue import namesake
from bireme.cluster.cluster import Bridge, Card, Cluster, Link, Mesh, Server
from bireme.cluster.device import Device
from bireme.errors import BiremeError

MEMORY_VARIABLE = "BIREME_MEMORY"
"""The environment variable with the most bytes of memory to use here."""

# CUDA devices as NVIDIA's management library tells of them: without torch, and without touching them.
#
# Bandwidths are what the links' makers say, for one direction. What programs attain is measured by a probe.

_PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""By generation."""

_NVLINK_BYTES_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 25e9, 6: 25e9, 7: 50e9, 8: 50e9}
"""Of one link, by the library's number for its version."""


@dataclass(frozen=True, slots=True)
class _CudaDevices:
    """The CUDA devices of this machine, the links between them, or the reason why there are none."""

    devices: tuple[Device, ...] = ()
    bridges: tuple[Bridge, ...] = ()
    meshes: tuple[Mesh, ...] = ()
    note: str = ""


def find_cuda_devices() -> _CudaDevices:
    """The devices that the driver knows and CUDA_VISIBLE_DEVICES lets through."""
    try:
        library = import_module("pynvml")
    except ImportError:
        return _CudaDevices(
            note="CUDA devices were not searched for, because nvidia-ml-py is missing. Install bireme[gpu]."
        )
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return _CudaDevices(note=f"No CUDA devices: {str(error).rstrip('.')}.")
    try:
        return _Finder(library).found()
    except library.NVMLError as error:
        raise BiremeError(f"The driver does not list its CUDA devices: {error}.") from error
    finally:
        library.nvmlShutdown()


class _Finder:
    def __init__(self, library: Any) -> None:
        self.library = library
        handles = [library.nvmlDeviceGetHandleByIndex(n) for n in range(library.nvmlDeviceGetCount())]
        self.handles = _visible(handles, [library.nvmlDeviceGetUUID(handle) for handle in handles])

    def found(self) -> _CudaDevices:
        """All that can be known."""
        devices = tuple(map(self._device, self.handles))
        if not devices:
            return _CudaDevices(note="No CUDA devices: there are none, or CUDA_VISIBLE_DEVICES hides them.")
        note = ""
        if any(self._ask("nvmlDeviceGetMigMode", handle, (0, 0))[0] for handle in self.handles):
            note = "A CUDA device is cut into MIG instances; it is listed whole."
        return _CudaDevices(devices, self._bridges(), self._meshes(), note)

    def _ask(self, what: str, *arguments: Any) -> Any:
        """What the library answers; the last argument where this device or driver cannot tell."""
        *given, otherwise = arguments
        try:
            return getattr(self.library, what)(*given)
        except (self.library.NVMLError, AttributeError):
            return otherwise

    def _device(self, handle: Any) -> Device:
        name = self.library.nvmlDeviceGetName(handle)
        total_bytes = int(self.library.nvmlDeviceGetMemoryInfo(handle).total)
        known = namesake(name)
        if known is None:
            return Device(name, "cuda", total_bytes)
        return replace(known, name=name, memory_bytes=total_bytes, watts=0.0, process_bytes=None)

    def _bridges(self) -> tuple[Bridge, ...]:
        """A bridge for each device, or for all devices on the same PCIe switches."""
        groups: list[list[int]] = []
        for place, handle in enumerate(self.handles):
            for group in groups:
                ancestor = self._ask(
                    "nvmlDeviceGetTopologyCommonAncestor", self.handles[group[0]], handle, None
                )
                if ancestor is not None and ancestor <= self.library.NVML_TOPOLOGY_MULTIPLE:
                    group.append(place)
                    break
            else:
                groups.append([place])
        bridges: list[Bridge] = []
        for group in groups:
            rates = [rate for place in group if (rate := self._pcie_bytes_per_s(self.handles[place]))]
            if rates:
                bridges.append(Bridge(f"pcie{len(bridges)}", tuple(group), Link(min(rates))))
        return tuple(bridges)

    def _pcie_bytes_per_s(self, handle: Any) -> float:
        generation = self._ask("nvmlDeviceGetMaxPcieLinkGeneration", handle, 0)
        width = self._ask("nvmlDeviceGetMaxPcieLinkWidth", handle, 0)
        return _PCIE_LANE_BYTES_PER_S.get(generation, 0.0) * float(width)

    def _meshes(self) -> tuple[Mesh, ...]:
        """One mesh over a switch, or cables between some of the devices, bundled where they are alike."""
        ports: dict[int, float] = {}
        cables: dict[tuple[int, int], float] = {}
        place_of = {
            _bus_of(self.library.nvmlDeviceGetPciInfo(handle)): place
            for place, handle in enumerate(self.handles)
        }
        for place, handle in enumerate(self.handles):
            for link in range(self.library.NVML_NVLINK_MAX_LINKS):
                if not self._ask("nvmlDeviceGetNvLinkState", handle, link, 0):
                    continue
                version = self._ask("nvmlDeviceGetNvLinkVersion", handle, link, 0)
                rate = _NVLINK_BYTES_PER_S.get(version, 0.0)
                kind = self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link, None)
                if kind == self.library.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                    ports[place] = ports.get(place, 0.0) + rate
                    continue
                remote = self._ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link, None)
                other = place_of.get(_bus_of(remote)) if remote is not None else None
                if other is not None and place < other:
                    cables[place, other] = cables.get((place, other), 0.0) + rate
        rates = [rate for rate in ports.values() if rate]
        if len(rates) > 1:
            members = tuple(place for place, rate in ports.items() if rate)
            return (Mesh("nvlink", members, Link(min(rates)), switched=True),)
        return _bundled({pair: rate for pair, rate in cables.items() if rate})


def _bus_of(info: Any) -> str:
    bus = info.busId
    return (bus.decode() if isinstance(bus, bytes) else str(bus)).lower()


def _bundled(cables: dict[tuple[int, int], float]) -> tuple[Mesh, ...]:
    """One mesh where every two have the same cable, else one for each cable."""
    members = sorted({place for pair in cables for place in pair})
    if len(members) > 1 and len(set(cables.values())) == 1 and set(combinations(members, 2)) == set(cables):
        return (Mesh("nvlink", tuple(members), Link(next(iter(cables.values())))),)
    return tuple(Mesh(f"nvlink{n}", pair, Link(rate)) for n, (pair, rate) in enumerate(cables.items()))


def _visible(handles: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """What CUDA_VISIBLE_DEVICES lets through, in its order; CUDA stops at the first word it does not know."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return list(handles)
    found = []
    for word in (part.strip() for part in chosen.split(",")):
        fits = [
            place
            for place, name in enumerate(names)
            if word == str(place) or (word.startswith("GPU-") and name.startswith(word))
        ]
        if len(fits) != 1:
            break
        found.append(handles[fits[0]])
    return found


MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Where Linux says how much memory a container may use."""

CORES_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""Where it says how much of the processor, as microseconds in a period."""

_MEMORY_USED, _MEMORY_DETAILS = Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory.stat")
"""Where it says how much a container uses, and for what."""

_MEMORY_HERE = Path("/proc/meminfo")

CARDS = Path("/sys/class/net")


def host_name() -> str:
    """This machine's name, as far as it can name a server."""
    words = re.findall(r"[A-Za-z0-9-]+", platform.node().partition(".")[0])
    return "-".join(words).strip("-") or "server0"


def processor_name() -> str:
    """What the processor is called."""
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def num_cores() -> int:
    """The cores that this process may use."""
    available = getattr(os, "sched_getaffinity", None)
    cores = len(available(0)) if available is not None else os.cpu_count() or 1
    quota, _, period = _read(CORES_LIMIT).strip().partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period):
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def memory_bytes() -> int:
    """The memory that this process may use."""
    limits = (_read(MEMORY_LIMIT).strip(), os.environ.get(MEMORY_VARIABLE, ""))
    all_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([all_bytes, *(int(limit) for limit in limits if limit.isdecimal())])


def available_bytes() -> int:
    """The memory that this process could still get without swapping, as far as the system says it."""
    limit, used = _read(MEMORY_LIMIT).strip(), _read(_MEMORY_USED).strip()
    free = memory_bytes()
    if (found := re.search(r"^MemAvailable:\s+(\d+) kB", _read(_MEMORY_HERE), re.MULTILINE)) is not None:
        free = min(free, int(found[1]) * 1024)
    if limit.isdecimal() and used.isdecimal():
        # Pages of files that were not read lately are given back when memory is asked for.
        idle = re.search(r"^inactive_file (\d+)$", _read(_MEMORY_DETAILS), re.MULTILINE)
        free = min(free, int(limit) - int(used) + (int(idle[1]) if idle else 0))
    return max(free, 0)


def _network_cards() -> list[tuple[str, Link]]:
    """The names and links of cards that are up and whose speed is known, the fastest first."""
    found = []
    for folder in sorted(CARDS.glob("*")):
        speed = _read(folder / "speed").strip()
        # A card without a device is virtual: loopback, bridges, tunnels.
        is_up = (folder / "device").exists() and _read(folder / "operstate").strip() == "up"
        if is_up and speed.isdecimal() and int(speed):
            is_full = _read(folder / "duplex").strip() != "half"
            found.append((folder.name, Link(int(speed) * 1e6 / 8, full_duplex=is_full)))
    return sorted(found, key=lambda card: -card[1].bytes_per_s)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # not on this system, or not for this kind of thing
        return ""


# This machine as a cluster of one server: what can be known without measuring anything.

_MOST_CPUS = 1024


@dataclass(frozen=True, slots=True)
class _Discovery:
    """What was found, and in sentences what could not be."""

    cluster: Cluster
    notes: tuple[str, ...]


def discover(cpus: int | None = None) -> _Discovery:
    """The devices and links of this machine.

    The processor is cut into so many devices, each with its share of cores and memory. Unless a number is
    given it is one device where there is no CUDA device, and none where there is.
    """
    if cpus is not None and not 0 <= cpus <= _MOST_CPUS:
        raise BiremeError(f"The CPU cannot be divided into {cpus} devices; it can be 0 to {_MOST_CPUS}.")
    cuda = find_cuda_devices()
    notes = [cuda.note] if cuda.note else []
    parts = (0 if cuda.devices else 1) if cpus is None else cpus
    if not cuda.devices and not parts:
        raise BiremeError("There is no CUDA device here, so the CPU must be at least one device.")
    devices = (*cuda.devices, *_processor(parts))
    cards, own = _network_cards(), list[Card]()
    if cards:
        name, link = cards[0]
        own.append(Card(name, tuple(range(len(devices))), link))
        if len(cards) > 1:
            others = ", ".join(other for other, _ in cards[1:])
            notes.append(f"All devices are put on the fastest network card, {name}; there is also {others}.")
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
    return _Discovery(Cluster((server,)), tuple(notes))


def _processor(parts: int) -> tuple[Device, ...]:
    if not parts:
        return ()
    cores, name = num_cores(), processor_name()
    share = Device(name, "cpu", memory_bytes() // parts, num_cores=max(1, cores // parts))
    return (share,) * parts
