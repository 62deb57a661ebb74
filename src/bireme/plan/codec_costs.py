"""What codecs cost and save in a plan: on boundaries bytes, seconds to encode and decode, and masks that are
kept; in sums over replicas seconds.

The seconds for a value are those of the profile. Where it has none, they are those of one core of an Intel
Xeon without numba, measured by `python benchmarks/codec_speed.py`. A device of another speed takes longer or
less long in proportion.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from bireme.codec.description import (
    AS_IT_IS,
    NONE,
    BoundaryCodecs,
    CodecChoice,
    CodecRate,
    bits_a_value,
    parse_codec,
    sum_name,
)
from bireme.codec.sum_description import ENTRY_BYTES, SumCost, SumKind
from bireme.plan.partition.chain import Chain
from bireme.simulate.costs import CodecCost, Costs

_MEASURED = (
    CodecRate("bfloat16", 0.7e-9, 1.3e-9, 0.7e-9, 1.3e-9),
    CodecRate("int8", 2.9e-9, 2.7e-9, 2.9e-9, 2.7e-9),
    CodecRate("int5", 5.5e-9, 3.9e-9, 5.5e-9, 3.9e-9),
    CodecRate("topk:0.25:8", 6.7e-9, 3.6e-9, 3.4e-9, 3.6e-9),
)
"""One of each kind: those of fewer than 8 bits are as slow as 5."""

_MEASURED_IN_SUMS = {
    SumKind.THRESHOLD: CodecRate("threshold:0.01:50", 4.9e-9, 0.4e-9, 4.9e-9, 0.4e-9),
    SumKind.LOWRANK: CodecRate("lowrank:4", 6.2e-9, 0.0, 6.2e-9, 0.0),
}
"""Of codecs that boundaries lack: all that a replica does for a sum, on one core of an AMD EPYC."""


def coded(
    costs: Costs, codecs: Sequence[BoundaryCodecs], value_bytes: int, rates: Sequence[CodecRate] = ()
) -> Costs:
    """The costs of stages with codecs on the boundaries between them, whose values have so many bytes; with
    the rates of a profile, where it has them.
    """
    if all(one.is_none for one in codecs):
        return costs
    boundaries = [*codecs, *[AS_IT_IS] * (costs.num_stages - len(codecs))]
    back_bytes = costs.gradient_message_bytes or costs.message_bytes
    known = {one.codec: one for one in rates}
    there, back = ([one / value_bytes for one in some] for some in (costs.message_bytes, back_bytes))
    found = tuple(_cost(*one, value_bytes, known) for one in zip(boundaries, there, back, strict=True))
    masks = [
        values / 8 if one.choice(forward=True).name == "topk" else 0.0
        for one, values in zip(boundaries, there, strict=True)
    ]
    kept = [sum(pair) for pair in zip(masks, (0.0, *masks[:-1]), strict=True)]
    return replace(
        costs,
        codecs=found,
        stash_bytes=tuple(own + mask for own, mask in zip(costs.stash_bytes, kept, strict=True)),
        input_bytes=tuple(own + mask for own, mask in zip(costs.input_bytes, kept, strict=True)),
    )


def with_fewer_bytes(chain: Chain, codecs: BoundaryCodecs, value_bytes: int) -> Chain:
    """The chain with the bytes that are sent over each cut by a codec."""
    if codecs.is_none:
        return chain
    there, back = _shares(codecs, value_bytes)
    return replace(
        chain,
        boundary_bytes=np.round(chain.boundary_bytes * there).astype(np.int64),
        returned_bytes=np.round(chain.returned_bytes * back).astype(np.int64),
    )


_GRADIENT_S = 26e-6
"""Seconds of each gradient in a sum through a codec besides those of its values, on one core of that Xeon: of
a GPT with 101 gradients of 4,200 values each in the mean, and four replicas.
"""


def sum_coding_s(
    sums: SumCost, gradient_bytes: float, num_replicas: int, rates: Sequence[CodecRate] = ()
) -> float:
    """The seconds in which a replica encodes its bytes of gradients and decodes the messages of all.
    Parts in few bits, and sums of parts, are together no more than the messages of two.
    """
    codec = sums.codec
    if codec.kind is SumKind.DENSE:
        return 0.0
    rate = next((one for one in rates if one.codec == sum_name(codec)), None)
    if rate is None and codec.kind is SumKind.BITS:
        rate = _rate(CodecChoice("int", codec.bits), {})
    rate = rate or _MEASURED_IN_SUMS[codec.kind]
    num_decoded = 2 if codec.is_cut(num_replicas) else num_replicas
    of_values_s = gradient_bytes / ENTRY_BYTES * (rate.encode_s + num_decoded * rate.decode_s)
    return of_values_s + gradient_bytes / sums.gradient_bytes * _GRADIENT_S


def _cost(
    codecs: BoundaryCodecs,
    num_values: float,
    num_back: float,
    value_bytes: int,
    known: Mapping[str, CodecRate],
) -> CodecCost:
    """With so many values of activations, and of gradients."""
    forward, backward = (_rate(codecs.choice(forward=way), known) for way in (True, False))
    return CodecCost(
        *_shares(codecs, value_bytes),
        encode_forward_s=num_values * forward.encode_s,
        decode_forward_s=num_values * forward.decode_s,
        encode_backward_s=num_back * backward.back_encode_s,
        decode_backward_s=num_back * backward.back_decode_s,
    )


def _shares(codecs: BoundaryCodecs, value_bytes: int) -> tuple[float, float]:
    """What is sent of each byte of activations, and of each byte of gradients."""
    there = bits_a_value(codecs.choice(forward=True), value_bytes)
    back = bits_a_value(codecs.choice(forward=False), value_bytes, is_back=True)
    return there / (8.0 * value_bytes), back / (8.0 * value_bytes)


def _rate(choice: CodecChoice, known: Mapping[str, CodecRate]) -> CodecRate:
    """What the profile says, else what was measured elsewhere of its kind; of one's own codec nothing was."""
    if str(choice) in known:
        return known[str(choice)]
    if choice == NONE or choice.where is not None:
        return CodecRate(str(choice), 0.0, 0.0, 0.0, 0.0)
    kind = choice.name, choice.is_rotated
    return next(
        one for one in _MEASURED if (parse_codec(one.codec).name, parse_codec(one.codec).is_rotated) == kind
    )
