"""Streams read no further ahead than the program says, and end where all ranks have agreed to end."""

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.generators.shape import Shape
from bireme.schedule.instruction import Kind
from bireme.schedule.program import Program, Rule
from bireme.schedule.source import read_ahead, stream
from tests.support.extent import examples


@dataclass(frozen=True, slots=True)
class Form:
    """What a program is generated from, but for its batches."""

    name: str
    num_stages: int
    num_microbatches: int
    lookahead: int

    def __call__(self, num_batches: int, first_batch: int) -> Program:
        return generate(
            self.name,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            num_batches=num_batches,
            lookahead=self.lookahead,
            first_batch=first_batch,
        )


@st.composite
def forms(draw: st.DrawFn) -> Form:
    """Any schedule, of up to 6 stages and 8 micro-batches, with any lookahead that it allows."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    schedule = SCHEDULES[name]
    per_rank = schedule.stages_per_rank
    num_stages = draw(st.integers(1, 6 // per_rank)) * per_rank
    fewest = num_stages if schedule.rule in (Rule.DELAYED, Rule.FRESH) else 1
    num_microbatches = draw(st.integers(fewest, 8))
    most = 0
    if schedule.most_lookahead is not None:
        most = schedule.most_lookahead(Shape(num_stages, num_microbatches, 1, per_rank, 0, 0))
    return Form(name, num_stages, num_microbatches, draw(st.sampled_from([0, most // 2, most])))


@dataclass(slots=True)
class Read:
    """A rank's stream of batches, which may be told while it runs to end earlier."""

    num_batches: int
    num_read: int = 0

    def has(self, number: int) -> bool:
        self.num_read = max(self.num_read, min(number, self.num_batches))
        return number <= self.num_batches


def results(form: Form, rank: int, read: Read, first_batch: int) -> Iterator[int]:
    """The batches of a window, counted from 0, each when the last stage of the rank has its update."""
    num_updates = len(form(1, 0).stages_of(rank))
    if SCHEDULES[form.name].rule is Rule.STASHED:
        num_updates *= form.num_microbatches
    made: dict[int, int] = {}
    for block in stream(form, rank, read.has, first_batch=first_batch):
        for written in block.instructions:
            if written.kind is Kind.UPDATE:
                batch = written.batch + block.batches - first_batch
                made[batch] = made.get(batch, 0) + 1
                if made[batch] == num_updates:
                    yield batch


@examples(60)
@given(forms(), st.sampled_from([0, 1, 7]), st.integers(0, 20))
def test_ranks_that_end_as_far_after_a_result_as_the_program_reads_ahead_all_end_there(
    form: Form, first_batch: int, asked_at: int
) -> None:
    """Two batches were promised for every program, and 2bw at its greatest lookahead reads more.

    There a run that was asked to end after batch 9 ended after 11 on one rank, and the others waited for it.
    """
    ahead = read_ahead(form)
    ended = []
    for rank in range(form(1, 0).num_ranks):
        read = Read(num_batches=40)
        for batch in results(form, rank, read, first_batch):
            assert read.num_read <= batch + 1 + ahead
            if batch == asked_at:
                read.num_batches = min(read.num_batches, batch + 1 + ahead)
        ended.append(batch + 1)
    assert ended == [min(40, asked_at + 1 + ahead)] * len(ended)


def test_most_programs_read_two_batches_ahead_and_none_more_than_it_must() -> None:
    """Those that drain between batches, and 2bw but for the greatest lookahead that two versions allow."""
    found = {
        (name, lookahead): read_ahead(Form(name, 4, 6, lookahead))
        for name in SCHEDULES
        for lookahead in (0, 2, 3)
        if not lookahead or name == "2bw"
    }
    assert {key for key, ahead in found.items() if ahead != 2} == {("2bw", 3)}
    assert found["2bw", 3] == 3
