"""What fails while a checkpoint is written costs that checkpoint, and all ranks say the same of it."""

import errno
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import cast

import pytest
import torch

from bireme.errors import BiremeError
from bireme.runtime.snapshot import Snapshot
from bireme.runtime.stores import HashStore, Store
from bireme.train.checkpoint import disk
from bireme.train.checkpoint.checkpoint import newest_good
from bireme.train.checkpoint.writer import CheckpointEvent, CheckpointWriter
from tests.support.checkpoints import (
    META,
    Ranks,
    hidden_in,
    ignore,
    is_step,
    ranks,
    snapshot_of,
    steps_in,
)
from tests.support.together import run_threads

pytestmark = pytest.mark.slow


class Fault:
    """One operation of the disk that fails on one rank's thread, or on any, from a call on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, what: str, code: int, path: str = "") -> None:
        self.code, self.path, self.is_on = code, path, True
        self.operation: Callable[..., object] = getattr(disk, what)
        monkeypatch.setattr(disk, what, self)

    def __call__(self, place: FileIO | Path, *more: object, **named: object) -> object:
        name = str(place if isinstance(place, Path) else place.name)
        if self.is_on and self.path in name and "/.draft-" in name:
            raise OSError(self.code, os.strerror(self.code))
        return self.operation(place, *more, **named)


FAULTS = [
    ("create", errno.EIO, "rank-0001"),
    ("create", errno.EACCES, "rank-0000"),
    ("create", errno.EROFS, "manifest.json"),
    ("write", errno.ENOSPC, "rank-0000"),
    ("write", errno.ENOSPC, "rank-0001"),
    ("write", errno.ENOSPC, "manifest.json"),
    ("write", errno.EDQUOT, ""),
    ("sync", errno.EIO, "rank-0001"),
    ("sync", errno.EIO, "manifest.json"),
    ("sync_folder", errno.EIO, ""),
    ("digest_of", errno.EIO, "rank-0001"),
    ("rename", errno.EIO, ""),
]


@pytest.mark.parametrize(("what", "code", "path"), FAULTS)
def test_a_failing_disk_costs_that_checkpoint_only_and_all_ranks_say_so(
    what: str, code: int, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranks(tmp_path) as run:
        run.save(1)
        run.save(2)
        fault = Fault(monkeypatch, what, code, path)
        run.save(3)
        run.save(4)
        assert steps_in(tmp_path) == [1, 2]
        assert hidden_in(tmp_path) == []
        for rank in (0, 1):
            assert run.saved(rank) == [1, 2]
            assert len(run.warnings(rank)) == 2
            assert "The checkpoint of step 3 failed; the newest is that of step 2." in run.warnings(rank)[0]
            assert os.strerror(code) in run.warnings(rank)[0]
            assert run.writers[rank].newest_step == 2
        assert run.warnings(0) == run.warnings(1)
        found = newest_good(tmp_path)
        assert found is not None
        assert is_step(found.snapshot().tensors, 2)
        fault.is_on = False
        run.save(4)
        run.save(5)
        assert steps_in(tmp_path) == [4, 5]
        assert run.saved(1) == [1, 2, 4, 5]


def test_a_folder_that_cannot_be_synced_after_the_rename_has_no_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EIO, "Input/output error")
        sync_folder(folder)

    with ranks(tmp_path) as run:
        run.save(1)
        sync_folder = disk.sync_folder
        monkeypatch.setattr(disk, "sync_folder", failing)
        run.save(2)
        assert steps_in(tmp_path) == [1]
        assert all("Input/output error" in run.warnings(rank)[0] for rank in (0, 1))


def test_what_reads_back_otherwise_than_it_was_written_becomes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lying(file: FileIO, data: memoryview) -> None:
        changed = bytearray(data)
        if "rank-0001" in str(file.name):
            changed[-1] ^= 1
        write(file, memoryview(changed))

    write = disk.write
    with ranks(tmp_path) as run:
        run.save(1)
        monkeypatch.setattr(disk, "write", lying)
        run.save(2)
        assert steps_in(tmp_path) == [1]
        assert all("differs from what was written" in run.warnings(rank)[0] for rank in (0, 1))


def test_a_rank_that_does_not_write_costs_that_checkpoint_only(tmp_path: Path) -> None:
    with ranks(tmp_path, 3) as run:
        run.set_patience(0.3)
        for rank in (0, 2):
            run.writers[rank].save(snapshot_of(rank, 1), META)
        run.wait()
        for rank in (0, 2):
            assert "Rank 1 did not report its part within 0.3 s." in run.warnings(rank)[0]
        assert steps_in(tmp_path) == []
        # It comes too late, hears what the others know, and takes part again.
        run.writers[1].save(snapshot_of(1, 1), META)
        run.wait()
        assert run.warnings(1) == run.warnings(0)
        assert hidden_in(tmp_path) == []
        run.set_patience(60.0)
        run.save(2)
        assert steps_in(tmp_path) == [2]


def test_a_rank_that_comes_several_checkpoints_too_late_still_hears_of_the_first(tmp_path: Path) -> None:
    with ranks(tmp_path) as run:
        run.set_patience(0.1)
        for step in (1, 2):
            run.writers[0].save(snapshot_of(0, step), META)
        run.writers[0].wait()
        for step in (1, 2):
            run.writers[1].save(snapshot_of(1, step), META)
        run.writers[1].wait()
        assert run.warnings(1) == run.warnings(0)
        run.set_patience(60.0)
        run.save(3)
        assert steps_in(tmp_path) == [3]
        assert hidden_in(tmp_path) == []


def test_without_a_word_of_rank_0_the_others_say_that_they_do_not_know(tmp_path: Path) -> None:
    with ranks(tmp_path, timeout_s=0.1) as run:
        run.writers[1].save(snapshot_of(1, 1), META)
        run.wait()
        assert "Rank 1 does not know whether the checkpoint of step 1 succeeded" in run.warnings(1)[0]


class GoneStore:
    """A store whose server is gone from some moment on."""

    def __init__(self, store: HashStore) -> None:
        self.store, self.is_gone = store, False

    def ask(self) -> HashStore:
        if self.is_gone:
            raise ConnectionError("Connection reset by peer\nwith a long trace of C++")
        return self.store

    def set(self, key: str, value: str, /) -> None:
        self.ask().set(key, value)

    def get(self, key: str, /) -> bytes:
        return self.ask().get(key)

    def check(self, keys: list[str], /) -> bool:
        return self.ask().check(keys)

    def delete_key(self, key: str, /) -> bool:
        return self.ask().delete_key(key)


def test_a_store_that_is_gone_costs_checkpoints_and_not_the_run(tmp_path: Path) -> None:
    store = GoneStore(HashStore())
    events: list[list[CheckpointEvent]] = [[], []]

    def opened(rank: int) -> CheckpointWriter:
        return CheckpointWriter(tmp_path, rank, 2, cast("Store", store), on_event=events[rank].append)

    run = Ranks(run_threads(2, opened), events)
    run.save(1)
    store.is_gone = True
    run.save(2)
    assert steps_in(tmp_path) == [1]
    for rank in (0, 1):
        assert len(run.warnings(rank)) == 1
        assert "(Connection reset by peer)" in run.warnings(rank)[0]
        run.writers[rank].close()


def test_ranks_that_save_different_moments_make_no_checkpoint(tmp_path: Path) -> None:
    with ranks(tmp_path) as run:
        run.writers[0].save(snapshot_of(0, 1), META)
        run.writers[1].save(snapshot_of(1, 1, clip_scale=0.7), META)
        run.wait()
        assert steps_in(tmp_path) == []
        assert all("from different moments" in run.warnings(rank)[0] for rank in (0, 1))


@pytest.mark.parametrize("clip_scale", [float("nan"), float("inf")])
def test_a_clipping_factor_that_is_no_number_makes_no_checkpoint(clip_scale: float, tmp_path: Path) -> None:
    with ranks(tmp_path) as run:
        for rank, writer in enumerate(run.writers):
            writer.save(snapshot_of(rank, 1, clip_scale=clip_scale), META)
        run.wait()
        assert steps_in(tmp_path) == []
        for rank in (0, 1):
            assert f"Rank 1 clips by {clip_scale}" in run.warnings(rank)[0]


def test_words_that_nobody_knows_are_no_word(tmp_path: Path) -> None:
    store = HashStore()
    store.set("checkpoint/open", '{"greeting": "of another version"}')
    with pytest.raises(BiremeError, match="rank 0 did not open the folder in a format that this version"):
        CheckpointWriter(tmp_path, 1, 2, store, on_event=ignore)


def test_a_name_that_two_ranks_hold_makes_no_checkpoint(tmp_path: Path) -> None:
    with ranks(tmp_path) as run:
        for writer in run.writers:
            writer.save(snapshot_of(0, 1), META)
        run.wait()
        assert steps_in(tmp_path) == []
        assert "two ranks have written" in run.warnings(0)[0]


def test_a_tensor_that_cannot_be_written_costs_that_checkpoint_only(tmp_path: Path) -> None:
    with ranks(tmp_path, 1) as run:
        run.writers[0].save(Snapshot(1, 1.0, {"weights/a": torch.ones(2, device="meta")}), META)
        run.wait()
        assert "The checkpoint of step 1 failed; there is none yet." in run.warnings(0)[0]
