"""Copies between tiers on the clock: exact where a closed form exists, and shown wherever a timeline is."""

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.cluster.device import EngineCost
from bireme.report.picture import write_picture
from bireme.report.timeline_document import write_trace
from bireme.schedule.budgets import Budgets
from bireme.schedule.catalogue import generate
from bireme.schedule.instruction import COMPUTE, Kind
from bireme.schedule.program import Program
from bireme.simulate.copies import TierLinks
from bireme.simulate.costs import Costs
from bireme.simulate.links import Links
from bireme.simulate.simulator import simulate
from bireme.timeline.timeline import Timeline
from tests.support.command import bireme, with_sets
from tests.support.extent import examples
from tests.support.page_programs import page

pytestmark = pytest.mark.slow

CHUNK = 64


def program_of(
    parts: int, microbatches: int = 4, ranks: int = 1, batches: int = 3, name: str = "1f1b"
) -> Program:
    return generate(
        name,
        num_stages=ranks * parts,
        num_microbatches=microbatches,
        num_batches=batches,
        stages_per_rank=parts,
    )


def costs_of(stages: int, *, stash: int = 1, optimizer: int = 4) -> Costs:
    return Costs.per_stage(
        stages,
        forward_s=1.0,
        backward_s=2.0,
        update_s=0.5,
        weight_bytes=2 * CHUNK,
        stash_bytes=stash * CHUNK,
        optimizer_bytes=optimizer * CHUNK,
        master_weights=True,
    )


def computed(timeline: Timeline) -> list[list[tuple[str, float, float]]]:
    return [
        [
            (str(one.instruction), one.start_s, one.end_s)
            for one in rank.intervals()
            if one.instruction.kind in COMPUTE
        ]
        for rank in timeline.ranks
    ]


def test_copies_that_take_no_time_change_no_time() -> None:
    program, costs = program_of(3, ranks=2), costs_of(6)
    paged = page(program, costs.sizes(), Budgets(16 * CHUNK, 14 * CHUNK, 99 * CHUNK), chunk_bytes=CHUNK)
    assert paged.tiers
    assert computed(simulate(paged, costs)) == computed(simulate(program, costs))


def test_a_rank_waits_for_just_what_a_copy_takes() -> None:
    """Room for one of two parts: the first leaves and the second comes, and then the other way round."""
    costs = Costs.per_stage(2, forward_s=1.0, backward_s=2.0, weight_bytes=CHUNK, gradient_bytes=0.0)
    program = page(program_of(2, 1, batches=1), costs.sizes(), Budgets(CHUNK), ahead=0, chunk_bytes=CHUNK)
    copy_s = 0.25
    timeline = simulate(program, costs, tier_links=TierLinks(CHUNK / copy_s))
    starts = {str(one.instruction): one.start_s for one in timeline.ranks[0].intervals()}
    first, second, back, end = (
        next(start for step, start in starts.items() if step.startswith(token))
        for token in ("0F0", "1F0", "1B0", "0B0")
    )
    # What begins on the device has no copy below and is copied out first; what came from there is not.
    assert (first, second, back, end) == (0.0, 1 + 2 * copy_s, 2 + 2 * copy_s, 4 + 3 * copy_s)


def test_an_update_on_the_host_takes_the_host_s_time_between_its_copies() -> None:
    """The gradient comes down, the host steps, the weights go up; the moments stay where they are."""
    host_s, copy_s = 0.75, 0.25
    costs = Costs.per_stage(
        1,
        forward_s=1.0,
        backward_s=2.0,
        update_s=0.5,
        host_update_s=host_s,
        weight_bytes=CHUNK,
        optimizer_bytes=3 * CHUNK,
        rank_speed=(1.0,),
    )
    program = page(
        program_of(1, 1, batches=3),
        costs.sizes(),
        Budgets(2 * CHUNK),
        ahead=0,
        chunk_bytes=CHUNK,
        host_updates=True,
    )
    timeline = simulate(program, costs, tier_links=TierLinks(CHUNK / copy_s))
    (rank,) = timeline.ranks
    updates = [one for one in rank.intervals() if one.instruction.kind is Kind.UPDATE]
    backwards = [one for one in rank.intervals() if one.instruction.kind is Kind.BACKWARD]
    forwards = [one for one in rank.intervals() if one.instruction.kind is Kind.FORWARD]
    for backward, update in zip(backwards, updates, strict=True):
        assert update.start_s == backward.end_s + copy_s
        assert update.end_s == update.start_s + host_s
    for update, forward in zip(updates, forwards[1:], strict=False):
        assert forward.start_s == update.end_s + copy_s


def test_the_fastest_place_for_updates_is_found_if_the_host_s_time_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = with_sets("plan.schedule=1f1b plan.depth=1 memory.device=14e6 --stages-per-rank 2".split())
    words += ["--weight-bytes", "1e6", "--optimizer-bytes", "6e6", "--host-bytes-per-s", "1e6"]
    device, fast, slow = (
        bireme(capsys, "simulate", *words, *more, "--json").document["steady_batch_s"]
        for more in ([], ["--host-update-s", "0.1"], ["--host-update-s", "1e3"])
    )
    assert fast < device == slow


@pytest.mark.parametrize("agreement", [[], ["--agree"]])
def test_stages_that_update_apart_wait_for_nothing_and_copy_less(
    agreement: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shape = "plan.schedule=1f1b plan.depth=1 plan.microbatches=1 memory.device=14e6 --stages-per-rank 4"
    words = [*with_sets(shape.split()), "--weight-bytes", "1e6", "--optimizer-bytes", "6e6", *agreement]
    together, apart = (
        bireme(capsys, "simulate", *words, "--host-bytes-per-s", "1e6", *more, "--json").document
        for more in ([], ["--set", "memory.updates=apart"])
    )
    assert apart["steady_batch_s"] < together["steady_batch_s"]
    moved = [sum(tier["predicted_bytes_moved"] for tier in one["tiers"]) for one in (apart, together)]
    assert moved[0] < moved[1]


def test_copies_take_the_rank_s_own_time_while_it_works_where_no_core_is_left() -> None:
    """The second part is copied out while the first still works; what the rank waits for costs no more."""
    program, costs = program_of(8, microbatches=8), costs_of(8, stash=0, optimizer=0)
    program = page(program, costs.sizes(), Budgets(10 * CHUNK), ahead=1, chunk_bytes=CHUNK)
    apart, half, one = (
        simulate(program, costs, tier_links=TierLinks(2 * CHUNK / 0.4, core_share=share))
        for share in (0.0, 0.5, 1.0)
    )
    (moved,) = apart.paging
    copied_s = sum(sum(copies.end_s) - sum(copies.start_s) for copies in moved.copies)
    slower_s = [other.makespan_s - apart.makespan_s for other in (half, one)]
    assert 0 < slower_s[0] < slower_s[1] <= copied_s
    for timeline, more_s in ((half, 0.5 * copied_s), (one, copied_s)):
        busy_s = timeline.ranks[0].busy_s - apart.ranks[0].busy_s
        assert 0 < busy_s <= more_s * (1 + 1e-9)


def test_small_chunks_are_copied_by_the_rank_itself_and_each_chunk_takes_some_of_its_time() -> None:
    """The simulator knew of bytes alone, and a run of many small chunks took twice what it said."""
    program, costs = program_of(8, microbatches=8), costs_of(8, stash=2, optimizer=0)
    program = page(program, costs.sizes(), Budgets(12 * CHUNK), ahead=1, chunk_bytes=CHUNK)
    links = TierLinks(CHUNK / 0.01, latency_s=0.02)
    plain, own, handled, stashed = (
        simulate(program, costs, tier_links=one)
        for one in (
            links,
            replace(links, own_bytes=CHUNK),
            replace(links, chunk_s=0.001),
            replace(links, stash_bytes_per_s=CHUNK / 0.005),
        )
    )
    (track,) = program.tracks
    moves = [step for step in track if step.page is not None]
    copies = [step for step in moves if step.page is not None and step.page.is_copied]
    forwards = [step for step in track if step.kind is Kind.FORWARD]

    def more_s(timeline: Timeline) -> float:
        return timeline.ranks[0].busy_s - plain.ranks[0].busy_s

    assert 0 < more_s(own) <= 0.03 * len(copies) * (1 + 1e-9)
    assert more_s(own) > 0.8 * 0.03 * len(copies), "few must wait for a slot, and go to the thread"
    assert more_s(handled) >= 0.001 * len(moves) * 0.99
    assert more_s(stashed) == pytest.approx(2 * 0.005 * len(forwards))
    counted = simulate(program, replace(costs, engine=EngineCost(instruction_s=0.001)), tier_links=links)
    least_s = 0.001 * (len(track) - len(moves) / 4)
    assert least_s < more_s(counted) < 0.001 * len(track), "moves too, but those after the last work"


def test_work_hides_copies_where_there_is_room_to_fetch_ahead() -> None:
    program, costs = program_of(8, microbatches=8), costs_of(8, stash=0, optimizer=0)
    links = TierLinks(2 * CHUNK / 0.4)
    budgets = Budgets(10 * CHUNK)
    late, ahead = (
        simulate(
            page(program, costs.sizes(), budgets, ahead=steps, chunk_bytes=CHUNK), costs, tier_links=links
        ).steady_batch_s
        for steps in (0, 1)
    )
    alone = simulate(program, costs).steady_batch_s
    assert alone <= ahead < 1.05 * alone < late


@examples(40)
@given(
    parts=st.integers(2, 4),
    ranks=st.integers(1, 2),
    budget=st.integers(9, 20),
    ahead=st.integers(0, 2),
    copy_s=st.sampled_from((0.125, 0.5, 1.0)),
    has_disk=st.booleans(),
)
def test_wires_carry_one_copy_at_a_time_and_shared_networks_change_nothing(
    parts: int, ranks: int, budget: int, ahead: int, copy_s: float, has_disk: bool
) -> None:
    program, costs = program_of(parts, ranks=ranks), costs_of(parts * ranks)
    budgets = Budgets(budget * CHUNK, 12 * CHUNK if has_disk else None, 200 * CHUNK if has_disk else 0)
    program = page(program, costs.sizes(), budgets, ahead=ahead, chunk_bytes=CHUNK)
    links = TierLinks(CHUNK / copy_s, CHUNK / (2 * copy_s))
    timeline = simulate(program, costs, tier_links=links)
    for moved in timeline.paging:
        kept = timeline.memory[moved.rank]
        assert sum(sum(one.num_bytes) for one in moved.copies) == sum(t.copied_in_bytes for t in kept.tiers)
        for copies in moved.copies:
            assert all(end <= start for end, start in pairwise_spans(copies.start_s, copies.end_s))
    shared = Links(1e9, full_duplex=False).network(program)
    assert shared.is_shared() == (ranks > 1)
    assert computed(simulate(program, costs, shared, tier_links=links)) == computed(timeline)
    faster = TierLinks(2 * CHUNK / copy_s, CHUNK / copy_s)
    assert simulate(program, costs, tier_links=faster).makespan_s <= timeline.makespan_s + 1e-9


def pairwise_spans(starts: Iterable[float], ends: Iterable[float]) -> list[tuple[float, float]]:
    spans = list(zip(starts, ends, strict=True))
    return [(before[1], after[0]) for before, after in pairwise(spans)]


# --- shown -------------------------------------------------------------------------------------------------

COMMAND = with_sets(
    (
        "simulate plan.schedule=1f1b plan.depth=1 plan.microbatches=2 memory.device=30MB memory.host=40MB "
        "memory.disk=/nowhere memory.disk_bytes=1GB --stages-per-rank 4 --batches 2 --forward-s 1 "
        "--weight-bytes 2e6 --optimizer-bytes 12e6 --stash-bytes 1e6 --host-bytes-per-s 2e7 "
        "--disk-bytes-per-s 1e7"
    ).split()
)


def test_the_command_shows_what_each_tier_holds_and_moves(capsys: pytest.CaptureFixture[str]) -> None:
    told = bireme(capsys, *COMMAND)
    assert told.status == 0, told.err
    assert "Offloading" in told.out
    document = json.loads(bireme(capsys, *COMMAND, "--json").out)
    assert [row["tier"] for row in document["tiers"]] == ["device", "host", "disk"]
    for row in document["tiers"]:
        assert set(row) == {"rank", "tier", "budget_bytes", "peak_bytes", "predicted_bytes_moved"}
        assert 0 < row["peak_bytes"] <= row["budget_bytes"]
        assert row["predicted_bytes_moved"] > 0


def test_without_paging_the_document_says_nothing_of_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    enough = [word.replace("30MB", "1GB") for word in COMMAND]
    assert "tiers" not in json.loads(bireme(capsys, *enough, "--json").out)


def test_a_device_too_small_is_refused_before_anything_is_simulated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = bireme(capsys, *[word.replace("30MB", "1MB") for word in COMMAND])
    assert told.status == 2
    assert "needs at least" in told.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["memory.disk_bytes=1GB"], "memory.disk_bytes is set, but memory.device is not"),
        (["memory.device=much"], "24GiB"),
        (["memory.device=auto"], "memory.device is auto"),
        (["memory.device=1GB", "memory.disk=/d"], "memory.disk_bytes is auto"),
        (["memory.device=1GB", "memory.host=0"], "nothing to offload to"),
        (["--chunk-bytes", "100"], "leave out --chunk-bytes"),
    ],
)
def test_keys_and_options_of_paging_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    told = bireme(capsys, *with_sets(["simulate", "plan.schedule=gpipe", "--forward-s", "1", *words]))
    assert told.status == 2
    assert why in told.err


def test_pictures_and_traces_show_the_copies(tmp_path: Path) -> None:
    program, costs = program_of(3), costs_of(3)
    paged = page(program, costs.sizes(), Budgets(14 * CHUNK), chunk_bytes=CHUNK)
    timeline = simulate(paged, costs, tier_links=TierLinks(CHUNK / 0.1))
    write_picture(timeline, tmp_path / "lanes.svg")
    assert "host to device" in (tmp_path / "lanes.svg").read_text()
    write_trace(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    copies = [event for event in events if event.get("cat") == "copy"]
    assert len(copies) == sum(len(one.start_s) for moved in timeline.paging for one in moved.copies)
    moved = [step for step in paged.tracks[0] if step.page is not None and step.page.is_copied]
    assert len(copies) == len(moved)
    assert {step.kind for step in moved} == {Kind.FETCH, Kind.EVICT}
