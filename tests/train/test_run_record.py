"""The files of a run that a resume reads: damage of each is found, and the recorded copy is used."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from bireme.errors import BiremeError
from bireme.runtime.stores import HashStore
from bireme.train.checkpoint.checkpoint import Checkpoint, newest_good
from bireme.train.checkpoint.manifest import RECORD
from bireme.train.checkpoint.writer import CheckpointWriter
from bireme.train.folder import RECORDED, RunFolder
from bireme.train.prepare import PreparedRun
from tests.support.checkpoints import META, ignore, snapshot_of
from tests.support.command import bireme
from tests.support.extent import draws
from tests.support.once import made_once
from tests.support.training import running, settings, stopped, write_run

TEXTS = {name: f'{{"name": "{name}", "values": [1, 2.5]}}\n' for name in RECORDED} | {
    "run.toml": "[training]\nsteps = 200\nbatch_size = 8\n\n[log]\nname = 'run'\n"
}

Damage = Callable[[bytes, int], bytes]
DAMAGES: dict[str, Damage] = {
    "cut": lambda data, at: data[:at],
    "zeroed": lambda data, at: data[:at] + bytes(len(data) - at),
    "flipped": lambda data, at: data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :],
}


def _begun(path: Path) -> RunFolder:
    """A run folder with all its files, and a checkpoint."""
    folder = RunFolder(path)
    path.mkdir()
    for name, text in TEXTS.items():
        (path / name).write_text(text)
    folder.record()
    with CheckpointWriter(
        path / "checkpoints", 0, 1, HashStore(), on_event=ignore, record=folder.recorded()
    ) as writer:
        writer.save(snapshot_of(0, 4), META)
    return folder


def _files(folder: RunFolder) -> dict[str, str]:
    return {name: (folder.path / name).read_text() for name in RECORDED if (folder.path / name).exists()}


def _restored(folder: RunFolder) -> list[str]:
    told: list[str] = []
    folder.restore(told.append)
    return told


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_a_run_file_is_named_at_every_position_and_the_recorded_copy_is_used(
    damage: str, name: str, tmp_path: Path
) -> None:
    folder = _begun(tmp_path / "run")
    data = TEXTS[name].encode()
    step = max(1, len(data) // draws(len(data), 8))
    for at in range(0, len(data), step):
        (folder.path / name).write_bytes(DAMAGES[damage](data, at))
        (sentence,) = _restored(folder)
        assert str(folder.path / name) in sentence
        assert f"The copy in {RECORD} is used" in sentence
        assert _files(folder) == TEXTS
        assert (folder.path / f"{name}.found").read_bytes() == DAMAGES[damage](data, at)
    assert _restored(folder) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_costs_nothing_but_a_sentence(damage: str, tmp_path: Path) -> None:
    folder = _begun(tmp_path / "run")
    record = folder.path / RECORD
    data = record.read_bytes()
    for at in range(0, len(data), len(data) // draws(40, 8)):
        record.write_bytes(DAMAGES[damage](data, at))
        (sentence,) = _restored(folder)
        assert f"{record} is damaged" in sentence
        assert "The copy in step-00000004 is used" in sentence
        assert _files(folder) == TEXTS
        assert record.read_bytes() == data


def test_missing_files_and_a_missing_record_come_back_from_the_checkpoint(tmp_path: Path) -> None:
    folder = _begun(tmp_path / "run")
    for name in (*RECORDED, RECORD):
        (folder.path / name).unlink()
    told = "\n".join(_restored(folder))
    assert all(f"{folder.path / name} is missing" in told for name in (*RECORDED, RECORD))
    assert _files(folder) == TEXTS


def test_a_damaged_copy_in_a_checkpoint_is_damage_of_the_checkpoint(tmp_path: Path) -> None:
    folder = _begun(tmp_path / "run")
    copy = folder.path / "checkpoints" / "step-00000004" / RECORD
    copy.write_bytes(copy.read_bytes()[:-1])
    with pytest.raises(BiremeError, match=f"{RECORD} is truncated"):
        newest_good(folder.path / "checkpoints")


def test_settings_that_were_changed_since_the_last_checkpoint_are_no_damage(tmp_path: Path) -> None:
    folder = _begun(tmp_path / "run")
    later = TEXTS["run.toml"].replace("200", "600")
    (folder.path / "run.toml").write_text(later)
    assert "training.steps is 600 instead of 200" in _restored(folder)[0]  # as after a power cut here
    (folder.path / "run.toml").write_text(later)
    folder.record()
    assert _restored(folder) == []
    assert (folder.path / "run.toml").read_text() == later


def test_a_file_that_the_run_did_not_write_is_not_used(tmp_path: Path) -> None:
    folder = _begun(tmp_path / "run")
    (folder.path / "base.json").unlink()
    folder.record()
    (folder.path / "base.json").write_text("{}")
    assert "is not a file of this run: it is not used" in _restored(folder)[0]
    assert not (folder.path / "base.json").exists()


def test_a_run_without_a_record_goes_on_with_a_sentence(tmp_path: Path) -> None:
    """An older Bireme began it, or it was killed before it had begun."""
    folder = RunFolder(tmp_path)
    (tmp_path / "run.toml").write_text("[training]\nsteps = 7\n")
    (sentence,) = _restored(folder)
    assert f"{RECORD} is missing. No checkpoint has a copy, so the files of the run are used" in sentence
    assert (tmp_path / "run.toml").read_text() == "[training]\nsteps = 7\n"


def test_a_replica_that_comes_back_refuses_a_damaged_file(tmp_path: Path) -> None:
    folder = _begun(tmp_path / "run")
    folder.check_recorded()
    (folder.path / "plan.json").write_text("{}")
    with pytest.raises(BiremeError, match=r"plan\.json is not as this run wrote it"):
        folder.check_recorded()


def _train(folder: Path) -> None:
    words = ["train", str(write_run(folder, "1f1b", 1)), *settings(training__steps=8), "--json"]
    with running(folder / "runs" / "run", *words) as train:
        assert train.ended().document["steps"] == 8


@pytest.mark.slow
def test_a_run_file_cut_in_half_is_named_and_the_run_goes_on_with_all_its_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first lines of a run file are a run file too: of another run, of other steps."""
    began: list[tuple[int, int]] = []

    def start(
        prepared: PreparedRun, _folder: RunFolder, checkpoint: Checkpoint, **_more: object
    ) -> SimpleNamespace:
        began.append((prepared.run.training.steps, checkpoint.manifest.step))
        return SimpleNamespace(lost="")

    monkeypatch.setattr("bireme.train.launching.start", start)
    monkeypatch.setattr("bireme.cli.train.show_finished", lambda *_words, **_more: None)
    run = stopped(made_once("to-be-damaged", _train) / "runs" / "run", tmp_path / "run", 4)
    before = {name: (run / name).read_bytes() for name in RECORDED if (run / name).is_file()}
    for name, data in before.items():
        (run / name).write_bytes(data[: len(data) // 2])
    (run / "graph.json").unlink()
    result = bireme(capsys, "resume", str(run))
    assert result.status == 0, result.err
    assert all(str(run / name) in result.err for name in before)
    assert "resuming after step 4 of 8" in result.err
    assert began == [(8, 4)]
    assert {name: (run / name).read_bytes() for name in before} == before
