"""The message of one micro-batch over one boundary: all its tensors in one piece of memory, after a header.

One message instead of one for each tensor costs one latency, and its header tells whose it is, so that a
tensor of another micro-batch, shape or dtype is never taken for the right one. Both ends make the format from
the same graph and micro-batch size; shapes are not sent, only compared. Most codecs say how many bytes a
tensor of a shape takes. Of others only the most is known: a message has room for that, and ends where the
last of its tensors ends.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from math import prod
from struct import Struct
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from bireme.codec.above import Thresholds, TopKAbove
from bireme.codec.choice import codec_of
from bireme.codec.codec import Codec, Masking, unpack_mask
from bireme.codec.description import (
    ALIGNMENT_BYTES,
    FEWEST_ENTRIES,
    NONE,
    CodecChoice,
    LinkCodecs,
    aligned,
    encoded_bytes,
)
from bireme.devices import pinned
from bireme.errors import BiremeError
from bireme.model.graph import Graph, evaluate, learned_values
from bireme.model.units import Unit
from bireme.plan.program_plan import ProgramPlan
from bireme.schedule.instruction import Message
from bireme.sync.group import Pending
from bireme.wire.connection import HEADER_BYTES, FrameKind, frame_header_maker, read_frame_header

# The header of a message between stages: it alone identifies the message, whatever carries it.

_TAG = "qiiiiQ"
"""Batch, micro-batch, half, receiving stage, direction, and what tells apart the tensors it may hold."""
_pack_header, _unpack_tag = frame_header_maker(FrameKind.BOUNDARY, _TAG), Struct(f"<{_TAG}").unpack_from


class MessageHeader(NamedTuple):
    """The header of a message. `num_bytes` is the length of the message with its header."""

    key: Message
    num_bytes: int
    signature: int


def header_of(key: Message, num_bytes: int, signature: int) -> bytes:
    """The header of a message. `signature` tells apart what tensors it may hold."""
    forward, to_stage, batch, microbatch, half = key
    half, microbatch = -1 if half is None else half, -1 if microbatch is None else microbatch
    return _pack_header(num_bytes, batch, microbatch, half, to_stage, forward, signature)


def read_header(header: bytes) -> MessageHeader:
    """Take a header apart. Raises an error if it is not a header of this version."""
    _, num_bytes, tag = read_frame_header(header)
    batch, microbatch, half, to_stage, forward, signature = _unpack_tag(tag)
    key = Message(
        bool(forward), to_stage, batch, None if microbatch < 0 else microbatch, None if half < 0 else half
    )
    return MessageHeader(key, num_bytes, signature)


# One tensor of a message: what both ends know of it before it comes.


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Its name, shape and type, and how it is encoded. `is_back` is set for a gradient; `batch_axis` is the
    axis of its samples, which counts where it is encoded.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    codec: CodecChoice = NONE
    is_back: bool = False
    batch_axis: int = 0

    @property
    def is_encoded(self) -> bool:
        """Whether it is not sent as it is."""
        return self.codec != NONE

    @property
    def num_bytes(self) -> int:
        """What it takes of a message; at most, where it is bounded: its bytes come after their number."""
        if not self.is_encoded:
            return prod(self.shape) * self.dtype.itemsize
        if self.codec.where is not None:
            return ALIGNMENT_BYTES + codec_of(self.codec).most_bytes(self.shape, self.dtype)
        length = ALIGNMENT_BYTES if self.codec.is_bounded else 0
        return length + encoded_bytes(self.codec, self.shape, self.dtype.itemsize, is_back=self.is_back)

    def __str__(self) -> str:
        """Such as `hidden float32 [4, 128]`, or `hidden float32 [4, 128] as int8`."""
        return f"{self.name} {self.form}"

    @property
    def form(self) -> str:
        """What tells it apart from others in the same place."""
        encoded = f" as {self.codec}" if self.is_encoded else ""
        return f"{_shown(self.shape, self.dtype)}{encoded}"


def _shown(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """A shape and a type in words."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


# What crosses the boundaries of one rank, encoded and decoded; masks are kept from the forward to the
# backward.
#
# A mask is made with the message of an activation. Both ends keep it, one bit an entry, until the gradient of
# the same micro-batch has crossed the boundary: it is sent for the same entries.
#
# Where only the most bytes of an encoded tensor are known before, their number comes first.

_codec_of = lru_cache(maxsize=64)(codec_of)


@dataclass(frozen=True, slots=True)
class _Mask:
    """One bit an entry, of a tensor of that shape."""

    bits: Tensor
    shape: tuple[int, ...]


class Coding:
    """The codecs of one rank. Set `keeps_masks` to False where no gradients follow, as in an evaluation."""

    def __init__(self) -> None:
        self.keeps_masks = True
        self._masks: dict[Message, dict[str, _Mask]] = {}
        """By the message of the activation."""
        self.thresholds = Thresholds()
        """What this rank's activations are compared with; an evaluation finds its own."""

    def encode(self, key: Message, spec: TensorSpec, tensor: Tensor, out: Tensor) -> int:
        """Write a tensor into its part of a message; gives how many bytes of it are used."""
        codec = self._codec(key, spec)
        # Messages may lie on the host: what is encoded on an accelerator is then copied there.
        room = out if tensor.device == out.device else torch.empty_like(out, device=tensor.device)
        begin = ALIGNMENT_BYTES if spec.codec.is_bounded else 0
        body = room[begin:]
        if self.keeps_masks and isinstance(codec, TopKAbove):
            threshold = self.thresholds.of(f"{key.to_stage}.{spec.name}", codec, key.batch, tensor)
            used = codec.encode(tensor, body, threshold=threshold)
        elif spec.codec.where is not None:
            used = codec.encode(tensor, body, seed=_seed(key, spec.name))
        else:  # nothing is drawn
            used = codec.encode(tensor, body)
        if begin:
            room[:begin].view(torch.int64).fill_(used)
        self._keep_mask(key, spec, codec, body)
        if room is not out:
            out.copy_(room)
        return begin + used

    def decode(
        self, key: Message, spec: TensorSpec, message: Tensor, arrived: Tensor | None = None
    ) -> Tensor:
        """The tensor in its part of a message. Where that is a copy on an accelerator, `arrived` is what lies
        on the host: the number of bytes is read there, for an accelerator would be waited for.
        """
        codec = self._codec(key, spec)
        if spec.codec.is_bounded:
            used = int((message if arrived is None else arrived)[:ALIGNMENT_BYTES].view(torch.int64))
            message = message[ALIGNMENT_BYTES : ALIGNMENT_BYTES + used]
        self._keep_mask(key, spec, codec, message)
        return codec.decode(message, spec.shape, spec.dtype)

    def _codec(self, key: Message, spec: TensorSpec) -> Codec:
        codec = _codec_of(spec.codec)
        if key.forward or not isinstance(codec, Masking):
            return codec
        return codec.back(self._mask(key, spec))

    def _keep_mask(self, key: Message, spec: TensorSpec, codec: Codec, message: Tensor) -> None:
        if self.keeps_masks and key.forward and isinstance(codec, Masking):
            bits = codec.mask_of(message, spec.shape).clone()
            self._masks.setdefault(key, {})[spec.name] = _Mask(bits, spec.shape)

    def _mask(self, key: Message, spec: TensorSpec) -> Tensor:
        """The mask that the activation had whose gradient comes or goes; or those of its two halves."""
        whole = Message(True, key.from_stage, key.batch, key.microbatch, None)
        if whole in self._masks:
            return self._taken(whole, spec.name).bits
        halves = [self._taken(whole._replace(half=half), spec.name) for half in (0, 1)]
        return torch.cat([unpack_mask(one.bits, one.shape) for one in halves], spec.batch_axis)

    def _taken(self, key: Message, name: str) -> _Mask:
        masks = self._masks[key]
        found = masks.pop(name)
        if not masks:
            del self._masks[key]
        return found


def _seed(key: Message, name: str) -> int:
    """What a codec of one's own draws from: another number for each message, the same in every run."""
    return crc32(f"{name} {tuple(key)}".encode())


def checked(codecs: LinkCodecs) -> LinkCodecs:
    """The codecs, if those of one's own keep the protocol; to be asked before anything is sent."""
    for one in {one for phase in codecs.phases for one in phase.boundaries}:
        there, back = (_codec_of(one.choice(forward=forward)) for forward in (True, False))
        if isinstance(there, Masking) != isinstance(back, Masking):
            raise BiremeError(
                f"A boundary has the codec {one.forward} forward and {one.backward} backward. The gradient "
                "of what a codec with a mask sends goes back for the same entries: give both directions that "
                "codec, or none of the two."
            )
    return codecs


_MESSAGE_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in a message, counted in its own elements; one that is encoded has `num_encoded`
    bytes.
    """

    spec: TensorSpec
    strides: tuple[int, ...]
    offset: int
    num_encoded: int | None

    def within(self, message: Tensor) -> Tensor:
        """The tensor, as a view of the message; of an encoded one its bytes."""
        if self.num_encoded is not None:
            return message[self.offset : self.offset + self.num_encoded]
        typed = message.view(self.spec.dtype)
        return typed.as_strided(self.spec.shape, self.strides, typed.storage_offset() + self.offset)


class WireFormat:
    """How tensors lie in a message. It never changes; make one for each boundary and micro-batch size.

    `num_bytes` is the length of a message, a multiple of 64, or the most that it may be if it `is_bounded`;
    without codecs it would be `raw_bytes`. `signature` tells formats apart.
    """

    __slots__ = ("_places", "encoded", "is_bounded", "num_bytes", "raw_bytes", "signature", "specs")

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.specs = tuple(specs)
        places = []
        end = raw_end = HEADER_BYTES
        for spec in self.specs:
            num_bytes, is_encoded = spec.num_bytes, spec.is_encoded
            raw_end = aligned(raw_end + prod(spec.shape) * spec.dtype.itemsize, _MESSAGE_ALIGNMENT_BYTES)
            offset = end if is_encoded else end // spec.dtype.itemsize
            places.append(_Place(spec, _strides(spec.shape), offset, num_bytes if is_encoded else None))
            end = aligned(end + num_bytes, _MESSAGE_ALIGNMENT_BYTES)
        self._places = tuple(places)
        self.encoded = tuple(spec for spec in self.specs if spec.is_encoded)
        self.is_bounded = bool(self.specs) and self.specs[-1].codec.is_bounded
        self.num_bytes, self.raw_bytes = end, raw_end
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

    def takes(self, header: bytes, key: Message) -> bool:
        """Whether a message with that header, which is not the one expected, is a shorter one of this."""
        come = read_header(header)
        return (
            self.is_bounded
            and come == (key, come.num_bytes, self.signature)
            and (come.num_bytes <= self.num_bytes)
        )

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

    __slots__ = ("_header", "_key", "_views", "message", "num_bytes", "pending", "wire_format")

    pending: Pending
    """The message on its way, from the moment when it is sent."""

    def __init__(self, wire_format: WireFormat, message: Tensor) -> None:
        self.wire_format = wire_format
        self.message = message
        self.num_bytes = wire_format.num_bytes
        """Of the message that is packed."""
        views = wire_format.views(message)
        self._views = [(spec, views[spec.name], spec.is_encoded) for spec in wire_format.specs]
        self._header = message.numpy().data[:HEADER_BYTES] if message.is_cpu else None
        self._key: Message | None = None

    def address(self, key: Message) -> None:
        """Write down which message it is."""
        self._key = key
        self._write(key, self.wire_format.num_bytes)

    def _write(self, key: Message, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        header = header_of(key, num_bytes, self.wire_format.signature)
        if self._header is not None:
            self._header[:] = header
        else:
            self.message[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def pack(self, tensors: Mapping[str, Tensor], coding: Coding | None = None) -> None:
        """Copy the tensors into it, or let `coding` write them. More than are sent may be given."""
        used = 0
        for spec, view, is_encoded in self._views:
            tensor = tensors[spec.name]
            if tensor.dtype != spec.dtype or tensor.shape != spec.shape:
                raise BiremeError(
                    f"The {self._key} should carry {spec}, but the stage made "
                    f"{_shown(tuple(tensor.shape), tensor.dtype)}. "
                    "The graph's shapes do not hold for this batch. Capture the model with inputs like the "
                    "ones it is trained on."
                )
            own = tensor.detach() if tensor.requires_grad else tensor
            if is_encoded:
                assert coding is not None, "what is encoded needs a codec"
                assert self._key is not None, "address() comes first"
                used = coding.encode(self._key, spec, own, view)
            else:
                view.copy_(own)
        if self.wire_format.is_bounded:
            assert self._key is not None
            last = self._views[-1][1].storage_offset() - self.message.storage_offset()
            self._write(self._key, int(last) + used)


class Arrival:
    """The memory of a message to come. On the host it begins with the header expected."""

    __slots__ = ("_expected", "_header", "_is_staged", "_key", "_wire_format", "message", "pending")

    pending: Pending
    """The message on its way, from the moment when it is expected."""

    def __init__(
        self, wire_format: WireFormat, key: Message, message: Tensor, *, is_staged: bool = False
    ) -> None:
        self.message = message
        self._wire_format = wire_format
        self._key = key
        self._is_staged = is_staged
        self._expected = header_of(key, wire_format.num_bytes, wire_format.signature)
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
        found = self._wire_format.views(here)
        for spec in self._wire_format.encoded:
            assert coding is not None, "what is encoded needs a codec"
            arrived = self._wire_format.views(self.message) if self._is_staged else found
            found[spec.name] = coding.decode(self._key, spec, found[spec.name], arrived[spec.name])
        return found


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a contiguous tensor."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


# What crosses the boundaries between stages, tensor by tensor, at any micro-batch size.
#
# Forward goes everything that the next stage receives, backward the gradients of those of these tensors that
# learn. Both ends know this from the graph, so no shapes are sent.
#
# A codec is for activations and their gradients. What no gradient comes back for (integers, masks, positions)
# and what is tiny is sent as it is.


class Boundaries:
    """The boundaries of a pipeline. `receives` are, stage by stage, the names of what it receives."""

    def __init__(self, graph: Graph, receives: tuple[tuple[str, ...], ...]) -> None:
        self.receives = receives
        self.learned = learned_values(graph)
        self._values = {v.name: v for op in graph.operators for v in op.outputs if v is not None}
        self._values |= {value.name: value for value in graph.inputs}
        self.forward = lru_cache(maxsize=256)(partial(self._format, is_back=False))
        """The message that a stage receives from the one before it."""
        self.backward = lru_cache(maxsize=256)(partial(self._format, is_back=True))
        """The message that a stage receives from the next one."""

    def gradients_into(self, stage: int) -> tuple[str, ...]:
        """The names of the tensors whose gradients a stage receives from the next one."""
        if stage + 1 >= len(self.receives):
            return ()
        return tuple(name for name in self.receives[stage + 1] if name in self.learned)

    def batch_axis(self, name: str) -> int | None:
        """The axis of a tensor that grows with the batch."""
        shape = self._values[name].shape
        return next((axis for axis, length in enumerate(shape) if not isinstance(length, int)), None)

    def check_halves(self, schedule: str) -> None:
        """Where micro-batches go in halves, everything that crosses a boundary must be cut too."""
        for names in self.receives:
            for name in names:
                if self.batch_axis(name) is None:
                    raise BiremeError(
                        f"{schedule} sends micro-batches in halves, and {name}, which crosses between "
                        "stages, is not cut by samples. Use 1f1b."
                    )

    def _format(
        self,
        to_stage: int,
        num_samples: int,
        codec: CodecChoice = NONE,
        of_samples: int = 0,
        *,
        is_back: bool,
    ) -> WireFormat:
        """The message for that many samples: part of a micro-batch of `of_samples`, if that is more."""
        names = self.gradients_into(to_stage) if is_back else self.receives[to_stage]
        specs = []
        for name in names:
            shape = self._shape(name, num_samples)
            dtype = getattr(torch, self._values[name].dtype)
            # A half is encoded where the whole is, for the whole gradient will need the masks of both.
            if self._is_encoded(name, codec, dtype, max(num_samples, of_samples)):
                axis = self.batch_axis(name) or 0
                specs.append(TensorSpec(name, shape, dtype, codec, is_back, axis))
            else:
                specs.append(TensorSpec(name, shape, dtype))
        return WireFormat(tuple(specs))

    def _shape(self, name: str, num_samples: int) -> tuple[int, ...]:
        return tuple(evaluate(length, num_samples) for length in self._values[name].shape)

    def _is_encoded(self, name: str, codec: CodecChoice, dtype: torch.dtype, num_samples: int) -> bool:
        """Whether a tensor is encoded. Rows, which `topk` takes entries from, must not go over samples."""
        if codec == NONE or name not in self.learned or not dtype.is_floating_point:
            return False
        shape = self._shape(name, num_samples)
        has_rows = codec.name != "topk" or codec.life is not None or self.batch_axis(name) != len(shape) - 1
        return has_rows and prod(shape) >= FEWEST_ENTRIES


def received_by(units: Sequence[Unit], plan: ProgramPlan) -> tuple[tuple[str, ...], ...]:
    """What each stage receives."""
    return tuple(units[plan.units_of(stage, len(units))[0]].receives for stage in range(plan.num_stages))
