"""A run's folder stands on its own: moved, resumed from elsewhere, with its data elsewhere or replaced."""

import json
import shutil
from pathlib import Path

import pytest

from bireme.plan.plan_file import load_plan
from bireme.train.folder import RunFolder, load_asked
from bireme.train.run_file import load_run_file
from tests.support.command import bireme
from tests.support.training import TEXT, losses, metrics, settings, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 12


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run begins; all its paths are relative to it."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """A run of all steps, begun by a file with relative paths only."""
    path = write_run(home, "1f1b")
    path.write_text(path.read_text().replace(f"{home}/", ""))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(home)
        run = load_asked(Path(path.name), ())
        assert run.data.source == str(home / "texts")
        from bireme.train.launching import start
        from bireme.train.prepare import prepare, write_prepared

        prepared = prepare(run, lambda _done, _what: None)
        folder = RunFolder(home / "runs" / "run")
        folder.path.mkdir(parents=True)
        write_prepared(prepared, folder)
        start(prepared, folder, None, is_shown=False)
    return folder.path


def stopped(whole: Path, to: Path, step: int = 8) -> Path:
    """A copy of the run as it was when it had its checkpoint of that step, its log gone."""
    shutil.copytree(whole, to)
    shutil.rmtree(to / "checkpoints" / f"step-{STEPS:08d}")
    shutil.rmtree(to / "model")
    for name in ("metrics.jsonl", "timeline-measured.json"):
        (to / name).unlink()
    return to


def test_a_moved_run_goes_on_from_another_folder_to_the_last_bit(
    whole: Path,
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it is resumed lies another `texts` of the same size, which the run once took without a word.

    Its own data have moved too, and the limit of time is another one, for which it once got a new plan.
    """
    run = stopped(whole, tmp_path / "moved")
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "texts").mkdir(parents=True)
    (elsewhere / "texts" / "numbers.py").write_text(TEXT.replace("value", "thing"))
    shutil.copytree(home / "texts", tmp_path / "archive")
    (tmp_path / "archive" / "numbers.py").rename(tmp_path / "archive" / "renamed.txt")
    monkeypatch.chdir(elsewhere)
    before = load_plan(run / "plan.json")
    with monkeypatch.context() as patched:
        patched.setattr("bireme.train.prepare.prepare", None)
        more = settings(cluster__timeout_s=20, data__source="../archive", cluster__backend="gloo")
        more += settings(log__trace="true")  # four steps are left, too few to be recorded by themselves
        result = bireme(capsys, "resume", "../moved", *more, "--json")
    assert result.status == 0, result.err
    assert load_plan(run / "plan.json") == before
    assert (run / "timeline-measured.json").is_file()
    expected = losses(whole)
    assert losses(run) == {step: expected[step] for step in range(9, STEPS + 1)}
    assert load_run_file(run / "run.toml").data.source == str(tmp_path / "archive")
    for rank in range(2):
        name = f"checkpoints/step-{STEPS:08d}/rank-{rank:04d}.safetensors"
        assert (run / name).read_bytes() == (whole / name).read_bytes()


def test_other_data_under_the_same_name_are_refused_and_the_folder_is_left_as_it_was(
    whole: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stopped(whole, tmp_path / "run")
    file = home / "texts" / "numbers.py"
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    file.write_text(TEXT.replace("value", "thing"))
    try:
        result = bireme(capsys, "resume", str(run))
        assert result.status == 2
        assert "was trained on other data than" in result.err
        manifest = run / "checkpoints" / "step-00000008" / "manifest.json"
        assert json.loads(manifest.read_text())["extra"]["data"]["sha256"][:12] in result.err
        assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    finally:
        file.write_text(TEXT)
    assert not metrics(run)


def test_the_run_file_of_a_run_names_what_lies_in_its_folder_within_that(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "run")
    folder.path.mkdir(parents=True)
    for name in ("cluster.toml", "plan.json", "graph.json", "own.py"):
        (folder.path / name).touch()
    (tmp_path / "tokens.npy").touch()
    sets = [
        f"cluster.source={folder.cluster}",
        f"data.source={folder.path}/own.py:rows",
        f"data.evaluation_source={tmp_path}/tokens.npy",
        f"model.source=hf:{folder.path}",
        f"log.folder={folder.path.parent}",
    ]
    run = load_run_file(None, sets)
    folder.write_run(run)
    written = load_run_file(folder.run_file)
    assert written.cluster.source == "./cluster.toml"
    assert written.data.source == "./own.py:rows"
    assert written.data.evaluation_source == f"{tmp_path}/tokens.npy"
    assert written.model.source == "hf:./."
    assert folder.load_run() == load_asked(folder.run_file, ()) == run
    moved = RunFolder(folder.path.rename(tmp_path / "moved"))
    again = moved.load_run(["training.steps=7"])
    assert again.cluster.source == str(moved.cluster)
    assert again.data.source == f"{moved.path}/own.py:rows"
    assert again.training.steps == 7
