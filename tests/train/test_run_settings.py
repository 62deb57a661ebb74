"""`--set table.key=value`: read as TOML or as a string, put before the file, and refused by name."""

from pathlib import Path

import pytest
from hypothesis import given

from bireme.documents import toml_value
from bireme.errors import BiremeError
from bireme.train.folder import tell_defaults
from bireme.train.run_file import RunFile, load_run_file
from bireme.train.run_file.text import synonyms
from tests.support.extent import examples
from tests.support.run_files import KEYS, NAMES, loaded, run_files, said, sentence, value_at


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
        ("plan.pin=0=host/gpu1", "plan", "pin", ("0=host/gpu1",)),
        ('plan.together=["0..1", "4..5"]', "plan", "together", ("0..1", "4..5")),
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
        (
            "xyz=5",
            "Known are: balance, checkpoint, cluster, data, elastic, export, format, links, log, memory, "
            "model, plan, sync, training.",
        ),
        ("training=5", "names a whole table. Set one of its keys, such as training.steps=…."),
        ("training.steps", "is not of the form table.key=value, such as model.source=…."),
        ("=5", "The key before the equals sign is missing."),
        ("training.steps=abc", ': training.steps is "abc"; it must be a valid integer.'),
        ("training.steps=0", ": training.steps is 0; it must be greater than or equal to 1."),
        ("plan.penalties.fresh=0", ": plan.penalties.fresh is 0; it must be greater than or equal to 1."),
        ("sync.codec=lowrank:x", ": sync.codec: "),
        ("training.gradient=principal", ": training.gradient: Gradients cannot be kept as 'principal'."),
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


# --- names that other programs have ---------------------------------------------------------------------

NEWCOMERS = {
    "training.lr": "training.learning_rate",
    "data.seq_len": "data.length",
    "data.max_length": "data.length",
    "data.block_size": "data.length",
    "bf16": "model.dtype",
    "training.mixed_precision": "model.dtype",
    "plan.dp": "plan.width",
    "plan.pp": "plan.depth",
    "plan.tp": "Bireme gives each device whole layers",
    "training.fsdp": "Bireme gives each device whole layers",
    "deepspeed.zero_stage": "Bireme gives each device whole layers",
    "training.gradient_accumulation": "plan.microbatches",
    "training.gradient-accumulation-steps": "plan.microbatches",
    "training.max_steps": "training.steps",
    "training.num_epochs": "training.epochs",
    "num_train_epochs": "training.epochs",
    "training.per_device_batch_size": "plan.micro_batch",
    "model.weight_decay": "training.weight_decay",
    "plan.warmup_steps": "training.warmup_steps",
    "training.max_grad_norm": "training.clip_norm",
    "data.sequence_length": "data.length",
    "learning_rate": "training.learning_rate",
    "training.save_steps": "checkpoint.every_steps",
    "training.eval_steps": "training.evaluate_every",
    "evaluation.every": "training.evaluate_every",
    "evaluate.every": "training.evaluate_every",
    "training.logging_steps": "log.every_steps",
    "output_dir": "log.folder",
    "model.model_name_or_path": "model.source",
    "data.dataset_name": "data.source",
    "training.num_workers": "data.num_workers",
    "cluster.num_workers": "cluster.workers",
    "training.optim": "training.optimizer",
    "training.lr_scheduler_type": "training.schedule",
    "cluster.gpus": "cluster.workers",
    "cluster.devices": "cluster.workers",
    "cluster.nodes": "cluster.source",
    "training.resume": "bireme resume RUN",
}


def test_names_that_newcomers_type_get_the_right_key(tmp_path: Path) -> None:
    """Of 26 that were tried, 19 were answered with a key that has nothing to do with them."""
    for typed, expected in NEWCOMERS.items():
        assert expected in said(f"{typed}=1"), typed
        table, _, name = typed.rpartition(".")
        assert expected in sentence(f"[{table}]\n{name} = 1" if table else f"{name} = 1", tmp_path), typed


def test_every_synonym_is_listed_once_and_leads_to_keys_that_exist() -> None:
    names = [name for one in synonyms() for name in one.names]
    assert len(names) == len(set(names))
    for one in synonyms():
        assert set(one.keys) <= set(NAMES), one
        assert one.keys or one.more, one


@pytest.mark.parametrize(
    ("text", "table", "key", "value"),
    [
        ("plan.schedule=2BW", "plan", "schedule", "2bw"),
        ("plan.schedule=1F1B", "plan", "schedule", "1f1b"),
        ("plan.recompute=where_needed", "plan", "recompute", "where-needed"),
        ("model.dtype=bf16", "model", "dtype", "bfloat16"),
        ("training.optimizer=AdamW", "training", "optimizer", "adamw"),
    ],
)
def test_words_may_be_in_other_letters(text: str, table: str, key: str, value: str) -> None:
    assert value_at(load_run_file(None, [text]), table, key) == value


def test_a_run_file_of_another_kind_is_answered_with_the_command_that_writes_one(tmp_path: Path) -> None:
    with pytest.raises(BiremeError, match=r"run files are TOML. `bireme init config\.toml` writes one"):
        load_run_file(tmp_path / "config.yaml")


def test_a_run_file_without_a_model_and_data_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty file trained the demonstration, and no line said so."""
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 3\n")
    for sets in (["model.source=gpt:layers=2"], ["data.source=texts"]):
        tell_defaults(load_run_file(path, sets), path)
    tell_defaults(load_run_file(), None)
    assert not capsys.readouterr().err
    tell_defaults(load_run_file(path), path)
    assert "no data.source: this trains the demonstration, gpt:layers=4," in capsys.readouterr().err
