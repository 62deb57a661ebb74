"""What codecs in sums over replicas cost in steps: how many a run takes for one with gradients as they are.

Measured by the study (`python benchmarks/convergence.py sums`, docs/gradient-codecs.md) with a small GPT in
runs of 300 steps, two and four replicas, each codec at its own best learning rate, three seeds; a test holds
these numbers to it. Differences under 0.03 are noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from bireme.codec.sum_words import SumCodec, SumKind, parse_sum_codec

__all__ = ["STUDIED_SUMS", "SumSteps", "sum_steps"]


@dataclass(frozen=True, slots=True)
class SumSteps:
    """Steps for one; at least so many where the loss was above that of the shortest run that it was compared
    with.
    """

    steps: float
    is_at_least: bool = False


STUDIED_SUMS: Mapping[str, Mapping[str, SumSteps]] = {
    "adamw": {
        "int8": SumSteps(1.03),
        "int4": SumSteps(1.0),
        "int3": SumSteps(1.02),
        "int2": SumSteps(1.09),
        "threshold:0.1:50": SumSteps(1.65),
        "threshold:0.01:50": SumSteps(4.82),
        "lowrank:8": SumSteps(1.06),
        "lowrank:4": SumSteps(1.16),
    },
    "muon": {
        "int8": SumSteps(1.01),
        "int4": SumSteps(1.02),
        "int3": SumSteps(1.11),
        "int2": SumSteps(1.22),
        "threshold:0.1:50": SumSteps(1.53),
        "threshold:0.01:50": SumSteps(5.0, is_at_least=True),
        "lowrank:8": SumSteps(1.27),
        "lowrank:4": SumSteps(1.52),
    },
}
"""By the optimiser and the codec: the mean of two and of four replicas."""


@lru_cache(maxsize=256)
def sum_steps(codec: SumCodec, optimizer: str) -> SumSteps:
    """The steps of a codec, or of the next coarser one of its kind that was studied; at least those of the
    coarsest where none is coarser. Optimisers that were not studied count as AdamW.
    """
    if codec.kind is SumKind.DENSE:
        return SumSteps(1.0)
    studied = STUDIED_SUMS.get(optimizer, STUDIED_SUMS["adamw"])
    alike = {
        _fineness(one): steps
        for one, steps in ((parse_sum_codec(word), steps) for word, steps in studied.items())
        if one.kind is codec.kind
    }
    coarser = [one for one in alike if one <= _fineness(codec)]
    return alike[max(coarser)] if coarser else SumSteps(alike[min(alike)].steps, is_at_least=True)


def _fineness(codec: SumCodec) -> float:
    """How much of a gradient a codec sends, next to others of its kind."""
    return {SumKind.BITS: codec.bits, SumKind.LOWRANK: codec.rank}.get(codec.kind, codec.share)
