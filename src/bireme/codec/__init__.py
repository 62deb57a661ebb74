"""Codecs: how a tensor of numbers becomes fewer bytes, and becomes a tensor again.

    from bireme.codec import codec_of, parse_codec

    codec = codec_of(parse_codec("topk:0.25:8"))
    message = torch.empty(codec.most_bytes(x.shape, x.dtype), dtype=torch.uint8)
    used = codec.encode(x, message)
    y = codec.decode(message[:used], x.shape, x.dtype)

They need neither the engine nor each other. `Codec` is the protocol for one's own, which a run uses by the
module that it is in (docs/codecs.md). Importing this imports no
torch: `description` says in plain numbers which codecs there are, for planners and run files.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bireme.codec.description import (
    NO_CODECS,
    NONE,
    BoundaryCodecs,
    CodecChoice,
    CodecPhase,
    LinkCodecs,
    parse_codec,
)

if TYPE_CHECKING:
    from bireme.codec.above import TopKAbove
    from bireme.codec.blocks import BlockCodec
    from bireme.codec.choice import codec_of, through
    from bireme.codec.codec import Cast, Codec, Masking
    from bireme.codec.topk import KeptEntries, TopK

__all__ = [
    "NONE",
    "NO_CODECS",
    "BlockCodec",
    "BoundaryCodecs",
    "Cast",
    "Codec",
    "CodecChoice",
    "CodecPhase",
    "KeptEntries",
    "LinkCodecs",
    "Masking",
    "TopK",
    "TopKAbove",
    "codec_of",
    "parse_codec",
    "through",
]

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
