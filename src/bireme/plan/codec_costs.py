"""What codecs on borders cost and save in a plan: bytes, seconds to encode and decode, masks that are kept.

The seconds a value are those of one core of an Intel Xeon, measured by
`python benchmarks/codec_speed.py`; a device of another speed takes longer or shorter in proportion.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bireme.codec.border import AS_IT_IS, BorderCodecs
from bireme.codec.description import NONE, CodecChoice, bits_a_value
from bireme.plan.partition.chain import Chain
from bireme.simulate.costs import CodecCost, Costs

__all__ = ["coded", "with_fewer_bytes"]


@dataclass(frozen=True, slots=True)
class _Rate:
    """Seconds a value of a tensor. `back` is for gradients, of which `keep` takes the entries it knows."""

    encode_s: float
    decode_s: float
    back_encode_s: float
    back_decode_s: float


MEASURED: Mapping[str, _Rate] = {
    "bfloat16": _Rate(0.7e-9, 1.3e-9, 0.7e-9, 1.3e-9),
    "int8": _Rate(2.9e-9, 2.7e-9, 2.9e-9, 2.7e-9),
    "int": _Rate(5.5e-9, 3.9e-9, 5.5e-9, 3.9e-9),
    "keep": _Rate(6.7e-9, 3.6e-9, 3.4e-9, 3.6e-9),
}
"""By codec; `int` is of fewer than 8 bits, as slow as 5, and `keep` is of a quarter in 8 bits."""


def coded(costs: Costs, codecs: Sequence[BorderCodecs], value_bytes: int) -> Costs:
    """The costs of stages with codecs on the borders between them, whose values have so many bytes."""
    if all(one.is_none for one in codecs):
        return costs
    borders = [*codecs, *[AS_IT_IS] * (costs.num_stages - len(codecs))]
    back_bytes = costs.gradient_message_bytes or costs.message_bytes
    found = tuple(
        _cost(one, costs.message_bytes[border] / value_bytes, back_bytes[border] / value_bytes, value_bytes)
        for border, one in enumerate(borders)
    )
    masks = [
        costs.message_bytes[border] / value_bytes / 8 if one.choice(forward=True).name == "keep" else 0.0
        for border, one in enumerate(borders)
    ]
    kept = [sum(pair) for pair in zip(masks, (0.0, *masks[:-1]), strict=True)]
    return replace(
        costs,
        codecs=found,
        stash_bytes=tuple(own + mask for own, mask in zip(costs.stash_bytes, kept, strict=True)),
        input_bytes=tuple(own + mask for own, mask in zip(costs.input_bytes, kept, strict=True)),
    )


def with_fewer_bytes(chain: Chain, codecs: BorderCodecs, value_bytes: int) -> Chain:
    """The chain with the bytes that are sent over each cut by a codec."""
    if codecs.is_none:
        return chain
    raw_bits = 8.0 * value_bytes
    there = bits_a_value(codecs.choice(forward=True), value_bytes) / raw_bits
    back = bits_a_value(codecs.choice(forward=False), value_bytes, is_back=True) / raw_bits
    return replace(
        chain,
        boundary_bytes=np.round(chain.boundary_bytes * there).astype(np.int64),
        returned_bytes=np.round(chain.returned_bytes * back).astype(np.int64),
    )


def _cost(codecs: BorderCodecs, num_values: float, num_back: float, value_bytes: int) -> CodecCost:
    """With so many values of activations, and of gradients."""
    there, back = codecs.choice(forward=True), codecs.choice(forward=False)
    raw_bits = 8.0 * value_bytes
    forward, backward = _rate(there), _rate(back)
    return CodecCost(
        forward_share=bits_a_value(there, value_bytes) / raw_bits,
        backward_share=bits_a_value(back, value_bytes, is_back=True) / raw_bits,
        encode_forward_s=num_values * forward.encode_s,
        decode_forward_s=num_values * forward.decode_s,
        encode_backward_s=num_back * backward.back_encode_s,
        decode_backward_s=num_back * backward.back_decode_s,
    )


def _rate(choice: CodecChoice) -> _Rate:
    """What was measured; of one's own codec nothing was."""
    if choice == NONE or choice.where is not None:
        return _Rate(0.0, 0.0, 0.0, 0.0)
    return MEASURED["int8" if choice.name == "int" and not choice.is_rotated else choice.name]
