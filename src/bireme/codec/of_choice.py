"""From the words for a codec to the codec."""

import torch

from bireme.codec.above import KeepAbove
from bireme.codec.blocks import BlockCodec
from bireme.codec.cast import Cast
from bireme.codec.codec import Codec
from bireme.codec.description import CodecChoice
from bireme.codec.keep import Keep
from bireme.codec.own import own_codec

__all__ = ["codec_of"]


def codec_of(choice: CodecChoice) -> Codec:
    """The codec that a choice names."""
    match choice.name:
        case "bfloat16":
            return Cast(torch.bfloat16)
        case "int":
            assert choice.bits is not None
            return BlockCodec(choice.bits, is_rotated=choice.is_rotated)
        case "keep":
            assert choice.share is not None
            if choice.life is not None:
                assert choice.bits is not None
                return KeepAbove(choice.share, choice.bits, choice.life)
            return Keep(choice.share, choice.bits)
        case "own":
            assert choice.where is not None
            return own_codec(choice.where)
        case _:
            return Cast()
