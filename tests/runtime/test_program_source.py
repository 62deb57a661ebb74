"""Programs that are given, as from a file: what windows they have, and that the engine trains with them."""

from dataclasses import replace
from itertools import product

import pytest

from bireme.errors import BiremeError
from bireme.plan.program_plan import ProgramPlan, even_cuts
from bireme.runtime.pipeline import Pipeline
from bireme.schedule.catalogue import generate
from bireme.schedule.checker import check
from bireme.schedule.instruction import Kind
from bireme.schedule.program import Program, Track
from bireme.schedule.source import source_like, source_of
from bireme.schedule.torch_csv import parse, to_csv
from tests.support.engine_parity import Setting, assert_equal, oracle, train_on_threads
from tests.support.regression import WIDTH, regression
from tests.support.small_models import real_batches


def shaped(name: str, num_batches: int, first_batch: int = 0) -> Program:
    return generate(name, num_stages=3, num_microbatches=4, num_batches=num_batches, first_batch=first_batch)


def written(program: Program) -> list[object]:
    return [
        program.num_batches,
        program.batches,
        *([str(step) for step in track] for track in program.tracks),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "2bw", "2bw-fresh"])
def test_a_loop_has_windows_of_any_length_from_any_batch_on(name: str) -> None:
    source = source_of(shaped(name, 12))
    assert source.num_batches is None
    for num_batches, first_batch in product((3, 4, 12, 31), (0, 1, 6)):
        made = source.program(num_batches, first_batch)
        assert written(made) == written(shaped(name, num_batches, first_batch))


def test_a_program_of_one_synchronous_batch_repeats() -> None:
    source = source_of(shaped("1f1b", 1))
    made = source.program(5, 2)
    assert made.batches == range(2, 7)
    assert check(made).ok


def test_what_does_not_repeat_has_windows_of_its_own_length_only() -> None:
    source = source_of(shaped("2bw", 3))
    assert source.num_batches == 3
    assert written(source.program(3, 4)) == written(shaped("2bw", 3, 4))
    with pytest.raises(BiremeError, match="of 3 batches that does not repeat, and one of 4 was asked for"):
        source.program(4)
    with pytest.raises(BiremeError, match="takes at least 2 batches to fill and drain, and there are 1"):
        source_of(shaped("2bw", 12)).program(1)


def test_a_program_that_is_not_right_is_no_source() -> None:
    sound = shaped("1f1b", 1)
    tracks = (*sound.tracks[:-1], replace(sound.tracks[-1], head=sound.tracks[-1].head[:-1]))
    with pytest.raises(BiremeError, match="Stage 2 never makes the update of batch 0"):
        source_of(replace(sound, tracks=tracks))


@pytest.mark.slow
def test_a_schedule_file_trains_a_stream_as_one_process_does() -> None:
    text = to_csv(generate("zbv", num_stages=4, num_microbatches=4), comms=True)
    source = source_of(parse(text, source="mine.csv"))
    setting = Setting(ProgramPlan(source, (1, 2, 3)), windows=(3, 1, 2))
    data = real_batches(8, 6, WIDTH)
    assert_equal(train_on_threads(regression(), setting, data), oracle(regression(), setting, data))


@pytest.mark.parametrize("name", ["2bw", "2bw-fresh"])
def test_a_program_of_its_own_length_trains_window_after_window(name: str) -> None:
    setting = Setting(ProgramPlan(source_of(shaped(name, 3)), (1, 3)), windows=(3, 3))
    data = real_batches(8, 6, WIDTH)
    assert_equal(train_on_threads(regression(), setting, data), oracle(regression(), setting, data))


def test_the_engine_says_what_it_does_not_run() -> None:
    model, data = regression(), real_batches(8, 4, WIDTH)

    def pipeline_of(program: Program | ProgramPlan) -> Pipeline:
        return Pipeline(model.graph, program, weights=model.given, optimizer="sgd")

    with pytest.raises(BiremeError, match="does not run pipedream, whose stages step after"):
        pipeline_of(generate("pipedream", num_stages=1, num_microbatches=2))
    alone = generate("2bw", num_stages=1, num_microbatches=2, num_batches=3)
    with pytest.raises(BiremeError, match=r"The cuts \[1\] make 2 stages, and 2bw is a program of 1"):
        pipeline_of(ProgramPlan(source_of(alone), (1,)))
    pipeline = pipeline_of(alone)
    with pytest.raises(BiremeError, match="each training is of just as many, and there are more"):
        list(pipeline.train(data))
    pipeline.close()


def test_stages_of_a_rank_end_their_batches_together() -> None:
    """A batch's norm and its verdict are of all stages of a rank, so none may run ahead with updates."""
    sound = generate("2bw", num_stages=2, num_microbatches=2, num_batches=3, stages_per_rank=2)
    (track,) = sound.tracks
    late = [step for step in track if step.kind is Kind.UPDATE and step.stage == 1]
    order = (*(step for step in track if step not in late), *late)
    program = replace(sound, tracks=(Track(order, (), 0, (), track.versions_per_batch),))
    source = source_like(program, lambda _num_batches, _first: program, num_batches=3)
    with pytest.raises(BiremeError, match=r"updates stage 0 from batch 1 before stage 1, .* from batch 0"):
        Pipeline(regression().graph, ProgramPlan(source), weights=regression().given, optimizer="sgd")


def test_stages_without_cuts_get_equal_shares_of_the_arithmetic() -> None:
    assert even_cuts([1, 1, 1, 1, 4], 2) == (4,)
    assert even_cuts([4, 1, 1, 1, 1, 4], 3) == (1, 5)
    assert even_cuts([5], 1) == ()
    with pytest.raises(BiremeError, match="2 units, which are too few for 3 stages"):
        even_cuts([1, 1], 3)
    model = regression()
    program = generate("1f1b", num_stages=2, num_microbatches=2, stages_per_rank=2)
    pipeline = Pipeline(model.graph, program, weights=model.given, optimizer="sgd")
    assert pipeline.plan.cuts is not None
    assert len(pipeline.plan.cuts) == 1
    assert [result.batch for result in pipeline.train(real_batches(8, 3, WIDTH))] == [0, 1, 2]
    pipeline.close()
