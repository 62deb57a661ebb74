"""Learning-rate schedules: they rise to one, fall to their end, and depend on the batch alone."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import BiremeError
from bireme.train.folder import RunFolder
from bireme.train.resume_checks import check_rate
from bireme.train.run_file import RunFile, Training
from bireme.train.run_file.tables import rate_factor

FALLING = ("linear", "cosine", "wsd")
TINY = 1e-12
"""What rounding may do to a curve that should not rise."""


@st.composite
def trainings(draw: st.DrawFn, schedules: tuple[str, ...] = ("constant", *FALLING)) -> Training:
    steps = draw(st.integers(1, 400))
    given: dict[str, Any] = {
        "steps": steps,
        "schedule": draw(st.sampled_from(schedules)),
        "final_fraction": draw(st.sampled_from([0.0, 0.1, 1.0]) | st.floats(0, 1)),
        "decay_fraction": draw(st.floats(0.01, 1)),
    }
    if draw(st.booleans()):
        given["warmup_steps"] = draw(st.integers(0, steps))
    else:
        given["warmup_fraction"] = draw(st.floats(0, 1))
    return Training(**given)


def factors(training: Training) -> list[float]:
    factor = rate_factor(training)
    return [factor(batch) for batch in range(training.steps)]


@given(training=trainings())
def test_warm_up_rises_in_equal_parts_until_it_reaches_one(training: Training) -> None:
    warmup = training.num_warmup_steps
    assert factors(training)[:warmup] == [(batch + 1) / warmup for batch in range(warmup)]


@given(training=trainings())
def test_the_factor_never_rises_after_warm_up_and_stays_between_its_end_and_one(training: Training) -> None:
    after = factors(training)[max(training.num_warmup_steps - 1, 0) :]
    assert after[0] == 1.0
    assert all(later <= earlier + TINY for earlier, later in itertools.pairwise(after))
    assert min(after) >= training.final_fraction - TINY


@given(training=trainings(FALLING))
def test_the_last_batch_has_just_the_fraction_wherever_there_is_room_to_fall(training: Training) -> None:
    has_room = training.steps > max(training.num_warmup_steps, 1)
    assert factors(training)[-1] == (training.final_fraction if has_room else 1.0)


@given(training=trainings(), beyond=st.integers(0, 1000))
def test_after_the_last_batch_the_factor_stays(training: Training, beyond: int) -> None:
    factor = rate_factor(training)
    assert factor(training.steps + beyond) == factor(training.steps - 1)


@given(training=trainings(), data=st.data())
def test_a_run_that_goes_on_has_the_factors_of_one_that_was_not_interrupted(
    training: Training, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, training.steps - 1))
    resumed = rate_factor(training)
    assert [resumed(batch) for batch in range(begin, training.steps)] == factors(training)[begin:]


@given(training=trainings(("constant",)))
def test_a_constant_rate_is_one_from_warm_up_on(training: Training) -> None:
    assert set(factors(training)[training.num_warmup_steps :]) <= {1.0}


def test_wsd_stays_at_one_until_its_last_part() -> None:
    training = Training(steps=100, schedule="wsd", warmup_steps=10, decay_fraction=0.2, final_fraction=0.0)
    found = factors(training)
    assert found[9:80] == [1.0] * 71
    assert found[80:] == pytest.approx([(19 - place) / 20 for place in range(20)])


def test_linear_and_cosine_meet_halfway() -> None:
    for schedule in ("linear", "cosine"):
        training = Training.model_validate(
            {"steps": 101, "schedule": schedule, "warmup_steps": 0, "final_fraction": 0.2}
        )
        assert rate_factor(training)(50) == pytest.approx(0.6)


@pytest.mark.parametrize("schedule", ["constant", *FALLING])
def test_a_run_of_one_step_takes_it_at_the_full_rate(schedule: str) -> None:
    assert factors(Training.model_validate({"steps": 1, "schedule": schedule})) == [1.0]


def test_the_demonstration_warms_up_over_a_tenth_of_its_steps() -> None:
    training = RunFile().training
    assert training.num_warmup_steps == 30
    assert factors(training)[29:31] == [1.0, pytest.approx(1.0, abs=1e-3)]


# --- a run that is made longer

LONGER = Training(steps=60, warmup_steps=5, schedule_steps=20)


def test_after_its_schedule_a_run_holds_the_last_rate_or_begins_the_schedule_again() -> None:
    first = factors(Training(steps=20, warmup_steps=5))
    held = factors(LONGER)
    assert held[:20] == first
    assert held[20:] == [first[-1]] * 40
    again = factors(LONGER.model_copy(update={"after_schedule": "restart"}))
    assert again == first + factors(Training(steps=40, warmup_steps=5))


def test_a_warm_up_that_does_not_fit_into_the_steps_left_is_refused() -> None:
    table = {"steps": 22, "warmup_steps": 5, "schedule_steps": 20, "after_schedule": "restart"}
    with pytest.raises(BiremeError, match="there are 2 steps left, fewer than"):
        RunFile.model_validate({"training": table})


def told(tmp_path: Path, step: int, schedule: str, *sets: str) -> str:
    """What is said when a run of 20 steps goes on after `step`."""
    folder, said = RunFolder(tmp_path), list[str]()
    folder.write_run(RunFile.model_validate({"training": {"steps": 20, "schedule": schedule}}))
    check_rate(folder.load_run([f"training.{text}" for text in sets]), folder, step, said.append)
    return " ".join(said)


@pytest.mark.slow
def test_a_finished_run_is_not_made_longer_with_a_rate_that_jumps_unless_that_is_asked_for(
    tmp_path: Path,
) -> None:
    for schedule in ("cosine", "linear", "wsd"):
        with pytest.raises(BiremeError, match=r"ended at step 20, at 0\.0003") as refused:
            told(tmp_path, 20, schedule, "steps=40")
        assert "--set training.schedule_steps=20 keeps the rate at 0.0003" in str(refused.value)
        assert "--set training.after_schedule=restart" in str(refused.value)
        assert not told(tmp_path, 20, schedule, "steps=40", "schedule_steps=20")
        restarted = told(tmp_path, 20, schedule, "steps=60", "schedule_steps=20", "after_schedule=restart")
        assert restarted.endswith("the learning rate of the next step is 0.00075 and not 0.0003.")
        assert "and not 0.0003." in told(tmp_path, 20, schedule, "steps=40", "schedule_steps=40")
    assert not told(tmp_path, 20, "constant", "steps=40")


def test_a_run_on_its_way_is_told_of_another_rate_where_there_is_one(tmp_path: Path) -> None:
    assert "the learning rate of the next step is" in told(tmp_path, 10, "cosine", "steps=40")
    assert not told(tmp_path, 10, "wsd", "steps=40")
    assert not told(tmp_path, 10, "cosine", "clip_norm=2")
    assert not told(tmp_path, 0, "cosine", "steps=40")
