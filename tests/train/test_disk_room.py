"""What a run saves has room before it starts, and no run ends well without the model that was asked for."""

import errno
import json
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from bireme.errors import BiremeError
from bireme.train import finishing, run_checkpoints
from bireme.train.checkpoint import disk
from bireme.train.checkpoint.checkpoint import find_checkpoints, open_checkpoint
from bireme.train.folder import RunFolder
from bireme.train.prepare import prepared_before
from tests.support.alone import alone
from tests.support.command import bireme
from tests.support.training import settings, steps_of_checkpoints, write_run

pytestmark = pytest.mark.slow

OWN_MODEL = """
import torch
from torch import nn

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(257, 8), nn.Linear(8, 257)

    def forward(self, input_ids, labels):
        logits = self.head(self.tokens(input_ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

def model():
    ids = torch.ones(2, 32, dtype=torch.long)
    return Reader(), {"input_ids": ids, "labels": ids}
"""

BRIEF = settings(training__steps=3, checkpoint__every_steps=0)


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(run_checkpoints, "LOOK_S", 0.01)
    monkeypatch.setattr(run_checkpoints, "AGAIN_S", 0.02)
    with alone():
        yield


def _fill(monkeypatch: pytest.MonkeyPatch, num_failures: int, code: int = errno.ENOSPC) -> None:
    """The next writes of checkpoints and looks for room find none; or writes fail for another cause."""
    left = [num_failures]

    def full(file: FileIO, data: memoryview) -> None:
        if left[0] and "/.draft-" in str(file.name):
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        write(file, data)

    def free(_folder: object) -> int:
        if left[0] and code == errno.ENOSPC:
            left[0] -= 1
            return 0
        return 1 << 40

    write = disk.write
    monkeypatch.setattr(disk, "write", full)
    monkeypatch.setattr(run_checkpoints, "free_bytes", free)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw-fresh"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_size_of_a_checkpoint_is_known_before_the_run(
    dtype: str, schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = write_run(tmp_path, schedule, 1), RunFolder(tmp_path / "runs" / "run")
    words = [*BRIEF, *settings(model__dtype=dtype, export__at_end="false", training__optimizer="muon")]
    assert bireme(capsys, "train", str(path), *words).status == 0
    run = folder.load_run()
    room = finishing.disk_room(prepared_before(run, folder, lambda _done, _what: None), folder)
    saved = open_checkpoint(find_checkpoints(folder.checkpoints(run))[-1]).snapshot().tensors
    assert room is not None
    trial_bytes = 0
    if schedule == "2bw-fresh":  # which a checkpoint has unless the pipeline has drained, as at the end here
        assert not any(name.startswith("trial/") for name in saved)
        trial_bytes = sum(saved[name].nbytes for name in saved if name.startswith("weights/"))
        trial_bytes //= 2 if dtype == "bfloat16" else 1
    assert room.checkpoint_bytes == sum(saved[name].nbytes for name in saved) + trial_bytes


def test_a_machine_with_its_own_folder_needs_room_for_its_part_and_for_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = write_run(tmp_path, "1f1b", 1), RunFolder(tmp_path / "runs" / "run")
    assert bireme(capsys, "train", str(path), *BRIEF).status == 0
    prepared = prepared_before(folder.load_run(), folder, lambda _done, _what: None)
    room = finishing.disk_room(prepared, folder)
    assert room is not None
    whole = room.num_checkpoints * room.checkpoint_bytes
    assert whole > 0
    assert [finishing.kept_bytes(prepared, folder, 0, num) for num in (2, 3, 4)] == [
        whole,
        whole * 2 // 3,
        whole // 2,
    ]
    finishing.check_kept(folder, whole)
    monkeypatch.setattr(finishing, "free_bytes", lambda _: whole - 1)
    with pytest.raises(BiremeError, match="copies of those of others take"):
        finishing.check_kept(folder, whole)


def test_a_run_waits_for_room_for_its_last_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run = write_run(tmp_path, "1f1b", 1), tmp_path / "runs" / "run"
    _fill(monkeypatch, 3)
    result = bireme(capsys, "train", str(path), *BRIEF)
    assert result.status == 0, result.err
    assert "No space left on device" in result.err
    assert "waits up to 12 hours for room" in result.err
    assert result.err.count("The checkpoint of step 3 failed") == 1
    assert steps_of_checkpoints(run) == [3]
    assert (run / "model" / "model.safetensors").is_file()


def test_a_run_that_never_finds_room_ends_with_status_1_and_says_what_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with status 0, and "no model, because checkpoint.at_end is false", which was true."""
    path, run = write_run(tmp_path, "1f1b", 1), tmp_path / "runs" / "run"
    _fill(monkeypatch, 10**9)
    result = bireme(capsys, "train", str(path), *BRIEF, *settings(checkpoint__wait_for_room_s=0))
    assert result.status == 1
    assert "checkpoint of step 3 could not be written" in result.err
    assert "There is no checkpoint." in result.err
    assert f"`bireme resume {run}` repeats steps 1 to 3" in result.err
    assert "at_end is false" not in result.out
    assert not (run / "model").exists()


def test_a_run_whose_checkpoint_fails_though_there_is_room_does_not_wait_for_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for 12 hours, with 76 GiB free."""
    path, _ = write_run(tmp_path, "1f1b", 1), tmp_path / "runs" / "run"
    _fill(monkeypatch, 10**9, errno.EIO)
    result = bireme(capsys, "train", str(path), *BRIEF)
    assert result.status == 1
    assert "tries 3 times more" in result.err
    assert "checkpoint of step 3 could not be written" in result.err


def test_a_model_that_cannot_be_exported_ends_with_status_1_and_its_checkpoint_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_words: object, **_more: object) -> None:
        raise BiremeError("model cannot be written: No space left on device.")

    path, run = write_run(tmp_path, "1f1b", 1), tmp_path / "runs" / "run"
    with monkeypatch.context() as patched:
        patched.setattr("bireme.train.finishing.export_checkpoint", full)
        result = bireme(capsys, "train", str(path), *BRIEF)
    assert result.status == 1
    assert "No space left on device" in result.err
    assert f"`bireme export {run} --to FOLDER` writes the model to any disk" in result.err
    assert bireme(capsys, "resume", str(run)).status == 0
    assert (run / "model" / "model.safetensors").is_file()


def test_a_run_without_room_for_its_result_is_refused_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run = write_run(tmp_path, "1f1b", 1), tmp_path / "runs" / "run"
    monkeypatch.setattr(finishing, "free_bytes", lambda _path: 100 * 1024)
    result = bireme(capsys, "train", str(path), *settings(training__steps=12))
    assert result.status == 2
    assert "3 checkpoints of 132 KiB and the model of 43.8 KiB need up to 438 KiB at a time" in result.err
    assert "100 KiB is free" in result.err
    assert "--anyway" in result.err
    assert not run.exists()
    dry = bireme(capsys, "train", str(path), *BRIEF, "--dry-run", "--json").document
    assert dry["disk"]["num_checkpoints"] == 1
    assert dry["disk"]["needed_bytes"] > dry["disk"]["free_bytes"]
    assert bireme(capsys, "train", str(path), *BRIEF, "--anyway").status == 0
    result = bireme(capsys, "resume", str(run), *settings(training__steps=9, training__schedule_steps=3))
    assert result.status == 2
    assert "1 checkpoint of 132 KiB" in result.err
    monkeypatch.setattr(finishing, "free_bytes", lambda _path: None)
    more = settings(training__steps=4, training__schedule_steps=3)
    assert bireme(capsys, "resume", str(run), *more).status == 0


def test_room_for_the_initial_weights_of_an_own_model_counts_while_its_run_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take 4 bytes per parameter until the run has ended, beside its checkpoints and its model."""
    path = write_run(tmp_path, "1f1b", 1)
    (tmp_path / "own.py").write_text(OWN_MODEL)
    words = [*BRIEF, "--set", f"model.source={json.dumps(f'python:{tmp_path}/own.py:model')}"]
    dry = bireme(capsys, "train", str(path), *words, "--dry-run", "--json")
    assert dry.status == 0, dry.err
    disk = dry.document["disk"]
    assert disk["initial_bytes"] == disk["export_bytes"] == 4 * (257 * 8 + 8 * 257 + 257)
    assert disk["needed_bytes"] == sum(
        disk[name] for name in ("initial_bytes", "checkpoint_bytes", "export_bytes")
    )
    monkeypatch.setattr(finishing, "free_bytes", lambda _path: disk["needed_bytes"] - 1)
    result = bireme(capsys, "train", str(path), *words)
    assert result.status == 2
    assert "initial weights of 17.1 KiB, 1 checkpoint of" in result.err
    assert not (tmp_path / "runs").exists()
    monkeypatch.setattr(finishing, "free_bytes", lambda _path: disk["needed_bytes"])
    assert bireme(capsys, "train", str(path), *words).status == 0
