"""A machine serves its folder of a run: what others may read there, and what they believe."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from bireme.errors import BiremeError
from bireme.runtime.copies import folder_server
from bireme.runtime.copies.folder_server import (
    FolderServer,
    ServedFile,
    digests_at,
    fetch_file,
    files_at,
    holders_of,
    read_range,
    steps_at,
)
from bireme.runtime.copies.keeper import KeeperAddress
from bireme.train.checkpoint.holders import (
    Holders,
    MachinesNote,
    SpreadTensors,
    fetch_manifests,
    find_holders,
    note_machines,
)
from bireme.train.checkpoint.manifest import FileEntry, Manifest, read_manifest, write_manifest
from bireme.train.checkpoint.shard import write_shard
from tests.support.patience import patience_s

DATA = bytes(range(256)) * 40_000
SHA256 = hashlib.sha256(DATA).hexdigest()


@contextmanager
def serving(*folders: Path) -> Iterator[list[KeeperAddress]]:
    with ExitStack() as stack:
        found = []
        for folder in folders:
            server = FolderServer(patience_s())
            stack.callback(server.close)
            server.folder = folder
            found.append(server.address)
        yield found


def written(folder: Path, name: str = "step-00000004/rank-0000.safetensors", data: bytes = DATA) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return folder


def manifest_of(step: int, entry: FileEntry) -> Manifest:
    return Manifest(
        step=step,
        next_batch=step,
        clip_scale=1.0,
        seed=0,
        schedule="1f1b",
        num_stages=1,
        width=1,
        graph_hash="",
        torch_version="",
        bireme_version="",
        extra={},
        files=[entry],
        machines=["red", "blue", "green"],
    )


def test_a_file_comes_from_all_that_have_it_at_once_and_from_the_others_if_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_server, "_PIECE_BYTES", 1 << 20)
    name = "step-00000004/rank-0000.safetensors"
    folders = [written(tmp_path / str(number)) for number in range(3)]
    with serving(*folders) as addresses:
        (folders[1] / name).unlink()
        fetch_file(addresses, name, tmp_path / "here", ServedFile(len(DATA), SHA256), patience_s())
        assert (tmp_path / "here").read_bytes() == DATA
        assert holders_of({name: SHA256}, addresses, patience_s())[name] == (addresses[0], addresses[2])
        assert bytes(read_range(addresses, name, 1_000, 2_000_000, patience_s())) == DATA[1_000:2_001_000]


def test_a_file_that_is_not_what_was_announced_is_not_taken(tmp_path: Path) -> None:
    with serving(written(tmp_path / "there", "file")) as addresses:
        wrong = ServedFile(len(DATA), hashlib.sha256(b"").hexdigest())
        with pytest.raises(BiremeError, match="does not have the SHA-256"):
            fetch_file(addresses, "file", tmp_path / "here", wrong, patience_s())
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "link", "root-1", "root-0/../../secret"])
def test_nothing_outside_the_folder_is_served(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = written(tmp_path / "run", "file")
    (folder / "link").symlink_to(tmp_path / "secret")
    server = FolderServer(patience_s())
    server.folder, server.roots = folder, (folder,)
    try:
        assert digests_at(server.address, ["file", name], patience_s())[1] is None
        with pytest.raises(BiremeError):
            read_range([server.address], name, 0, 4, patience_s())
    finally:
        server.close()


def test_a_root_is_a_folder_with_all_its_files_or_one_file(tmp_path: Path) -> None:
    folder = written(written(tmp_path / "data", "a/one"), "two", b"two")
    server = FolderServer(patience_s())
    server.roots = folder, folder / "two"
    try:
        assert files_at(server.address, "root-0", patience_s()) == ["a/one", "two"]
        assert files_at(server.address, "root-1", patience_s()) == [""]
        assert bytes(read_range([server.address], "root-1", 0, 3, patience_s())) == b"two"
    finally:
        server.close()


def test_a_file_that_is_deleted_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    """A machine deletes old checkpoints while another one still copies them."""
    name = "step-00000004/rank-0000.safetensors"
    folder = written(tmp_path / "run")
    with serving(folder) as addresses:
        first = read_range(addresses, name, 0, 1000, patience_s())
        (folder / name).unlink()
        rest = read_range(addresses, name, 1000, len(DATA) - 1000, patience_s())
    assert bytes(first + rest) == DATA


def test_a_machine_that_does_not_answer_has_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as (address,):
        pass
    assert steps_at(address, "checkpoints", "manifest.json", patience_s()) == {}
    assert digests_at(address, ["file"], patience_s()) == (None,)


def test_a_tensor_is_read_here_or_from_a_machine_that_has_it_as_it_was_written(tmp_path: Path) -> None:
    """The own file has a changed byte, and so has that of the first machine that is asked."""
    runs = [tmp_path / str(number) for number in range(3)]
    steps = [run / "checkpoints" / "step-00000004" for run in runs]
    tensors = {"weights/a": torch.arange(1000.0), "weights/b": torch.ones(3, dtype=torch.bool)}
    for step in steps:
        step.mkdir(parents=True)
        entry = write_shard(step / "rank-0000.safetensors", tensors, 1)
    for step in steps[:2]:
        data = bytearray((step / "rank-0000.safetensors").read_bytes())
        data[-2000] ^= 1
        (step / "rank-0000.safetensors").write_bytes(data)
    manifest = manifest_of(4, entry)
    with serving(*runs) as addresses:
        name = "checkpoints/step-00000004/rank-0000.safetensors"
        spread = SpreadTensors(steps[0], runs[0], manifest, Holders({name: tuple(addresses[1:])}))
        assert all(torch.equal(spread[name], tensor) for name, tensor in tensors.items())
        note_machines(runs[0], MachinesNote(tuple(addresses), 0))
        assert find_holders(runs[0], steps[0], manifest, [entry]).files == {name: (addresses[2],)}
        (steps[2] / "rank-0000.safetensors").unlink()
        with pytest.raises(BiremeError, match="damaged on all machines"):
            SpreadTensors(steps[0], runs[0], manifest, Holders({name: (addresses[1],)}))["weights/a"]
        with pytest.raises(
            BiremeError, match=r"lacks rank-0000\.safetensors: .* was written on blue, and no"
        ):
            find_holders(runs[0], steps[0], manifest, [entry])


def test_a_machine_gets_the_manifests_that_it_lacks_and_passes_over_one_that_only_it_has(
    tmp_path: Path,
) -> None:
    """A machine was cut off just after it had written a checkpoint that the others gave up."""
    runs = [tmp_path / str(number) for number in range(3)]
    entry = FileEntry(name="rank-0000.safetensors", num_bytes=1, sha256=SHA256, tensors=[])
    for run, steps in zip(runs, ([8], [4, 6], [4, 6]), strict=True):
        for step in steps:
            folder = run / "checkpoints" / f"step-{step:08d}"
            folder.mkdir(parents=True)
            write_manifest(folder, manifest_of(step, entry))
    with serving(*runs) as addresses:
        note_machines(runs[0], MachinesNote(tuple(addresses), 0))
        minor = fetch_manifests(runs[0], "checkpoints")
    assert minor == {runs[0] / "checkpoints" / "step-00000008"}
    for step in (4, 6):
        assert read_manifest(runs[0] / "checkpoints" / f"step-{step:08d}") == manifest_of(step, entry)
