"""What crosses the borders of one rank, encoded and decoded; masks are kept from the forward to the backward.

A mask is made with the message of an activation. Both ends keep it, one bit an entry, until the gradient of
the same micro-batch has crossed the border: it is sent for the same entries.

Where only the most bytes of an encoded tensor are known before, their number comes first.
"""

from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

import torch
from torch import Tensor

from bireme.codec.above import KeepAbove, Thresholds
from bireme.codec.border import LinkCodecs
from bireme.codec.codec import Codec, Masking
from bireme.codec.description import ALIGNMENT_BYTES
from bireme.codec.of_choice import codec_of
from bireme.codec.packing import unpack_mask
from bireme.errors import BiremeError
from bireme.runtime.tensor_spec import TensorSpec
from bireme.schedule.instruction import Message

__all__ = ["Coding", "checked"]

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

    @property
    def num_masks(self) -> int:
        """How many messages there are whose gradient has not crossed the border yet."""
        return len(self._masks)

    def encode(self, key: Message, spec: TensorSpec, tensor: Tensor, out: Tensor) -> int:
        """Write a tensor into its part of a message; gives how many bytes of it are used."""
        codec = self._codec(key, spec)
        # Messages may lie on the host: what is encoded on an accelerator is then copied there.
        room = out if tensor.device == out.device else torch.empty_like(out, device=tensor.device)
        begin = ALIGNMENT_BYTES if spec.codec.is_bounded else 0
        body = room[begin:]
        if self.keeps_masks and isinstance(codec, KeepAbove):
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
    for one in {one for phase in codecs.phases for one in phase.borders}:
        there, back = (_codec_of(one.choice(forward=forward)) for forward in (True, False))
        if isinstance(there, Masking) != isinstance(back, Masking):
            raise BiremeError(
                f"A border has the codec {one.forward} forward and {one.backward} backward. The gradient of "
                "what a codec with a mask sends goes back for the same entries: give both directions that "
                "codec, or none of the two."
            )
    return codecs
