"""What the operating system says about this machine: its processor, memory and network cards."""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "NetworkCard",
    "available_bytes",
    "host_name",
    "memory_bytes",
    "network_cards",
    "num_cores",
    "processor_name",
]

MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Where Linux says how much memory a container may use."""

CORES_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""Where it says how much of the processor, as microseconds in a period."""

MEMORY_USED, MEMORY_DETAILS = Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory.stat")
"""Where it says how much a container uses, and for what."""

MEMORY_HERE = Path("/proc/meminfo")

CARDS = Path("/sys/class/net")


@dataclass(frozen=True, slots=True)
class NetworkCard:
    """A network card in use, and how fast it says it is."""

    name: str
    bytes_per_s: float
    full_duplex: bool


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
    all_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(MEMORY_LIMIT).strip()
    return min(all_bytes, int(limit)) if limit.isdecimal() else all_bytes


def available_bytes() -> int:
    """The memory that this process could still get without swapping, as far as the system says it."""
    limit, used = _read(MEMORY_LIMIT).strip(), _read(MEMORY_USED).strip()
    free = memory_bytes()
    if (found := re.search(r"^MemAvailable:\s+(\d+) kB", _read(MEMORY_HERE), re.MULTILINE)) is not None:
        free = min(free, int(found[1]) * 1024)
    if limit.isdecimal() and used.isdecimal():
        # Pages of files that were not read lately are given back when memory is asked for.
        idle = re.search(r"^inactive_file (\d+)$", _read(MEMORY_DETAILS), re.MULTILINE)
        free = min(free, int(limit) - int(used) + (int(idle[1]) if idle else 0))
    return max(free, 0)


def network_cards() -> tuple[NetworkCard, ...]:
    """The cards that are up and whose speed is known, the fastest first."""
    found = []
    for folder in sorted(CARDS.glob("*")):
        speed = _read(folder / "speed").strip()
        # A card without a device is virtual: loopback, bridges, tunnels.
        if (folder / "device").exists() and _read(folder / "operstate").strip() == "up" and speed.isdecimal():
            bits_per_s = int(speed) * 1e6
            if bits_per_s:
                half = _read(folder / "duplex").strip() == "half"
                found.append(NetworkCard(folder.name, bits_per_s / 8, not half))
    return tuple(sorted(found, key=lambda card: -card.bytes_per_s))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # not on this system, or not for this kind of thing
        return ""
