"""What delayed updates cost in steps: as the study measured it, and as plans count it."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.delay_study.law import LAWS, agreement_law, codec_law, law, sum_law, topk_with_muon
from benchmarks.delay_study.pair_cells import counted_steps, is_pair
from benchmarks.delay_study.study import Known, Run
from benchmarks.delay_study.table import Row, rows
from bireme.codec.sum_description import SiteRounds
from bireme.errors import BiremeError
from bireme.plan.penalties import (
    DEFAULT_DELAY_WARMUP,
    ENOUGH_STEPS,
    EXCESSES,
    FINER_FORWARD,
    LOST,
    MEASURED,
    STUDIED,
    STUDIED_CELLS,
    STUDIED_SUMS,
    TOPK_WITH_MUON,
    AgreementSteps,
    agreement_steps,
    delay_warmup_of,
    steps_for_one,
    unseen_share,
)
from bireme.plan.plan_request import Goal, PlanRequest
from bireme.profile.optimizers import OPTIMIZERS
from bireme.schedule.program import Rule

RESULTS = Path(__file__).parents[2] / "docs" / "convergence.jsonl"
NOISE = 0.002
"""What the losses of two runs of equal settings lie apart at least, as parts of them."""
DEPTHS = st.integers(1, 16)


@given(d=DEPTHS, m=st.integers(1, 64), lookahead=st.integers(0, 20))
def test_the_unseen_share_is_a_share_that_grows_with_depth_and_lookahead(
    d: int, m: int, lookahead: int
) -> None:
    share = unseen_share(d, m, lookahead)
    assert 0 <= share <= 1
    assert unseen_share(d, m) <= unseen_share(d + 1, m)
    assert share <= unseen_share(d, m, lookahead + 1)
    assert share >= unseen_share(d, m + 1, lookahead)
    assert unseen_share(1, m, lookahead) == 0


def test_without_lookahead_a_stage_misses_as_many_as_are_behind_it() -> None:
    assert unseen_share(4, 8) == (3 + 2 + 1 + 0) / (4 * 8)
    assert unseen_share(4, 8, 3) == (6 + 4 + 2 + 0) / (4 * 8)
    assert unseen_share(4, 2) == (2 + 2 + 1 + 0) / (4 * 2)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("key", MEASURED)
def test_the_steps_are_what_the_study_says(key: tuple[Rule, bool], optimizer: str) -> None:
    found = law(LAWS[key], optimizer, studied())
    assert found is not None
    measured = MEASURED[key][optimizer]
    assert (round(found.seen, 2), round(found.unseen, 2)) == (measured.seen, measured.unseen)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["int8/int4", *(word for word, one in EXCESSES.items() if one.is_studied)])
def test_the_losses_of_codecs_are_what_the_study_says_and_no_less(word: str) -> None:
    counted = FINER_FORWARD[4] if word == "int8/int4" else EXCESSES[word]
    found = codec_law(word, studied(), has_ending=word.startswith("topk"))
    assert found is not None
    assert round(found.median, 3) <= counted.ended <= found.median + NOISE
    assert found.num_seeds == counted.num_seeds


@pytest.mark.slow
def test_what_an_eighth_costs_to_the_end_is_what_the_study_says() -> None:
    found = codec_law("topk:0.125:8", studied(), has_ending=False)
    assert found is not None
    assert round(found.median, 3) == EXCESSES["topk:0.125:8"].bare


@pytest.mark.slow
@pytest.mark.parametrize("has_ending", [False, True])
def test_what_topk_costs_with_muon_is_what_the_study_says(has_ending: bool) -> None:
    found = topk_with_muon(studied(), has_ending=has_ending)
    assert found is not None
    assert round(found, 1) == TOPK_WITH_MUON[has_ending]


@pytest.mark.slow
@pytest.mark.parametrize("agreement", STUDIED)
def test_the_steps_of_replicas_that_average_weights_are_what_the_study_says(
    agreement: tuple[str, int],
) -> None:
    mode, every = agreement
    for (optimizer, replicas), counted in zip(STUDIED_CELLS, STUDIED[agreement], strict=True):
        for rule, steps in zip(("synchronous", "fresh+warm-up"), counted, strict=True):
            found = agreement_law(f"{mode}:{every}", rule, optimizer, replicas, studied())
            assert (LOST if found is None else round(found, 2)) == steps, (optimizer, replicas, rule)


def steps_of(
    mode: str = "diloco",
    every: int = 50,
    optimizer: str = "adamw",
    replicas: int = 4,
    rule: Rule = Rule.SYNCHRONOUS,
    *,
    has_warmup: bool = True,
) -> AgreementSteps:
    return agreement_steps(mode, every, optimizer, replicas, rule, has_warmup=has_warmup)


def test_replicas_that_average_count_as_the_next_more_that_were_studied() -> None:
    few, eight, many = (steps_of(replicas=count) for count in (2, 5, 9))
    assert few == steps_of() == AgreementSteps(1.97, is_studied=True, is_at_least=False)
    assert eight == AgreementSteps(2.58, is_studied=True, is_at_least=False)
    assert many == AgreementSteps(2.58, is_studied=False, is_at_least=True)


def test_averages_that_were_not_studied_count_as_what_is_nearest_and_say_so() -> None:
    others = [
        steps_of(every=60),
        steps_of(optimizer="sgd"),
        steps_of(rule=Rule.DELAYED),
        steps_of(rule=Rule.FRESH, has_warmup=False),
    ]
    assert {one.steps for one in others} == {1.97}
    assert not any(one.is_studied for one in others)
    lost = steps_of(every=200, optimizer="muon", replicas=8)
    assert (lost.is_studied, lost.is_at_least) == (False, True)
    assert steps_of("groups", 1, "muon").steps == 1.0  # 0.95 is noise


def test_averages_under_a_fresh_rule_count_beside_what_the_rule_itself_takes() -> None:
    rule = MEASURED[Rule.FRESH, True]["adamw"].at(unseen_share(4, 4))
    assert steps_of("groups", 10, rule=Rule.FRESH).steps * rule == pytest.approx(1.32)
    rounds = SiteRounds(averages=True, connect_every=10)
    one, other = (PlanRequest(8, rounds=found) for found in (rounds, None))
    gain = one.agreement_penalty(4, "adamw", Rule.FRESH)
    assert gain == steps_of("groups", 10, rule=Rule.FRESH).steps
    assert other.agreement_penalty(4, "adamw", Rule.FRESH) == 1.0
    throughput = replace(one, goal=Goal.THROUGHPUT)
    assert throughput.agreement_penalty(4, "adamw", Rule.SYNCHRONOUS) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "word"), [(optimizer, word) for optimizer, found in STUDIED_SUMS.items() for word in found]
)
def test_the_steps_of_codecs_of_sums_are_what_the_study_says(optimizer: str, word: str) -> None:
    counted = STUDIED_SUMS[optimizer][word]
    found = sum_law(word, optimizer, studied())
    assert counted.is_at_least == (found is None)
    assert found is None or max(round(found, 2), 1.0) == counted.steps


@pytest.mark.slow
def test_what_costs_steps_together_costs_no_more_than_plans_count() -> None:
    """One seed may be off by 1 % of the loss, which is 8 % of the steps."""
    found = {row.cell: row for row in studied() if is_pair(row.cell)}
    assert {cell.rule for cell in found} == {"synchronous", "2bw", "2bw+warm-up", "fresh+warm-up"}
    for cell, row in found.items():
        assert row.penalty is not None
        assert row.penalty <= counted_steps(cell) * (1.03 if row.num_seeds >= 3 else 1.08), cell


@cache
def studied() -> list[Row]:
    """The rows of the study's table."""
    known = Known()
    for line in RESULTS.read_text().splitlines():
        known.add(Run.from_line(line))
    return rows(known)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_start_without_delay_and_a_fresh_rule_cost_less(optimizer: str) -> None:
    def steps(rule: Rule, *, starts: bool, unseen: float = 0.375) -> float:
        return steps_for_one(
            rule, optimizer, delay_warmup=DEFAULT_DELAY_WARMUP if starts else 0.0, unseen=unseen
        )

    assert steps(Rule.SYNCHRONOUS, starts=False) == 1
    assert 1 <= steps(Rule.FRESH, starts=True) <= steps(Rule.FRESH, starts=False)
    assert steps(Rule.FRESH, starts=False) < steps(Rule.DELAYED, starts=True)
    assert steps(Rule.DELAYED, starts=True) < steps(Rule.DELAYED, starts=False)
    shares = [share / 10 for share in range(11)]
    for less, more in pairwise(shares):
        for starts in (True, False):
            assert steps(Rule.FRESH, starts=starts, unseen=less) <= steps(
                Rule.FRESH, starts=starts, unseen=more
            )


def test_a_shorter_start_counts_in_proportion_and_a_longer_one_as_ours() -> None:
    none, half, ours, longer = (
        steps_for_one(Rule.FRESH, "adamw", delay_warmup=start, unseen=0.375)
        for start in (0, DEFAULT_DELAY_WARMUP / 2, DEFAULT_DELAY_WARMUP, 1)
    )
    assert half == pytest.approx((none + ours) / 2)
    assert longer == ours < none


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(BiremeError, match="was not measured"):
        steps_for_one(Rule.STASHED, "adamw", delay_warmup=0, unseen=0)


def test_the_delay_warm_up_is_ours_if_the_planner_chooses_the_schedule_and_the_user_s_otherwise() -> None:
    assert PlanRequest(8).delay_warmup_share == DEFAULT_DELAY_WARMUP
    assert PlanRequest(8, schedule="2bw").delay_warmup_share == 0
    assert PlanRequest(8, schedule="2bw", delay_warmup=0.5).delay_warmup_share == 0.5
    assert PlanRequest(8, delay_warmup=0.0).delay_warmup_share == 0


def test_a_long_run_starts_for_twice_the_rise_of_its_rate_or_a_thousand_steps() -> None:
    assert delay_warmup_of(300, 30) == DEFAULT_DELAY_WARMUP
    assert delay_warmup_of(300, 0) == DEFAULT_DELAY_WARMUP
    assert delay_warmup_of(300_000, 2000) * 300_000 == pytest.approx(4000)
    assert delay_warmup_of(300_000, 0) * 300_000 == pytest.approx(ENOUGH_STEPS)


@pytest.mark.parametrize("start", [-0.1, 1.5, float("nan")])
def test_a_start_that_is_no_share_is_refused(start: float) -> None:
    with pytest.raises(BiremeError, match="must be 0 to 1"):
        PlanRequest(8, delay_warmup=start)


def test_a_start_counts_the_bubble_of_its_batches() -> None:
    request = PlanRequest(8, penalties={Rule.DELAYED: 2.0}, delay_warmup=0.25)
    assert request.delay_warmup_share >= DEFAULT_DELAY_WARMUP
    assert request.penalty(Rule.DELAYED, "adamw", 5, 8) == 2.0 * (1 + 0.25 * 4 / 8)
    assert request.penalty(Rule.SYNCHRONOUS, "adamw", 5, 8) == 1
    measured = MEASURED[Rule.FRESH, True]["adamw"].at(unseen_share(5, 8))
    assert request.penalty(Rule.FRESH, "adamw", 5, 8) == pytest.approx(measured * (1 + 0.25 * 4 / 8))


def test_throughput_minds_no_steps() -> None:
    request = PlanRequest(8, goal=Goal.THROUGHPUT, penalties={Rule.DELAYED: 2.0})
    assert all(request.penalty(rule, "sgd", 4, 8) == 1 for rule in (Rule.DELAYED, Rule.FRESH))
