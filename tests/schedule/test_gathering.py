"""Programs of replicas that share weights: the same passes, with weights that are whole for a while only."""

from dataclasses import replace
from itertools import product

import pytest

from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.schedule.accesses import Sizes
from bireme.schedule.catalogue import generate
from bireme.schedule.checker import check
from bireme.schedule.gathering import gathered, times_a_batch
from bireme.schedule.instruction import COMPUTE, SHARING, Instruction, Kind
from bireme.schedule.program import Program, Track
from bireme.schedule.residency import resident
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network, Path, Wire
from bireme.simulate.simulator import simulate

SHARERS = 4
WHOLE = 8.0
"""Bytes of a stage's weights, and of its gradients."""


def plain(schedule: str, parts: int, num_batches: int = 3, sweep: int = 1) -> Program:
    per_rank = {"interleaved": 2, "zbv": 2}.get(schedule, parts)
    return generate(
        schedule,
        num_stages=2 * per_rank,
        num_microbatches=4,
        num_batches=num_batches,
        stages_per_rank=per_rank,
        sweep=sweep,
    )


def shares(step: Instruction) -> bool:
    return step.kind in SHARING or step.moves_whole


def only_weights(num_stages: int) -> Sizes:
    each, nothing = (WHOLE,) * num_stages, (0.0,) * num_stages
    return Sizes(each, each, nothing, nothing, nothing, nothing, nothing)


@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b", "2bw", "interleaved", "zb-h1", "zbv"])
def test_the_passes_stay_and_no_more_is_whole_than_was_asked_for(schedule: str) -> None:
    for parts, most in product((1, 3), (1, 2, 3)):
        before = plain(schedule, parts)
        program = gathered(before, SHARERS, most)
        assert check(program).ok
        for track, was in zip(program.tracks, before.tracks, strict=True):
            assert [step for step in track if not shares(step)] == [*was]
        for rank, track in enumerate(program.tracks):
            whole = most_whole = 0
            for step in track:
                whole += step.moves_whole and (step.kind is Kind.FETCH) - (step.kind is Kind.EVICT)
                most_whole = max(most_whole, whole)
            assert most_whole <= most
            sets = 2 if schedule == "2bw" else 1
            stages = len(program.stages_of(rank))
            kept = resident(program, rank, only_weights(program.num_stages))
            parts_of_all = (max(program.banks) + sets) * stages * WHOLE / SHARERS
            summed = 1 if most > 1 else 0  # beside those that the rank adds to
            assert kept.peak_bytes <= parts_of_all + (most_whole + sets + summed) * WHOLE


def test_weights_of_the_next_pass_travel_while_one_runs() -> None:
    for most in (1, 2):
        track = [*gathered(plain("1f1b", 3), SHARERS, most).tracks[0]]
        posted = {
            (step.stage, step.version): place
            for place, step in reversed([*enumerate(track)])
            if step.kind is Kind.FETCH
        }
        used = [place for place, step in enumerate(track) if step.kind in COMPUTE and step.stage == 1]
        between = [step.kind for step in track[posted[1, 0] : used[0]]]
        assert (Kind.FORWARD in between) == (most == 2)


def test_sums_travel_while_the_rank_computes_on_the_next_stage() -> None:
    """They held the rank until they were through. They still do where one stage only may be whole."""
    seconds = {}
    for most in (1, 2):
        program = gathered(generate("1f1b", num_stages=3, num_microbatches=1, stages_per_rank=3), 2, most)
        (track,) = program.tracks
        kinds = [step.kind for step in track]
        first, end = kinds.index(Kind.SCATTER), kinds.index(Kind.COLLECT)
        assert [*track][first].stage == [*track][end].stage == 2
        assert (Kind.BACKWARD in kinds[first:end]) == (most == 2)
        costs = Costs.per_stage(3, forward_s=0.0, backward_s=1.0, gradient_bytes=2.0)
        wire = Network((Wire("between replicas", 2.0),), {}, sync_paths={0: Path((0,))})
        seconds[most] = simulate(program, costs, wire).makespan_s
    # A backward takes 1 s, and a sum 0.5 s; the last sum hides behind nothing.
    assert seconds == {1: pytest.approx(4.5), 2: pytest.approx(3.5)}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_several_passes_in_a_row_share_the_time_between_sums_and_the_next_weights(schedule: str) -> None:
    """Gradients of two stages were whole beside the weights of two."""
    program = gathered(plain(schedule, 3, sweep=4), SHARERS, 2)
    assert check(program).ok
    for track in program.tracks:
        weights, gradients, most = 0, set[tuple[int, int]](), 0
        for step in track:
            weights += step.moves_whole and (step.kind is Kind.FETCH) - (step.kind is Kind.EVICT)
            if step.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                gradients.add((step.stage, step.batch))
            elif step.kind is Kind.COLLECT:
                gradients.remove((step.stage, step.batch))
            most = max(most, weights + len(gradients))
        assert most == 3
        kinds = [step.kind for step in track]
        first = kinds.index(Kind.SCATTER)
        end = kinds.index(Kind.COLLECT)
        assert len([kind for kind in kinds[first:end] if kind in COMPUTE]) == 2
        assert kinds[end + 1] is Kind.FETCH


def test_sweeps_save_gathers_and_sums() -> None:
    each, together = (gathered(plain("1f1b", 3, sweep=sweep), SHARERS, 1) for sweep in (1, 4))
    for kind in (Kind.FETCH, Kind.SCATTER):
        often, seldom = (times_a_batch(program, kind)[1] for program in (each, together))
        assert seldom < often
    assert times_a_batch(together, Kind.SCATTER) == (1.0,) * 6


def test_the_checker_finds_whatever_is_left_out() -> None:
    program = gathered(plain("2bw", 2), SHARERS, 2)
    track = [*program.tracks[1]]
    places = [place for place, step in enumerate(track) if shares(step)]
    assert {track[place].kind for place in places} == {*SHARING, Kind.FETCH, Kind.EVICT}
    for place in places[:: max(len(places) // 12, 1)]:
        less = Track(tuple(track[:place] + track[place + 1 :]))
        wrong = check(replace(program, tracks=(program.tracks[0], less)))
        assert not wrong.ok, track[place]


def test_plans_of_replicas_that_share_weights_are_loops_and_others_have_none_of_it() -> None:
    plan = Plan((1, 2, 3), 4, "2bw", width=2, stages_per_rank=2, whole_weights=2)
    assert all(track.repeats for track in plan.program(40).tracks)
    assert check(plan.program(40)).ok
    assert plan.program(5, 3).num_sharers == 2
    alone = replace(plan, width=1)
    assert alone.program(5) == replace(alone, whole_weights=0).program(5)


def test_schedules_that_need_whole_gradients_are_refused() -> None:
    with pytest.raises(BiremeError, match="steps with gradients of one replica alone"):
        gathered(generate("2bw-fresh", num_stages=2, num_microbatches=4), 2, 2)


def test_gradients_that_stages_share_stay_whole_until_the_update() -> None:
    """They were counted as if they lay in parts like the others."""
    before = generate("1f1b", num_stages=2, num_microbatches=1, stages_per_rank=2)
    program = gathered(before, SHARERS, 1)
    nothing, tied = (0.0,) * 2, 2.0
    sizes = Sizes(
        nothing, (WHOLE,) * 2, nothing, nothing, nothing, nothing, nothing, tied_gradient=(tied,) * 2
    )
    series = resident(program, 0, sizes, series=True).series
    assert series is not None
    kept, whole = (WHOLE - tied) / SHARERS + tied, WHOLE - tied
    found: dict[Kind, list[float]] = {}
    for step, num_bytes in zip(program.tracks[0], series, strict=True):
        found.setdefault(step.kind, []).append(num_bytes)
    assert found[Kind.FORWARD] == [0.0, 0.0]
    assert found[Kind.BACKWARD] == [kept + whole, 2 * kept + whole]
    assert found[Kind.UPDATE] == [2 * kept, kept]
