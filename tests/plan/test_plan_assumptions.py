"""What a forecast assumes is said with the plan: in its file, in its document, to people."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.made_up.models import profile_of
from bireme.cluster.cluster import ASSUMED_CARD, ASSUMED_LINK, Card, Cluster, Server
from bireme.cluster.device import Device
from bireme.codec.description import CodecRate
from bireme.plan.forecast import Answer
from bireme.plan.plan_file import load_plan, write_plan
from bireme.plan.plan_request import Goal, PlanRequest
from bireme.plan.search.search import find_plan
from bireme.profile.profile import Profile
from bireme.report.plan_document import plan_document, plan_notes
from bireme.report.plan_table import print_plan

PROFILE = profile_of([1.0] * 4, [2.0] * 4, sizes=(1, 2), boundary_bytes=[4, 4, 4, 0])


def with_halves(profile: Profile) -> Profile:
    units = tuple(
        replace(
            unit,
            costs=tuple(
                replace(cost, backward_input_s=cost.backward_s / 2, backward_weight_s=cost.backward_s / 2)
                for cost in unit.costs
            ),
        )
        for unit in profile.units
    )
    return replace(profile, units=units)


def cluster(*, kind: str = "emulated", num_servers: int = 1, num_devices: int = 2) -> Cluster:
    devices = (Device("any", kind, 2**30),) * num_devices
    cards = (Card(ASSUMED_CARD, tuple(range(num_devices)), ASSUMED_LINK),)
    return Cluster(tuple(Server(f"s{n}", devices, cards=cards) for n in range(num_servers)))


def answer(profile: Profile, on: Cluster, **asked: object) -> Answer:
    request = PlanRequest(**{"batch_size": 8, "width": 1, "goal": Goal.THROUGHPUT} | asked)  # type: ignore[arg-type]
    found = find_plan(profile, on, request)
    assert isinstance(found, Answer)
    return found


@pytest.mark.parametrize(
    ("asked", "on", "profile", "said"),
    [
        ({"schedule": "zb-h1", "depth": 2}, cluster(), PROFILE, "halves of the backward that zb-h1 runs"),
        ({"schedule": "zb-h1", "depth": 2}, cluster(), with_halves(PROFILE), None),
        ({"schedule": "1f1b", "depth": 2}, cluster(), PROFILE, None),
        (
            {"schedule": "1f1b-sliced", "depth": 2, "micro_batch": 2},
            cluster(),
            replace(PROFILE, units=tuple(replace(one, costs=one.costs[1:]) for one in PROFILE.units)),
            "Profile micro-batches of 1 too",
        ),
        ({"depth": 1}, cluster(kind="cuda"), PROFILE, "process_bytes of these devices in the cluster file"),
        (
            {"schedule": "1f1b", "depth": 4},
            cluster(num_servers=2),
            PROFILE,
            "The links of s0, s1 are unknown",
        ),
        (
            {"schedule": "1f1b", "depth": 4, "codec": "int8"},
            cluster(num_servers=2),
            PROFILE,
            "How long the codecs int8 take",
        ),
        (
            {"schedule": "1f1b", "depth": 2, "codec": "int8"},
            cluster(),
            replace(PROFILE, codecs=(CodecRate("int8", 0.0, 0.0, 0.0, 0.0),)),
            None,
        ),
    ],
)
def test_a_plan_says_what_its_forecast_assumes(
    asked: dict[str, object], on: Cluster, profile: Profile, said: str | None
) -> None:
    """Zero-bubble schedules won by halves of a backward that nobody had measured, without a word."""
    found = answer(profile, on, **asked).best.forecast.assumptions
    assert bool(found) == (said is not None)
    assert said is None or any(said in sentence for sentence in found)


def test_assumptions_are_in_the_file_the_document_the_notes_and_on_the_screen(tmp_path: Path) -> None:
    found = answer(PROFILE, cluster(), schedule="zb-h1", depth=2)
    (sentence,) = found.best.forecast.assumptions
    write_plan(tmp_path / "plan.json", found)
    forecast = load_plan(tmp_path / "plan.json").forecast
    assert forecast is not None
    assert forecast.assumptions == (sentence,)
    assert plan_document(found, PROFILE, 0.0)["assumptions"] == (sentence,)
    assert sentence in plan_notes(PROFILE, cluster(), PlanRequest(8), found.candidates)
    console = Console(file=StringIO(), width=400)
    print_plan(found, PROFILE, 0.0, console)
    assert sentence in console.file.getvalue()  # type: ignore[attr-defined]


def test_notes_have_what_the_other_candidates_assume() -> None:
    found = answer(PROFILE, cluster(), synchronous=True, depth=2)
    others = {s for one in found.candidates for s in one.forecast.assumptions}
    assert any("halves of the backward" in sentence for sentence in others)
    assert others <= set(plan_notes(PROFILE, cluster(), PlanRequest(8), found.candidates))
