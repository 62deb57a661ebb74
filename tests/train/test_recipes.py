"""Recipes of `bireme init`: short, explained, equal to the examples, and each of them trains."""

import os
import pty
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from bireme.cli.init import PURPOSES
from bireme.train.run_file import load_run_file
from bireme.train.run_file.recipes import RECIPES
from tests.support.command import bireme, with_sets
from tests.support.copies import Copy
from tests.support.extent import TRY_ALL
from tests.support.patience import patience_s
from tests.support.tiny_project import make_project

EXAMPLES = Path(__file__).parents[2] / "examples" / "recipes"
Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.slow  # transformers makes the model


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


@pytest.fixture
def here(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with the project in it, in which commands run."""
    for path in project.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def example(name: str) -> str:
    return (EXAMPLES / f"{name}.toml").read_text(encoding="utf-8")


def test_the_help_names_every_recipe() -> None:
    assert PURPOSES.split(", ") == [*RECIPES]


@pytest.mark.parametrize("name", RECIPES)
def test_an_example_is_what_its_command_writes(name: str, here: Path, capsys: Capture) -> None:
    pytest.importorskip("transformers")
    command = re.search(r"^# Written by: bireme (init .*)$", example(name), flags=re.MULTILINE)
    assert command is not None
    result = bireme(capsys, *shlex.split(command[1]))
    assert result.status == 0, result.err
    text = (here / f"{name}.toml").read_text(encoding="utf-8")
    assert text == example(name)
    assert text in result.out
    keys = [line for line in text.splitlines() if "=" in line and not line.startswith(("#", "format"))]
    assert 7 <= len(keys) <= 15
    assert all("  # " in line for line in keys), "every key is explained"
    assert max(map(len, text.splitlines())) <= 116
    assert load_run_file(Path(f"{name}.toml")).training.batch_size in (8, 32)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name for name in RECIPES if name == "lora" or (TRY_ALL and name != "machines")]
)
def test_an_example_trains(name: str, here: Path, capsys: Capture) -> None:
    pytest.importorskip("peft")
    sets = ["training.steps=4", "cluster.device=cpu", "log.name=run", "log.sample_tokens=0"]
    if name == "pretrain":
        sets += ["model.source=gpt:layers=2,width=16,heads=2,vocab=257,context=32", "data.length=32"]
    result = bireme(capsys, "train", str(EXAMPLES / f"{name}.toml"), *with_sets(sets), "--json")
    assert result.status == 0, result.err
    assert result.document["steps"] == 4
    assert (here / "runs" / "run" / "model").is_dir()


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "own-model"])
def test_a_recipe_without_model_and_data_is_a_file_to_fill_in(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "run.toml"
    assert bireme(capsys, "init", str(path), "--for", name).status == 0
    run = load_run_file(path)
    assert run.data.source is not None
    assert run.data.source.startswith("path/to/")
    if RECIPES[name].starts_from_weights:
        assert not {"dtype", "length", "learning_rate"} & set(re.findall(r"^(\w+) =", path.read_text(), re.M))


def test_a_folder_with_weights_is_pretrained_from_new_ones(here: Path, capsys: Capture) -> None:
    words = ["init", "--for", "pretrain", "--model", "models/llama", "--data", "data/texts"]
    assert bireme(capsys, *words).status == 0
    found = tomllib.loads((here / "run.toml").read_text())
    assert found["model"] == {"source": "hf:models/llama", "from_scratch": True}
    assert (found["training"]["learning_rate"], found["training"]["warmup_fraction"]) == (3e-3, 0.1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--for lora --model nowhere", "nowhere is no folder. Name a folder of a transformers model"),
        ("--for lora --model data", "data has no config.json."),
        ("--for lora --model model.py:model", "which is for --for own-model"),
        ("--for own-model --model model.py:modl", "Did you mean 'model'?"),
        ("--for lora --data nowhere.jsonl", "There is no file or folder 'nowhere.jsonl'"),
        ("--for lra", "There is no recipe 'lra'. Did you mean 'lora'?"),
        ("--model models/llama", "--model needs a purpose. Add --for with one of: finetune, lora,"),
        ("--all --for lora", "--all and --for exclude each other."),
        ("--from a.yml --data x", "--from and --data exclude each other."),
    ],
)
def test_a_wrong_option_is_one_sentence_and_writes_nothing(
    words: str, sentence: str, here: Path, capsys: Capture
) -> None:
    result = bireme(capsys, "init", *shlex.split(words))
    assert result.status == 2
    assert sentence in result.err
    assert result.err.count("\n") == 1
    assert not (here / "run.toml").exists()


def test_a_folder_without_weights_is_not_fine_tuned(here: Path, capsys: Capture) -> None:
    (here / "empty").mkdir()
    (here / "empty" / "config.json").write_text("{}")
    result = bireme(capsys, "init", "--for", "lora", "--model", "empty")
    assert result.status == 2
    assert "empty has no weights to start from. Use --for pretrain to train new ones." in result.err


def test_json_says_what_to_run_for_machines(here: Path, capsys: Capture) -> None:
    document = bireme(capsys, "init", "m.toml", "--for", "machines", "--json").document
    assert document == {
        "path": "m.toml",
        "replaced": False,
        "next": "bireme coordinate m.toml --machines 2",
    }


def in_terminal(folder: Path, answer: Callable[[str], str]) -> tuple[int, str]:
    """`bireme init` at a terminal; `answer` gets each question and what was printed before."""
    own, other = pty.openpty()
    process = Copy(["-m", "bireme", "init"], folder, first=partial(_at_terminal, os.ttyname(other)))
    try:
        said = os.read(own, 4096).decode()
        os.close(other)  # the process has opened it
        while True:
            if said.endswith(": "):
                os.write(own, f"{answer(said)}\n".encode())
                said += "\n"
            try:
                said += os.read(own, 4096).decode()
            except OSError:  # how Linux says that the other end is closed
                break
        return process.wait(patience_s()), said
    finally:
        process.close()
        os.close(own)


def _at_terminal(name: str) -> None:
    terminal = os.open(name, os.O_RDWR)
    for number in range(3):
        os.dup2(terminal, number)
    os.close(terminal)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of Unix")
def test_at_a_terminal_it_asks_three_questions_again_until_the_answer_is_right(here: Path) -> None:
    answers = iter(["pretrain", "nowhere", "", "data/texts"])
    status, said = in_terminal(here, lambda _said: next(answers))
    assert status == 0, said
    assert "nowhere is no folder." in said
    assert said.count("Which model?") == 2
    assert tomllib.loads((here / "run.toml").read_text())["training"]["steps"] == 2000
