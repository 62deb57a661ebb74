"""A machine serves its folder of a run: what others may read there, and what they believe."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bireme.errors import BiremeError
from bireme.files import FileDigest, path_within
from bireme.pieces import FileIdentity
from bireme.runtime.copies import folder_server
from bireme.runtime.copies.folder_server import (
    FolderServer,
    digests_at,
    fetch_file,
    files_at,
    holders_of,
    read_file,
    read_range,
    steps_at,
)
from bireme.runtime.copies.keeper import KeeperAddress, RequestConnection, RequestServer, talk_to
from bireme.train import host_launcher
from bireme.train.checkpoint.checkpoint import (
    MachinesNote,
    SpreadTensors,
    fetch_manifest,
    fetch_manifests,
    find_holders,
    note_machines,
)
from bireme.train.checkpoint.manifest import FileEntry, Manifest, read_manifest, write_manifest
from bireme.train.checkpoint.shard import places_in, write_shard
from bireme.train.fetched import FetchProgress
from bireme.train.folder import RunFolder
from bireme.train.host_launcher import note_begin, note_end, part
from bireme.train.outcome import Outcome
from bireme.train.rank_part import RunStart
from bireme.train.rendezvous import Orders
from bireme.train.run_file import load_run_file
from bireme.train.run_machines import MachineFolders, Mirror
from tests.support.patience import patience_s
from tests.support.training import write_run

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


class _Liar(RequestServer):
    """A machine that answers each question with the same text, and each request for bytes with the same."""

    def __init__(self, data: bytes = b"", **answers: Any) -> None:
        def read(talk: RequestConnection, _asked: dict[str, Any]) -> None:
            talk.say({})
            talk.send(data)

        self.acts = {
            name: lambda talk, _, own=answers: talk.say(own)  # type: ignore[misc]  # `own` has a default
            for name in ("steps", "tree", "digests")
        }
        self.acts["read"] = read
        super().__init__("liar", patience_s())


@contextmanager
def lying(data: bytes = b"", **answers: Any) -> Iterator[KeeperAddress]:
    liar = _Liar(data, **answers)
    try:
        yield liar.address
    finally:
        liar.close()


def test_a_file_comes_from_all_that_have_it_at_once_and_from_the_others_if_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_server, "_PIECE_BYTES", 1 << 20)
    name = "step-00000004/rank-0000.safetensors"
    folders = [written(tmp_path / str(number)) for number in range(3)]
    with serving(*folders) as addresses:
        (folders[1] / name).unlink()
        fetch_file(addresses, name, tmp_path / "here", FileDigest(len(DATA), SHA256), patience_s())
        assert (tmp_path / "here").read_bytes() == DATA
        assert holders_of({name: SHA256}, addresses, patience_s())[name] == (addresses[0], addresses[2])
        assert bytes(read_range(addresses, name, 1_000, 2_000_000, patience_s())) == DATA[1_000:2_001_000]


def test_a_file_that_is_not_what_was_announced_is_not_taken(tmp_path: Path) -> None:
    with serving(written(tmp_path / "there", "file")) as addresses:
        wrong = FileDigest(len(DATA), hashlib.sha256(b"").hexdigest())
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
        assert [*files_at(server.address, "root-0", patience_s())] == ["a/one", "two"]
        assert files_at(server.address, "root-1", patience_s()) == {"": FileIdentity.of(folder / "two")}
        assert bytes(read_range([server.address], "root-1", 0, 3, patience_s())) == b"two"
    finally:
        server.close()


def test_a_file_of_a_root_may_be_a_link_and_a_folder_of_it_may_not(tmp_path: Path) -> None:
    """A folder of a downloaded model has links to files beside it."""
    written(tmp_path / "blobs", "one")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model").symlink_to(tmp_path / "blobs" / "one")
    (snapshot / "all").symlink_to(tmp_path / "blobs")
    server = FolderServer(patience_s())
    server.roots = (snapshot,)
    try:
        assert [*files_at(server.address, "root-0", patience_s())] == ["model"]
        found = digests_at(server.address, ["root-0/model", "root-0/all/one"], patience_s())
        assert found == (FileDigest(len(DATA), SHA256), None)
    finally:
        server.close()


def test_a_machine_has_few_files_open_however_many_are_read(tmp_path: Path) -> None:
    for number in range(70):
        written(tmp_path, f"{number}", b"some")
    server = FolderServer(patience_s())
    server.folder = tmp_path
    try:
        for number in range(70):
            assert bytes(read_range([server.address], f"{number}", 0, 4, patience_s())) == b"some"
        assert [*server._files] == [f"{number}" for number in range(6, 70)]
    finally:
        server.close()


OUTSIDE = ["../outside", "a/../../outside", "/outside", "..", "a/\0"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_file_that_another_machine_puts_outside_of_its_folder_is_not_written(
    name: str, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    digest = hashlib.sha256(b"bad").hexdigest()
    with lying(b"bad", files=[["good", 3, 0], [name, 3, 0]]) as address:
        note, progress = MachinesNote((address, address), 1), FetchProgress(print, {})
        with pytest.raises(BiremeError, match="leads out of"):
            MachineFolders().take_files(RunFolder(run), run, ["/nowhere/data"], note, progress)
        with pytest.raises(BiremeError, match="leads out of"):
            fetch_manifest(run, f"{name}/step-00000004", FileDigest(3, digest), [address])
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"runs/run/machines.json"}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leads_out_of_a_folder_is_no_path_in_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(BiremeError, match="leads out of"):
        path_within(tmp_path, name)
    assert path_within(tmp_path, "a/..b/c") == tmp_path / "a" / "..b" / "c"


def test_rank_0_cannot_place_a_checkpoint_outside_of_the_folder_of_the_run(tmp_path: Path) -> None:
    there = Path("/there/run")

    def orders(checkpoint: Path) -> Orders:
        start = RunStart(there, checkpoint, threads=None, is_shown=False, words={})
        return Orders(start, digest="", places=[0], backend="gloo", device="cpu", timeout_s=1.0)

    moved = orders(there / "checkpoints" / "step-00000004").moved(tmp_path).start
    assert moved.checkpoint == tmp_path / "checkpoints" / "step-00000004"
    with pytest.raises(BiremeError, match="leads out of"):
        orders(there / ".." / "step-00000004").moved(tmp_path)


@pytest.mark.parametrize(
    "name", ["../step-00000004", "step-00000004.bak", "step-4", "step-x", "step-00000004/"]
)
def test_only_folders_of_checkpoints_are_listed(name: str, tmp_path: Path) -> None:
    """Someone has copied a checkpoint to another name beside it."""
    with lying(steps={name: [3, SHA256], "step-00000008": [3, SHA256]}) as address:
        found = steps_at(address, "checkpoints", "manifest.json", patience_s())
    assert found == {"step-00000008": FileDigest(3, SHA256)}


@pytest.mark.parametrize(
    "one", [[-1, SHA256], [3, SHA256.upper()], ["3", SHA256], [3, SHA256, 0], {}, [3.5, SHA256], [3, None]]
)
def test_a_file_without_length_and_digest_is_not_there(one: object) -> None:
    with lying(digests=[one], steps={"step-00000004": one}) as address:
        assert digests_at(address, ["file"], patience_s()) == (None,)
        assert steps_at(address, "checkpoints", "manifest.json", patience_s()) == {}
    with lying(digests=[[3, SHA256]]) as address:
        assert digests_at(address, ["file", "other"], patience_s()) == (None, None)
    with lying(error="of the liar") as address, pytest.raises(BiremeError, match="of the liar"):
        files_at(address, "root-0", patience_s())


@pytest.mark.parametrize("text", [{"do": "delete"}, {}, [1]])
def test_a_text_that_is_no_request_is_answered_with_an_error(text: Any, tmp_path: Path) -> None:
    with serving(tmp_path) as (address,), talk_to(address, patience_s()) as talk:
        talk.say(text)
        with pytest.raises(BiremeError, match=r"no request|no JSON object"):
            talk.hear()


def test_more_bytes_than_were_asked_for_are_refused() -> None:
    with (
        lying(b"longer") as address,
        pytest.raises(BiremeError, match="6 bytes of file came instead of 3"),
    ):
        read_range([address], "file", 0, 3, patience_s())
    with lying(b"bad") as address:
        with pytest.raises(BiremeError, match="does not have the SHA-256"):
            read_file([address], "file", FileDigest(3, SHA256), patience_s())
        with pytest.raises(BiremeError, match="too many"):
            read_file([address], "file", FileDigest(1 << 50, SHA256), patience_s())


def test_a_manifest_is_of_its_step_and_its_machines(tmp_path: Path) -> None:
    entry = FileEntry(name="rank-0000.safetensors", num_bytes=1, sha256=SHA256, tensors=[])
    for change in ({"machine": 3}, {"digests": ["0"]}):
        with pytest.raises(ValueError, match=r"rank-0000\.safetensors lacks"):
            manifest_of(4, entry.model_copy(update=change))
    with pytest.raises(BiremeError, match="has 1 bytes, and its tensors have others"):
        [*places_in(entry)]
    there = tmp_path / "there" / "step-00000008"
    there.mkdir(parents=True)
    write_manifest(there, manifest_of(4, entry))
    with serving(tmp_path / "there") as addresses:
        served = steps_at(addresses[0], ".", "manifest.json", patience_s())["step-00000008"]
        with pytest.raises(BiremeError, match="has the checkpoint of step 4 as step-00000008"):
            fetch_manifest(tmp_path / "here", "step-00000008", served, addresses)
    assert not (tmp_path / "here").exists()


def test_a_file_that_is_deleted_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    """A machine deletes old checkpoints while another one still copies them."""
    name = "step-00000004/rank-0000.safetensors"
    folder = written(tmp_path / "run")
    with serving(folder) as addresses:
        first = read_range(addresses, name, 0, 1000, patience_s())
        (folder / name).unlink()
        rest = read_range(addresses, name, 1000, len(DATA) - 1000, patience_s())
    assert bytes(first + rest) == DATA


def test_a_damaged_manifest_on_one_machine_does_not_keep_the_others_from_being_copied(tmp_path: Path) -> None:
    own, there = tmp_path / "own", tmp_path / "there"
    step = there / "checkpoints" / "step-00000004"
    step.mkdir(parents=True)
    own.mkdir()
    entry = write_shard(step / "rank-0000.safetensors", {"weights/a": torch.arange(1000.0)}, 2)
    write_manifest(step, manifest_of(4, entry))
    run = load_run_file(write_run(tmp_path))
    bad = hashlib.sha256(b"bad").hexdigest()
    with serving(own, there) as addresses, lying(b"bad", steps={"step-00000008": [3, bad]}) as liar:
        Mirror(RunFolder(own), run, MachinesNote((addresses[0], liar, addresses[1]), 0)).finish()
        files = {path.relative_to(own).as_posix() for path in own.rglob("*") if path.is_file()}
    where = "checkpoints/step-00000004"
    assert files == {f"{where}/manifest.json", f"{where}/rank-0000.safetensors"}


def test_the_end_of_a_run_waits_for_machines_that_may_copy_and_not_for_those_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next phase, which is prepared on the other one meanwhile, serves the same folder there. The end
    waited for it for ever.
    """
    monkeypatch.setattr(host_launcher, "_WRITTEN_S", 0.01)
    folders = [tmp_path / "own", tmp_path / "other"]
    all_orders = [
        Orders(RunStart(one, None, None, is_shown=False, words={}), "", [0], "gloo", "cpu", 1.0)
        for one in folders
    ]
    with serving(tmp_path) as (gone,):
        pass
    with serving(*folders) as (own, following), ExitStack() as copying:
        (other,) = copying.enter_context(serving(folders[1]))
        for number, (folder, orders) in enumerate(zip(folders, all_orders, strict=True)):
            folder.mkdir()
            note_machines(folder, MachinesNote((own, other, gone), number))
            note_begin(orders, 0)
        note_machines(folders[0], MachinesNote((own, following, gone), 0))
        note_end(all_orders[0], cast(Outcome, SimpleNamespace(reason="finished", steps=3)))
        leader, follower = (
            threading.Thread(target=part, args=(orders, others), kwargs={"leads": not number})
            for number, (orders, others) in enumerate(
                zip(all_orders, ((other, gone), (own, gone)), strict=True)
            )
        )
        follower.start()
        leader.start()
        follower.join(patience_s())
        assert not follower.is_alive()
        assert leader.is_alive(), "the other machine still serves its folder"
        copying.close()
        leader.join(patience_s())
        assert not leader.is_alive()


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
        spread = SpreadTensors(steps[0], runs[0], manifest, {name: tuple(addresses[1:])})
        assert all(torch.equal(spread[name], tensor) for name, tensor in tensors.items())
        note_machines(runs[0], MachinesNote(tuple(addresses), 0))
        assert find_holders(runs[0], steps[0], manifest, [entry]) == {name: (addresses[2],)}
        (steps[2] / "rank-0000.safetensors").unlink()
        with pytest.raises(BiremeError, match="damaged on all machines"):
            SpreadTensors(steps[0], runs[0], manifest, {name: (addresses[1],)})["weights/a"]
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


def test_the_end_of_a_run_asks_all_machines_at_once_and_none_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that was gone took seconds, one after the other."""
    orders = Orders(RunStart(tmp_path, None, None, is_shown=False, words={}), "", [0], "gloo", "cpu", 1.0)
    together, asked = threading.Barrier(3), list[KeeperAddress]()

    def under_way_at(address: KeeperAddress, *_: object) -> Any:
        asked.append(address)
        together.wait(patience_s())
        return SimpleNamespace(is_finished=True)

    monkeypatch.setattr(host_launcher, "_under_way_at", under_way_at)
    with serving(tmp_path, tmp_path, tmp_path) as there:
        with serving(tmp_path, tmp_path) as gone:
            pass
        note_begin(orders, 0)
        part(orders, [*gone, *there], leads=True)
    assert {one.address for one in asked} == {one.address for one in there}
