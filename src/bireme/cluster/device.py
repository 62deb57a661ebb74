"""A device as numbers: the rates at which it computes and moves bytes, and the bytes that it holds."""

import math
from dataclasses import dataclass, fields, replace

from bireme.errors import BiremeError

# What a cost occupies. That decides how long it takes on another device than the profiled one.


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast a device is at each resource, relative to where the model was profiled. Links are as fast
    everywhere: what crosses them is in bytes, or in seconds that no device changes.
    """

    compute: float = 1.0
    memory: float = 1.0
    host: float = 1.0


@dataclass(frozen=True, slots=True)
class ResourceSeconds:
    """Seconds of a piece of work by the resource that it occupies: arithmetic of the device, reads and writes
    of its memory, the host's own program, or a link.
    """

    compute: float = 0.0
    memory: float = 0.0
    host: float = 0.0
    link: float = 0.0

    def on(self, speeds: Speeds) -> float:
        """How long the work keeps a device busy that has these speeds."""
        own_s = self.compute / speeds.compute + self.memory / speeds.memory
        return own_s + self.host / speeds.host + self.link


# What the engine itself takes on a machine, in time and memory, besides the work of a model's stages.

MOST_SENDS = 4
"""Sends over one boundary in one direction that may be under way; before another, the oldest is waited for.
Each has memory of its own, which later messages use again."""


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Figures of one process of the engine on a machine; all zero where nobody measured them.

    `instruction_s` is what any instruction takes besides its work. The rank that sends a message is busy for
    `send_s`, the rank that gets it for `receive_s` when it posts the receive and for `take_s` when it uses
    the message; `late_s` passes between the two. Sending, taking and lateness grow with the bytes.
    REDUCE, UPDATE and TRIAL take `reduce_s`, `update_s` and `trial_s` however few the parameters are.
    `batch_s` is what a batch takes on each rank besides its instructions, with the other threads of its
    process if ranks want all cores; `agree_s` how long after the last rank's REDUCE all know of
    it. `process_bytes` is what a process holds on its device beside tensors: on a
    processor the interpreter, its libraries and the data; on a GPU its context and kernels. Each byte that a
    rank exchanges with replicas on its machine takes `reduce_s_per_byte` in a sum of whole gradients,
    `gather_s_per_byte` if weights are gathered and `scatter_s_per_byte` if gradients are summed in parts,
    both in memory that is new to the process.

    Seconds that grow with bytes belong to links, and so do `late_s` and `agree_s`. All others are the host's.

    `control_s` is what the control took: a fixed piece of work that no model changes, timed while
    `num_processes` computed at once.

    If processes want more cores than there are, one that is woken may wait for a busy core while another core
    is idle: `wake_share` of the seconds of the work that it begins are lost so, at most `wake_s`.
    """

    instruction_s: float = 0.0
    send_s: float = 0.0
    send_s_per_byte: float = 0.0
    receive_s: float = 0.0
    take_s: float = 0.0
    take_s_per_byte: float = 0.0
    late_s: float = 0.0
    late_s_per_byte: float = 0.0
    reduce_s: float = 0.0
    update_s: float = 0.0
    trial_s: float = 0.0
    batch_s: float = 0.0
    agree_s: float = 0.0
    reduce_s_per_byte: float = 0.0
    gather_s_per_byte: float = 0.0
    scatter_s_per_byte: float = 0.0
    process_bytes: int = 0
    control_s: float = 0.0
    num_processes: int = 0
    wake_share: float = 0.0
    wake_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise BiremeError(f"{field.name} of the engine is {value}; it must be 0 or greater.")

    def sending_s(self, num_bytes: float) -> ResourceSeconds:
        """For how long a rank is busy that sends so many bytes."""
        return ResourceSeconds(host=self.send_s, link=self.send_s_per_byte * num_bytes)

    def taking_s(self, num_bytes: float) -> ResourceSeconds:
        """For how long a rank is busy that takes so many bytes which have come."""
        return ResourceSeconds(host=self.take_s, link=self.take_s_per_byte * num_bytes)

    def lateness_s(self, num_bytes: float) -> float:
        """How long so many bytes are under way on a machine, with nothing else in their way."""
        return self.late_s + self.late_s_per_byte * num_bytes

    def waking_s(self, seconds: float) -> float:
        """The seconds of a core that are lost when a process is woken for work of these `seconds`."""
        return min(self.wake_share * seconds, self.wake_s)


NO_ENGINE = EngineCost()
"""An engine that takes nothing."""


KINDS = ("cpu", "cuda", "xpu", "mps", "emulated")
"""What a device can be."""

FASTEST = 1e6
"""Times as fast as where the model was profiled."""

_SUMMED = (
    *("memory_bytes", "bytes_per_s", "float32_flops_per_s", "bfloat16_flops_per_s"),
    *("watts", "host_bytes_per_s", "process_bytes"),
)
"""Figures of which several devices have the sum."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device. `flops_per_s` is per type of number, `bytes_per_s` the bandwidth of its own memory.

    Where a figure is zero or None it is not known. `speed` is relative to where the model was profiled: on a
    device of 0.5 a forward takes twice as long. `update_speed` is the same of work that only reads and writes
    its memory, such as an optimizer step; left out, it is the `speed`. `host_speed` is that of the engine's
    own program; left out, it is the `speed` of a processor, which is its own host, and 1 of any other device.
    An emulated device is a process that keeps that pace and stays within `memory_bytes`, wherever it runs.
    `watts` is what it draws at work. `host_bytes_per_s` is how fast chunks go between its memory and the
    host's, each way; `copy_s` is what each takes besides its bytes, and `chunk_s` what giving a chunk room
    takes the device's process, or taking it. `process_bytes` is what a process holds on it beside tensors.
    With `members` it stands for several devices that run each operator together, and its figures are theirs.
    """

    name: str
    kind: str
    memory_bytes: int = 0
    bytes_per_s: float = 0.0
    float32_flops_per_s: float = 0.0
    bfloat16_flops_per_s: float = 0.0
    num_cores: int = 0
    speed: float = 1.0
    watts: float = 0.0
    host_bytes_per_s: float = 0.0
    copy_s: float = 0.0
    chunk_s: float = 0.0
    update_speed: float | None = None
    host_speed: float | None = None
    process_bytes: int | None = None
    members: int = 1

    def __post_init__(self) -> None:
        if self.members < 1:
            raise BiremeError(f"{self.name} stands for {self.members} devices; it must be 1 or more.")
        if self.kind not in KINDS:
            raise BiremeError(f"The kind of {self.name} is {self.kind!r}; it must be {' or '.join(KINDS)}.")
        for name in ("speed", "update_speed", "host_speed"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= FASTEST:
                raise BiremeError(
                    f"The {name} of {self.name} is {value}; it must be greater than 0, 1 being as profiled, "
                    f"and at most {FASTEST:g}."
                )

    @property
    def speeds(self) -> Speeds:
        """How fast it is at each resource."""
        host = self.speed if self.kind == "cpu" else 1.0
        return Speeds(
            compute=self.speed,
            memory=self.speed if self.update_speed is None else self.update_speed,
            host=host if self.host_speed is None else self.host_speed,
        )

    def together(self, members: int) -> "Device":
        """`members` of these devices as one, with the figures of all."""
        own = {name: getattr(self, name) for name in _SUMMED}
        summed = {name: members * value for name, value in own.items() if value is not None}
        return replace(self, members=members, **summed)

    def flops_per_s(self, dtype: str) -> float:
        """How fast it multiplies matrices of a type of number."""
        match dtype:
            case "bfloat16" | "float16":
                return self.bfloat16_flops_per_s
            case "float64":
                return self.float32_flops_per_s / 2
        return self.float32_flops_per_s


GIB = 2**30
