"""Stages on several ranks: each micro-batch passes each stage once, on the rank that takes it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import BiremeError
from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.checker import check
from bireme.schedule.grid import ascii_picture
from bireme.schedule.instruction import Kind
from bireme.schedule.program import Program, Track
from bireme.schedule.torch_csv import to_csv
from bireme.schedule.weave import UpdateTiming
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network, Path, Wire
from bireme.simulate.simulator import pairs_that_talk, simulate
from tests.support.extent import examples

WIDE = sorted(schedule.name for schedule in SCHEDULES.values() if schedule.widens)

Shares = tuple[tuple[int, ...], ...]


@st.composite
def shares(draw: st.DrawFn) -> Shares:
    """Of one to four stages on one to three ranks each, with micro-batches for two weight versions."""
    widths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    num = sum(widths) + draw(st.integers(0, 4))
    found = []
    for width in widths:
        ends = sorted(draw(st.permutations(range(1, num)))[: width - 1])
        found.append(tuple(end - begin for begin, end in zip([0, *ends], [*ends, num], strict=True)))
    return tuple(found)


def program_of(name: str, of: Shares, *, num_batches: int = 1, lookahead: int = 0) -> Program:
    return generate(
        name,
        num_stages=len(of),
        num_microbatches=sum(of[0]),
        num_batches=num_batches,
        shares=of,
        lookahead=lookahead,
    )


@examples(60)
@given(name=st.sampled_from(WIDE), of=shares(), num_batches=st.integers(1, 4), data=st.data())
def test_every_program_is_proved_right(name: str, of: Shares, num_batches: int, data: st.DataObject) -> None:
    most = max(sum(of[0]) - sum(map(len, of)) + 1, 0) if len(of) > 1 and name != "gpipe" else 0
    program = program_of(name, of, num_batches=num_batches, lookahead=data.draw(st.integers(0, most)))
    report = check(program)
    assert report.ok, report.problems or report.deadlock
    ran = [
        (i.kind, i.stage, i.batch, i.microbatch)
        for track in program.tracks
        for i in track
        if i.kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
    assert len(ran) == len(set(ran)) == 2 * len(of) * sum(of[0]) * num_batches
    assert sum(i.kind is Kind.UPDATE for track in program.tracks for i in track) == num_batches * sum(
        map(len, of)
    )


@pytest.mark.parametrize("name", WIDE)
def test_a_long_window_is_a_loop_and_still_right(name: str) -> None:
    program = program_of(name, ((3, 2, 2), (7,), (4, 3)), num_batches=30)
    assert all(track.repeats > 20 for track in program.tracks)
    assert check(program).ok


def test_one_rank_for_each_stage_is_the_schedule_as_it_is() -> None:
    for name in WIDE:
        plain = generate(name, num_stages=3, num_microbatches=5, num_batches=2)
        assert program_of(name, ((5,), (5,), (5,)), num_batches=2).tracks == plain.tracks


def moved(program: Program, rank: int, to: int, microbatch: int) -> Program:
    """The program with a micro-batch of the first batch on another rank of the stage."""
    taken = [i for i in program.tracks[rank] if i.microbatch == microbatch and i.batch == 0]
    tracks = list(program.tracks)
    tracks[rank] = Track(tuple(i for i in program.tracks[rank] if i not in taken))
    tracks[to] = Track((*taken, *program.tracks[to]))
    return replace(program, tracks=tuple(tracks))


def test_the_proof_finds_a_microbatch_on_the_wrong_rank() -> None:
    program = program_of("1f1b", ((2, 2), (4,)))
    assert "rank 1 takes micro-batch 1 through stage 0" in check(moved(program, 1, 0, 1)).problems[0]


def test_the_proof_finds_a_microbatch_that_no_rank_runs() -> None:
    program = program_of("1f1b", ((2, 2), (4,)))
    tracks = list(program.tracks)
    tracks[1] = Track(tuple(i for i in tracks[1] if i.microbatch != 3))
    problems = " ".join(check(replace(program, tracks=tuple(tracks))).problems)
    assert "comes when 1 of 2 micro-batches have their gradient" in problems
    assert "rank 1 posts no receive for it" in problems


PICTURE = """
rank 0: F0=== F2=== .  B0========= F4=== B2========= .  .  B4=========|.  .  .
rank 1: F1=== F3=== .  .  .  .  B1========= F5=== B3========= .  .  B5=========|
rank 2: .  .  F0 B0=== F1 B1=== F2 B2=== F3 B3=== F4 B4=== F5 B5===|.  .  .  .
F forward   B backward   . idle   | update
"""


def test_two_ranks_take_turns_before_one_that_is_twice_as_fast() -> None:
    """PipeDream's order: once the pipeline is full, the last rank never waits."""
    assert ascii_picture(program_of("1f1b", ((3, 3), (6,)))) == PICTURE.strip()


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - set(WIDE)))
def test_other_schedules_refuse(name: str) -> None:
    num_stages = 4
    with pytest.raises(BiremeError, match="cannot put a stage on several ranks"):
        generate(name, num_stages=num_stages, num_microbatches=4, shares=((2, 2), *[(4,)] * 3))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sweep": 2}, "one micro-batch at a time"),
        ({"stages_per_rank": 2}, "one micro-batch at a time"),
        ({"timing": UpdateTiming(early=True)}, "cannot update early"),
        ({"timing": UpdateTiming(halfway=True)}, "cannot update early"),
        ({"timing": UpdateTiming(average_lag=1)}, "average weights"),
        ({"shares": ((2, 2),)}, "shares for the ranks of 1 stages, and 2 stages"),
        ({"num_microbatches": 2, "shares": ((1, 1), (2,))}, "2 for 3 ranks"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, object], words: str) -> None:
    asked = {"num_stages": 2, "num_microbatches": 4, "shares": ((2, 2), (4,))} | options
    with pytest.raises(BiremeError, match=words):
        generate("2bw", **asked)  # type: ignore[arg-type]


def test_torch_has_no_file_for_it() -> None:
    with pytest.raises(BiremeError, match="several ranks"):
        to_csv(program_of("1f1b", ((2, 2), (4,))))


# --- on the simulator's clock ------------------------------------------------------------------------------


def test_a_stage_twice_as_slow_on_two_ranks_keeps_pace() -> None:
    """Under 2bw both stages are busy all the time: no bubble is left."""
    costs = Costs.per_stage(2, forward_s=[2, 1], backward_s=[4, 2])
    timeline = simulate(program_of("2bw", ((4, 4), (8,)), num_batches=8), costs)
    assert timeline.steady_batch_s == 8 * 3
    assert timeline.steady_bubble_fraction == pytest.approx(0.0, abs=1e-12)


def test_a_rank_of_half_the_speed_with_half_the_share_keeps_pace() -> None:
    costs = Costs.per_stage(2, forward_s=[1.5, 1], backward_s=[3, 2], rank_speed=[1, 0.5, 1])
    timeline = simulate(program_of("2bw", ((6, 3), (9,)), num_batches=8, lookahead=1), costs)
    assert timeline.steady_batch_s == 9 * 3


@pytest.mark.parametrize("agree", [False, True])
def test_the_sum_of_a_stage_begins_when_all_its_ranks_are_there_and_ends_for_all(*, agree: bool) -> None:
    """Rank 1 is slow: rank 0 waits for it, and then for the bytes of the sum, which go once."""
    program = program_of("gpipe", ((1, 1),))
    costs = Costs.per_stage(
        1, forward_s=1, backward_s=2, reduce_bytes=10, reduce_s=1, rank_speed=[1, 0.25], update_s=1
    )
    network = Network((Wire("ring", 5.0),), {}, {0: Path((0,))})
    for overlap_reduce in (True, False):
        timeline = simulate(program, costs, network, agree=agree, overlap_reduce=overlap_reduce)
        ends = [rank.end_s[-1] for rank in timeline.ranks]
        assert ends == [12 + 2 + 1 + 1, 12 + 2 + 1 + 4]
        assert [list(one.num_bytes) for one in timeline.transfers] == [[10.0]]


def test_only_stages_on_several_ranks_need_a_path_for_their_sums() -> None:
    program = program_of("1f1b", ((2, 2), (4,)))
    network = Network.dedicated(pairs_that_talk(program))
    ring = {0: Path((len(network.wires),))}
    summed = replace(network, wires=(*network.wires, Wire("ring", 1.0)), sync_paths=ring)
    costs = Costs.per_stage(2, forward_s=1, backward_s=2, reduce_bytes=[10, 0])
    apart = replace(costs, reduce_bytes=(0.0, 0.0), reduce_s=(10.0, 0.0))
    assert simulate(program, costs, summed).makespan_s == simulate(program, apart, network).makespan_s
    with pytest.raises(BiremeError, match="no path for rank 0's gradient sync"):
        simulate(program, costs, network)


def test_messages_cross_between_the_ranks_that_have_the_microbatch() -> None:
    program = program_of("1f1b", ((2, 2), (1, 3)))
    assert pairs_that_talk(program) == {
        pair for a, b in ((0, 3), (1, 3), (1, 2)) for pair in ((a, b), (b, a))
    }
    paths = {pair: Path((0,) if pair == (1, 2) else ()) for pair in pairs_that_talk(program)}
    network = Network((Wire("slow", 1.0),), paths)
    timeline = simulate(program, Costs.per_stage(2, forward_s=1, backward_s=2, message_bytes=7), network)
    crossed = {
        (one.source, one.destination): len(one.num_bytes) for one in timeline.transfers if not one.is_sync
    }
    assert crossed == {(1, 2): 1, (2, 1): 1, (1, 3): 1, (3, 1): 1, (0, 3): 2, (3, 0): 2}
