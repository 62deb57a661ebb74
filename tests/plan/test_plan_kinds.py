"""Plans for unlike devices: seconds of each stage are those of its device's own profile."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.made_up.models import profile_of
from bireme.cluster.cluster import Card, Cluster, Link, Server
from bireme.cluster.device import Device
from bireme.plan.forecast import Answer
from bireme.plan.plan import Plan
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.search import find_plan, forecast_of
from bireme.profile.profile import KindProfile, Profile, save_profile
from bireme.schedule.catalogue import generate
from bireme.simulate import Costs, simulate
from tests.support.command import bireme, with_sets
from tests.support.hand_plans import tiny_profile

FAST, ODD = "fast", "odd"


def cluster(*names: str, speed: float = 1.0) -> Cluster:
    """Servers of one device each with these names."""
    card = (Card("eth0", (0,), Link(1e12)),)
    devices = [Device(name, "cuda", 2**40, speed=speed if name == ODD else 1.0) for name in names]
    return Cluster(tuple(Server(f"s{place}", (one,), cards=card) for place, one in enumerate(devices)))


def scaled(profile: Profile, times: Sequence[float], updates: float = 1.0) -> Profile:
    """The profile with the seconds of each unit multiplied."""
    units = [
        replace(
            unit,
            update_s=updates * unit.update_s,
            trial_s=updates * unit.trial_s,
            costs=tuple(
                replace(
                    cost,
                    forward_s=cost.forward_s * factor,
                    backward_s=cost.backward_s * factor,
                    recompute_backward_s=cost.recompute_backward_s * factor,
                )
                for cost in unit.costs
            ),
        )
        for unit, factor in zip(profile.units, times, strict=True)
    ]
    return replace(profile, units=tuple(units))


def with_odd(profile: Profile, times: Sequence[float], updates: float = 1.0) -> Profile:
    """The profile beside one of the odd devices."""
    return replace(profile, kinds=(KindProfile(ODD, scaled(profile, times, updates)),))


BASE = profile_of([0.01, 0.02, 0.03, 0.01], [0.02, 0.04, 0.05, 0.03], sizes=(1, 2), update_s=[0.004] * 4)


def plan_on(*devices: str, cut: int = 2) -> Plan:
    """Two stages, one on each device."""
    return Plan((cut,), 4, "1f1b", micro_batch_sizes=(1,), devices=tuple((name,) for name in devices))


def test_each_stage_takes_the_seconds_of_its_own_device() -> None:
    both = cluster(FAST, ODD)
    profile = with_odd(BASE, (9, 9, 3, 0.5), updates=7)
    found = forecast_of(plan_on("s0/gpu0", "s1/gpu0"), profile, both, PlanRequest(4))
    forward, backward = (0.03, 0.03 * 3 + 0.01 / 2), (0.06, 0.05 * 3 + 0.03 / 2)
    updates = (0.008, 0.056)
    for stage, own in enumerate(zip(forward, backward, updates, strict=True)):
        assert found.stages[stage].busy_s == pytest.approx(4 * (own[0] + own[1]) + own[2])
    program = generate("1f1b", num_stages=2, num_microbatches=4, num_batches=2)
    costs = Costs.per_stage(2, forward_s=forward, backward_s=backward, update_s=updates)
    steady_s = simulate(program, costs, agree=True).steady_batch_s
    assert found.batch_s == pytest.approx(steady_s)


@pytest.mark.usefixtures("brief_searches")
@pytest.mark.parametrize("schedule", ["auto", "1f1b", "2bw"])
def test_a_profile_that_is_twice_as_slow_is_half_the_speed(schedule: str) -> None:
    request = PlanRequest(8, schedule=schedule)
    by_kind = find_plan(with_odd(BASE, (2, 2, 2, 2), 2), cluster(FAST, ODD, ODD), request)
    by_speed = find_plan(BASE, cluster(FAST, ODD, ODD, speed=0.5), request)
    assert isinstance(by_kind, Answer)
    assert isinstance(by_speed, Answer)
    assert by_kind.best.plan == by_speed.best.plan
    assert by_kind.best.forecast.batch_s == pytest.approx(by_speed.best.forecast.batch_s)


@settings(max_examples=4)
@given(st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0]), min_size=4, max_size=4))
def test_no_plan_is_faster_than_the_one_that_a_search_of_all_finds(times: list[float]) -> None:
    profile, three = with_odd(BASE, times), cluster(FAST, ODD, ODD)
    request = PlanRequest(4, schedule="1f1b", depth=2, width=1, micro_batch=1, lookahead=False)
    found = find_plan(profile, three, request)
    assert isinstance(found, Answer)
    assert found.origin.how.startswith("all")
    names = [placed.name for placed in three.devices()]
    plans = [plan_on(*pair, cut=cut) for pair in permutations(names, 2) for cut in (1, 2, 3)]
    least_s = min(forecast_of(one, profile, three, request).batch_s for one in plans)
    assert found.best.forecast.batch_s == pytest.approx(least_s)


def test_a_heuristic_search_cuts_by_the_seconds_of_each_device() -> None:
    """Sixteen units on nine devices, of which one takes long for the last eight units alone."""
    profile = profile_of([0.01] * 16, [0.02] * 16)
    profile = with_odd(profile, [1] * 8 + [50] * 8)
    found = find_plan(profile, cluster(*[FAST] * 8, ODD), PlanRequest(64, schedule="2bw", depth=9, width=1))
    assert isinstance(found, Answer)
    assert not found.origin.how.startswith("all")
    stage = next(one for one in found.best.forecast.stages if one.devices == ("s8/gpu0",))
    assert stage.end <= 8
    assert found.best.forecast.batch_s == pytest.approx(64 * 0.06)


def test_profiles_without_a_common_size_are_refused() -> None:
    odd = profile_of([0.01] * 4, [0.02] * 4, sizes=(4,))
    profile = replace(BASE, kinds=(KindProfile(ODD, odd),))
    with pytest.raises(Exception, match=r"no size of micro-batches in common"):
        find_plan(profile, cluster(FAST, ODD), PlanRequest(4))


CLUSTER = """
format = 1
[[server]]
[[server.device]]
kind = "cuda"
name = "one"
memory_bytes = 1e9
[[server.device]]
kind = "cuda"
name = "two"
memory_bytes = 1e9
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with profiles of two kinds of devices."""
    monkeypatch.chdir(tmp_path)
    base = tiny_profile()
    save_profile(base, Path("one.json"))
    save_profile(scaled(base, [4.0] * len(base.units)), Path("two.json"))
    save_profile(tiny_profile(layers=3), Path("other.json"))
    Path("two.toml").write_text(CLUSTER)


@pytest.mark.usefixtures("folder", "remember_plans", "brief_searches")
def test_the_command_line_and_the_run_file_name_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    usual = "cluster.source=two.toml training.batch_size=8 plan.depth=2 plan.schedule=1f1b --profile one.json"

    def plan(more: str) -> list[float]:
        words = with_sets(shlex.split(f"{usual} {more}"))
        document = bireme(capsys, "plan", *words, "--json").document
        assert not [note for note in document["notes"] if "different makes" in note]
        return [stage["predicted_busy_s"] for stage in document["stages"]]

    named = plan("--profile two=two.json")
    assert named == plan("""plan.profiles='["two=two.json"]'""")
    assert named == plan("""plan.profiles='["two=one.json"]' --profile two=two.json""")
    assert sum(named) < 4 * sum(plan("--profile two=one.json"))
    assert named != plan("--profile two=one.json")


@pytest.mark.usefixtures("folder")
def test_a_wrong_profile_is_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bireme.train.captured_run.RunModel.of", None)
    found = bireme(capsys, "plan", "--profile", "two=nowhere.json")
    assert (found.status, "no file nowhere.json" in found.err) == (2, True)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--profile one.json --profile two.json", "are for all devices"),
        ("--profile one.json --profile three=two.json", "a profile for three, but no device"),
        ("--profile one.json --profile two=other.json", "other.json: It is the profile of another model"),
        ("--profile one.json --profile two=nowhere.json", "no file nowhere.json"),
        ("--profile one.json --profile =two.json", "is not NAME=FILE"),
    ],
)
def test_wrong_profiles_are_one_sentence(
    capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    usual = "cluster.source=two.toml training.batch_size=8"
    found = bireme(capsys, "plan", *with_sets(shlex.split(f"{usual} {words}")))
    assert found.status == 2
    assert sentence in " ".join(found.err.split())
