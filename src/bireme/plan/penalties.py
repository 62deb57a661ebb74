"""What updating late costs in steps: how many a rule takes for one of a synchronous run.

Measured on small GPTs in runs of 300 steps, each rule at its own best learning rate (docs/convergence.md,
whose runs `tests/plan/test_penalties.py` holds these numbers to). Early steps suffer most, so longer runs
pay less: in 1,200 steps 2bw-fresh took 1.03 where it takes 1.08 here. A GPT of 355M that was trained for
300,000 steps with a delay of one reached the perplexity of a synchronous run of 20 % fewer (Narayanan et
al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 5).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import log

from bireme.codec.description import BoundaryCodecs, CodecChoice
from bireme.codec.sum_description import SumCodec, SumKind, parse_sum_codec
from bireme.errors import BiremeError
from bireme.schedule.program import Rule

# What codecs on boundaries cost in steps: how many a run takes for one without codecs.
#
# The excess losses are of small GPTs on four stages, with AdamW and 300 steps, every boundary encoded
# (docs/figures-codecs.md). Most are of the study (`python benchmarks/convergence.py codecs`): 2bw-fresh with
# its start, over the loss of the same run without codecs, width 128, or 64 where that alone was run. The
# others are of a pilot: width 64, 1f1b, a last part of a fifth, one seed, so differences under 1 % are noise.
# Steps follow from the loss as in docs/convergence.md: 1 % of loss is 8 % of the steps.

_STEPS_OF_LOSS = 8.0
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
    "topk:0.5:4": Excess(0.022, 0.022, num_seeds=3, is_studied=True),
    "topk:0.25:8": Excess(0.022, 0.013, num_seeds=3, is_studied=True),
    "topk:0.125:8": Excess(0.044, 0.019, num_seeds=3, is_studied=True),
    "topk:0.0625:8": Excess(0.05, 0.05),
}
"""By the codec of both directions. Of int8, int6 and int5 the order is chance.

Of topk the study has runs with an ending of 5 to 9 % of the steps. Without one topk:0.125:8 is the study's,
the others are the pilot's. A longer ending costs less, but sends more.
"""

FINER_FORWARD = {4: Excess(0.005, 0.005, num_seeds=3, is_studied=True)}
"""By the bits of gradients, where activations have 8 or more."""

_OVER_TENSOR = 0.01
"""What `topk` over a whole tensor with an old threshold had more than by rows, in the pilot."""

TOPK_WITH_MUON = {False: 2.9, True: 4.8}
"""What `topk` adds to the loss with Muon, as times what it adds with AdamW, by whether a run has an ending:
the study's, of an eighth. Rounding costs both the same.
"""

WORDS_TO_TRY = ("int8", "int5", "topk:0.25:8", "topk:0.125:8")
"""What the planner tries: of equal bytes those with the least loss."""


def codec_steps(boundaries: Iterable[BoundaryCodecs], optimizer: str, *, has_ending: bool) -> float:
    """Steps with codecs on boundaries that equal one step without: the worst boundary counts for all.

    `has_ending` says that the last steps of a run have int8, or none.
    """
    most, with_muon = 0.0, TOPK_WITH_MUON[has_ending] if optimizer == "muon" else 1.0
    for one in boundaries:
        there, back = one.choice(forward=True), one.choice(forward=False)
        for choice, found in ((there, _excess(there)), (back, _excess_back(there, back))):
            excess = found.ended if has_ending else found.bare
            most = max(most, excess * (with_muon if choice.name == "topk" else 1.0))
    return 1.0 + _STEPS_OF_LOSS * most


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
    shares = {float(word.split(":")[1]): one for word, one in EXCESSES.items() if word.startswith("topk")}
    found = shares[max([share for share in shares if share <= choice.share], default=min(shares))]
    return found if choice.life is None else Excess(found.bare + _OVER_TENSOR, found.ended + _OVER_TENSOR)


# What averaging weights costs in steps: how many it takes for one where all replicas sum gradients.
#
# Measured by the study (`python benchmarks/convergence.py replicas`, docs/agreement.md) with a small GPT in
# runs of 300 steps; a test holds these numbers to it. Short runs from random weights are the worst case for
# outer steps, which are made for long ones.

STUDIED_CELLS = (("adamw", 4), ("adamw", 8), ("muon", 4), ("muon", 8))
"""The optimizers, and the numbers of replicas, of each agreement's figures."""

LOST = 5.0
"""At least so many, where the loss was above that of the shortest run that it was compared with."""

STUDIED: Mapping[tuple[str, int], tuple[tuple[float, float], ...]] = {
    ("groups", 1): ((1.17, 1.20), (1.23, 1.27), (0.95, 1.08), (1.02, 1.21)),
    ("groups", 2): ((1.17, 1.22), (1.15, 1.23), (0.98, 1.10), (1.03, 1.19)),
    ("groups", 5): ((1.07, 1.10), (1.33, 1.39), (1.14, 1.21), (1.15, 1.32)),
    ("groups", 10): ((1.15, 1.32), (1.38, 1.40), (1.29, 1.39), (1.32, 1.43)),
    ("diloco", 10): ((2.47, 2.61), (2.68, 2.84), (2.29, 2.32), (2.85, 2.92)),
    ("diloco", 50): ((1.97, 2.03), (2.58, 2.62), (2.40, 2.43), (4.28, 4.35)),
    ("diloco", 200): ((1.84, 1.85), (2.54, 2.58), (3.68, 3.77), (LOST, LOST)),
}
"""By the mode, and the batches within which all are connected, or after which they step outside: the steps
under schedules that drain, and under 2bw-fresh after its delay warm-up, of each of `STUDIED_CELLS`.
"""


@dataclass(frozen=True, slots=True)
class AgreementSteps:
    """Steps for one with an agreement. `is_studied` if the study has the figure, of as many or more replicas;
    `is_at_least` if it has only a lower bound.
    """

    steps: float
    is_studied: bool
    is_at_least: bool


@lru_cache(maxsize=1024)
def agreement_steps(
    mode: str, every: int, optimizer: str, num_replicas: int, rule: Rule, *, has_warmup: bool
) -> AgreementSteps:
    """The steps of replicas that average weights, as a factor of what the update rule takes. A number of
    replicas counts as the next larger one of the study.

    What was not studied counts as what is nearest: another number of batches as the nearest one, an optimizer
    as AdamW, and delayed updates as none.
    """
    nearest = min((known for name, known in STUDIED if name == mode), key=lambda one: abs(log(one / every)))
    known = optimizer if any(optimizer == one for one, _ in STUDIED_CELLS) else "adamw"
    cells = [
        (replicas, pair)
        for (name, replicas), pair in zip(STUDIED_CELLS, STUDIED[mode, nearest], strict=True)
        if name == known
    ]
    replicas, (synchronous, fresh) = next((one for one in cells if one[0] >= num_replicas), cells[-1])
    is_fresh = rule is Rule.FRESH and has_warmup
    alone = MEASURED[Rule.FRESH, True][known].at(unseen_share(*_STUDIED_SHAPES[replicas])) if is_fresh else 1
    is_studied = nearest == every and known == optimizer and (is_fresh or rule is Rule.SYNCHRONOUS)
    is_at_least = num_replicas > replicas or synchronous == LOST
    return AgreementSteps(
        max((fresh if is_fresh else synchronous) / alone, 1.0), is_studied and not is_at_least, is_at_least
    )


_STUDIED_SHAPES = {4: (4, 4), 8: (2, 2)}
"""Stages and micro-batches of the study's replicas, by their number."""


# What codecs in sums over replicas cost in steps: how many a run takes for one with gradients as they are.
#
# Measured by the study (`python benchmarks/convergence.py sums`, docs/figures-codecs.md) with a small GPT in
# runs of 300 steps, two and four replicas, each codec at its own best learning rate, three seeds; a test
# holds these numbers to it. Differences under 0.03 are noise.


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
"""By the optimizer and the codec: the mean of two and of four replicas."""


SUMS_TO_TRY = ("int4", "int8", "int2", "lowrank:4")
"""What the planner tries: of equal bytes those with the fewest steps."""


@lru_cache(maxsize=256)
def sum_steps(codec: SumCodec, optimizer: str) -> SumSteps:
    """The steps of a codec, or of the next coarser one of its kind that was studied, and no fewer than those
    of finer ones: that these took more is chance. If none is coarser, at least those of the coarsest.
    Optimizers that were not studied count as AdamW.
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
    if not coarser:
        return SumSteps(alike[min(alike)].steps, is_at_least=True)
    return max((alike[one] for one in alike if one >= max(coarser)), key=lambda found: found.steps)


BOTH_CODED = 1.05
"""Steps for one of a run with codecs on boundaries and in sums, as a factor of what both cost alone: the
study's, of `int5` with `int4`. Codecs and delayed updates together cost their product.
"""


def _fineness(codec: SumCodec) -> float:
    """How much of a gradient a codec sends, next to others of its kind."""
    return {SumKind.BITS: codec.bits, SumKind.LOWRANK: codec.rank}.get(codec.kind, codec.share)


DEFAULT_DELAY_WARMUP = 0.2
"""The default delay warm-up, as a share of the run."""

ENOUGH_STEPS = 1000
"""The default delay warm-up is no longer than these steps or twice the warm-up of the learning rate.

Short runs show that it must outlast the warm-up of the rate; this number is a judgement.
"""


@dataclass(frozen=True, slots=True)
class PenaltySteps:
    """Steps for one: so many with the whole batch before seen, and so many more with nothing of it."""

    seen: float
    unseen: float = 0.0

    def at(self, unseen: float) -> float:
        """With that share of a batch not seen."""
        return self.seen + unseen * self.unseen


MEASURED: Mapping[tuple[Rule, bool], Mapping[str, PenaltySteps]] = {
    (Rule.DELAYED, False): {
        "adamw": PenaltySteps(2.15),
        "muon": PenaltySteps(1.74),
        "sgd": PenaltySteps(3.66),
    },
    (Rule.DELAYED, True): {
        "adamw": PenaltySteps(1.48),
        "muon": PenaltySteps(1.51),
        "sgd": PenaltySteps(2.06),
    },
    (Rule.FRESH, False): {
        "adamw": PenaltySteps(1.03, 0.32),
        "muon": PenaltySteps(1.01, 0.11),
        "sgd": PenaltySteps(1.0, 0.34),
    },
    (Rule.FRESH, True): {
        "adamw": PenaltySteps(1.0, 0.11),
        "muon": PenaltySteps(1.0, 0.07),
        "sgd": PenaltySteps(1.0),
    },
}
"""By the rule and whether the run starts without delay; optimizers that are not here are taken for adamw."""


def delay_warmup_of(num_steps: int, warmup_steps: int) -> float:
    """The default delay warm-up, as a share of the run; `warmup_steps` are those of its learning rate."""
    return min(DEFAULT_DELAY_WARMUP, max(2 * warmup_steps, ENOUGH_STEPS) / num_steps)


@lru_cache(maxsize=4096)
def unseen_share(num_stages: int, num_microbatches: int, lookahead: int = 0) -> float:
    """The share of the batch before that a trial version of 2bw-fresh misses, in the mean over the stages.

    A stage begins a batch when as many micro-batches of the one before are still on their way as there are
    stages after it. With a lookahead the first stage runs that many further ahead, the others in proportion.
    """
    most = max(num_stages - 1, 1)
    missing = (behind + -(-lookahead * behind // most) for behind in range(num_stages))
    return sum(min(count, num_microbatches) for count in missing) / (num_stages * num_microbatches)


def steps_for_one(rule: Rule, optimizer: str, *, delay_warmup: float, unseen: float) -> float:
    """Steps with a rule that equal one synchronous step, after a delay warm-up of the share `delay_warmup`.

    No warm-up and `DEFAULT_DELAY_WARMUP` are measured; shares in between are interpolated.
    """
    if rule is Rule.SYNCHRONOUS:
        return 1.0
    if (rule, True) not in MEASURED:
        raise BiremeError(f"The cost of {rule} updates in steps was not measured.")
    without, with_start = (
        known.get(optimizer, known["adamw"]).at(unseen)
        for known in (MEASURED[rule, False], MEASURED[rule, True])
    )
    part = min(delay_warmup / DEFAULT_DELAY_WARMUP, 1.0)
    return max(1.0, (1 - part) * without + part * with_start)
