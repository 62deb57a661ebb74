"""What this machine's devices are called and how much memory they have."""

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from bireme.cluster.device import Device
from bireme.errors import BiremeError

__all__ = ["check_measurable", "device_here", "torch_device", "versions_here"]

LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Where Linux says how much memory a container may use."""


def torch_device(name: str) -> torch.device:
    """The device of this machine that torch calls so, if seconds can be measured on it."""
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise BiremeError(f"There is no device {name!r} here. Write cpu, cuda, cuda:1 or meta.") from error
    check_measurable(device)
    return device


def check_measurable(device: torch.device) -> None:
    """Refuse a device whose seconds cannot be measured."""
    if device.type not in ("cpu", "cuda"):
        raise BiremeError(
            f"Seconds are measured on cpu and cuda, and not on {device}. Give the description of a device "
            "instead, and they are estimated."
        )


def device_here(device: torch.device) -> Device:
    """A device of this machine; how fast it is has to be measured."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(properties.name, "cuda", properties.total_memory)
    return Device(_processor(), "cpu", _memory_bytes())


def versions_here() -> str:
    """The software that what is measured here depends on."""
    own = metadata.version("bireme")
    return f"Bireme {own}, torch {torch.__version__}, Python {platform.python_version()}"


def _memory_bytes() -> int:
    all_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(all_bytes, int(LIMIT.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # there is no such file, or it says that there is no limit
        return all_bytes


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
