"""What codecs on borders cost in steps: how many a run takes for one without codecs.

The excess losses are those of a pilot (docs/codecs.md): GPTs of four stages and width 64, AdamW, 300 steps,
every border encoded, one seed. Differences under 1 % are noise there. Steps follow from the loss as in
docs/convergence.md: 1 % of loss is 8 % of the steps. A study with three seeds and more sizes is still to be
run (`python benchmarks/convergence.py codecs`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bireme.codec.border import BorderCodecs
from bireme.codec.description import CodecChoice

__all__ = ["PILOT", "WORDS_TO_TRY", "Excess", "codec_steps"]

STEPS_OF_LOSS = 8.0
"""Steps for one, less one, over the excess of loss: +1.0 % took 1.08 steps, +1.8 % took 1.14."""


@dataclass(frozen=True, slots=True)
class Excess:
    """The loss over that of no codec, less 1: without the codec, after all steps with it; and where the last
    fifth of the steps had int8 in its place.
    """

    bare: float
    ended: float


PILOT: Mapping[str, Excess] = {
    "bfloat16": Excess(0.0, 0.0),
    "int8": Excess(0.003, 0.003),
    "int5": Excess(0.003, 0.003),
    "int4": Excess(0.026, 0.026),
    "int3": Excess(0.11, 0.11),
    "int2": Excess(0.26, 0.26),
    "keep:0.5:4": Excess(0.016, 0.016),
    "keep:0.25:8": Excess(0.022, 0.010),
    "keep:0.125:8": Excess(0.034, 0.016),
    "keep:0.0625:8": Excess(0.05, 0.05),
}
"""By the codec of both directions. int5 was better than none by less than the noise, and counts as int8."""

OVER_TENSOR = 0.01
"""What `keep` over a whole tensor with an old threshold had more than by rows, in the pilot."""

WORDS_TO_TRY = ("int8", "int5", "keep:0.25:8", "keep:0.125:8")
"""What the planner tries: of equal bytes those with the least loss."""


def codec_steps(borders: Iterable[BorderCodecs], *, has_ending: bool) -> float:
    """Steps with codecs on borders that equal one step without: the worst border counts for all.

    `has_ending` says that the last fifth of a run has int8, or none.
    """
    excess = 0.0
    for one in borders:
        for choice in (one.choice(forward=True), one.choice(forward=False)):
            found = _excess(choice)
            excess = max(excess, found.ended if has_ending else found.bare)
    return 1.0 + STEPS_OF_LOSS * excess


def _excess(choice: CodecChoice) -> Excess:
    """What is known of a codec, or of the next worse one of its kind; of one's own nothing is."""
    if choice.name == "none":
        return Excess(0.0, 0.0)
    if choice.where is not None:
        return Excess(0.0, 0.0)
    if choice.name == "bfloat16":
        return PILOT["bfloat16"]
    if choice.name == "int":
        assert choice.bits is not None
        known = {int(word[3:]): one for word, one in PILOT.items() if word.startswith("int")}
        return known[max([bits for bits in known if bits <= choice.bits], default=min(known))]
    assert choice.share is not None
    shares = {float(word.split(":")[1]): one for word, one in PILOT.items() if word.startswith("keep")}
    found = shares[max([share for share in shares if share <= choice.share], default=min(shares))]
    return found if choice.life is None else Excess(found.bare + OVER_TENSOR, found.ended + OVER_TENSOR)
