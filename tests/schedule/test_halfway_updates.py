"""Updates halfway between their sum and their use, for replicas that share an optimizer."""

from itertools import product

import pytest

from bireme.plan.plan import Plan
from bireme.schedule.catalogue import generate
from bireme.schedule.checker import check
from bireme.schedule.instruction import Kind
from bireme.schedule.program import Program
from bireme.schedule.weave import UpdateTiming
from tests.support.symbolic import expected, outcome

pytestmark = pytest.mark.slow


def forwards_around_updates(program: Program, batch: int) -> list[tuple[int, int]]:
    """For each stage, how many forwards of its rank run between a batch's REDUCE and its UPDATE, and from
    there to the first forward on what that has made.
    """
    found = []
    for stage, rank in enumerate(program.rank_of_stage):
        steps = [step for step in program.tracks[rank] if step.stage == stage]
        reduced, updated, used = (
            next(
                place
                for place, step in enumerate(steps)
                if step.kind is kind and step.batch == batch + more and step.microbatch in (None, 0)
            )
            for kind, more in ((Kind.REDUCE, 0), (Kind.UPDATE, 0), (Kind.FORWARD, 2))
        )
        kinds = [step.kind for step in steps]
        found.append((kinds[reduced:updated].count(Kind.FORWARD), kinds[updated:used].count(Kind.FORWARD)))
    return found


def test_as_many_forwards_hide_the_sum_as_hide_what_the_update_makes() -> None:
    for depth, per_rank, more, lookahead in product((1, 3), (1, 2), (0, 3), (0, 1)):
        if lookahead and (not more or depth == 1):
            continue
        for num_batches in (1, 2, 4):
            program = generate(
                "2bw",
                num_stages=depth * per_rank,
                num_microbatches=depth + more,
                num_batches=num_batches,
                stages_per_rank=per_rank,
                lookahead=lookahead,
                timing=UpdateTiming(halfway=True),
            )
            assert check(program).ok
            assert outcome(program) == expected(program)
            if num_batches == 4:
                for before, after in forwards_around_updates(program, 1):
                    assert before - 1 <= after <= before


def test_long_programs_are_loops_and_others_than_2bw_stay_as_they_are() -> None:
    plan = Plan((1,), 4, "2bw", width=2, updates_halfway=True)
    assert all(track.repeats for track in plan.program(20).tracks)
    assert plan.source.read_ahead <= Plan((1,), 4, "2bw", width=2).source.read_ahead
    for name in ("1f1b", "2bw-fresh", "zb-h1"):
        late, halfway = (
            generate(name, num_stages=3, num_microbatches=4, num_batches=3, timing=UpdateTiming(halfway=one))
            for one in (False, True)
        )
        assert late == halfway
