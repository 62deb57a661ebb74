"""Plans as files: what is read is what was written; what is damaged or of another model is not used."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import BiremeError
from bireme.model.graph_file import graph_hash
from bireme.model.units import units_of
from bireme.plan.forecast import Answer, Candidate, Forecast, Origin, PlanKind, StageForecast, summarize
from bireme.plan.plan import Plan, values_of
from bireme.plan.plan_file import (
    PlannedUnit,
    SavedPlan,
    check_plan_fits,
    load_plan,
    planned_units,
    profile_hash,
    saved_plan,
    write_plan,
)
from bireme.profile.profile import save_profile
from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.source import LONG
from bireme.schedule.weave import UpdateTiming
from tests.support.extent import examples
from tests.support.hand_plans import answer_of, candidate_of, tiny_profile
from tests.support.patience import patience_s
from tests.support.tiny_profiles import gpt

Change = Callable[[dict[str, Any]], object]

positive = st.floats(1e-12, 1e12)
names = st.text(max_size=8)


def kind_of(plan: Plan) -> PlanKind:
    return PlanKind.of(plan.schedule, plan.num_stages, plan.width)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan of a schedule with one stage on each rank."""
    schedule = draw(st.sampled_from(["sequential", "gpipe", "1f1b", "2bw", "2bw-fresh", "zb-h1"]))
    depth = 1 if schedule == "sequential" else draw(st.integers(1, 4))
    is_wide = schedule in ("gpipe", "1f1b", "2bw") and depth > 1 and draw(st.booleans())
    width = 1 if is_wide else draw(st.integers(1, 3))
    widths = draw(st.lists(st.integers(1, 3), min_size=depth, max_size=depth)) if is_wide else []
    cuts = draw(st.sets(st.integers(1, 30), min_size=depth - 1, max_size=depth - 1))
    stages = st.sets(st.integers(0, depth - 1))
    sizes = st.lists(st.integers(1, 64), min_size=width, max_size=width)
    devices = st.tuples(
        *(st.lists(names, min_size=count, max_size=count).map(tuple) for count in widths or [width] * depth)
    )
    num_microbatches = draw(st.integers(sum(widths) or depth, 12))
    # The last replica of each stage takes all that is left over.
    shares = tuple((1,) * (count - 1) + (num_microbatches - count + 1,) for count in widths)
    return Plan(
        cuts=tuple(sorted(cuts)),
        num_microbatches=num_microbatches,
        schedule=schedule,
        width=width,
        recompute=tuple(sorted(draw(stages))),
        micro_batch_sizes=tuple(draw(st.just([]) | sizes)),
        devices=draw(st.just(()) | devices),
        stage_widths=tuple(widths),
        stage_shares=shares if draw(st.booleans()) else (),
    )


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    plan = draw(plans())
    end = draw(st.integers(31, 40))
    bounds = [0, *plan.cuts, end]
    stages = tuple(
        StageForecast(
            begin,
            other,
            tuple(draw(st.lists(names, min_size=1, max_size=2))),
            draw(st.booleans()),
            draw(st.floats(0, 1e9)),
            draw(st.floats(0, 1e15)),
            draw(st.floats(0, 1e15)),
        )
        for begin, other in pairwise(bounds)
    )
    forecast = Forecast(
        draw(positive), draw(positive), draw(st.floats(1, 9)), draw(st.floats(0, 1)), draw(names), stages
    )
    return Candidate(plan, forecast)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    found = draw(st.lists(candidates(), min_size=1, max_size=3))
    origin = Origin(draw(names), draw(names), draw(names), draw(st.integers(1, 10**6)), draw(names))
    return Answer(tuple(found), origin, 7)


@given(answer=answers())
@examples(60)
def test_what_is_read_is_what_was_written(tmp_path_factory: pytest.TempPathFactory, answer: Answer) -> None:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    write_plan(path, answer)
    read = load_plan(path)
    assert read == saved_plan(answer)
    assert read.plan == answer.best.plan
    assert read.forecast == answer.best.forecast
    assert read.origin == answer.origin
    assert list(read.others) == [summarize(one) for one in answer.candidates[1:]]


@given(plan=plans())
@examples(30)
def test_a_bare_plan_or_candidate_is_a_file_too(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    write_plan(path, plan)
    assert load_plan(path) == SavedPlan(plan)
    candidate = candidate_of(plan, 31)
    write_plan(path, candidate)
    assert load_plan(path) == SavedPlan(candidate.plan, candidate.forecast)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_later_window_is_as_if_it_were_generated(name: str) -> None:
    plan = Plan((1, 2, 3), 4, name)
    for num_batches, first_batch in product((3, 13, LONG), (1, 5)):
        generated = generate(
            name,
            num_batches=num_batches,
            first_batch=first_batch,
            timing=UpdateTiming(early=plan.is_early, halfway=plan.updates_halfway),
            **values_of(plan, ("num_stages", "num_microbatches", "stages_per_rank", "num_sliced")),
        )
        assert plan.program(num_batches, first_batch) == generated


def test_a_plan_written_by_hand_needs_the_plan_alone(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"format": 1, "plan": {"cuts": [3], "num_microbatches": 4, "schedule": "1f1b"}}')
    assert load_plan(path) == SavedPlan(Plan((3,), 4, "1f1b"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    best = candidate_of(Plan((3, 6), 4, "1f1b"))
    write_plan(path, answer_of(best, best), planned_units(tiny_profile()))
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p.update(format=2), "format is 2"),
        (lambda p: p.update(plann={}), "unknown key 'plann'. Did you mean 'plan'?"),
        (lambda p: p.pop("plan"), "lacks plan"),
        (lambda p: p["plan"].update(cutz=[1]), "unknown key 'plan.cutz'. Did you mean 'cuts'?"),
        (lambda p: p["plan"].update(cuts=[6, 3]), "they must rise"),
        (lambda p: p["plan"].update(cuts=[3, 7]), "the cuts of the plan make"),
        (lambda p: p["plan"].update(cuts=[3, 60]), "the cuts of the plan make"),
        (lambda p: p["plan"].update(num_microbatches=0), "num_microbatches is 0"),
        (lambda p: p["plan"].update(num_microbatches=2.5), "num_microbatches is 2.5"),
        (lambda p: p["plan"].update(schedule="2wb"), "Did you mean '2bw'?"),
        (lambda p: p["plan"].update(micro_batch_sizes=[1, 2]), "no shares for 1 replicas"),
        (lambda p: p["plan"].update(devices=[["a"]]), "names devices for 1 ranks"),
        (lambda p: p["forecast"].update(batch_s=-1), "forecast.batch_s is -1"),
        (lambda p: p["forecast"].update(busy_share=2.0), "forecast.busy_share is 2.0"),
        (lambda p: p["forecast"]["stages"][1].pop("end"), "forecast.stages[1].end"),
        (lambda p: p["forecast"].update(stages=[]), "forecast.stages is []"),
        (lambda p: p["forecast"]["stages"].pop(), "the cuts of the plan make"),
        (lambda p: p["others"][0].update(kind="best"), "others[0].kind is \"best\"; it must be '2bw'"),
        (lambda p: p["units"].pop(), "names 9 units"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(file: Path, change: Change, said: str) -> None:
    plain = json.loads(file.read_text())
    change(plain)
    file.write_text(json.dumps(plain))
    with pytest.raises(BiremeError) as error:
        load_plan(file)
    assert said in str(error.value)
    assert str(file) in str(error.value)


def test_a_file_without_a_forecast_may_not_cut_after_its_last_unit(file: Path) -> None:
    plain = json.loads(file.read_text())
    plain["forecast"] = None
    file.write_text(json.dumps(plain))
    assert load_plan(file).forecast is None
    plain["plan"]["cuts"] = [3, 10]
    file.write_text(json.dumps(plain))
    with pytest.raises(BiremeError, match="cuts at unit 10, and names 10 units"):
        load_plan(file)


def test_a_file_is_not_written_into_nowhere(tmp_path: Path) -> None:
    with pytest.raises(BiremeError, match="Make it first"):
        write_plan(tmp_path / "missing" / "plan.json", Plan((), 1, "sequential"))


# --- hashes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hashes_are_the_same_in_every_process(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(tiny_profile(), path)
    code = f"""
from pathlib import Path
from bireme.plan.plan_file import profile_hash
from bireme.profile.profile import load_profile
print(profile_hash(load_profile(Path({str(path)!r}))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=patience_s(),
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )
    assert done.stdout.strip() == profile_hash(tiny_profile())


def test_another_number_makes_another_hash() -> None:
    profile = tiny_profile()
    unit = replace(profile.units[1], parameter_bytes=profile.units[1].parameter_bytes + 1)
    other = replace(profile, units=(profile.units[0], unit, *profile.units[2:]))
    assert profile_hash(other) != profile_hash(profile)
    assert profile_hash(replace(other, units=profile.units)) == profile_hash(profile)


def test_a_plan_fits_the_model_it_was_made_for() -> None:
    graph = gpt(4, tied="false")
    origin = answer_of(candidate_of(Plan((3,), 4)), graph=graph_hash(graph)).origin
    check_plan_fits(origin, graph)
    check_plan_fits(origin, replace(graph, name="renamed"))


def test_a_plan_fits_its_model_captured_at_another_batch_size() -> None:
    graph = gpt(4, tied="false")
    origin = answer_of(candidate_of(Plan((3,), 4)), graph="of another batch").origin
    check_plan_fits(origin, graph, planned_units(tiny_profile(4)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "dtype", "tied", "said"),
    [
        (2, "float32", "false", "Its unit 5 is layers.2.attention, but here it is head."),
        (4, "float64", "false", "Unit 0 (positions) differs here"),
    ],
)
def test_a_plan_of_another_model_is_refused_with_what_differs(
    layers: int, dtype: str, tied: str, said: str
) -> None:
    origin = answer_of(candidate_of(Plan((3,), 4)), graph=tiny_profile(4).graph).origin
    with pytest.raises(BiremeError) as error:
        check_plan_fits(origin, gpt(layers, dtype=dtype, tied=tied), planned_units(tiny_profile(4)))
    text = str(error.value)
    assert said in text
    assert origin.graph in text
    assert "Plan again" in text


def test_a_plan_that_names_no_units_is_refused_by_its_hash_alone() -> None:
    origin = answer_of(candidate_of(Plan((3,), 4))).origin
    with pytest.raises(BiremeError, match=r"0000000000000000, and .* has"):
        check_plan_fits(origin, gpt(2))


def test_a_model_with_fewer_units_of_the_same_kind_is_refused() -> None:
    origin = answer_of(candidate_of(Plan((3,), 4))).origin
    found = units_of(gpt(2))
    units = [PlannedUnit(unit.name, unit.structure) for unit in found]
    check_plan_fits(origin, gpt(2), units)
    with pytest.raises(BiremeError, match="It has 7 units, but this model has 6"):
        check_plan_fits(origin, gpt(2), [*units, PlannedUnit("more", "work")])


# --- summaries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_is_of_a_kind(name: str) -> None:
    per_rank = SCHEDULES[name].stages_per_rank
    depth = 1 if name == "sequential" else 2 * per_rank
    kind = kind_of(Plan(tuple(range(1, depth)), 4, name))
    expected = {
        "sequential": PlanKind.ONE_DEVICE,
        "2bw": PlanKind.DELAYED,
        "2bw-fresh": PlanKind.FRESH,
        "pipedream": PlanKind.STASHED,
        "zb-h1": PlanKind.ZERO_BUBBLE,
        "zbv": PlanKind.ZERO_BUBBLE,
    }
    assert kind is expected.get(name, PlanKind.FLUSH)


def test_replicas_of_a_whole_model_are_data_parallel() -> None:
    assert kind_of(Plan((), 1, "sequential", width=3)) is PlanKind.DATA_PARALLEL


def test_a_summary_says_what_each_replica_gets() -> None:
    even = summarize(candidate_of(Plan((3,), 4, "1f1b", width=2), batch_size=32))
    assert (even.micro_batch_sizes, even.batch_size, even.depth, even.width) == ((4, 4), 32, 2, 2)
    uneven = Plan((3,), 4, "1f1b", width=2, micro_batch_sizes=(6, 2))
    assert summarize(candidate_of(uneven, batch_size=32)).micro_batch_sizes == (6, 2)
