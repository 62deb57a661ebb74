"""A border within one process: what crosses it is encoded and decoded, there and back.

A model with this at its cuts learns as it would over a pipeline with the same codecs. The engine is compared
with it, and studies of codecs train with it.
"""

from typing import Any

import torch
from torch import Tensor

from bireme.codec.above import KeepAbove, Thresholds
from bireme.codec.border import BorderCodecs
from bireme.codec.codec import Codec, Masking
from bireme.codec.description import FEWEST_ENTRIES, CodecChoice
from bireme.codec.of_choice import codec_of

__all__ = ["through"]


def through(
    codecs: BorderCodecs,
    tensor: Tensor,
    *,
    thresholds: Thresholds | None = None,
    name: str = "",
    batch: int = 0,
) -> Tensor:
    """A tensor as the next stage sees it; its gradient comes back by the other codec. What is tiny goes as
    it is. The gradient of what a codec with a mask has sent is that of the entries in it.

    `thresholds` are those of earlier batches, by `name`; without them, a codec that has one finds it again.
    """
    if codecs.is_none or not tensor.is_floating_point() or tensor.numel() < FEWEST_ENTRIES:
        return tensor
    there, back = codecs.choice(forward=True), codecs.choice(forward=False)
    codec = codec_of(there)
    threshold = None
    if thresholds is not None and isinstance(codec, KeepAbove):
        threshold = thresholds.of(name, codec, batch, tensor)
    found: Tensor = _Cut.apply(tensor, codec, back, threshold)  # type: ignore[no-untyped-call]  # torch's own
    return found


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, codec: Codec, back: CodecChoice, threshold: Tensor | None
    ) -> Tensor:
        ctx.back = codec_of(back)
        message, found = _sent(codec, tensor, threshold)
        if isinstance(codec, Masking):
            ctx.back = ctx.back.back(codec.mask_of(message, tuple(tensor.shape)))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _sent(ctx.back, gradients[0])[1], None, None, None


def _sent(codec: Codec, tensor: Tensor, threshold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The message, and what arrives."""
    shape = tuple(tensor.shape)
    message = torch.empty(codec.most_bytes(shape, tensor.dtype), dtype=torch.uint8, device=tensor.device)
    if isinstance(codec, KeepAbove):
        used = codec.encode(tensor, message, threshold=threshold)
    else:
        used = codec.encode(tensor, message)
    return message, codec.decode(message[:used], shape, tensor.dtype)
