"""`--set table.key=value`: read as TOML or as a string, put before the file, and refused by name."""

from pathlib import Path

import pytest
from hypothesis import given

from bireme.train.run_file import RunFile, load_run_file
from bireme.train.run_file.text import toml_value
from tests.support.extent import examples
from tests.support.run_files import KEYS, loaded, run_files, said, sentence, value_at


@examples(30)
@given(run=run_files())
def test_settings_alone_make_any_run(run: RunFile) -> None:
    """Those keys that are not set give way to no other, so they need no setting."""
    pairs = [(f"{table}.{key.name}", value_at(run, table, key.name)) for table, key in KEYS]
    sets = [f"{name}={toml_value(value)}" for name, value in pairs if value is not None]
    assert load_run_file(None, sets) == run


@pytest.mark.parametrize(
    ("text", "table", "key", "value"),
    [
        ("training.steps=500", "training", "steps", 500),
        ("training.steps = 5_000", "training", "steps", 5000),
        ("training.learning_rate=1e-4", "training", "learning_rate", 1e-4),
        ("training.learning_rate=1", "training", "learning_rate", 1.0),
        ("training.betas=[0.8, 0.9]", "training", "betas", (0.8, 0.9)),
        ("plan.schedule=2bw", "plan", "schedule", "2bw"),
        ('plan.schedule="2bw"', "plan", "schedule", "2bw"),
        ("plan.penalties.fresh=2", "plan.penalties", "fresh", 2.0),
        ("plan.lookahead=false", "plan", "lookahead", False),
        ("model.source=gpt:layers=2,width=64", "model", "source", "gpt:layers=2,width=64"),
        ("log.prompt=''", "log", "prompt", ""),
        ("log.prompt=one, two # three", "log", "prompt", "one, two # three"),
        ("log.prompt=1, y = 2", "log", "prompt", "1, y = 2"),
        ("log.prompt='1}'", "log", "prompt", "1}"),
        ("log.prompt=]", "log", "prompt", "]"),
        ("log.name=2026-11-21", "log", "name", "2026-11-21"),
    ],
)
def test_a_setting_is_read_as_toml_or_else_as_a_string(
    text: str, table: str, key: str, value: object
) -> None:
    found = value_at(load_run_file(None, [text]), table, key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training.step=5", "has an unknown key 'training.step'. Did you mean 'training.steps'?"),
        ("plan.steps=5", "has an unknown key 'plan.steps'. Did you mean 'training.steps'?"),
        ("steps=5", "Did you mean 'training.steps'?"),
        ("seed=5", "Did you mean 'model.seed' or 'data.seed' or 'training.seed'?"),
        ("trainin.stps=5", "Did you mean 'training'?"),
        ("plan.penalties.frsh=2", "Did you mean 'plan.penalties.fresh'?"),
        ("lr=5", "Known are: checkpoint, cluster, data, export, format, log, model, plan, training."),
        ("training=5", "is for a whole table. Set a key of it, such as training.steps=…."),
        ("training.steps", "is not of the form table.key=value, such as model.source=…."),
        ("=5", "is not of the form table.key=value"),
        ("training.steps=abc", ': training.steps is "abc"; it must be a valid integer.'),
        ("training.steps=0", ": training.steps is 0; it must be greater than or equal to 1."),
        ("plan.penalties.fresh=0", ": plan.penalties.fresh is 0; it must be greater than or equal to 1."),
        ("format=2", ": format is 2; it must be 1."),
    ],
)
def test_a_wrong_setting_gets_the_sentence_of_a_file_and_is_named(text: str, expected: str) -> None:
    found = said("training.steps=9", text)
    assert found.startswith(f"--set {text}")
    assert expected in found


def test_bytes_of_the_command_line_that_are_no_text_are_refused() -> None:
    assert said("log.prompt=\udc80").startswith("--set 'log.prompt=\\udc80' is not UTF-8.")


def test_a_setting_goes_before_the_file_and_the_last_one_before_all(tmp_path: Path) -> None:
    run = loaded("[training]\nsteps = 3\nbatch_size = 4", tmp_path, "training.steps=5", "training.steps=6")
    assert (run.training.steps, run.training.batch_size) == (6, 4)


def test_an_empty_setting_takes_the_key_out_of_the_file(tmp_path: Path) -> None:
    text = '[plan]\ndepth = 2\n[data]\nevaluation_source = "x"\n[plan.penalties]\nfresh = 3.0'
    run = loaded(
        text, tmp_path, "plan.depth=", "data.evaluation_source=", "plan.penalties.fresh=", "log.name="
    )
    assert run == RunFile()


def test_a_setting_can_put_right_what_a_file_contradicts(tmp_path: Path) -> None:
    text = "[training]\nsteps = 5\nwarmup_steps = 6"
    assert "run.toml: training.warmup_steps is 6" in sentence(text, tmp_path)
    assert loaded(text, tmp_path, "training.steps=6").training.steps == 6


def test_where_file_and_setting_contradict_each_other_both_are_named(tmp_path: Path) -> None:
    found = sentence("[training]\nsteps = 5", tmp_path, "training.warmup_steps=6")
    assert found.startswith("run.toml with --set training.warmup_steps=6: training.warmup_steps is 6")
