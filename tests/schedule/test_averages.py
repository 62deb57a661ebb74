"""Replicas that average weights: where the two instructions lie, what is proved of them, how they look."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import pytest

from bireme.errors import BiremeError
from bireme.schedule.catalogue import generate
from bireme.schedule.checker import check
from bireme.schedule.grid import ascii_picture
from bireme.schedule.instruction import AVERAGES, Instruction, Kind
from bireme.schedule.program import Program, Rule, Track
from bireme.schedule.proofs.deadlock import run_to_end
from bireme.schedule.weave import UpdateTiming
from bireme.simulate.costs import Costs
from bireme.simulate.simulator import simulate
from tests.support.averaging_replicas import in_a_loop, interpreted
from tests.support.extent import several
from tests.support.granted_meetings import granted

SCHEDULES = ("1f1b", "2bw", "2bw-fresh")


def program_of(
    name: str,
    d: int = 3,
    m: int = 4,
    batches: int = 4,
    lag: int = 0,
    *,
    per_rank: int | None = None,
    first_batch: int = 0,
) -> Program:
    return generate(
        name,
        num_stages=d,
        num_microbatches=m,
        num_batches=batches,
        stages_per_rank=per_rank,
        first_batch=first_batch,
        timing=UpdateTiming(early=True, average_lag=lag),
    )


LONG = 16
"""Batches of a window that comes as a loop."""


def programs() -> Iterator[Program]:
    shapes = list(product(SCHEDULES, (1, 2, 4), (1, 2), (0, 1, 2)))
    for name, d, per_rank, lag in several(shapes, len(shapes)):
        yield program_of(name, d * per_rank, d + 1, 3, lag, per_rank=per_rank)
        yield program_of(name, d * per_rank, d, LONG, lag, per_rank=per_rank, first_batch=2)


@pytest.mark.slow
def test_what_the_generators_make_is_proved_right_and_repeats_itself() -> None:
    for program in programs():
        report = check(program)
        assert report.ok, (program.name, program.num_stages, program.average_lag, report)
        assert program.num_batches < LONG or all(track.repeats for track in program.tracks)
        for track in program.tracks:
            kinds = [step.kind for step in track]
            assert (
                kinds.count(Kind.AVERAGE_START) == kinds.count(Kind.AVERAGE_END) == kinds.count(Kind.UPDATE)
            )


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_averages_they_are_the_programs_of_before(name: str) -> None:
    averaged, plain = (
        generate(
            name,
            num_stages=3,
            num_microbatches=4,
            num_batches=3,
            timing=UpdateTiming(early=True, average_lag=lag),
        )
        for lag in (0, None)
    )
    for one, other in zip(averaged.tracks, plain.tracks, strict=True):
        assert [step for step in one if step.kind not in AVERAGES] == list(other)


@pytest.mark.parametrize(
    ("name", "lag"), [("2bw", 0), ("2bw-fresh", 0), ("1f1b", 1), ("2bw", 1), ("2bw-fresh", 1)]
)
def test_the_exchange_hides_behind_the_next_batch(name: str, lag: int) -> None:
    """With 12 micro-batches on 3 stages one of three quarters of a batch's work does; 1f1b has to wait."""
    program = program_of(name, 3, 12, 8, lag)

    def batch_s(program: Program, exchange_s: float) -> float:
        costs = Costs.per_stage(3, forward_s=1.0, backward_s=2.0, update_s=0.1, reduce_s=exchange_s)
        return simulate(program, costs, agree=True).steady_batch_s

    assert batch_s(program, 27.0) == pytest.approx(batch_s(program, 0.0))
    at_once = program_of("1f1b", 3, 12, 8)
    assert batch_s(at_once, 27.0) == pytest.approx(batch_s(at_once, 0.0) + 27.0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_average_starts_right_after_its_update(name: str) -> None:
    for track in program_of(name).tracks:
        steps = list(track)
        for before, step in pairwise(steps):
            if step.kind is Kind.AVERAGE_START:
                assert (before.kind, before.batch) == (Kind.UPDATE, step.batch)


def spoilt(program: Program, rank: int, steps: list[Instruction]) -> Program:
    tracks = list(program.tracks)
    tracks[rank] = Track(tuple(steps), versions_per_batch=tracks[rank].versions_per_batch)
    return replace(program, tracks=tuple(tracks))


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_checker_finds_averages_that_are_missing_doubled_late_or_mislabelled(name: str, lag: int) -> None:
    program = program_of(name, 2, 3, 3, lag)
    for rank, track in enumerate(program.tracks):
        steps = list(track)
        for at, step in enumerate(steps):
            if step.kind not in AVERAGES:
                continue
            without = steps[:at] + steps[at + 1 :]
            assert step.version is not None
            wrong = [
                without,
                [*steps[:at], step, *steps[at:]],
                [*steps[:at], step._replace(version=step.version + 1), *steps[at + 1 :]],
                [*steps[:at], step._replace(batch=(step.batch + 1) % 3), *steps[at + 1 :]],
            ]
            used = next(
                (i for i, s in enumerate(without) if i >= at and _uses(program, s, step.version)), None
            )
            if used is not None and step.kind is Kind.AVERAGE_END:
                wrong.append([*without[: used + 1], step, *without[used + 1 :]])
            for one in wrong:
                assert not check(spoilt(program, rank, one)).ok, (rank, at, str(step))


def _uses(program: Program, step: Instruction, version: int) -> bool:
    if program.rule is Rule.FRESH:
        return step.kind is Kind.TRIAL and step.batch == version + 1
    return step.kind is Kind.FORWARD and step.version == version


SEVERAL_STAGES = [("interleaved", 4), ("zbv", 4), ("1f1b", 4), ("2bw", 4), ("2bw-fresh", 4)]


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("name", "num_stages"), SEVERAL_STAGES)
def test_a_rank_averages_all_its_stages_at_once(name: str, num_stages: int, lag: int) -> None:
    program = program_of(name, num_stages, 4, 4, lag, per_rank=2)
    assert check(program).ok
    for track in program.tracks:
        steps = [step for step in track if step.kind is Kind.UPDATE or step.kind in AVERAGES]
        for first, second in zip(steps[::2], steps[1::2], strict=True):
            assert (first.kind, first.batch) == (second.kind, second.batch)
            assert first.stage != second.stage


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", ["interleaved", "2bw"])
def test_the_checker_finds_averages_of_one_rank_that_are_apart(name: str, lag: int) -> None:
    program = program_of(name, 4, 4, 3, lag, per_rank=2)
    for rank, track in enumerate(program.tracks):
        steps = list(track)
        places = [at for at, step in enumerate(steps) if step.kind is Kind.AVERAGE_END and step.batch == 1]
        assert places[1] == places[0] + 1
        # The second end after what the rank does next, or the first start after the ends.
        late = [*steps[: places[1]], steps[places[1] + 1], steps[places[1]], *steps[places[1] + 2 :]]
        start = next(
            at for at, step in enumerate(steps) if step.kind is Kind.AVERAGE_START and step.batch == 1
        )
        after = [*steps[:start], *steps[start + 1 : places[1] + 1], steps[start], *steps[places[1] + 1 :]]
        for one in (late, after):
            assert not check(spoilt(program, rank, one)).ok, (rank, name, lag)


def test_a_program_that_averages_nothing_may_not_hold_an_average() -> None:
    program = replace(program_of("2bw"), average_lag=None)
    assert "replicas average no weights" in check(program).problems[0]


def test_what_updates_after_every_micro_batch_cannot_be_averaged() -> None:
    with pytest.raises(BiremeError, match="pipedream, which updates after every micro-batch"):
        program_of("pipedream")
    with pytest.raises(BiremeError, match="must be 0 or more"):
        program_of("2bw", lag=-1)


def test_groups_that_name_who_is_not_there_wait_in_a_circle() -> None:
    """Stage 0 pairs A's first batch with B's second, stage 1 the other way round."""
    program = program_of("1f1b", 2, 2, 2)
    meetings = granted(2, [(0, {0: 0, 1: 1}), (1, {0: 1, 1: 0})])
    stuck = run_to_end(program, synchronous_sends=False, meetings=meetings)
    assert stuck is not None
    assert len(stuck.cycle) >= 2
    assert "AVERAGE_END of batch 0" in stuck.waits[stuck.cycle[0]]


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_programs_with_averages_compute_what_a_plain_loop_does(name: str, lag: int) -> None:
    """Which weights each micro-batch runs on, and the weights in the end, on plain numbers."""
    for d, m, per_rank in ((1, 2, 1), (2, 2, 1), (3, 5, 1), (4, 3, 2), (6, 3, 3)):
        program = program_of(name, d, m, 6, lag, per_rank=per_rank)
        used, ends = interpreted(program, 3)
        wanted, wanted_ends = in_a_loop(program, 3)
        assert used == pytest.approx(wanted, rel=1e-12)
        assert ends == pytest.approx(wanted_ends, rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_pictures_show_averages(name: str) -> None:
    text = ascii_picture(program_of(name, 2, 2, 3))
    assert "average starts" in text
    plain = ascii_picture(generate(name, num_stages=2, num_microbatches=2, num_batches=3))
    assert "average" not in plain
