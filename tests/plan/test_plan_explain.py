"""What would help a plan: one change at a time, and what planning again finds. Devices in few words."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.cluster.cluster import Bridge, Card, Cluster, Link, Server, Switch, device_names
from bireme.cluster.cluster_file import load_cluster
from bireme.cluster.device import Device
from bireme.codec.sum_description import SiteRounds
from bireme.errors import BiremeError
from bireme.plan.agreements import agreements
from bireme.plan.explain import Help, changes, explain
from bireme.plan.forecast import Answer, NothingFits
from bireme.plan.partition.loads import Recompute
from bireme.plan.plan import device_ranges
from bireme.plan.plan_request import PlanRequest
from bireme.profile.profile import Profile
from tests.support.clusters import clusters
from tests.support.extent import examples
from tests.support.hand_plans import tiny_profile
from tests.support.remembered import find_plan_once as find_plan

CODECS_THAT_HELP = {2: "codecs on the boundaries", 1: "sums of gradients through int4"}
"""By the depth of a plan for two devices: where there is one, there is nothing for the other."""


def answered(profile: Profile, cluster: Cluster, request: PlanRequest) -> tuple[Answer, dict[str, Help]]:
    """The best plan, and what each change brings."""
    answer = find_plan(profile, cluster, request)
    assert isinstance(answer, Answer)
    helps = explain(profile, cluster, request, answer, find_plan)
    gains = [one.gain for one in helps]
    assert gains == sorted(gains, reverse=True)
    for one in helps:
        assert one.candidate.forecast.fits
    return answer, {one.words: one for one in helps}


def two(bytes_per_s: float, memory_bytes: int = 2**30) -> Cluster:
    """Two equal devices on a bridge."""
    device = Device("a device", "emulated", memory_bytes)
    server = Server("one", (device, device), (Bridge("bus", (0, 1), Link(bytes_per_s)),))
    return Cluster((server,))


def apart(bytes_per_s: float) -> Cluster:
    """Two servers with a device each."""
    card = Card("card", (0,), Link(bytes_per_s))
    device = Device("a device", "emulated", 2**30)
    return Cluster(tuple(Server(name, (device,), cards=(card,)) for name in ("one", "other")))


# --- explain -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("bytes_per_s", "least", "most"), [(1e6, 1.5, 2.0), (1e15, 0.999, 1.001)])
def test_a_faster_link_helps_where_the_link_is_slow(bytes_per_s: float, least: float, most: float) -> None:
    """No other change is searched for."""
    cluster, request = two(bytes_per_s), PlanRequest(4, depth=2, width=1, schedule="1f1b")
    answer = find_plan(tiny_profile(), cluster, request)
    assert isinstance(answer, Answer)

    def search(profile: Profile, changed: Cluster, request: PlanRequest) -> Answer | NothingFits:
        if changed.bandwidth(0, 1) == bytes_per_s:
            raise BiremeError("Another change.")
        return find_plan(profile, changed, request)

    (found,) = explain(tiny_profile(), cluster, request, answer, search)
    assert found.words == "2 × the bandwidth of one/bus"
    assert least < found.gain < most


@pytest.mark.slow
def test_groups_pay_where_times_spread_and_outer_steps_where_links_are_slow() -> None:
    """Times four, and the modes in the order of `allreduce`, groups, diloco. The optimizer's state is sent
    along by all but `allreduce`.
    """

    def rates(bytes_per_s: float, spread: float, rounds: SiteRounds | None = None) -> list[float]:
        profile = tiny_profile()
        units = tuple(
            replace(unit, costs=tuple(replace(cost, spread=spread) for cost in unit.costs))
            for unit in profile.units
        )
        request = PlanRequest(8, depth=1, width=2, schedule="1f1b", rounds=rounds)
        answer = find_plan(profile, two(bytes_per_s), request)
        assert isinstance(answer, Answer)
        found = agreements(answer.best, replace(profile, units=units), two(bytes_per_s), request)
        assert [(one.mode, one.every) for one in found] == [
            ("allreduce", 1),
            ("groups", 1),
            ("groups", 10),
            ("diloco", 50),
        ]
        if rounds is None:
            assert found[0].samples_per_s == answer.best.forecast.samples_per_s
        assert found[0].gain == 1.0
        return [one.samples_per_s / found[0].samples_per_s for one in found]

    assert rates(1e15, 0.0) == pytest.approx([1.0] * 4, rel=0.02)
    spread = rates(1e15, 1.0)
    assert spread[2] > 1.05
    slow = rates(1e3, 0.0)
    assert slow[3] > 1.5 * slow[0]
    assert slow[1] == pytest.approx(1.0, rel=0.05)
    assert rates(1e3, 0.0, SiteRounds(averages=True, state_share=2.0))[1] < 0.7 * slow[1]


@pytest.mark.slow
def test_stages_whose_replicas_exchange_over_one_link_share_it() -> None:
    """Outer steps are rare. If the link's time counted once, half of it would seem to be the batch's own."""
    device = Device("a device", "emulated", 2**30)
    bus, card = Bridge("bus", (0, 1), Link(1e15)), Card("card", (0, 1), Link(1e3))
    servers = tuple(Server(name, (device, device), (bus,), cards=(card,)) for name in ("one", "other"))
    cluster, request = Cluster(servers), PlanRequest(128, depth=2, width=2, schedule="1f1b")
    answer = find_plan(tiny_profile(), cluster, request)
    assert isinstance(answer, Answer)
    assert all(
        {name.split("/")[0] for name in names} == {"one", "other"} for names in answer.best.plan.devices
    )
    found = agreements(answer.best, tiny_profile(), cluster, request)
    assert found[-1].samples_per_s > 4 * found[0].samples_per_s


@pytest.mark.slow
def test_a_rank_exchanges_the_weights_of_all_its_stages() -> None:
    device = Device("a device", "emulated", 2**30)
    cluster = Cluster((Server("one", (device,) * 4, (Bridge("bus", (0, 1, 2, 3), Link(1e3)),)),))
    request = PlanRequest(8, depth=2, width=2, schedule="zbv")
    answer = find_plan(tiny_profile(), cluster, request)
    assert isinstance(answer, Answer)
    assert answer.best.plan.num_stages == 4
    found = agreements(answer.best, tiny_profile(), cluster, request)
    assert [one.mode for one in found[::3]] == ["allreduce", "diloco"]
    assert found[-1].samples_per_s > 1.5 * found[0].samples_per_s


@pytest.mark.parametrize(("width", "shard"), [(1, "none"), (2, "optimizer")])
def test_replicas_that_cannot_average_weights_have_no_other_way_to_agree(width: int, shard: str) -> None:
    request = PlanRequest(8, depth=2 // width, width=width, schedule="1f1b", shard=shard)
    answer = find_plan(tiny_profile(), two(1e9), request)
    assert isinstance(answer, Answer)
    assert agreements(answer.best, tiny_profile(), two(1e9), request) == ()


@pytest.mark.slow
def test_a_larger_batch_helps_a_schedule_that_drains() -> None:
    request = PlanRequest(4, depth=2, width=1, schedule="gpipe", micro_batch=1)
    _, found = answered(tiny_profile(), two(1e15), request)
    assert found["a batch of 8 samples"].gain > 1.05


@pytest.mark.slow
def test_more_memory_helps_where_the_forward_had_to_run_again() -> None:
    profile = tiny_profile()
    request = PlanRequest(8, depth=2, width=1, schedule="gpipe", micro_batch=4)
    wide = find_plan(profile, two(1e15), replace(request, recompute=Recompute.NEVER))
    lean = find_plan(profile, two(1e15), replace(request, recompute=Recompute.ALWAYS))
    assert isinstance(wide, Answer)
    assert isinstance(lean, Answer)
    needs, enough = (max(s.peak_bytes for s in one.best.forecast.stages) for one in (wide, lean))
    assert enough < needs
    scarce = two(1e15, int((needs + enough) / 2))
    answer, found = answered(profile, scarce, request)
    assert answer.best.plan.recompute
    more = found["2 × the memory on one/emulated0…1"]
    assert more.gain > 1.01
    assert not more.candidate.plan.recompute


@pytest.mark.slow
def test_giving_up_a_wish_is_tried_for_each() -> None:
    request = PlanRequest(
        8,
        schedule="gpipe",
        synchronous=True,
        memory_fraction=0.5,
        depth=2,
        width=1,
        micro_batch=1,
        pinned={0: "one/emulated0"},
        together=((0, 1),),
        devices=("one/emulated0", "one/emulated1"),
        recompute=Recompute.NEVER,
    )
    words = [change.words for change in changes(two(1e9), request)]
    assert len(words) == len(set(words)) == 13
    _, found = answered(tiny_profile(), two(1e15), request)
    assert found["any schedule, not gpipe alone"].gain > 1
    assert found["other micro-batches than of 1"].candidate.plan.num_microbatches < 8


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "words"), CODECS_THAT_HELP.items())
def test_a_codec_helps_where_the_link_between_servers_is_slow(depth: int, words: str) -> None:
    request = PlanRequest(8, depth=depth, width=2 // depth, schedule="1f1b")
    _, slow = answered(tiny_profile(), apart(1e6), request)
    _, fast = answered(tiny_profile(), apart(1e15), request)
    assert slow[words].gain > 1.5
    assert fast[words].gain < 1.001
    assert sum(one in slow for one in CODECS_THAT_HELP.values()) == 1


@pytest.mark.slow
def test_what_then_fits_nowhere_is_left_out() -> None:
    request = PlanRequest(8, depth=2, width=1, schedule="gpipe", micro_batch=2, recompute=Recompute.NEVER)
    plenty = find_plan(tiny_profile(), two(1e15), request)
    assert isinstance(plenty, Answer)
    enough = max(stage.peak_bytes for stage in plenty.best.forecast.stages)
    _, found = answered(tiny_profile(), two(1e15, int(enough)), request)
    assert "a batch of 16 samples" not in found
    assert "2 × the memory on one/emulated0…1" in found


@pytest.mark.slow
def test_a_change_that_cannot_be_is_left_out() -> None:
    request = PlanRequest(4, depth=2, width=1, schedule="gpipe", synchronous=True)
    answer = find_plan(tiny_profile(), two(1e9), request)
    assert isinstance(answer, Answer)

    def search(profile: Profile, cluster: Cluster, request: PlanRequest) -> Answer | NothingFits:
        """What refuses batches of 8 samples, as where no micro-batches make them up."""
        if request.batch_size == 8:
            raise BiremeError("No plan makes batches of 8 samples.")
        return find_plan(profile, cluster, request)

    words = [one.words for one in explain(tiny_profile(), two(1e9), request, answer, search)]
    assert "a batch of 8 samples" not in words
    assert "delayed updates allowed" in words


@pytest.mark.slow
def test_progress_is_told_up_to_the_end() -> None:
    request = PlanRequest(4, depth=2, width=1, schedule="gpipe")
    answer = find_plan(tiny_profile(), two(1e9), request)
    assert isinstance(answer, Answer)
    told: list[float] = []
    explain(tiny_profile(), two(1e9), request, answer, find_plan, tell=lambda done, _: told.append(done))
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0.0, 1.0)


# --- changes -----------------------------------------------------------------------------------------------


@given(cluster=clusters())
@examples(40)
def test_each_change_is_of_one_thing_and_only_more_of_it(cluster: Cluster) -> None:
    request = PlanRequest(4)
    for change in changes(cluster, request):
        is_cluster = change.cluster != cluster
        assert is_cluster != (change.request != request)
        before, after = cluster.devices(), change.cluster.devices()
        assert [placed.name for placed in before] == [placed.name for placed in after]
        more = [a.device.memory_bytes / b.device.memory_bytes for a, b in zip(after, before, strict=True)]
        assert set(more) <= {1, 2}
        is_memory = "memory" in change.words
        assert is_memory == (2 in more)
        for a in range(min(cluster.num_devices, 4)):
            for b in range(min(cluster.num_devices, 4)):
                usual, faster = cluster.bandwidth(a, b), change.cluster.bandwidth(a, b)
                assert usual <= faster <= 2 * usual


def test_both_directions_of_a_link_and_the_switch_are_made_faster() -> None:
    device = Device("a device", "cpu", 2**30)
    server = Server("home0", (device,), cards=(Card("line", (0,), Link(1e6, back_bytes_per_s=4e6)),))
    cluster = Cluster((server, replace(server, name="home1")), Switch(5e5))
    found = {change.words: change.cluster for change in changes(cluster, PlanRequest(1))}
    line = found["2 × the bandwidth of home0…1/line"].servers[1].cards[0].link
    assert (line.bytes_per_s, line.back_bytes_per_s) == (2e6, 8e6)
    switch = found["2 × the bandwidth of the switch"].switch
    assert switch == Switch(1e6)


def test_a_largest_batch_grows_along() -> None:
    batches = [
        (change.request.batch_size, change.request.largest_batch)
        for change in changes(two(1e9), PlanRequest(4, largest_batch=6))
        if change.request.batch_size != 4
    ]
    assert batches == [(8, 8)]


# --- devices in few words ----------------------------------------------------------------------------------


def unfold(text: str) -> list[str]:
    """The names behind the words, read from left to right."""
    found: list[str] = []
    servers, stem = [""], ""
    for part in text.split(", "):
        outer, slash, inner = part.rpartition("/")
        if slash:
            servers = expand(outer)
        elif not inner[0].isdigit():
            servers = [""]
        names = expand(inner if not inner[0].isdigit() else stem + inner)
        stem = re.sub(r"\d+$", "", names[0])
        found += [f"{server}/{name}" if server else name for server in servers for name in names]
    return found


def expand(word: str) -> list[str]:
    first, dots, last = word.partition("…")
    if not dots:
        return [first]
    stem, number = re.fullmatch(r"(.*?)(\d+)", first).groups()  # type: ignore[union-attr]  # else it fails
    return [f"{stem}{n}" for n in range(int(number), int(last) + 1)]


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b0", "b1", "b2", "c9", "c10"]), st.integers(0, 12)),
        min_size=1,
        unique=True,
    )
)
def test_all_names_can_be_read_back(pairs: list[tuple[str, int]]) -> None:
    names = [f"{server}/gpu{number}" for server, number in pairs]
    assert sorted(unfold(device_ranges(names))) == sorted(names)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a/gpu0"], "a/gpu0"),
        (["a/gpu0", "a/gpu2", "a/gpu3", "a/cpu0"], "a/gpu0, 2…3, cpu0"),
        (["a/gpu1", "a/gpu0"], "a/gpu1, 0"),
        (["s9/gpu0", "s10/gpu0", "t/gpu0"], "s9…10/gpu0, t/gpu0"),
        (["s01/gpu0", "s02/gpu0"], "s01/gpu0, s02/gpu0"),
        (["one", "two"], "one, two"),
    ],
)
def test_devices_in_few_words(names: list[str], text: str) -> None:
    assert device_ranges(names) == text


def test_a_thousand_devices_are_one_word() -> None:
    server = load_cluster("one-server-of-8").servers[0]
    names = [f"server{n}/{name}" for n in range(128) for name in device_names(server.devices)]
    assert device_ranges(names) == "server0…127/gpu0…7"
