"""Devices as torch knows them: which there are, their memory, streams and clocks, their draws, their backend.

The one file that tells an accelerator from the CPU, and CUDA from other accelerators. It asks
`torch.accelerator` where that has an answer, so what is left of CUDA is its word and its allocator's history.
Who imports this file may run where there is no accelerator, or one that Bireme does not compute on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bireme.errors import BiremeError

ACCELERATOR = "cuda"
"""The accelerators that Bireme is tested on. ROCm's go by this name as well."""

UNTESTED = ("xpu", "mps")
"""Accelerators that Bireme computes on in the same way, but that nobody has tested it on."""

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable that lets a process see some GPUs only."""

_PINNING = (ACCELERATOR, "xpu")

KINDS: tuple[str, ...] = ("cpu", ACCELERATOR, *UNTESTED)
"""The types of devices that Bireme computes on."""

Backend = Literal["gloo", "nccl"]
"""What joins processes: nccl between accelerators, or gloo, which is Bireme's own lines between hosts."""


@dataclass(frozen=True, slots=True)
class _Properties:
    """What an accelerator is called, and how much memory it has."""

    name: str
    memory_bytes: int


@dataclass(slots=True)
class _Allocations:
    """What an accelerator's allocator counted: the most in use, the most it held, how often it was asked."""

    peak_bytes: int = 0
    reserved_bytes: int = 0
    num_allocations: int = 0


def is_accelerator(device: torch.device) -> bool:
    """Whether work on a device goes on after the call that asked for it, in memory the host cannot read."""
    return device.type not in ("cpu", "meta")


def num_accelerators(kind: str = ACCELERATOR) -> int:
    """How many accelerators of a kind there are here."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.device_count() if found is not None and found.type == kind else 0


def device_called(name: str | torch.device) -> torch.device:
    """The device that torch calls so here, with its number if devices of its type have one."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        numbers = [f"{ACCELERATOR}:{number}" for number in range(num_accelerators())]
        raise BiremeError(
            f"There is no device {str(name)!r} here. Use {', '.join(['cpu', *numbers])} or meta."
        ) from error


def check_supported(device: torch.device) -> None:
    """Refuse a device that Bireme does not compute on."""
    if device.type not in KINDS:
        raise BiremeError(
            f"Bireme computes on {', '.join(KINDS)}, not on {device}. Use device = cpu, or write the "
            "description of a device if you only need a plan."
        )


def device_of_process(kind: str, local_rank: int) -> torch.device:
    """The device of the process of that number on its machine; processes share accelerators in turns."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, local_rank % max(1, num_accelerators(kind)))


def use(device: torch.device) -> None:
    """Let the calling thread's work go to a device where none is named.

    It also multiplies once, forward and backward. The libraries of an accelerator take memory for each thread
    that uses them, tens of megabytes of what torch's allocator counts; what is measured from here on is of
    tensors. Autograd's own thread has to have the device as well before a library is its first call.
    """
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)
        one = torch.ones(1, 1, device=device, requires_grad=True)
        torch.autograd.backward((one * (one @ one)).sum())


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all it was asked for; at once where calls return with their result."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def properties_of(device: torch.device) -> _Properties:
    """The name and the memory of an accelerator."""
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "get_device_properties"):  # as of mps
        return _Properties(device.type, int(module.recommended_max_memory()))
    found: Any = module.get_device_properties(device)
    return _Properties(str(found.name), int(found.total_memory))


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operators on a device draw from unless told otherwise."""
    if not is_accelerator(device):
        return torch.default_generator
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    module: Any = torch.get_device_module(device)
    if not module.default_generators:
        torch.empty(0, device=device)  # there are none before the device is first used
    generator: torch.Generator = module.default_generators[index]
    return generator


def pinned(num_bytes: int) -> Tensor:
    """Host memory that an accelerator reads and writes by itself, while the host goes on. Where memory is
    shared with the accelerator, as on a Mac, it is ordinary memory.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=any(map(num_accelerators, _PINNING)))


def pinned_like(tensor: Tensor) -> Tensor:
    """Such memory for a tensor like this one."""
    return pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)


def on_host(tensor: Tensor) -> Tensor:
    """The tensor if it is on the host, else a copy of it in pinned memory there."""
    room = room_on_host(tensor)
    return tensor if room is tensor else room.copy_(tensor)


def room_on_host(tensor: Tensor) -> Tensor:
    """The tensor if it is on the host, else pinned memory there for one like it."""
    return tensor if tensor.device.type == "cpu" else pinned_like(tensor)


def mark(device: torch.device) -> torch.Event:
    """A point in the current stream of an accelerator. `one.elapsed_time(other)` is milliseconds once both
    are reached.
    """
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def allocated_bytes(device: torch.device) -> int:
    """What this process's tensors take on an accelerator."""
    return int(torch.accelerator.memory_allocated(device))


def peak_bytes(device: torch.device) -> int:
    """The most they took since `reset_peak`."""
    return int(torch.accelerator.max_memory_allocated(device))


def process_bytes(device: torch.device) -> int:
    """What is in use on an accelerator beside tensors: this process's context, kernels and communicators,
    what libraries hold of torch's memory, and all that other programs hold there. To be asked when no tensor
    is left on it. Only what libraries hold where the driver does not say.
    """
    libraries = allocated_bytes(device)
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):  # as of mps
        return libraries
    free, total = module.mem_get_info(device)
    return libraries + max(int(total) - int(free) - int(torch.accelerator.memory_reserved(device)), 0)


def reset_peak(device: torch.device) -> None:
    """Start a new measurement of the peak."""
    torch.empty(0, device=device)  # there is no allocator to ask before the first tensor
    torch.accelerator.reset_peak_memory_stats(device)


@contextmanager
def allocations(device: torch.device) -> Iterator[_Allocations | None]:
    """What a device's allocator does inside, once the block has ended; None where nobody counts it.

    Torch offers the history of its allocator under private names, and for CUDA alone.
    """
    if device.type != "cuda":
        yield None
        return
    found = _Allocations()
    reset_peak(device)
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        yield found
        history = torch.cuda.memory._snapshot(device)["device_traces"]
        found.num_allocations = sum(entry["action"] == "alloc" for entries in history for entry in entries)
        found.peak_bytes = peak_bytes(device)
        found.reserved_bytes = int(torch.accelerator.max_memory_reserved(device))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
