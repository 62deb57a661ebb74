"""What codecs on borders cost in steps: how many a run takes for one without codecs.

The excess losses are of small GPTs on four stages, with AdamW and 300 steps, every border encoded
(docs/codecs.md). Most are of the study (`python benchmarks/convergence.py codecs`): 2bw-fresh with its start,
over the loss of the same run without codecs, width 128, or 64 where that alone was run. The others are of a
pilot: width 64, 1f1b, an ending of a fifth, one seed, so that differences under 1 % are noise. Steps follow
from the loss as in docs/convergence.md: 1 % of loss is 8 % of the steps.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bireme.codec.border import BorderCodecs
from bireme.codec.description import CodecChoice

__all__ = ["EXCESSES", "FINER_FORWARD", "KEEP_WITH_MUON", "WORDS_TO_TRY", "Excess", "codec_steps"]

STEPS_OF_LOSS = 8.0
"""Steps for one, less one, over the excess of loss: +1.0 % took 1.08 steps, +1.8 % took 1.14."""


@dataclass(frozen=True, slots=True)
class Excess:
    """The loss over that of no codec, less 1: without the codec, after all steps with it; and where the last
    steps had int8 or int5 in its place. `num_seeds` is how many seeds that rests on, `is_studied` whether on
    the study's, and not the pilot's.
    """

    bare: float
    ended: float
    num_seeds: int = 1
    is_studied: bool = False


EXCESSES: Mapping[str, Excess] = {
    "bfloat16": Excess(0.0, 0.0),
    "int8": Excess(0.004, 0.004, num_seeds=3, is_studied=True),
    "int6": Excess(0.002, 0.002, num_seeds=3, is_studied=True),
    "int5": Excess(0.001, 0.001, num_seeds=3, is_studied=True),
    "int4": Excess(0.019, 0.019, num_seeds=3, is_studied=True),
    "int3": Excess(0.11, 0.11),
    "int2": Excess(0.26, 0.26),
    "keep:0.5:4": Excess(0.022, 0.022, num_seeds=3, is_studied=True),
    "keep:0.25:8": Excess(0.022, 0.013, num_seeds=3, is_studied=True),
    "keep:0.125:8": Excess(0.044, 0.019, num_seeds=3, is_studied=True),
    "keep:0.0625:8": Excess(0.05, 0.05),
}
"""By the codec of both directions. Of int8, int6 and int5 the order is chance.

Of keep the study has runs with an ending of 5 to 9 % of the steps. Without one keep:0.125:8 is the study's,
the others are the pilot's. A longer ending costs less, but sends more.
"""

FINER_FORWARD = {4: Excess(0.005, 0.005, num_seeds=3, is_studied=True)}
"""By the bits of gradients, where activations have 8 or more."""

OVER_TENSOR = 0.01
"""What `keep` over a whole tensor with an old threshold had more than by rows, in the pilot."""

KEEP_WITH_MUON = {False: 2.9, True: 4.8}
"""What `keep` adds to the loss with Muon, as times what it adds with AdamW, by whether a run has an ending:
the study's, of an eighth. Rounding costs both the same.
"""

WORDS_TO_TRY = ("int8", "int5", "keep:0.25:8", "keep:0.125:8")
"""What the planner tries: of equal bytes those with the least loss."""


def codec_steps(borders: Iterable[BorderCodecs], optimizer: str, *, has_ending: bool) -> float:
    """Steps with codecs on borders that equal one step without: the worst border counts for all.

    `has_ending` says that the last steps of a run have int8, or none.
    """
    most, with_muon = 0.0, KEEP_WITH_MUON[has_ending] if optimizer == "muon" else 1.0
    for one in borders:
        there, back = one.choice(forward=True), one.choice(forward=False)
        for choice, found in ((there, _excess(there)), (back, _excess_back(there, back))):
            excess = found.ended if has_ending else found.bare
            most = max(most, excess * (with_muon if choice.name == "keep" else 1.0))
    return 1.0 + STEPS_OF_LOSS * most


def _excess_back(there: CodecChoice, back: CodecChoice) -> Excess:
    """Gradients stand fewer bits than activations do."""
    has_fine_activations = there.name in ("none", "bfloat16") or (there.name == "int" and there.bits == 8)
    if has_fine_activations and back.name == "int" and back.bits in FINER_FORWARD:
        return FINER_FORWARD[back.bits]
    return _excess(back)


def _excess(choice: CodecChoice) -> Excess:
    """What is known of a codec, or of the next worse one of its kind; of one's own nothing is."""
    if choice.name == "none" or choice.where is not None:
        return Excess(0.0, 0.0)
    if choice.name == "bfloat16":
        return EXCESSES["bfloat16"]
    if choice.name == "int":
        assert choice.bits is not None
        known = {int(word[3:]): one for word, one in EXCESSES.items() if word.startswith("int")}
        return known[max([bits for bits in known if bits <= choice.bits], default=min(known))]
    assert choice.share is not None
    shares = {float(word.split(":")[1]): one for word, one in EXCESSES.items() if word.startswith("keep")}
    found = shares[max([share for share in shares if share <= choice.share], default=min(shares))]
    return found if choice.life is None else Excess(found.bare + OVER_TENSOR, found.ended + OVER_TENSOR)
