"""What this machine's devices are called and how much memory they have."""

import platform
from importlib import metadata

import torch

from bireme.cluster.device import Device
from bireme.cluster.machine import memory_bytes, processor_name
from bireme.devices import KINDS, device_called, is_accelerator, properties_of
from bireme.errors import BiremeError

__all__ = ["check_measurable", "device_here", "torch_device", "versions_here"]


def torch_device(name: str) -> torch.device:
    """The device of this machine that torch calls so, if seconds can be measured on it."""
    device = device_called(name)
    check_measurable(device)
    return device


def check_measurable(device: torch.device) -> None:
    """Refuse a device whose seconds cannot be measured."""
    if device.type not in KINDS:
        raise BiremeError(
            f"Seconds are measured on {' and '.join(KINDS)}, not on {device}. Give the "
            "description of a device to estimate them instead."
        )


def device_here(device: torch.device) -> Device:
    """A device of this machine; how fast it is has to be measured."""
    if is_accelerator(device):
        properties = properties_of(device)
        return Device(properties.name, device.type, properties.memory_bytes)
    return Device(processor_name(), "cpu", memory_bytes())


def versions_here() -> str:
    """The software that what is measured here depends on."""
    own = metadata.version("bireme")
    return f"Bireme {own}, torch {torch.__version__}, Python {platform.python_version()}"
