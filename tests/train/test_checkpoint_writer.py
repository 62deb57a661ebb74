"""Writing checkpoints during training: it waits for its turn and for nothing else, and forgets nothing."""

import errno
import gc
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest
from torch import Tensor

from bireme.errors import BiremeError
from bireme.files import FileDigest
from bireme.runtime.snapshot import Snapshot
from bireme.runtime.stores import HashStore, PrefixStore
from bireme.train.checkpoint import disk
from bireme.train.checkpoint.checkpoint import find_checkpoints, newest_good
from bireme.train.checkpoint.manifest import CheckpointMeta
from bireme.train.checkpoint.writer import CheckpointEvent, CheckpointSaved, CheckpointWriter
from tests.support.checkpoints import (
    META,
    Ranks,
    hidden_in,
    is_step,
    open_files,
    ranks,
    snapshot_of,
    steps_in,
)
from tests.support.patience import patience_s
from tests.support.together import run_threads


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_what_all_ranks_saved_is_one_checkpoint(num_ranks: int, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    with ranks(folder, num_ranks) as run:
        run.save(300)
        assert [writer.newest_step for writer in run.writers] == [300] * num_ranks
    found = newest_good(folder)
    assert found is not None
    assert found.folder == folder / "step-00000300"
    assert is_step(found.snapshot().tensors, 300, num_ranks)
    assert hidden_in(folder) == []
    for events in run.events:
        (event,) = events
        assert isinstance(event, CheckpointSaved)
        assert (event.step, event.folder, event.num_bytes) == (300, found.folder, found.manifest.num_bytes)


@pytest.mark.parametrize("num_full", [0, 1, 2])
def test_a_checkpoint_of_machines_that_share_no_folder_counts_if_most_have_its_manifest(
    num_full: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, full = disk.rename, [tmp_path / str(number) for number in (1, 2)[:num_full]]

    def renamed(old: Path, new: Path) -> None:
        if new.parent in full and new.name == "step-00000008":
            raise OSError(errno.ENOSPC, "no space")
        rename(old, new)

    monkeypatch.setattr(disk, "rename", renamed)
    store = HashStore()
    with ranks(tmp_path, 3, is_spread=True, store=store) as run:
        run.save(4)
        run.save(8)
        num_keys = store.num_keys()
        run.save(12)
        assert store.num_keys() == num_keys  # none is left of the one before
        is_saved = num_full < 2
        assert run.saved() == ([4, 8, 12] if is_saved else [4, 12])
        assert len(run.warnings()) == (not is_saved)
        for number in range(3):
            is_here = tmp_path / str(number) not in full
            assert run.saved(number)[1:-1] == ([8] if is_here and (number or is_saved) else [])
            for step in steps_in(tmp_path / str(number)):
                (file,) = (tmp_path / str(number) / f"step-{step:08d}").glob("*.safetensors")
                assert file.name == f"rank-{number:04d}.safetensors"


def test_a_machine_whose_disk_is_full_reports_it_and_is_named_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only rank 0 reported it, on its own machine, as a rank without a machine."""
    write = disk.write

    def written(file: FileIO, data: memoryview) -> None:
        if tmp_path / "1" in Path(str(file.name)).parents:
            raise OSError(errno.ENOSPC, "no space")
        write(file, data)

    with ranks(tmp_path, 3, is_spread=True) as run:
        monkeypatch.setattr(disk, "write", written)
        run.save(4)
        assert "Rank 1 on 1 could not write " in run.warnings()[0]
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("bireme: Rank 1 on 1 could not write ")
    assert said.endswith(": no space.")


def test_the_newest_are_kept_and_older_ones_deleted(tmp_path: Path) -> None:
    for keep in (2, 3):
        folder = tmp_path / str(keep)
        with ranks(folder, keep=keep) as run:
            seen = []
            for step in (1, 2, 3, 5, 8):
                run.save(step)
                seen.append(steps_in(folder))
        assert seen == [[1, 2, 3, 5, 8][max(0, n - keep) : n] for n in range(1, 6)]
        assert hidden_in(folder) == []


class Gate:
    """Holds up all writing to the disk until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached, self.opened = threading.Event(), threading.Event()
        self.write = disk.write
        monkeypatch.setattr(disk, "write", self)

    def __call__(self, file: FileIO, data: memoryview) -> None:
        self.is_reached.set()
        assert self.opened.wait(patience_s())
        self.write(file, data)


def test_saving_returns_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(tmp_path, 1) as run:
        gate = Gate(monkeypatch)
        run.save(1, waits=False)
        assert gate.is_reached.wait(patience_s())
        assert run.events == [[]]
        assert not run.writers[0].wait(0.0)
        assert steps_in(tmp_path) == []
        gate.opened.set()
        run.wait()
        assert run.saved() == [1]


def test_the_next_one_waits_for_the_one_before_and_counts_that_as_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranks(tmp_path, 1) as run:
        gate = Gate(monkeypatch)
        run.save(1, waits=False)
        assert gate.is_reached.wait(patience_s())
        is_begun, is_over = threading.Event(), threading.Event()

        def next_one() -> None:
            is_begun.set()
            run.writers[0].save(snapshot_of(0, 2), META, copied_s=1000.0)
            is_over.set()

        thread = threading.Thread(target=next_one)
        thread.start()
        assert is_begun.wait(patience_s())
        assert not is_over.wait(0.6)
        gate.opened.set()
        thread.join(patience_s())
        assert run.saved()[:1] == [1]
        run.wait()
        first, second = (event for event in run.events[0] if isinstance(event, CheckpointSaved))
        assert first.stall_s < 100.0
        assert second.stall_s > 1000.1


def test_the_snapshot_is_let_go_of_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_freed = threading.Event()

    class Watched(dict[str, Tensor]):
        def __del__(self) -> None:
            is_freed.set()

    def waiting(path: Path, *, from_disk: bool = False) -> FileDigest:
        assert is_freed.wait(patience_s())
        return digest_of(path, from_disk=from_disk)

    digest_of = disk.digest_of
    monkeypatch.setattr(disk, "digest_of", waiting)
    with ranks(tmp_path, 1) as run:
        run.writers[0].save(Snapshot(1, 1.0, Watched(snapshot_of(0, 1).tensors)), META)
        run.wait()
        assert run.saved() == [1]


def test_nothing_gets_its_name_before_all_of_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def watched(what: str) -> Callable[..., object]:
        operation: Callable[..., object] = getattr(disk, what)

        def watching(place: FileIO | Path, *more: object, **named: object) -> object:
            name = Path(str(place if isinstance(place, Path) else place.name)).name
            word = f"{what} {'draft' if name.startswith('.draft') else name}"
            if not done or done[-1] != word:
                done.append(word)
            return operation(place, *more, **named)

        return watching

    with ranks(tmp_path, 1) as run:
        for what in ("create", "write", "sync", "sync_folder", "digest_of", "rename"):
            monkeypatch.setattr(disk, what, watched(what))
        run.save(1)
    shard, manifest = "rank-0000.safetensors", "manifest.json"
    assert done == [
        *(f"{what} {shard}" for what in ("create", "write", "sync")),
        "sync_folder draft",
        f"digest_of {shard}",
        *(f"{what} {manifest}" for what in ("create", "write", "sync")),
        "sync_folder draft",
        "rename draft",
        f"sync_folder {tmp_path.name}",
    ]


@pytest.mark.parametrize("extra", [{"a": object()}, {"a": float("nan")}, {"a": "x" * (1 << 21)}])
def test_what_is_no_small_json_is_refused_at_once(extra: dict[str, object], tmp_path: Path) -> None:
    meta = CheckpointMeta(7, 3, "2bw", 2, 1, "abc", extra)  # type: ignore[arg-type]  # that is the mistake
    with ranks(tmp_path, 1) as run:
        with pytest.raises(BiremeError, match="Extra data in a checkpoint"):
            run.writers[0].save(snapshot_of(0, 1), meta)
        run.save(2)
        assert run.saved() == [2]


def test_what_was_saved_already_is_not_written_again_and_nothing_older_is(tmp_path: Path) -> None:
    with ranks(tmp_path) as run:
        run.save(5)
        run.save(5)
        assert run.saved() == [5]
        with pytest.raises(BiremeError, match="step 4 would be older than that of step 5"):
            run.save(4)


def test_an_error_of_who_is_told_comes_out_at_the_next_call(tmp_path: Path) -> None:
    def failing(_event: CheckpointEvent) -> None:
        raise ArithmeticError("the metrics file is full")

    writer = CheckpointWriter(tmp_path, 0, 1, HashStore(), on_event=failing)
    writer.save(snapshot_of(0, 1), META)
    with pytest.raises(ArithmeticError, match="metrics"):
        writer.wait()
    writer.close()
    assert steps_in(tmp_path) == [1]


def test_closing_waits_for_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(tmp_path) as run:
        gate = Gate(monkeypatch)
        run.save(1, waits=False)
        assert gate.is_reached.wait(patience_s())
        gate.opened.set()
    assert steps_in(tmp_path) == [1]
    with pytest.raises(BiremeError, match="already closed"):
        run.save(2)


def test_leaving_with_an_error_does_not_wait_for_a_rank_that_is_gone(tmp_path: Path) -> None:
    events: list[CheckpointEvent] = []

    def leave() -> None:
        with CheckpointWriter(tmp_path, 0, 2, HashStore(), on_event=events.append, timeout_s=1e6) as writer:
            writer.save(snapshot_of(0, 1), META)
            raise ArithmeticError("another rank is gone")

    with pytest.raises(ArithmeticError, match="another rank"):
        leave()
    (event,) = events
    assert "the run is ending" in str(event)
    assert hidden_in(tmp_path) == []


@pytest.mark.slow
def test_a_hundred_saves_leave_no_file_open_no_thread_and_no_key(tmp_path: Path) -> None:
    gc.collect()  # of earlier tests, whose files would be closed meanwhile
    store = HashStore()
    events: list[list[CheckpointEvent]] = [[], []]

    def opened(rank: int) -> CheckpointWriter:
        return CheckpointWriter(tmp_path, rank, 2, PrefixStore("run", store), on_event=events[rank].append)

    run = Ranks(run_threads(2, opened), events)
    run.save(1)
    counted = [(open_files(), threading.active_count(), store.num_keys())]
    for step in range(2, 101):
        run.save(step)
        counted.append((open_files(), threading.active_count(), store.num_keys()))
    assert len(run.saved()) == 100
    assert set(counted) == {counted[0]}
    for writer in run.writers:
        writer.close()
    assert open_files() == counted[0][0] - 1
    assert len(find_checkpoints(tmp_path)) == 2
