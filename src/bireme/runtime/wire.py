"""The message of one micro-batch over one border: all its tensors in one piece of memory, behind a header.

One message instead of one for each tensor costs one latency, and its header tells whose it is, so that a
tensor of another micro-batch, shape or dtype is never taken for the right one. Both ends make the format from
the same graph and micro-batch size; shapes are not sent, only compared.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.schedule.instruction import Message

__all__ = ["Parcel", "TensorSpec", "WireFormat"]

ALIGNMENT_BYTES = 64
MAGIC = b"BIREME\x00\x01"
HEADER = struct.Struct("<8sqiiiiQQ16x")
"""Magic, batch, micro-batch, half, stage, direction, bytes of the message, signature."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a message."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        """Such as `hidden float32 [4, 128]`."""
        return f"{self.name} {_shown(self.shape, self.dtype)}"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in a message, counted in its own elements."""

    spec: TensorSpec
    strides: tuple[int, ...]
    offset: int

    def within(self, message: Tensor) -> Tensor:
        """The tensor, as a view of the message."""
        typed = message.view(self.spec.dtype)
        return typed.as_strided(self.spec.shape, self.strides, typed.storage_offset() + self.offset)


class WireFormat:
    """How tensors lie in a message. It never changes; make one for each border and micro-batch size.

    `num_bytes` is the length of a message, a multiple of 64; `signature` tells formats apart.
    """

    __slots__ = ("_places", "num_bytes", "signature", "specs")

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.specs = tuple(specs)
        places = []
        end = HEADER.size
        for spec in self.specs:
            places.append(_Place(spec, _strides(spec.shape), end // spec.dtype.itemsize))
            end = _aligned(end + prod(spec.shape) * spec.dtype.itemsize)
        self._places = tuple(places)
        self.num_bytes = end
        written = ";".join(_shown(spec.shape, spec.dtype) for spec in self.specs)
        self.signature = int.from_bytes(blake2b(written.encode(), digest_size=8).digest(), "little")

    def parcel(self, device: torch.device) -> "Parcel":
        """Room for one message at a time."""
        message = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        views = [(place.spec, place.within(message)) for place in self._places]
        return Parcel(self, message, views)

    def unpack(self, message: Tensor, key: Message) -> dict[str, Tensor]:
        """The tensors, by name, as views of the message; raises if it is not the one that `key` names.

        On a CUDA device the check waits until the message is there.
        """
        if message.numel() != self.num_bytes or message.dtype != torch.uint8:
            raise ValueError(f"a message of {self.num_bytes} bytes cannot lie in {_shown_tensor(message)}")
        there = message if message.is_cpu else message[: HEADER.size].cpu()
        header = there.numpy()[: HEADER.size].tobytes()
        if header != self.header(key):
            raise self._mismatch(header, key)
        return {place.spec.name: place.within(message) for place in self._places}

    def header(self, key: Message) -> bytes:
        """What stands ahead of the tensors."""
        return HEADER.pack(
            MAGIC,
            key.batch,
            -1 if key.microbatch is None else key.microbatch,
            -1 if key.half is None else key.half,
            key.to_stage,
            key.forward,
            self.num_bytes,
            self.signature,
        )

    def _mismatch(self, header: bytes, key: Message) -> BiremeError:
        magic, batch, microbatch, half, to_stage, forward, num_bytes, signature = HEADER.unpack(header)
        expected = f"This rank expected the {key} ({self._listed()}, {self.num_bytes} bytes in all)"
        if magic != MAGIC:
            return BiremeError(
                f"{expected}, but what came is no message of this version of Bireme: it begins with "
                f"{magic.hex(' ')}. Run the same version on all ranks."
            )
        come = Message(
            bool(forward),
            to_stage,
            batch,
            None if microbatch < 0 else microbatch,
            None if half < 0 else half,
        )
        if come != key:
            return BiremeError(
                f"{expected}, but the {come} came ({num_bytes} bytes). The two ranks do not follow the same "
                "program: give all ranks the same plan and schedule, and check the program."
            )
        return BiremeError(
            f"{expected}, but it came with tensors of other shapes or dtypes ({num_bytes} bytes, signature "
            f"{signature:016x} instead of {self.signature:016x}). Give all ranks the same model and the same "
            "batches."
        )

    def _listed(self) -> str:
        return ", ".join(map(str, self.specs)) or "no tensors"


class Parcel:
    """The memory of a message to be sent, with its tensors as views, made once and packed many times."""

    __slots__ = ("_format", "_header", "_key", "_views", "message")

    def __init__(
        self, wire_format: WireFormat, message: Tensor, views: list[tuple[TensorSpec, Tensor]]
    ) -> None:
        self.message = message
        self._format = wire_format
        self._views = views
        self._header = message.numpy().data[: HEADER.size] if message.is_cpu else None
        self._key: Message | None = None

    @property
    def wire_format(self) -> WireFormat:
        """What it is a message of."""
        return self._format

    def address(self, key: Message) -> None:
        """Write down which message it is."""
        self._key = key
        header = self._format.header(key)
        if self._header is not None:
            self._header[:] = header
        else:
            self.message[: HEADER.size].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def pack(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors into it. More than are sent may be given."""
        for spec, view in self._views:
            tensor = tensors[spec.name]
            if tensor.dtype != spec.dtype or tensor.shape != spec.shape:
                raise BiremeError(
                    f"The {self._key} should carry {spec}, but the stage made {_shown_tensor(tensor)}. "
                    "The graph's shapes do not hold for this batch. Capture the model with inputs like the "
                    "ones it is trained on."
                )
            view.copy_(tensor.detach() if tensor.requires_grad else tensor)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a contiguous tensor."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _shown(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _shown_tensor(tensor: Tensor) -> str:
    return _shown(tuple(tensor.shape), tensor.dtype)
