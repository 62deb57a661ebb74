"""Sites of replicas in predictions: sums within a site in every batch, and rounds between sites when they are
due, with bytes and seconds that are counted by hand.
"""

from dataclasses import replace
from typing import Any

import pytest

from bireme.cluster.cluster import Bridge, Card, Cluster, Link, Server
from bireme.cluster.device import Device
from bireme.codec.description import CodecRate
from bireme.codec.sum_description import SiteRounds, SumCost, parse_sum_codec, sum_cost
from bireme.plan.forecast import Answer, Forecast
from bireme.plan.plan import Plan
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.search import find_plan, forecast_of
from bireme.report.plan_document import shared_hosts_note
from bireme.train.choices import rounds_of
from bireme.train.plan_search import plan_request_of
from bireme.train.run_file import RunFile
from tests.support.hand_plans import tiny_profile
from tests.support.tiny_profiles import gpt

SLOW, LATENCY_S = 1.25e6, 0.02
QUORUM = SiteRounds(in_parts=True)
HOP_S = 2 * LATENCY_S
"""Through the cards of both servers."""


def gradients() -> float:
    """Bytes of a batch's gradients."""
    return sum(unit.gradient_bytes for unit in tiny_profile().units)


def cluster(bytes_per_s: float = SLOW, latency_s: float = 0.0, kind: Any = "cuda") -> Cluster:
    """Two servers with two devices each, which share a slow link to the other server."""
    device = Device("a device", kind, memory_bytes=2**30)
    bus, card = Bridge("bus", (0, 1), Link(1e15)), Card("card", (0, 1), Link(bytes_per_s, latency_s))
    return Cluster(tuple(Server(name, (device,) * 2, (bus,), cards=(card,)) for name in ("one", "other")))


def forecast(
    rounds: SiteRounds | None,
    *,
    on: Cluster | None = None,
    schedule: str = "1f1b",
    rates: tuple[CodecRate, ...] = (),
    **asked: Any,
) -> Forecast:
    """Of four replicas of one stage, in two sites if there are rounds."""
    machines = on or cluster()
    sites = asked.pop("sites", 1 if rounds is None else 2)
    devices = (tuple(device.name for device in machines.devices()),)
    plan = Plan((), 4, schedule, width=4, micro_batch_sizes=(1,) * 4, devices=devices, sites=sites)
    request = PlanRequest(16, sites=sites, rounds=rounds, **asked)
    return forecast_of(plan, replace(tiny_profile(), codecs=rates), machines, request)


def test_a_link_between_sites_carries_a_part_of_the_gradients_of_each_replica_in_every_batch() -> None:
    """If all four replicas summed, three hops of 3/2 of the gradients each would cross it twice."""
    free = forecast(QUORUM, on=cluster(1e15), shard="optimizer")
    found = forecast(QUORUM, shard="optimizer")
    # Two replicas of a site send half of the gradients each, at the same time.
    assert found.batch_s - free.batch_s == pytest.approx(gradients() / SLOW, rel=1e-3)
    within, between = gradients() / 2, gradients() / 2
    assert found.tiers[1].predicted_bytes_moved == pytest.approx(within + between)
    assert forecast(None, shard="optimizer").batch_s - free.batch_s > 1.4 * gradients() / SLOW


def test_the_way_to_the_coordinator_and_around_the_members_is_part_of_a_batch() -> None:
    near, far = (forecast(QUORUM, on=cluster(SLOW, late), shard="optimizer") for late in (0.0, LATENCY_S))
    # To the coordinator and back, to the other member, the sum, and to the coordinator and back.
    assert far.batch_s - near.batch_s == pytest.approx((2 + 1 + 1 + 2) * HOP_S, rel=1e-3)


def test_without_sites_a_round_is_the_sum_over_all_replicas() -> None:
    """The ring of four takes six messages, and the coordinator and the others five; a replica of one rank
    agrees with itself.
    """
    near_s, far_s = (
        forecast(SiteRounds(), on=cluster(1e15, latency_s, "cpu"), sites=1).batch_s
        for latency_s in (0.0, 1e-6)
    )
    assert far_s - near_s == pytest.approx((6 + 5) * 2e-6, abs=1e-10)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_batch_waits_for_the_messages_of_its_sum_and_of_the_agreement(kind: str) -> None:
    """Each of the 2 · 3 messages of a ring waits for the one before it. Then all ranks tell each other their
    numbers. Under 2bw the next batch hides it all.
    """
    for schedule, late in (("1f1b", 6 + 1), ("2bw", 0)):
        near_s, far_s = (
            forecast(None, on=cluster(1e15, latency_s, kind), schedule=schedule).batch_s
            for latency_s in (0.0, 1e-6)
        )
        assert far_s - near_s == pytest.approx(late * 2e-6, abs=1e-10)


@pytest.mark.parametrize(("every", "fragments"), [(4, 1), (8, 2)])
@pytest.mark.parametrize(("schedule", "hidden"), [("1f1b", 1), ("2bw", 2)])
def test_averages_between_sites_take_time_when_they_are_due(
    every: int, fragments: int, schedule: str, hidden: int
) -> None:
    """Under 2bw the batch that is under way hides them as well."""
    rounds = SiteRounds(averages=True, every=every, fragments=fragments, lag=1, in_parts=True)
    free = forecast(rounds, on=cluster(1e15), schedule=schedule)
    own_s = free.batch_s
    slow = gradients() / fragments / (10 * own_s)  # a round takes ten batches
    found = forecast(rounds, on=cluster(slow), schedule=schedule)
    waits_s = fragments / every * (10 - hidden) * own_s
    assert found.batch_s == pytest.approx(max(own_s + waits_s, 10 * fragments / every * own_s), rel=1e-3)
    assert forecast(replace(rounds, every=10**4), on=cluster(slow), schedule=schedule).batch_s < 1.01 * own_s


def test_replicas_that_average_weights_are_sites_of_their_own() -> None:
    rounds = SiteRounds(averages=True)
    request = PlanRequest(16, rounds=rounds, sums=SumCost(kept_share=2.0))
    assert [request.num_sites(4), request.site_width(4)] == [4, 1]
    assert request.kept_share(4) == 0.0
    assert request.kept_host_share(4) == 2.0 + rounds.kept_share


def test_the_codec_of_rounds_takes_its_seconds_for_the_part_that_a_rank_has() -> None:
    encode_s, decode_s = 3e-6, 1e-6
    rate = CodecRate("int4 in sums", encode_s, decode_s, encode_s, decode_s)
    sums = sum_cost(parse_sum_codec("int4"), [(1000, 1000)])
    slow, quick = (
        forecast(QUORUM, shard="optimizer", sums=sums, rates=(one,))
        for one in (rate, replace(rate, encode_s=0.0, decode_s=0.0))
    )
    entries = gradients() / 4 / 2
    assert slow.batch_s - quick.batch_s == pytest.approx(entries * (encode_s + 2 * decode_s), rel=1e-3)
    # Within a site gradients are sent as they are.
    assert slow.tiers[1].predicted_bytes_moved == pytest.approx(gradients() / 2 * (1 + sums.message_share))


@pytest.mark.parametrize(("kind", "num_copies"), [("cpu", 1), ("cuda", 0)])
def test_a_rank_of_a_site_keeps_the_sums_of_its_part_alone(kind: Any, num_copies: int) -> None:
    kept, none = (
        forecast(replace(QUORUM, kept_share=share), on=cluster(kind=kind), shard="optimizer")
        for share in (QUORUM.kept_share, 0.0)
    )
    more_bytes = kept.stages[0].peak_bytes - none.stages[0].peak_bytes
    assert more_bytes == pytest.approx(num_copies * gradients(), abs=2.0)


def test_a_run_says_what_its_sites_send_each_other() -> None:
    def rounds(mode: str, **sync: Any) -> SiteRounds | None:
        run = RunFile.model_validate({"sync": {"mode": mode, **sync}})
        found = rounds_of(run, gpt(2))
        assert plan_request_of(run, SumCost(), gpt(2)).rounds == found
        return found

    assert rounds("allreduce") is None
    diloco = rounds("diloco", diloco_every=30, diloco_fragments=3, diloco_overlap=2)
    assert diloco == SiteRounds(averages=True, every=30, fragments=3, lag=2, in_parts=True, kept_share=5.0)
    whole = rounds("groups", average_optimizer=True)
    assert whole == SiteRounds(averages=True, state_share=2.0, kept_share=6.0, connect_every=10)


def test_sites_are_planned_on_servers_of_their_own() -> None:
    """Which replicas share a site is not the same for all mappings."""
    request = PlanRequest(
        16, depth=1, width=4, schedule="1f1b", micro_batch=1, sites=2, rounds=QUORUM, shard="optimizer"
    )
    found = find_plan(tiny_profile(), cluster(), request)
    assert isinstance(found, Answer)
    servers = [name.split("/")[0] for name in found.best.plan.devices[0]]
    assert servers[0] == servers[1] != servers[2] == servers[3]
    assert PlanningProblem(tiny_profile(), cluster(), request).kept_share(4) == 0.0


def unlike(speeds: tuple[float, ...] = (1.0, 0.6, 0.5)) -> Cluster:
    """Three servers, of which the first has two devices and is the fastest."""
    servers = []
    for place, speed in enumerate(speeds):
        device = Device("a device", "cpu", memory_bytes=2**30, speed=speed)
        devices = (device,) * (1 if place else 2)
        card = Card("card", tuple(range(len(devices))), Link(1e12))
        bus = (Bridge("bus", (0, 1), Link(1e12)),) if not place else ()
        servers.append(Server(f"h{place}", devices, bus, cards=(card,)))
    return Cluster(tuple(servers))


def test_replicas_of_several_stages_are_planned_over_unlike_servers_where_that_is_fastest() -> None:
    """One of the two fast devices for each replica, and a slow one for the rest of it."""
    request = PlanRequest(32, schedule="2bw", micro_batch=4, rounds=SiteRounds())
    found = find_plan(tiny_profile(), unlike(), request)
    assert isinstance(found, Answer)
    plan = found.best.plan
    assert (plan.source.num_ranks, plan.width) == (2, 2)
    servers = [[name.split("/")[0] for name in row] for row in zip(*plan.devices, strict=True)]
    assert [len(set(row)) for row in servers] == [2, 2]
    (note,) = shared_hosts_note(plan, unlike(), 2)
    assert "All replicas have stages on h0" in note


def test_whoever_may_die_is_planned_at_least_twice() -> None:
    """A plan of one replica is refused by the run."""
    alone = unlike((1.0, 1e-3, 1e-3))
    one = find_plan(tiny_profile(), alone, PlanRequest(4, schedule="1f1b", micro_batch=4))
    assert isinstance(one, Answer)
    assert one.best.plan.width == 1
    two = find_plan(tiny_profile(), alone, PlanRequest(4, schedule="1f1b", rounds=SiteRounds()))
    assert isinstance(two, Answer)
    assert {candidate.plan.width for candidate in two.candidates} == {2}
    places = Plan((), 2, "1f1b", width=2, devices=(("h0/cpu0", "h1/cpu0"),))
    assert shared_hosts_note(places, alone, 2) == []
