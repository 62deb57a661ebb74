"""A device as numbers: what it can compute, move and hold.

The figures of the ready ones are their makers', for dense matrices and without sparsity; what a program
attains of them is for who estimates to say. Their watts are the board power of the makers' data sheets.
"""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from bireme.documents import read_json
from bireme.errors import BiremeError, closest

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
    `batch_s` is what a batch takes on each rank besides its instructions, `agree_s` how long after the last
    rank's REDUCE all know of it. `process_bytes` is what a process holds before it has a tensor of the model.

    `control_s` is what the control took: a fixed piece of work that no model changes, timed while
    `num_processes` computed at once.
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
    process_bytes: int = 0
    control_s: float = 0.0
    num_processes: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise BiremeError(f"{field.name} of the engine is {value}; it must be 0 or greater.")

    def sending_s(self, num_bytes: float) -> float:
        """For how long a rank is busy that sends so many bytes."""
        return self.send_s + self.send_s_per_byte * num_bytes

    def taking_s(self, num_bytes: float) -> float:
        """For how long a rank is busy that takes so many bytes which have come."""
        return self.take_s + self.take_s_per_byte * num_bytes

    def lateness_s(self, num_bytes: float) -> float:
        """How long so many bytes are under way on a machine, with nothing else in their way."""
        return self.late_s + self.late_s_per_byte * num_bytes


NO_ENGINE = EngineCost()
"""An engine that takes nothing."""


KINDS = ("cpu", "cuda", "xpu", "mps", "emulated")
"""What a device can be."""

FASTEST = 1e6
"""Times as fast as where the model was profiled."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device. `flops_per_s` is per type of number, `bytes_per_s` the bandwidth of its own memory.

    Where a figure is zero it is not known. `speed` is relative to where the model was profiled: on a device
    of 0.5 everything takes twice as long. An emulated device is a process that keeps that pace and stays
    within `memory_bytes`, wherever it runs. `watts` is what it draws at work. `host_bytes_per_s` is how fast
    chunks go between its memory and the host's, each way; `copy_s` is what each takes besides its bytes, and
    `chunk_s` what giving a chunk room takes the device's process, or taking it.
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

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BiremeError(f"The kind of {self.name} is {self.kind!r}; it must be {' or '.join(KINDS)}.")
        if not 0 < self.speed <= FASTEST:
            raise BiremeError(
                f"The speed of {self.name} is {self.speed}; it must be greater than 0, 1 being as profiled, "
                f"and at most {FASTEST:g}."
            )

    def flops_per_s(self, dtype: str) -> float:
        """How fast it multiplies matrices of a type of number."""
        match dtype:
            case "bfloat16" | "float16":
                return self.bfloat16_flops_per_s
            case "float64":
                return self.float32_flops_per_s / 2
        return self.float32_flops_per_s


GIB = 2**30

KNOWN = {
    "h200": Device("NVIDIA H200", "cuda", 141 * 10**9, 4.8e12, 67e12, 989e12, watts=700),
    "h100": Device("NVIDIA H100 SXM", "cuda", 80 * GIB, 3.35e12, 67e12, 989e12, watts=700),
    "a100": Device("NVIDIA A100 SXM", "cuda", 80 * GIB, 2.039e12, 19.5e12, 312e12, watts=400),
    "l4": Device("NVIDIA L4", "cuda", 24 * GIB, 0.3e12, 30.3e12, 121e12, watts=72),
    "rtx4090": Device("NVIDIA GeForce RTX 4090", "cuda", 24 * GIB, 1.008e12, 82.6e12, 165e12, watts=450),
    "rtx3090": Device("NVIDIA GeForce RTX 3090", "cuda", 24 * GIB, 0.936e12, 35.6e12, 71e12, watts=350),
    "v100": Device("NVIDIA V100 SXM2", "cuda", 16 * GIB, 0.9e12, 15.7e12, 125e12, watts=300),
    "t4": Device("NVIDIA T4", "cuda", 16 * GIB, 0.32e12, 8.1e12, 65e12, watts=70),
    "laptop": Device("a laptop's CPU of 8 cores", "cpu", 16 * GIB, 50e9, 0.8e12, 0.8e12),
}
"""Ready descriptions, by the word to ask for them."""


class _DeviceDocument(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: Literal[1] = 1
    name: str = Field(description="what to call the device")
    kind: Literal["cpu", "cuda"] = Field(description="cpu or cuda")
    memory_bytes: Annotated[int, Field(gt=0, description="the memory it has")]
    bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False, description="bandwidth of its memory")]
    float32_flops_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False, description="speed in float32")]
    bfloat16_flops_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False, description="speed in bfloat16")]


def device_named(text: str) -> Device:
    """The ready device of that name, or the one described in a JSON file with the fields of `Device`."""
    if text.endswith(".json"):
        return Device(**read_json(Path(text), _DeviceDocument).model_dump(exclude={"format"}))
    if text not in KNOWN:
        raise BiremeError(
            f"There is no device {text!r}. {closest(text, KNOWN)} A device of your own goes into a .json "
            "file."
        )
    return KNOWN[text]
