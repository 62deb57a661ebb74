"""The message of one micro-batch over one border: all its tensors in one piece of memory, after a header.

One message instead of one for each tensor costs one latency, and its header tells whose it is, so that a
tensor of another micro-batch, shape or dtype is never taken for the right one. Both ends make the format from
the same graph and micro-batch size; shapes are not sent, only compared. Most codecs say how many bytes a
tensor of a shape takes. Of others only the most is known: a message has room for that, and ends where the
last of its tensors ends.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from bireme.devices import pinned
from bireme.errors import BiremeError
from bireme.runtime.coding import Coding
from bireme.runtime.header import HEADER_BYTES, header_of, read_header
from bireme.runtime.tensor_spec import TensorSpec, shown
from bireme.schedule.instruction import Message

__all__ = ["Arrival", "OutgoingMessage", "TensorSpec", "WireFormat"]

MESSAGE_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in a message, counted in its own elements; an encoded one in bytes."""

    spec: TensorSpec
    strides: tuple[int, ...]
    offset: int

    def within(self, message: Tensor) -> Tensor:
        """The tensor, as a view of the message; of an encoded one its bytes."""
        if self.spec.is_encoded:
            return message[self.offset : self.offset + self.spec.num_bytes]
        typed = message.view(self.spec.dtype)
        return typed.as_strided(self.spec.shape, self.strides, typed.storage_offset() + self.offset)


class WireFormat:
    """How tensors lie in a message. It never changes; make one for each border and micro-batch size.

    `num_bytes` is the length of a message, a multiple of 64, or the most that it may be if it `is_bounded`;
    `signature` tells formats apart.
    """

    __slots__ = ("_encoded", "_places", "is_bounded", "num_bytes", "signature", "specs")

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.specs = tuple(specs)
        places = []
        end = HEADER_BYTES
        for spec in self.specs:
            unit = 1 if spec.is_encoded else spec.dtype.itemsize
            places.append(_Place(spec, _strides(spec.shape), end // unit))
            end = _aligned(end + spec.num_bytes)
        self._places = tuple(places)
        self._encoded = tuple(spec for spec in self.specs if spec.is_encoded)
        self.is_bounded = bool(self.specs) and self.specs[-1].codec.is_bounded
        self.num_bytes = end
        written = ";".join(spec.form for spec in self.specs)
        self.signature = int.from_bytes(blake2b(written.encode(), digest_size=8).digest(), "little")

    def parcel(self, device: torch.device, *, is_pinned: bool = False) -> "OutgoingMessage":
        """Room for one message at a time, in the memory that the transport sends from."""
        return OutgoingMessage(self, self._memory(device, is_pinned=is_pinned))

    def arrival(self, key: Message, device: torch.device, *, is_pinned: bool = False) -> "Arrival":
        """Room for the message that `key` names to come, in the memory that the transport receives into."""
        return Arrival(self, key, self._memory(device, is_pinned=is_pinned), is_staged=is_pinned)

    def _memory(self, device: torch.device, *, is_pinned: bool) -> Tensor:
        if is_pinned:
            return pinned(self.num_bytes)
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def views(self, message: Tensor) -> dict[str, Tensor]:
        """The tensors, by name, as views of a message; of those that are encoded the bytes."""
        return {place.spec.name: place.within(message) for place in self._places}

    def tensors(
        self, key: Message, message: Tensor, coding: Coding | None, arrived: Tensor
    ) -> dict[str, Tensor]:
        """The tensors of a message, by name: views, or what `coding` makes of those that are encoded. It is
        a copy of the message that has `arrived`, or that itself.
        """
        found = self.views(message)
        came = found if arrived is message else self.views(arrived)
        for spec in self._encoded:
            assert coding is not None, "what is encoded needs a codec"
            found[spec.name] = coding.decode(key, spec, found[spec.name], came[spec.name])
        return found

    def header(self, key: Message, num_bytes: int | None = None) -> bytes:
        """What a message begins with that has so many bytes."""
        return header_of(key, self.num_bytes if num_bytes is None else num_bytes, self.signature)

    def takes(self, header: bytes, key: Message) -> bool:
        """Whether a message with that header, which is not the one expected, is a shorter one of this."""
        come = read_header(header)
        return (
            self.is_bounded
            and come == (key, come.num_bytes, self.signature)
            and (come.num_bytes <= self.num_bytes)
        )

    def end_of(self, used: int) -> int:
        """The length of a message of whose last tensor so many bytes are used."""
        return self._places[-1].offset + used

    def mismatch(self, header: bytes, key: Message) -> BiremeError:
        """Why a message with that header is not the one that `key` names."""
        come, num_bytes, signature = read_header(header)
        listed = ", ".join(map(str, self.specs)) or "no tensors"
        expected = f"This rank expected the {key} ({listed}, {self.num_bytes} bytes in all)"
        if come != key:
            return BiremeError(
                f"{expected}, but got the {come} ({num_bytes} bytes). The two ranks do not follow the same "
                "program: give all ranks the same plan and schedule, and check the program."
            )
        return BiremeError(
            f"{expected}, but got tensors of other shapes or dtypes ({num_bytes} bytes, signature "
            f"{signature:016x} instead of {self.signature:016x}). Give all ranks the same batches, and "
            "the same model."
        )


class OutgoingMessage:
    """The memory of a message to be sent, with its tensors as views, made once and packed many times."""

    __slots__ = ("_header", "_key", "_views", "message", "num_bytes", "wire_format")

    def __init__(self, wire_format: WireFormat, message: Tensor) -> None:
        self.wire_format = wire_format
        self.message = message
        self.num_bytes = wire_format.num_bytes
        """Of the message that is packed."""
        views = wire_format.views(message)
        self._views = [(spec, views[spec.name]) for spec in wire_format.specs]
        self._header = message.numpy().data[:HEADER_BYTES] if message.is_cpu else None
        self._key: Message | None = None

    def address(self, key: Message) -> None:
        """Write down which message it is."""
        self._key = key
        self.num_bytes = self.wire_format.num_bytes
        self._write(self.wire_format.header(key))

    def _write(self, header: bytes) -> None:
        if self._header is not None:
            self._header[:] = header
        else:
            self.message[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def pack(self, tensors: Mapping[str, Tensor], coding: Coding | None = None) -> None:
        """Copy the tensors into it, or let `coding` write them. More than are sent may be given."""
        used = 0
        for spec, view in self._views:
            tensor = tensors[spec.name]
            if tensor.dtype != spec.dtype or tensor.shape != spec.shape:
                raise BiremeError(
                    f"The {self._key} should carry {spec}, but the stage made "
                    f"{shown(tuple(tensor.shape), tensor.dtype)}. "
                    "The graph's shapes do not hold for this batch. Capture the model with inputs like the "
                    "ones it is trained on."
                )
            own = tensor.detach() if tensor.requires_grad else tensor
            if spec.is_encoded:
                assert coding is not None, "what is encoded needs a codec"
                assert self._key is not None, "address() comes first"
                used = coding.encode(self._key, spec, own, view)
            else:
                view.copy_(own)
        if self.wire_format.is_bounded:
            assert self._key is not None
            self.num_bytes = self.wire_format.end_of(used)
            self._write(self.wire_format.header(self._key, self.num_bytes))


class Arrival:
    """The memory of a message to come. On the host it begins with the header expected."""

    __slots__ = ("_expected", "_header", "_is_staged", "_key", "_wire_format", "message")

    def __init__(
        self, wire_format: WireFormat, key: Message, message: Tensor, *, is_staged: bool = False
    ) -> None:
        self.message = message
        self._wire_format = wire_format
        self._key = key
        self._is_staged = is_staged
        self._expected = wire_format.header(key)
        self._header = message.numpy().data[:HEADER_BYTES] if message.is_cpu else None
        if self._header is not None:
            self._header[:] = self._expected

    def unpack(self, device: torch.device, coding: Coding | None = None) -> dict[str, Tensor]:
        """The tensors, by name: views of the message, or of a copy on the device if it is staged on the host;
        what is encoded is decoded by `coding`.

        Raises if it is not the message expected. On a CUDA device the check waits until it has come.
        """
        header = self._header
        came = self.message[:HEADER_BYTES].cpu().numpy().tobytes() if header is None else bytes(header)
        if came != self._expected and not self._wire_format.takes(came, self._key):
            raise self._wire_format.mismatch(came, self._key)
        # Torch knows of the copy, and does not give pinned memory away before it is made.
        here = self.message.to(device, non_blocking=True) if self._is_staged else self.message
        return self._wire_format.tensors(self._key, here, coding, self.message)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a contiguous tensor."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // MESSAGE_ALIGNMENT_BYTES) * MESSAGE_ALIGNMENT_BYTES
