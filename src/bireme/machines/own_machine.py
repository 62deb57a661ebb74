"""What is checked on a machine by itself, and the facts that two machines compare."""

import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from bireme.bounds import counted
from bireme.cluster.machine import available_bytes, host_name, num_cores
from bireme.errors import BiremeError, printable
from bireme.files import free_bytes
from bireme.machines.findings import Finding, fails, note, well
from bireme.machines.keys import own_key
from bireme.machines.lending import LEAST_MEMORY_BYTES

_LEAST_DISK_BYTES, _LEAST_SHARED_BYTES = 5 << 30, 64 << 20
_LEAST_FILES = 1024
_SHARED = Path("/dev/shm")
_DRIVER = Path("/proc/driver/nvidia/version")
_OF_GPUS = (
    _DRIVER,
    *map(Path, ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvmap", "/dev/kfd", "/dev/dxg")),
)
"""A Linux machine with a GPU that torch computes on has one of these files: NVIDIA's, also on a Jetson,
AMD's, or that of Linux within Windows.
"""
_MOST_TEXT = 100


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What the other side of a line learns of a machine."""

    name: str
    python: str
    torch: str
    bireme: str

    @classmethod
    def own(cls, bireme: str) -> "MachineFacts":
        """Those of this machine, with that version of Bireme."""
        return cls(host_name(), platform.python_version(), _torch_version(), bireme)

    @classmethod
    def read(cls, words: object) -> "MachineFacts":
        """Those that the other side has sent, each a short text."""
        given = words if isinstance(words, dict) else {}
        return cls(*(printable(given.get(name, "unknown"))[:_MOST_TEXT] for name in cls.__slots__))


def check_machine(own: MachineFacts) -> Iterator[Finding]:
    """Everything that can be checked without another machine."""
    yield well("versions", f"Python {own.python}, torch {own.torch}, Bireme {own.bireme}")
    yield _encryption()
    yield _name(own.name)
    yield from _room()
    yield _devices()


def _encryption() -> Finding:
    if find_spec("cryptography") is None:
        return fails(
            "encryption",
            "the package cryptography is missing, which lines to other hosts need.",
            "pip install 'bireme[encryption]', or set links.encrypt = false in a network of your own.",
        )
    try:
        key = own_key()
    except BiremeError as error:
        return fails("key", str(error), "")
    return well("key", f"the public key of this machine begins with {key.public[:16]}")


def _name(name: str) -> Finding:
    remedy = f"Add a line with its address and {name} to /etc/hosts, or set BIREME_ADDRESS to its address."
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return note("name", f"this machine does not find its own name, {name}.", remedy)
    if address.startswith("127."):
        return note("name", f"{name} is {address}, at which other machines do not find it.", remedy)
    return well("name", f"{name} is {address}")


def _room() -> Iterator[Finding]:
    memory, disk = available_bytes(), free_bytes(Path.cwd())
    text = f"{memory / 2**30:.1f} GiB of memory are free, for {num_cores()} cores"
    if memory < LEAST_MEMORY_BYTES:
        yield fails("memory", f"{text}.", "End other programs: a rank needs about 0.5 GiB besides its model.")
    else:
        yield well("memory", text)
    if disk is not None:
        text = f"{disk / 2**30:.1f} GiB are free in {Path.cwd()}"
        is_little = disk < _LEAST_DISK_BYTES
        yield note("disk", f"{text}.", "Checkpoints need room.") if is_little else well("disk", text)
    if _SHARED.is_dir() and (shared := shutil.disk_usage(_SHARED).total) <= _LEAST_SHARED_BYTES:
        yield note(
            "shared memory",
            f"{_SHARED} has {shared / 2**20:.0f} MiB, too few for processes that load data.",
            "Start the container with --shm-size=1g.",
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < _LEAST_FILES:
        yield note("files", f"a process may open {files} files.", f"Run: ulimit -n {4 * _LEAST_FILES}")


def _devices() -> Finding:
    if names := gpu_names():
        count = counted(len(names), "GPU")
        return well("devices", f"{count}: {', '.join(sorted({*names}))}")
    if not _DRIVER.exists():
        return well("devices", "no GPU; ranks compute on the CPU")
    import torch

    if built_for := torch.version.cuda or torch.version.hip:
        return fails(
            "devices",
            f"there is a driver for GPUs, and torch, which is built for CUDA {built_for}, finds no GPU.",
            "Compare the CUDA version of `nvidia-smi`: install a newer driver, or a torch for an older CUDA.",
        )
    remedy = "Install a torch that is built for the GPU (pytorch.org)."
    return note("devices", "there is a driver for GPUs, and this torch is for CPUs only.", remedy)


def _torch_version() -> str:
    """Without importing torch, if it is installed as a package."""
    if "torch" not in sys.modules:
        with suppress(PackageNotFoundError):
            return version("torch")
    import torch

    return torch.__version__


def gpu_names() -> tuple[str, ...]:
    """The GPUs of this machine that ranks may use. It imports torch only if there may be one."""
    if sys.platform == "linux" and not any(path.exists() for path in _OF_GPUS):
        return ()
    import torch

    from bireme.devices import num_accelerators

    return tuple(map(torch.cuda.get_device_name, range(num_accelerators())))
