"""`bireme simulate` of a run: the plan that it would train with, from a run file, settings and a profile."""

import json
from pathlib import Path

import pytest

from bireme.profile.profile import save_profile
from tests.support.command import bireme, with_sets
from tests.support.hand_plans import tiny_profile

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run file and a profile of its model."""
    monkeypatch.chdir(tmp_path)
    save_profile(tiny_profile(), tmp_path / "profile.json")
    lines = (
        "training = {batch_size = 8}",
        'cluster = {workers = 4, device = "cpu"}',
        'plan = {schedule = "1f1b", depth = 2, width = 1, micro_batch = 2}',
    )
    (tmp_path / "run.toml").write_text("\n".join(lines))
    return tmp_path


def test_the_plan_of_a_run_file_is_simulated(capsys: Capture) -> None:
    words = ["run.toml", "--profile", "profile.json", "--json"]
    planned = bireme(capsys, "plan", *words).document
    found = bireme(capsys, "simulate", *words).document
    shape = (found["schedule"], found["num_stages"], found["num_microbatches"], found["num_batches"])
    assert shape == ("1f1b", 2, 4, 10)
    assert found["steady_batch_s"] == pytest.approx(planned["predicted_batch_s"])


def test_settings_come_after_the_run_file(capsys: Capture) -> None:
    words = with_sets(
        "simulate run.toml plan.schedule=2bw plan.depth=3 --profile profile.json --json".split()
    )
    found = bireme(capsys, *words, "--batches", "3").document
    assert (found["schedule"], found["num_stages"], found["num_batches"]) == ("2bw", 3, 3)


def test_keys_of_a_run_file_shape_a_schedule_with_given_costs(capsys: Capture) -> None:
    """No model is loaded, and no batch size has to fit."""
    words = with_sets("simulate run.toml plan.microbatches=5 --forward-s 0.5 --json".split())
    found = bireme(capsys, *words).document
    assert (found["schedule"], found["num_stages"], found["num_microbatches"]) == ("1f1b", 2, 5)


def test_a_trace_and_a_picture_of_a_run_are_written(capsys: Capture, folder: Path) -> None:
    words = ["simulate", "run.toml", "--profile", "profile.json", "--trace", "t.json", "--picture", "p.svg"]
    assert "Wrote t.json." in bireme(capsys, *words).out
    assert json.loads((folder / "t.json").read_text())["traceEvents"]
    assert (folder / "p.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("run.toml --profile profile.json --lookahead 2", "leave out --lookahead"),
        ("run.toml --profile profile.json --link-latency-s 1", "leave out --link-latency-s"),
        (
            "run.toml --profile profile.json --forward-s 1",
            "Given costs stand for a model: leave out",
        ),
        ("run.toml --profile profile.json plan.dept=3", "Did you mean 'plan.depth'?"),
        (
            "run.toml --profile profile.json plan.depth=9",
            "plan.depth times plan.width is 9, but the run has 4 devices",
        ),
        ("run.toml --profile profile.json --batches 0", "at least one batch, not 0"),
        ("none.toml", "There is no file none.toml"),
        ("--stages 8", "has no option --stages. Did you mean 'plan.depth'?"),
        ("--recompute", "Did you mean 'plan.recompute'"),
    ],
)
def test_wrong_words_get_one_sentence_and_status_2(capsys: Capture, words: str, sentence: str) -> None:
    result = bireme(capsys, *with_sets(["simulate", *words.split()]))
    assert result.status == 2
    assert sentence in result.err
    assert result.err.count("\n") == 1
