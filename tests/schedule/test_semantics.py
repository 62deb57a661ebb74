"""Every schedule computes exactly what its update rule says, on every shape, with or without recomputation.

The programs are executed on formulas by `tests/support/symbolic.py`; what they make is compared with what the
rules demand, version by version and stage by stage.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import BiremeError
from bireme.schedule import source as folding
from bireme.schedule.catalogue import SCHEDULES, generate, source_named
from bireme.schedule.checker import check
from bireme.schedule.generators.shape import Shape
from bireme.schedule.generators.two_buffer import never_drain
from bireme.schedule.program import Program, Rule
from bireme.schedule.routes import Routes
from bireme.schedule.source import ProgramSource, source_like
from bireme.schedule.weave import UpdateTiming, lower, weave
from tests.support.extent import examples, several
from tests.support.symbolic import expected, outcome

DELAYED_ONCE = {Rule.DELAYED, Rule.FRESH}
SEVERAL_STAGES = {"interleaved", "zbv"}


@dataclass(frozen=True, slots=True)
class Request:
    """What `generate` is asked for."""

    name: str
    num_stages: int
    num_microbatches: int
    num_batches: int
    stages_per_rank: int | None = None
    num_sliced: int | None = None
    recompute: frozenset[int] = frozenset()
    first_batch: int = 0
    updates_early: bool = False

    def program(self) -> Program:
        return generate(
            self.name,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            num_batches=self.num_batches,
            stages_per_rank=self.stages_per_rank,
            num_sliced=self.num_sliced,
            recompute=self.recompute,
            first_batch=self.first_batch,
            timing=UpdateTiming(early=self.updates_early),
        )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Anything that `generate` accepts, up to 8 stages, 12 micro-batches and 4 batches written out."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    per_rank = None
    if name == "interleaved":
        per_rank = draw(st.integers(1, 4))
    elif name == "zbv":
        per_rank = 2
    elif SCHEDULES[name].rule is not Rule.STASHED:
        per_rank = draw(st.sampled_from((None, None, 2, 3)))
    num_stages = draw(st.integers(1, 8 // (per_rank or 1))) * (per_rank or 1)
    depth = num_stages // (per_rank or 1)
    num_microbatches = draw(st.integers(depth if SCHEDULES[name].rule in DELAYED_ONCE else 1, 12))
    num_sliced = None
    if name == "1f1b-sliced":
        num_sliced = draw(st.none() | st.integers(0, min(depth, num_microbatches)))
    return Request(
        name,
        num_stages,
        num_microbatches,
        draw(st.integers(1, 4)),
        per_rank,
        num_sliced,
        draw(st.frozensets(st.integers(0, num_stages - 1))),
        draw(st.sampled_from([0, 0, 1, 2, 5])),
        draw(st.booleans()),
    )


def small_requests(name: str) -> Iterator[Request]:
    """All small shapes of a schedule."""
    stages = (2, 4) if name in SEVERAL_STAGES else (1, 2, 3, 4)
    for num_stages, num_microbatches, num_batches in itertools.product(stages, range(1, 6), range(1, 4)):
        if SCHEDULES[name].rule in DELAYED_ONCE and num_microbatches < num_stages:
            continue
        for recompute in (frozenset[int](), frozenset(range(num_stages)), frozenset({num_stages - 1})):
            for first_batch in (0, 1):
                yield Request(
                    name,
                    num_stages,
                    num_microbatches,
                    num_batches,
                    recompute=recompute,
                    first_batch=first_batch,
                )


def assert_follows_its_rule(program: Program) -> None:
    assert outcome(program) == expected(program)


@pytest.mark.slow
@examples(300)
@given(requests())
def test_every_schedule_computes_what_its_rule_says(request: Request) -> None:
    assert_follows_its_rule(request.program())


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_small_shape_computes_what_its_rule_says(name: str) -> None:
    for request in several(list(small_requests(name)), 60):
        assert_follows_its_rule(request.program())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*SCHEDULES} - SEVERAL_STAGES - {"pipedream"}))
def test_neighbors_on_a_rank_compute_what_their_rule_says_and_are_proved(name: str) -> None:
    for depth, per_rank, first_batch in itertools.product((1, 2, 3), (2, 3), (0, 1)):
        program = Request(name, depth * per_rank, 4, 3, per_rank, first_batch=first_batch).program()
        assert program.rank_of_stage == tuple(stage // per_rank for stage in range(depth * per_rank))
        assert_follows_its_rule(program)
        assert check(program).ok


@pytest.mark.parametrize("num_sliced", range(5))
def test_slicing_changes_no_value(num_sliced: int) -> None:
    sliced = Request("1f1b-sliced", 4, 5, 2, num_sliced=num_sliced).program()
    assert outcome(sliced) == outcome(Request("1f1b", 4, 5, 2).program())


def test_draining_schedules_all_compute_the_same() -> None:
    names = [name for name, schedule in SCHEDULES.items() if schedule.rule is Rule.SYNCHRONOUS]
    results = {outcome(Request(name, 4, 5, 2, recompute=frozenset({1})).program()) for name in names}
    assert len(names) == 7
    assert len(results) == 1


def test_recomputation_changes_no_value() -> None:
    for name in SCHEDULES:
        kept = Request(name, 4, 4, 3)
        recomputed = Request(name, 4, 4, 3, recompute=frozenset({0, 2}))
        assert outcome(kept.program()) == outcome(recomputed.program())


def test_2bw_delays_every_stage_and_so_differs_from_1f1b() -> None:
    delayed, synchronous = (outcome(Request(name, 3, 4, 2).program()).made for name in ("2bw", "1f1b"))
    for late, exact in zip(delayed, synchronous, strict=True):
        assert late[0] == exact[0]
        assert late[1] != exact[1]


@pytest.mark.slow
@pytest.mark.few(14)
@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("first_batch", [0, 3])
@pytest.mark.parametrize("recompute", [frozenset[int](), frozenset({0, 3})], ids=["kept", "recomputed"])
def test_a_folded_program_is_the_written_out_one(
    name: str, first_batch: int, recompute: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(name, 4, 5, 12, recompute=recompute, first_batch=first_batch)
    folded = request.program()
    monkeypatch.setattr(folding, "WRITTEN_OUT", 12)
    written = request.program()
    assert all(track.repeats > 1 for track in folded.tracks)
    assert all(track.repeats == 0 for track in written.tracks)
    assert [list(track) for track in folded.tracks] == [list(track) for track in written.tracks]
    assert_follows_its_rule(folded)


@pytest.mark.slow
@examples(40)
@given(requests(), st.integers(9, 14))
def test_folding_changes_no_instruction(request: Request, num_batches: int) -> None:
    long = replace(request, num_batches=num_batches)
    folded = long.program()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folding, "WRITTEN_OUT", num_batches)
        written = long.program()
    assert [list(track) for track in folded.tracks] == [list(track) for track in written.tracks]
    assert folded.num_batches == written.num_batches == num_batches
    assert_follows_its_rule(folded)


@pytest.mark.slow
@pytest.mark.parametrize("rule", sorted(DELAYED_ONCE))
def test_two_versions_are_enough_from_one_micro_batch_less_than_stages_on(rule: Rule) -> None:
    for num_stages, num_microbatches in itertools.product(range(2, 7), range(1, 8)):
        shape = Shape(num_stages, num_microbatches, num_batches=4)
        program = lower(
            weave(
                "2bw-short",
                rule,
                Routes(tuple(range(num_stages))),
                never_drain(shape),
                num_microbatches=num_microbatches,
                num_batches=4,
            )
        )
        enough = num_microbatches >= num_stages - 1
        assert (outcome(program) == expected(program)) == enough


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_source_of_a_schedule_is_that_of_its_programs(name: str) -> None:
    """With the same refusals, and with micro-batches that go in halves counted on the first stage."""

    def answer(make: Callable[..., ProgramSource], depth: int, per_rank: int | None, ahead: int) -> object:
        try:
            return make(
                num_stages=depth,
                num_microbatches=6,
                stages_per_rank=per_rank,
                lookahead=ahead,
                recompute=range(depth % 2),
            )
        except BiremeError as error:
            return str(error)

    def window(num_batches: int, first_batch: int) -> Program:
        raise AssertionError

    def generated(**asked: Any) -> ProgramSource:
        return source_like(generate(name, **asked), window)

    def described(**asked: Any) -> ProgramSource:
        return source_named(name, window, **asked)

    for depth, per_rank, ahead in itertools.product((1, 2, 3, 4, 6), (None, 1, 2), (0, 1, 9)):
        assert answer(described, depth, per_rank, ahead) == answer(generated, depth, per_rank, ahead)
