"""`run.toml`: what is written is read back, nothing is the demonstration, every mistake is one sentence."""

import json
import pickle
import re
import tomllib
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from pydantic import ValidationError

from bireme.documents import toml_value
from bireme.errors import BiremeError
from bireme.model.sources import load_source
from bireme.profile.optimizers import OPTIMIZERS
from bireme.schedule.catalogue import SCHEDULES
from bireme.schedule.program import Rule
from bireme.train.folder import RunFolder
from bireme.train.run_file import (
    RunFile,
    Training,
    commented_toml,
    load_run_file,
    reference_markdown,
    to_toml,
    with_absolute_paths,
    with_model_defaults,
)
from tests.support.extent import examples
from tests.support.run_files import KEYS, NAMES, loaded, run_files, said, sentence, value_at

ROOT = Path(__file__).parents[2]
BOUNDED = examples(30)

BESIDE = {
    "sync.sites": ["sync.mode=diloco"],
    "memory.disk": ["memory.device=6GB"],
    "model.loss": ["model.source=hf:folder"],
    "model.lora.alpha": ["model.lora.rank=8"],
    "training.gradient_of": ["training.gradient=principal:8"],
    "training.momentum": ["training.optimizer=sgd"],
    "training.rest_learning_rate": ["training.optimizer=muon"],
}
"""What must be otherwise for a key to mean anything."""
APART = ["memory.device=1GB", "memory.updates=apart"]

# --- any run file ----------------------------------------------------------------------------------------


@BOUNDED
@given(run=run_files())
def test_what_is_written_is_read_back(run: RunFile, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = to_toml(run)
    again = loaded(text, tmp_path_factory.mktemp("runs"))
    assert again == run
    assert to_toml(again) == text


@BOUNDED
@given(run=run_files())
def test_a_complete_file_names_every_key_and_needs_no_default(run: RunFile) -> None:
    text = to_toml(run)
    plain = tomllib.loads(text)
    for table, key in KEYS:
        place = plain
        for name in table.split("."):
            place = place[name]
        if value_at(run, table, key.name) is None:
            assert key.name not in place
            assert f"# {key.name} is not set\n" in text
        else:
            assert key.name in place


def test_a_run_goes_to_another_process_as_it_is() -> None:
    run = load_run_file(None, ["training.steps=7", "data.evaluation_source=x"])
    assert pickle.loads(pickle.dumps(run)) == run


def test_a_run_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunFile().training.steps = 3


# --- defaults --------------------------------------------------------------------------------------------


def test_an_empty_file_is_the_demonstration(tmp_path: Path) -> None:
    run = loaded("", tmp_path)
    assert run == RunFile() == load_run_file()
    assert (run.data.source, run.data.tokenizer, run.training.steps) == ("stdlib", "auto", 300)


def test_a_folder_with_weights_brings_the_defaults_of_fine_tuning(tmp_path: Path) -> None:
    """Such a model was trained at 3e-3 in float32, on 128 bytes a sample."""
    folder = tmp_path / "llama"
    folder.mkdir()
    config = {"max_position_embeddings": 4096, "torch_dtype": "bfloat16", "hidden_size": 4096}
    (folder / "config.json").write_text(json.dumps(config))

    def defaults(*sets: str) -> tuple[float, float | None, int, str]:
        run = load_run_file(None, [f"model.source=hf:{folder}", *sets])
        return (
            run.training.learning_rate,
            run.training.warmup_fraction,
            run.data.length,
            run.model.dtype,
        )

    assert defaults() == (1.9e-4, 0.1, 1024, "bfloat16"), "without weights there is nothing to tune"
    (folder / "model.safetensors").touch()
    assert defaults() == (2e-5, 0.03, 1024, "bfloat16")
    assert defaults("model.lora.rank=4") == (2e-4, 0.03, 1024, "bfloat16")
    assert defaults("model.from_scratch=true") == (1.9e-4, 0.1, 1024, "bfloat16")
    assert defaults("training.warmup_steps=5")[1] is None
    own = ("training.learning_rate=3e-3", "data.length=128", "model.dtype=float32")
    assert defaults(*own) == (3e-3, 0.03, 128, "float32"), "they are the usual defaults, but were asked for"
    run = load_run_file(None, [f"model.source=hf:{folder}"])
    assert "learning_rate = 2e-05\n" in to_toml(run)
    assert with_model_defaults(RunFile.model_validate({"model": {"source": f"hf:{folder}"}})) == run


@pytest.mark.parametrize(
    ("config", "kind", "expected"),
    [
        ({"dtype": "float16"}, "F32", "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "F32", "bfloat16"),
        ({"dtype": "float32"}, "BF16", "float32"),
        ({}, "F16", "bfloat16"),
        ({}, "F32", "float32"),
        ({}, "", "float32"),
    ],
)
def test_weights_of_two_bytes_compute_in_bfloat16(
    config: dict[str, object], kind: str, expected: str, tmp_path: Path
) -> None:
    """A Llama whose config.json says float16, or nothing, was tuned in float32."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensor = {"dtype": kind, "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({"__metadata__": {}, "w": tensor}).encode() if kind else b"{}"
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert load_run_file(None, [f"model.source=hf:{tmp_path}"]).model.dtype == expected


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"n_positions": 40}, 40),
        ({"max_position_embeddings": 514}, 512),
        ({"text_config": {"max_position_embeddings": 77}}, 77),
        ({"image_size": 224}, 128),
        ([], 128),
    ],
)
def test_samples_are_as_long_as_the_context_of_a_folder_s_model(
    config: object, length: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_run_file(None, [f"model.source=hf:{tmp_path}"]).data.length == length


def test_samples_are_as_long_as_the_context_of_the_built_in_model() -> None:
    sizes = "gpt:layers=1,width=8,heads=1,vocab=257,context"
    assert load_run_file(None, [f"model.source={sizes}=40"]).data.length == 40
    assert load_run_file(None, [f"model.source={sizes}=40", "data.length=20"]).data.length == 20
    assert load_run_file(None, ["model.source=hf:nowhere"]).data.length == RunFile().data.length == 128


@pytest.mark.slow
def test_the_demonstration_s_model_takes_its_samples_and_all_bytes() -> None:
    run = RunFile()
    source = load_source(run.model.source, length=run.data.length)
    assert source.example_inputs["input_ids"].shape[1] == run.data.length
    assert "vocab=257" in run.model.source


def test_every_default_is_a_value_that_may_be_given(tmp_path: Path) -> None:
    for table, key in KEYS:
        if key.default is not None:
            run = loaded(f"[{table}]\n{key.name} = {toml_value(key.default)}\n", tmp_path)
            assert run == RunFile()


def test_words_are_those_of_the_other_rooms() -> None:
    choices = {f"{table}.{key.name}": key.choices for table, key in KEYS}
    runnable = [name for name, schedule in SCHEDULES.items() if schedule.rule is not Rule.STASHED]
    assert sorted(choices["plan.schedule"]) == sorted(["auto", *runnable])
    assert sorted(choices["training.optimizer"]) == sorted(OPTIMIZERS)


# --- texts made of the tables ----------------------------------------------------------------------------


def uncommented(text: str, *, among: set[str]) -> str:
    """The file with the comment signs taken away from these keys."""
    table, lines = "", []
    for line in text.splitlines():
        if line.startswith("["):
            table = line.strip("[]")
        key = re.match(r"#(\w+) = ", line)
        lines.append(line[1:] if key and f"{table}.{key[1]}" in among else line)
    return "\n".join(lines)


def test_the_file_to_begin_with_is_the_demonstration_and_so_are_all_its_defaults(tmp_path: Path) -> None:
    text = commented_toml()
    assert loaded(text, tmp_path) == RunFile()
    defaults = {f"{table}.{key.name}" for table, key in KEYS if key.default is not None}
    assert loaded(uncommented(text, among=defaults), tmp_path) == RunFile()


@pytest.mark.slow
@pytest.mark.few(40)
@pytest.mark.parametrize("name", NAMES)
def test_any_one_key_of_the_file_to_begin_with_can_be_uncommented(name: str, tmp_path: Path) -> None:
    text = uncommented(commented_toml(), among={name})
    assert text != uncommented(commented_toml(), among=set())
    table, _, key = name.rpartition(".")
    assert value_at(loaded(text, tmp_path, *BESIDE.get(name, ())), table, key) is not None


def test_lines_of_the_file_to_begin_with_fit_a_screen() -> None:
    assert max(map(len, commented_toml().splitlines())) <= 108


def test_the_reference_is_up_to_date() -> None:
    remedy = (
        'Write it again: python -c "from bireme.train.run_file import reference_markdown as text; '
        "print(text(), end='')\" > docs/run-file.md"
    )
    assert (ROOT / "docs" / "run-file.md").read_text(encoding="utf-8") == reference_markdown(), remedy


def test_the_reference_s_examples_are_run_files(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```toml\n(.*?)^```", reference_markdown(), flags=re.MULTILINE | re.DOTALL)
    assert loaded(example, tmp_path) != RunFile()
    (command,) = re.findall(
        r"^\$ bireme train run.toml (--set .*)$", reference_markdown(), flags=re.MULTILINE
    )
    sets = re.findall(r"--set (\S+)", command)
    assert load_run_file(None, sets).training.steps == 500


# --- mistakes in a file ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[training]\nstep = 3", "run.toml has an unknown key 'training.step'. Did you mean 'steps'?"),
        ("[trainning]\nsteps = 3", "run.toml has an unknown key 'trainning'. Did you mean 'training'?"),
        (
            "[plan.penalties]\nfrsh = 2",
            "run.toml has an unknown key 'plan.penalties.frsh'. Did you mean 'fresh'?",
        ),
        ("data = 3", "run.toml: data is 3; it must be a table of keys."),
        ("[[training]]\nsteps = 3", 'run.toml: training is [{"steps": 3}]; it must be a table of keys.'),
        ('[training]\nsteps = "3"', 'run.toml: training.steps is "3"; it must be a valid integer.'),
        ("[training]\nsteps = 3.0", "run.toml: training.steps is 3.0; it must be a valid integer."),
        ("[training]\nsteps = 0", "run.toml: training.steps is 0; it must be greater than or equal to 1."),
        (
            "[training]\nlearning_rate = nan",
            "run.toml: training.learning_rate is NaN; it must be a finite number.",
        ),
        (
            "[training]\nbetas = [0.9]",
            "training.betas is [0.9]; it must be two numbers, such as [0.9, 0.95].",
        ),
        ("[training]\nbetas = [0.9, 1.0]", "training.betas[1] is 1.0; it must be less than 1."),
        ("[training]\nbetas = [0.9, true]", "training.betas[1] is true; it must be a valid number."),
        ("[plan]\nlookahead = 1", "plan.lookahead is 1; it must be a valid boolean."),
        ('[plan]\nschedule = "pipedream"', "it must be 'auto', 'sequential', 'gpipe', '1f1b',"),
        ('[log]\nname = "../up"', 'log.name is "../up"; it must be a plain name, without slashes.'),
        ('[log]\nname = ".."', 'log.name is ".."; it must be a plain name, without slashes.'),
        ('[data]\nsource = " "', 'data.source is " "; it must be a text that is not empty.'),
        (
            '[model]\nloss = "mean"',
            "it must be cross_entropy, l1, mse, or a function of your own as module:function.",
        ),
        ("[model]\ntrain = []", 'model.train is []; it must be texts such as ["a", "b"].'),
        ("[model]\nfreeze = [3]", "model.freeze[0] is 3; it must be a valid string."),
        ("format = 2", "run.toml: format is 2; it must be 1."),
        ("[model", "run.toml is not TOML:"),
    ],
)
def test_a_wrong_key_gets_one_sentence(text: str, expected: str, tmp_path: Path) -> None:
    assert expected in sentence(text, tmp_path)


def test_a_file_that_is_no_text_is_said_to_be_none(tmp_path: Path) -> None:
    """The message was Python's: 'utf-8' codec can't decode byte 0x89 in position 0."""
    image = tmp_path / "image.toml"
    image.write_bytes(b"format = 1\n\x89PNG")
    with pytest.raises(BiremeError, match=r"image\.toml is not a text in UTF-8: byte 12 is 0x89\. Name"):
        load_run_file(image)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BiremeError, match=r"There is no file .*none\.toml\. `bireme init .*none\.toml`"):
        load_run_file(tmp_path / "none.toml")
    with pytest.raises(BiremeError, match="is a folder, not a run file"):
        load_run_file(tmp_path)


# --- keys that contradict each other ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (
            ["training.steps=5", "training.warmup_steps=6"],
            "training.warmup_steps is 6, but training.steps is 5:",
        ),
        (["training.warmup_steps=6", "training.warmup_fraction=0.1"], "both set the length of the warm-up."),
        (["training.schedule=wsd", "training.decay_fraction=0.95"], "Warm-up takes 0.1 of all steps"),
        (["training.schedule=wsd", "training.warmup_steps=290"], "together they are more than 1."),
        (["training.rest_learning_rate=0.1"], 'training.optimizer is "adamw"'),
        (["training.momentum=0.5"], "which uses training.betas instead."),
        (
            ["data.evaluation_source=x", "data.evaluation_fraction=0.1"],
            "evaluation uses only one of them",
        ),
        (["model.loss=mse"], "the built-in GPT returns its loss itself."),
        (['model.train=["a"]', 'model.freeze=["b"]'], "one names what learns, the other what does not."),
        (["model.lora.rank=4", 'model.train=["a"]'], 'model.train is ["a"]: only the adapter learns.'),
        (["model.lora.merge=true"], "model.lora.merge is set, but model.lora.rank is not"),
        (["plan.file=p.json", "plan.depth=2"], "which is a whole plan, but plan.depth asks for a new one."),
        (["plan.file=p.json", "plan.penalties.fresh=2"], "but plan.penalties asks for a new one."),
        (["plan.file=p.json", "plan.synchronous=true"], "but plan.synchronous asks for a new one."),
        (["plan.microbatches=2", "plan.micro_batch=2"], "by their number or by their size."),
        (["plan.width=40"], "every replica needs a sample."),
        (
            ["plan.microbatches=5"],
            "plan.microbatches = 5 does not divide. Make the batch a multiple of 5, such as 35.",
        ),
        (
            ["plan.width=2", "plan.microbatches=6"],
            "plan.width = 2 times plan.microbatches = 6 does not divide.",
        ),
        (["plan.width=2", "plan.micro_batch=3"], "Make the batch a multiple of 6, such as 36."),
        (
            ["plan.synchronous=true", "plan.schedule=2bw"],
            'forbids plan.schedule = "2bw", whose update rule is delayed.',
        ),
        (["plan.synchronous=true", "plan.delay_warmup_steps=9"], "forbids delayed updates."),
        (
            ["plan.schedule=1f1b", "plan.delay_warmup_steps=9"],
            'plan.schedule is "1f1b", which delays no updates.',
        ),
        (["plan.delay_warmup_steps=301"], "updates would never be delayed."),
        (["plan.schedule=gpipe", "plan.delay_warmup_fraction=0.1"], "which delays no updates."),
        (
            ["plan.delay_warmup_steps=3", "plan.delay_warmup_fraction=0.1"],
            "both set when delayed updates begin. Leave out one of the two.",
        ),
        (["cluster.device=cpu", "cluster.backend=nccl"], "which joins only GPUs"),
        (["memory.host=1GB"], "memory.host is set, but memory.device is not, so nothing is offloaded."),
        (["memory.device=0"], "memory.device is 0, so there is no room for any stage."),
        (["memory.device=1GB", "memory.host=0"], "there is nothing to offload to."),
        (["memory.device=1GB", "memory.disk_bytes=5e9"], "but memory.disk names no folder."),
        ([*APART, "plan.schedule=2bw"], 'but plan.schedule is "2bw", which updates late'),
        ([*APART, "plan.width=2"], "but plan.width is 2, and gradients are summed"),
        (["memory.updates=apart"], "memory.updates is set, but memory.device is not"),
        (["plan.file=p.json", "memory.device=1GB"], "but memory.device asks for a new plan."),
        (["memory.shard=weights", "plan.schedule=2bw-fresh"], 'and memory.shard is "weights". A trial step'),
        (["sync.mode=quorum", "balance.mode=start"], "assigns samples by the speed of the replicas."),
        (["sync.mode=diloco", "balance.replan=true"], "balance.replan is true, but"),
        (["memory.shard=optimizer", "sync.mode=quorum"], "Set sync.sites, so that replicas of a site share"),
        (["sync.mode=quorum", "sync.sites=2", "plan.width=4"], "can die one by one. Leave out sync.sites"),
        (["memory.shard=optimizer", "sync.mode=diloco"], "Set sync.sites, so that replicas of a site share"),
        (["sync.mode=groups", "sync.sites=2", "plan.width=3"], "which 2 does not divide"),
        (["sync.lease_s=3"], 'which does not use it. Leave it out, or set sync.mode = "quorum" or "groups"'),
        (["sync.mode=groups", "sync.grace_s=2"], 'or set sync.mode = "quorum" or "diloco".'),
        (["sync.mode=diloco", "sync.compare_every=9"], 'or set sync.mode = "quorum".'),
        (["sync.compare_every=9"], "sync.compare_every is 9"),
    ],
)
def test_keys_that_contradict_each_other_get_one_sentence(sets: list[str], expected: str) -> None:
    found = said(*sets)
    assert expected in found
    assert all(f"--set {text}" in found for text in sets)


@pytest.mark.parametrize(
    "sets",
    [
        ["training.steps=5", "training.warmup_steps=5"],
        ["training.steps=1"],
        ["training.schedule=wsd", "training.warmup_fraction=0.1", "training.decay_fraction=0.9"],
        ["training.optimizer=muon", "training.momentum=0.5", "training.rest_learning_rate=0.1"],
        ["data.evaluation_source=x"],
        ["model.source=hf:folder", "model.loss=mse"],
        ["model.lora.rank=4", "model.lora.alpha=2", 'model.lora.targets=["q_proj", "v_proj"]'],
        ["plan.file=p.json", "plan.delay_warmup_steps=20"],
        ["plan.file=p.json", "plan.schedule=auto", "plan.delay_warmup_fraction=0.5"],
        ["plan.width=2", "plan.microbatches=16"],
        ["plan.schedule=2bw-fresh", "plan.delay_warmup_steps=300"],
        ["plan.schedule=1f1b", "plan.delay_warmup_steps=0"],
        ["cluster.workers=4", "plan.depth=2", "plan.width=2"],
        ["cluster.backend=nccl"],
        ["memory.device=auto", "memory.host=0", "memory.disk=/scratch", "memory.disk_bytes=200000000000"],
        ["plan.file=p.json", "memory.disk=/scratch"],
        [*APART, "plan.schedule=1f1b", "plan.width=1"],
    ],
)
def test_keys_that_go_together_are_taken(sets: list[str]) -> None:
    assert load_run_file(None, sets) != RunFile() or not sets


def test_a_run_made_in_python_is_checked_too() -> None:
    with pytest.raises(BiremeError, match=r"training\.warmup_steps is 6, but training\.steps is 5"):
        RunFile(training=Training(steps=5, warmup_steps=6))


@pytest.mark.parametrize("table", ["data", "training"])
def test_a_default_without_which_nothing_is_said_cannot_be_taken_away(table: str) -> None:
    """A file has no word for it, so the run would not be read back as it was."""
    key = {"data": "evaluation_fraction", "training": "warmup_fraction"}[table]
    with pytest.raises(BiremeError, match=rf"{table}\.{key} is None, and so is"):
        RunFile.model_validate({table: {key: None}})


def test_a_default_gives_way_to_the_key_that_says_it_otherwise() -> None:
    run = load_run_file(None, ["training.warmup_steps=7", "data.evaluation_source=x"])
    assert (run.training.warmup_fraction, run.training.num_warmup_steps) == (None, 7)
    assert run.data.evaluation_fraction is None
    assert RunFile().data.evaluation_fraction is not None


def test_functions_in_files_are_found_from_another_folder(tmp_path: Path) -> None:
    (tmp_path / "own.py").touch()
    (tmp_path / "weights").mkdir()
    asked = ["model.source=own.py:make", "model.loss=own.py:loss", "model.weights=weights"]
    run = with_absolute_paths(load_run_file(None, [*asked, "data.source=python:own.py:samples"]), tmp_path)
    assert run.model.source == f"{tmp_path}/own.py:make"
    assert run.model.loss == f"{tmp_path}/own.py:loss"
    assert run.model.weights == f"{tmp_path}/weights"
    assert run.data.source == f"python:{tmp_path}/own.py:samples"


def test_paths_have_no_dots_in_them_unless_a_link_would_then_lead_elsewhere(tmp_path: Path) -> None:
    """They are in messages, where nobody wants to read `a/../b`."""
    here = tmp_path / "here"
    for folder in (here, tmp_path / "texts", tmp_path / "away" / "inner", tmp_path / "away" / "texts"):
        folder.mkdir(parents=True)
    (here / "link").symlink_to(tmp_path / "away" / "inner")
    run = with_absolute_paths(load_run_file(None, ["data.source=../texts", "log.folder=./a/../runs"]), here)
    assert (run.data.source, run.log.folder) == (str(tmp_path / "texts"), str(here / "runs"))
    linked = with_absolute_paths(load_run_file(None, ["data.source=link/../texts"]), here)
    assert linked.data.source == str(here / "link" / ".." / "texts")


# --- epochs ----------------------------------------------------------------------------------------------


def test_epochs_are_instead_of_steps_and_a_setting_replaces_the_other_one(tmp_path: Path) -> None:
    run = loaded("[training]\nepochs = 2.5\nbatch_size = 10", tmp_path)
    assert value_at(run, "training", "steps") is None
    assert run.training.epochs == 2.5
    assert loaded(to_toml(run), tmp_path) == run
    assert run.counted(33).training.steps == 9
    assert run.counted(32).training.steps == 8
    assert run.counted(1).training.steps == 1
    assert run.counted(32).training.epochs is None
    again = loaded("[training]\nepochs = 2.5", tmp_path, "training.steps=7")
    assert (again.training.steps, again.training.epochs) == (7, None)
    assert load_run_file(None, ["training.steps=7", "training.epochs=2"]).training.epochs == 2
    thirds = load_run_file(None, ["training.epochs=0.1", "training.batch_size=1"])
    assert thirds.counted(30).training.steps == 3, "and not 4, which a rounded product would give"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[training]\nsteps = 3\nepochs = 1", "training.epochs is 1, but training.steps is 3. Leave out"),
        (
            '[training]\nepochs = 1\n[[data.mixture]]\nsource = "x"',
            "data.mixture takes its sources in turns. Set training.steps instead.",
        ),
        ('[training]\nepochs = 1\n[data.private]\na = "x"', "data.private names samples that other servers"),
        ('[training]\nepochs = 1\n[balance]\nbatch = "grow"', 'balance.batch is "grow"'),
        ("[training]\nepochs = 1\n[plan]\nlargest_batch = 64", "plan.largest_batch lets the planner"),
    ],
)
def test_epochs_are_refused_where_samples_are_not_counted_before(
    text: str, expected: str, tmp_path: Path
) -> None:
    assert expected in sentence(text, tmp_path)


def test_what_steps_must_be_is_checked_when_epochs_are_counted() -> None:
    run = load_run_file(None, ["training.epochs=1", "training.warmup_steps=6"])
    with pytest.raises(BiremeError, match=r"warmup_steps is 6, but training\.steps is 2"):
        run.counted(64)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("hf:/models/a-long-way/to/the/models/Llama-3.2", "llama-3-2"),
        ("gpt:layers=4,width=8", "gpt-layers-4"),
        ("own/model.py:made", "model-py-made"),
    ],
)
def test_a_run_is_named_by_its_date_and_the_last_part_of_its_model(source: str, name: str) -> None:
    """The first letters of a long path named none."""
    run = load_run_file(None, [f"model.source={source}"])
    assert RunFolder.named(run, datetime(2026, 11, 28, 7, 15)).path == Path(f"runs/20261128-071500-{name}")
