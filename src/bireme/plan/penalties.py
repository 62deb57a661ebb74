"""What updating late costs in steps: how many a rule takes for one of a synchronous run.

Measured on small GPTs in runs of 300 steps, each rule at its own best learning rate (docs/convergence.md,
whose runs `tests/plan/test_penalties.py` holds these numbers to). Early steps suffer most, so longer runs
pay less: in 1,200 steps 2bw-fresh took 1.03 where it takes 1.08 here. A GPT of 355M that was trained for
300,000 steps with a delay of one reached the perplexity of a synchronous run of 20 % fewer (Narayanan et
al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 5).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from bireme.errors import BiremeError
from bireme.schedule.rule import Rule

__all__ = [
    "DEFAULT_DELAY_WARMUP",
    "ENOUGH_STEPS",
    "MEASURED",
    "PenaltySteps",
    "delay_warmup_of",
    "steps_for_one",
    "unseen_share",
]

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
"""By the rule and whether the run starts without delay; optimisers that are not here are taken for adamw."""


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
