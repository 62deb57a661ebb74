"""What codecs on borders demand of numbers, by one process: `decode∘encode` at every cut, there and back.

Nothing of `bireme.runtime` may be used here. The gradient of `keep` is that of the kept entries alone, sent by
the codec of the way back.
"""

from typing import Any

import torch
from torch import Tensor

from bireme.codec import BorderCodecs, Codec, Masking, codec_of
from bireme.codec.description import FEWEST_ENTRIES, CodecChoice

__all__ = ["through"]


def through(codecs: BorderCodecs, tensor: Tensor) -> Tensor:
    """A tensor as the next stage sees it. What is tiny goes as it is."""
    if codecs.is_none or not tensor.is_floating_point() or tensor.numel() < FEWEST_ENTRIES:
        return tensor
    found: Tensor = _Cut.apply(tensor, codecs.choice(forward=True), codecs.choice(forward=False))
    return found


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: CodecChoice, back: CodecChoice) -> Tensor:
        codec = codec_of(there)
        message, found = _sent(codec, tensor)
        ctx.back = codec_of(back)
        if isinstance(codec, Masking):
            assert isinstance(ctx.back, Masking)
            ctx.back = ctx.back.back(codec.mask_of(message, tuple(tensor.shape)))
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _sent(ctx.back, gradient)[1], None, None


def _sent(codec: Codec, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The message, and what arrives."""
    shape = tuple(tensor.shape)
    message = torch.empty(codec.most_bytes(shape, tensor.dtype), dtype=torch.uint8)
    used = codec.encode(tensor, message)
    return message, codec.decode(message[:used], shape, tensor.dtype)
