"""Plans where messages do not overlap with work: on links that stop their ends, and for other frameworks."""

from dataclasses import replace

import pytest

from benchmarks.made_up.models import profile_of
from bireme.cluster.cluster import Card, Cluster, Link, Overlap, Server
from bireme.cluster.device import Device
from bireme.plan.export import overlaps_of
from bireme.plan.forecast import Answer
from bireme.plan.plan_request import Goal, PlanRequest
from bireme.plan.search.search import find_plan, forecast_of
from bireme.report.plan_document import plan_notes

PROFILE = profile_of([2.0] * 4, [4.0] * 4, boundary_bytes=[1, 1, 1, 0])
REQUEST = PlanRequest(8, schedule="1f1b", depth=2, width=1, goal=Goal.THROUGHPUT)


def cluster(overlap: Overlap) -> Cluster:
    """Two servers of a device each; a message between them takes two seconds."""
    card = Card("eth0", (0,), Link(1.0, latency_s=0.5, overlap=overlap))
    device = Device("any", "emulated", 2**30)
    return Cluster(tuple(Server(f"s{n}", (device,), cards=(card,)) for n in range(2)))


def answer(request: PlanRequest, overlap: Overlap = Overlap.FULL) -> Answer:
    found = find_plan(PROFILE, cluster(overlap), request)
    assert isinstance(found, Answer)
    return found


def test_a_plan_takes_longer_the_less_its_links_overlap() -> None:
    """A plan that runs ahead hides its messages only where both ends go on."""
    plan = answer(REQUEST).best.plan
    assert plan.lookahead
    both, receiver, nobody = (
        forecast_of(plan, PROFILE, cluster(overlap), REQUEST).batch_s for overlap in Overlap
    )
    assert both >= receiver > 1.1 * nobody


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("overlap", [Overlap.NONE, Overlap.RECEIVER])
def test_a_framework_that_waits_counts_as_a_link_that_stops_its_ends(schedule: str, overlap: Overlap) -> None:
    request = replace(REQUEST, schedule=schedule, lookahead=False)
    of_framework = answer(replace(request, overlaps={schedule: overlap})).best
    of_links = answer(request, overlap).best
    assert (of_framework.plan, of_framework.forecast) == (of_links.plan, of_links.forecast)
    assert of_framework.forecast.batch_s > answer(request).best.forecast.batch_s
    assert answer(replace(request, overlaps={"zb-h1": overlap})).best == answer(request).best


@pytest.mark.parametrize(
    ("names", "with_csv", "expected"),
    [
        ((), False, {}),
        (("megatron",), False, {"1f1b": Overlap.NONE}),
        (("nemo",), False, {"1f1b": Overlap.NONE, "gpipe": Overlap.RECEIVER}),
        (("torch-csv", "torchtitan"), True, {}),
        (("torch-csv", "torchtitan", "megatron"), True, {"1f1b": Overlap.NONE}),
    ],
)
def test_each_framework_sends_in_its_own_way(
    names: tuple[str, ...], with_csv: bool, expected: dict[str, Overlap]
) -> None:
    assert overlaps_of(names, with_csv=with_csv) == expected


def test_notes_say_who_waits_in_the_framework_of_the_export() -> None:
    request = replace(REQUEST, overlaps={"1f1b": Overlap.NONE})
    (note,) = [one for one in plan_notes(PROFILE, cluster(Overlap.FULL), request, ()) if "export" in one]
    assert "under 1f1b both ends wait while a message crosses" in note
