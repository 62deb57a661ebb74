"""From the words for a codec to the codec."""

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bireme.codec.above import Thresholds, TopKAbove
from bireme.codec.blocks import BlockCodec
from bireme.codec.codec import Cast, Codec, Masking
from bireme.codec.description import FEWEST_ENTRIES, BoundaryCodecs, CodecChoice, aligned
from bireme.codec.topk import TopK
from bireme.errors import BiremeError, closest
from bireme.user_code import reason_of

# One's own codec, by the module that has it and its name there; checked once in each process.
#
# The attribute is a codec, or a function or class without arguments that makes one. It must keep the protocol
# of `bireme.codec.Codec`: what the check sees here is what every message of a run relies on.

SHAPE = (4, 16, 8)
"""Of the tensor that a codec is checked with."""

_METHODS = ("most_bytes", "encode", "decode")


@cache
def _own_codec(where: str) -> Codec:
    """The codec that `module:attribute` names, once it has passed the check."""
    module_name, _, name = where.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the module, and that can fail in any way
        raise BiremeError(
            f"The codec {where} cannot be imported: {reason_of(error)}. Install the module, or put its "
            "folder on PYTHONPATH."
        ) from error
    if not hasattr(module, name):
        raise BiremeError(f"The module {module_name} has no {name!r}. {closest(name, list(vars(module)))}")
    found = getattr(module, name)
    if isinstance(found, type) or (callable(found) and not hasattr(found, "encode")):
        found = _tried(where, "The making", found)
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise BiremeError(
            f"{where} is not a codec: it has no {' and no '.join(missing)}. See bireme.codec.Codec."
        )
    _check_own_codec(where, found)
    codec: Codec = found
    return codec


def _check_own_codec(where: str, codec: Codec) -> None:
    """Refuses a codec that breaks the protocol on a small tensor, or on one with a NaN."""
    given = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    message = _message(where, codec, given)
    if not torch.equal(message, _message(where, codec, given)):
        raise BiremeError(
            f"The codec {where} makes other bytes of the same tensor the second time. It must keep nothing "
            "between calls, and draw from `seed` only."
        )
    _decoded(where, codec, message, given)
    given[0, 0, 0] = torch.nan
    if not bool(_decoded(where, codec, _message(where, codec, given), given).isnan().any()):
        raise BiremeError(
            f"The codec {where} hides a NaN: the tensor had one, and what came back has none. A step that "
            "has diverged would not be seen. Let it arrive as a NaN."
        )
    if isinstance(codec, Masking):
        mask = codec.mask_of(message, SHAPE).clone()
        gradient = torch.ones(SHAPE)
        _decoded(where, codec.back(mask), _message(where, codec.back(mask), gradient), gradient)


def _message(where: str, codec: Codec, tensor: Tensor) -> Tensor:
    most = _tried(where, "most_bytes", lambda: codec.most_bytes(SHAPE, tensor.dtype))
    if not isinstance(most, int) or isinstance(most, bool) or most < 0:
        raise BiremeError(f"The codec {where} says that a tensor takes at most {most!r} bytes: give an int.")
    out = torch.zeros(aligned(most), dtype=torch.uint8)
    before = tensor.clone()
    used = _tried(where, "encode", lambda: codec.encode(tensor, out[:most], seed=0))
    if not isinstance(used, int) or not 0 <= used <= most:
        raise BiremeError(
            f"The codec {where} says that a message takes {used!r} bytes, and at most {most} by its "
            "most_bytes. encode must give the number of bytes it wrote, and never more."
        )
    if not torch.equal(before, tensor) and not bool(before.isnan().any()):
        raise BiremeError(f"The codec {where} changes the tensor that it is given. It must leave it alone.")
    return out[:used]


def _decoded(where: str, codec: Codec, message: Tensor, like: Tensor) -> Tensor:
    found = _tried(where, "decode", lambda: codec.decode(message, SHAPE, like.dtype))
    if not isinstance(found, Tensor) or tuple(found.shape) != SHAPE or found.dtype != like.dtype:
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else repr(type(found))
        raise BiremeError(
            f"The codec {where} makes {what} of a message of {like.dtype} {list(SHAPE)}. decode must give "
            "the shape and the type that it is asked for."
        )
    return found


def _tried(where: str, what: str, work: Any) -> Any:
    try:
        return work()
    except Exception as error:
        raise BiremeError(f"{what} of the codec {where} fails: {reason_of(error)}.") from error


def codec_of(choice: CodecChoice) -> Codec:
    """The codec that a choice names."""
    match choice.name:
        case "bfloat16":
            return Cast(torch.bfloat16)
        case "int":
            assert choice.bits is not None
            return BlockCodec(choice.bits, is_rotated=choice.is_rotated)
        case "topk":
            assert choice.share is not None
            if choice.life is not None:
                assert choice.bits is not None
                return TopKAbove(choice.share, choice.bits, choice.life)
            return TopK(choice.share, choice.bits)
        case "own":
            assert choice.where is not None
            return _own_codec(choice.where)
        case _:
            return Cast()


# A boundary within one process: what crosses it is encoded and decoded, there and back.
#
# A model with this at its cuts learns as it would over a pipeline with the same codecs. The engine is
# compared with it, and studies of codecs train with it.


def through(
    codecs: BoundaryCodecs,
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
    if thresholds is not None and isinstance(codec, TopKAbove):
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
    if isinstance(codec, TopKAbove):
        used = codec.encode(tensor, message, threshold=threshold)
    else:
        used = codec.encode(tensor, message)
    return message, codec.decode(message[:used], shape, tensor.dtype)
