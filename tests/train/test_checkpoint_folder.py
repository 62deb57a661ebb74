"""The folder of checkpoints: whose it is, what is left over in it, and what a resumed run does there."""

import errno
import os
import shutil
from contextlib import closing
from dataclasses import replace
from io import FileIO
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.runtime.copies.folder_server import FolderServer
from bireme.runtime.stores import HashStore, PrefixStore
from bireme.train.checkpoint import checkpoint as folder_module
from bireme.train.checkpoint.checkpoint import MachinesNote, newest_good, note_machines, open_checkpoint
from bireme.train.checkpoint.writer import CheckpointWriter
from tests.support.checkpoints import (
    fill,
    hidden_in,
    ignore,
    is_step,
    ranks,
    steps_in,
)
from tests.support.patience import patience_s
from tests.support.together import run_threads


def damage(folder: Path, step: int) -> None:
    path = folder / f"step-{step:08d}" / "rank-0000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def test_leftovers_of_an_earlier_run_are_removed_and_nothing_else(tmp_path: Path) -> None:
    fill(tmp_path, [1, 2])
    for name in (".draft-3-1-0123", ".gone-step-00000001-4567", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0000.safetensors").write_bytes(b"half")
    with ranks(tmp_path, resumed_from=newest_good(tmp_path)):
        assert hidden_in(tmp_path) == []
        assert steps_in(tmp_path) == [1, 2]
        assert (tmp_path / "mine").is_dir()


def test_a_resumed_run_continues_and_deletes_only_what_is_older_than_a_good_checkpoint(
    tmp_path: Path,
) -> None:
    fill(tmp_path, [1, 2, 3])
    found = newest_good(tmp_path)
    with ranks(tmp_path, keep=3, resumed_from=found) as run:
        assert [writer.newest_step for writer in run.writers] == [3, 3]
        run.save(3)
        assert run.saved() == []
        run.save(4)
        # Nobody has looked whether 1 and 2 are whole, so with 3 and 4 there are not three yet.
        assert steps_in(tmp_path) == [1, 2, 3, 4]
        run.save(5)
        assert steps_in(tmp_path) == [3, 4, 5]


def test_a_start_deletes_what_killed_runs_have_left_once_enough_were_read_back(tmp_path: Path) -> None:
    """Each start of a run that is killed before `keep` saves once left one more for ever."""
    fill(tmp_path, [1, 2, 3, 4, 5])
    with ranks(tmp_path, keep=3, resumed_from=newest_good(tmp_path)) as run:
        run.wait()
        assert steps_in(tmp_path) == [3, 4, 5]
        run.save(6)
        assert steps_in(tmp_path) == [4, 5, 6]


def test_a_start_deletes_nothing_older_than_damaged_ones_that_it_would_need(tmp_path: Path) -> None:
    fill(tmp_path, [1, 2, 3, 4, 5, 6])
    for step in (3, 5):
        damage(tmp_path, step)
    with ranks(tmp_path, keep=3, resumed_from=newest_good(tmp_path)) as run:
        run.wait()
        assert steps_in(tmp_path) == [2, 3, 4, 5, 6]
    damage(tmp_path, 2)
    with ranks(tmp_path, keep=3, resumed_from=newest_good(tmp_path)) as run:
        run.wait()
        assert steps_in(tmp_path) == [2, 3, 4, 5, 6]


def test_a_damaged_newer_one_gives_way_and_never_stands_for_a_good_one(tmp_path: Path) -> None:
    fill(tmp_path, [1, 2, 3, 4])
    damage(tmp_path, 3)
    damage(tmp_path, 4)
    found = newest_good(tmp_path)
    assert found is not None
    assert found.manifest.step == 2
    with ranks(tmp_path, resumed_from=found) as run:
        run.save(3)
        assert run.saved() == [3]
        assert steps_in(tmp_path) == [2, 3]
        assert is_step(newest_of(tmp_path), 3)


def newest_of(folder: Path) -> dict[str, Tensor]:
    found = newest_good(folder)
    assert found is not None
    return dict(found.snapshot().tensors)


def test_a_good_one_in_the_way_stays(tmp_path: Path) -> None:
    with ranks(tmp_path) as run:
        (tmp_path / "step-00000001").mkdir()
        (tmp_path / "step-00000001" / "mine").write_text("somebody else's")
        run.save(1)
        assert all("could not be completed: Directory not empty" in run.warnings(rank)[0] for rank in (0, 1))
        assert (tmp_path / "step-00000001" / "mine").is_file()


def refusals(folder: Path, num_ranks: int = 2, **more: object) -> list[str]:
    """What each rank is told when it opens a folder that it must not have."""
    store = HashStore()

    def opened(rank: int) -> str:
        with pytest.raises(BiremeError) as told:
            CheckpointWriter(
                folder,
                rank,
                num_ranks,
                PrefixStore("run", store),
                on_event=ignore,
                **(more if rank == 0 else {}),  # type: ignore[arg-type]  # of any kind
            )
        return str(told.value)

    return run_threads(num_ranks, opened)


def test_two_runs_in_one_folder_are_refused_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "GRACE_S", 0.1)
    with ranks(tmp_path) as run:
        for sentence in refusals(tmp_path):
            assert f"{tmp_path} is in use: process {os.getpid()} on" in sentence
        run.save(1)
        assert run.saved() == [1]
    with ranks(tmp_path, resumed_from=newest_good(tmp_path)) as run:
        run.save(2)
        assert run.saved() == [2]


def test_checkpoints_of_another_run_are_refused_on_every_rank(tmp_path: Path) -> None:
    fill(tmp_path, [1, 2])
    for sentence in refusals(tmp_path):
        assert "holds 2 checkpoints of another run, up to step 2" in sentence
    first = newest_good(tmp_path)
    fill_more = newest_good(tmp_path)
    with ranks(tmp_path, resumed_from=fill_more) as run:
        run.save(3)
    for sentence in refusals(tmp_path, resumed_from=first):
        assert "holds a checkpoint of step 3, newer than step 2" in sentence
    assert steps_in(tmp_path) == [2, 3]


def test_a_folder_that_ranks_do_not_really_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "GRACE_S", 0.1)
    store = HashStore()
    with CheckpointWriter(tmp_path / "one", 0, 2, PrefixStore("run", store), on_event=ignore):
        (tmp_path / "other").mkdir()
        with pytest.raises(BiremeError, match=r"on .* is not the same folder as on rank 0"):
            CheckpointWriter(tmp_path / "other", 1, 2, PrefixStore("run", store), on_event=ignore)


def test_a_place_where_no_folder_can_be_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for sentence in refusals(tmp_path / "file" / "checkpoints"):
        assert "Checkpoints cannot be written to" in sentence


def test_rank_0_that_does_not_come_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(BiremeError, match=r"rank 0 did not open the folder within 0.1 s\."):
        CheckpointWriter(tmp_path, 1, 2, HashStore(), on_event=ignore, timeout_s=0.1)


def test_where_files_cannot_be_locked_a_person_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_file: FileIO) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_module, "_try_to_lock", failing)
    with ranks(tmp_path) as run:
        assert "make sure that no other run writes there" in run.warnings(0)[0]
        run.save(1)
        assert run.saved() == [1]


def test_a_machine_that_comes_later_reads_what_one_machine_has_written(tmp_path: Path) -> None:
    """A run went on alone after a machine was lost. It came back, had the manifest, and looked for the file
    in its own folder.
    """
    here, there = tmp_path / "here", tmp_path / "there"
    fill(here / "checkpoints", [1])
    with closing(FolderServer(patience_s())) as server:
        server.folder = here
        note_machines(here, MachinesNote((server.address,), 0))
        found = newest_good(here / "checkpoints")
        assert found is not None
        assert not found.manifest.machines
        path = there / "checkpoints" / found.folder.name
        path.mkdir(parents=True)
        shutil.copy(found.folder / "manifest.json", path)
        read = replace(open_checkpoint(path), holders=found.holders).snapshot().tensors
        expected = found.snapshot().tensors
        assert {*read} == {*expected}
        assert all(torch.equal(read[name], expected[name]) for name in expected)
