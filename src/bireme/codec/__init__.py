"""Codecs: how a tensor of numbers becomes fewer bytes, and becomes a tensor again.

    from bireme.codec import codec_of as codec_of
    from bireme.codec import parse_codec as parse_codec

    codec = codec_of(parse_codec("topk:0.25:8"))
    message = torch.empty(codec.most_bytes(x.shape, x.dtype), dtype=torch.uint8)
    used = codec.encode(x, message)
    y = codec.decode(message[:used], x.shape, x.dtype)

They need neither the engine nor each other. `Codec` is the protocol for one's own, which a run uses by the
module that it is in (docs/own-codecs.md). Importing this imports no
torch: `description` says in plain numbers which codecs there are, for planners and run files.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bireme.codec.description import NO_CODECS as NO_CODECS
from bireme.codec.description import NONE as NONE
from bireme.codec.description import BoundaryCodecs as BoundaryCodecs
from bireme.codec.description import CodecChoice as CodecChoice
from bireme.codec.description import CodecPhase as CodecPhase
from bireme.codec.description import LinkCodecs as LinkCodecs
from bireme.codec.description import parse_codec as parse_codec

if TYPE_CHECKING:
    from bireme.codec.above import TopKAbove as TopKAbove
    from bireme.codec.blocks import BlockCodec as BlockCodec
    from bireme.codec.choice import codec_of as codec_of
    from bireme.codec.choice import through as through
    from bireme.codec.codec import Cast as Cast
    from bireme.codec.codec import Codec as Codec
    from bireme.codec.codec import Masking as Masking
    from bireme.codec.topk import KeptEntries as KeptEntries
    from bireme.codec.topk import TopK as TopK

PLACES = {
    "BlockCodec": "bireme.codec.blocks",
    "Cast": "bireme.codec.codec",
    "Codec": "bireme.codec.codec",
    "TopK": "bireme.codec.topk",
    "TopKAbove": "bireme.codec.above",
    "KeptEntries": "bireme.codec.topk",
    "Masking": "bireme.codec.codec",
    "codec_of": "bireme.codec.choice",
    "through": "bireme.codec.choice",
}


def __getattr__(name: str) -> Any:
    if name in PLACES:
        return getattr(importlib.import_module(PLACES[name]), name)
    raise AttributeError(f"module 'bireme.codec' has no attribute {name!r}")
