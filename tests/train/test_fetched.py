"""Files of another machine: pieces come when they are needed, from all that have them, and are checked."""

import hashlib
import os
import random
import resource
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bireme.errors import BiremeError
from bireme.model.capture import capture
from bireme.model.gpt import GPT, GPTConfig
from bireme.model.weights import load_weights
from bireme.pieces import PIECE_BYTES, FileIdentity, PieceFile, partial_files
from bireme.runtime.copies import folder_server
from bireme.runtime.copies.folder_server import FolderServer, digests_at, fetch_pieces, read_range
from bireme.runtime.copies.keeper import KeeperAddress, RateLimit, RequestConnection, RequestServer, talk_to
from bireme.train import fetched, resume_checks
from bireme.train.checkpoint.checkpoint import MachinesNote, note_machines
from bireme.train.data.prepare import ModelSide, RunData, prepare_data
from bireme.train.fetched import FetchProgress, bring, bring_copies, bring_weights
from bireme.train.folder import RunFolder
from bireme.train.resume_checks import DataIdentity, check_files_here, write_identity
from bireme.train.run_file import RunFile
from bireme.train.run_file.tables import Data
from bireme.train.run_machines import MachineFolders
from tests.support.patience import patience_s

NUM_PIECES = 6
CONTENT = random.Random(0).randbytes(NUM_PIECES * PIECE_BYTES - 100)


def placed(path: Path, content: bytes = CONTENT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


class Machines:
    """Machines that each serve the run in a folder of their own. The first one has the files at `roots`."""

    def __init__(self, folder: Path, count: int, roots: Sequence[Path]) -> None:
        self.runs = [RunFolder(folder / f"machine-{number}") for number in range(count)]
        self.folders = [MachineFolders() for _ in self.runs]
        for run in self.runs:
            run.path.mkdir(exist_ok=True)
        self.addresses = tuple(one.served(run.path) for one, run in zip(self.folders, self.runs, strict=True))
        self.folders[0].serve_roots(self.runs[0], [str(one) for one in roots])
        self.said = list[str]()

    def take(self, number: int, paths: Sequence[str]) -> list[Path]:
        """Where a machine has what the first one has at these paths, which no other machine sees."""
        note, progress = MachinesNote(self.addresses, number), FetchProgress(self.said.append, {})
        here = self.folders[number].take_files(self.runs[number], self.runs[0].path, paths, note, progress)
        progress.finish(partial_files(self.runs[number].path))
        return [Path(here[path]) for path in paths]


@contextmanager
def machines(folder: Path, count: int, *roots: Path) -> Iterator[Machines]:
    with ExitStack() as stack:
        found = Machines(folder, count, roots)
        for one in found.folders:
            stack.callback(one.close)
        yield found


@pytest.fixture(autouse=True)
def small_files_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched, "WHOLE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(folder_server, "_GROUP_PIECES", 2)
    monkeypatch.setattr(folder_server, "_AGAIN_S", 0.01)


def fetch(file: PieceFile, pieces: Sequence[int], addresses: Sequence[KeeperAddress]) -> dict[str, int]:
    """Fetch pieces; the bytes from each machine."""
    came = dict[str, int]()

    def note(address: str, num_bytes: int) -> None:
        came[address] = came.get(address, 0) + num_bytes

    fetch_pieces(file, pieces, lambda: addresses, patience_s(), came=note)
    return came


def begun(path: Path, source: Path, name: str = "root-0") -> PieceFile:
    found = PieceFile.begun(path, name, FileIdentity.of(source))
    assert found is not None
    return found


def test_pieces_come_from_all_that_have_them_and_stay_when_the_fetch_begins_again(tmp_path: Path) -> None:
    source = placed(tmp_path / "there" / "data.bin")
    with machines(tmp_path, 2, source) as found:
        first = begun(tmp_path / "one" / "data.bin", source)
        assert fetch(first, [0, 1, 2], found.addresses[:1]) == {found.addresses[0].address: 3 * PIECE_BYTES}
        assert first.missing() == [3, 4, 5]
        found.folders[1].served(None, [str(first.path)])
        second = begun(tmp_path / "two" / "data.bin", source)
        came = fetch(second, range(NUM_PIECES), found.addresses)
        assert sum(came.values()) == len(CONTENT)
        assert came[found.addresses[0].address] >= len(CONTENT) - 3 * PIECE_BYTES
        assert second.path.read_bytes() == CONTENT
        assert PieceFile.at(second.path) is None
        assert PieceFile.begun(second.path, "root-0", FileIdentity.of(source)) is None
        again = begun(first.path, source, "root-1")
        assert again.missing() == [3, 4, 5]
        assert PieceFile.at(first.path) == again
        fetch(begun(first.path, source), [4], found.addresses[:1])
        assert first.missing([(0, PIECE_BYTES), (4 * PIECE_BYTES - 1, 4 * PIECE_BYTES + 1)]) == [3]


def test_a_partial_file_is_served_by_pieces_alone(tmp_path: Path) -> None:
    source = placed(tmp_path / "there" / "data.bin")
    with machines(tmp_path, 2, source) as found:
        partial = begun(tmp_path / "machine-1" / "data.bin", source)
        fetch(partial, [1], found.addresses[:1])
        own = found.addresses[1:]
        assert digests_at(own[0], ["data.bin"], patience_s()) == (None,)
        assert read_range(own, "data.bin", PIECE_BYTES, 9, patience_s()) == CONTENT[PIECE_BYTES:][:9]
        with pytest.raises(BiremeError, match="only some pieces"):
            read_range(own, "data.bin", 0, 9, patience_s())


def test_a_damaged_piece_comes_from_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = placed(tmp_path / "there" / "data.bin")
    with machines(tmp_path, 2, source) as found:
        damaged = begun(tmp_path / "machine-1" / "data.bin", source)
        fetch(damaged, [0, 1], found.addresses[:1])
        with damaged.path.open("r+b") as file:
            file.write(b"damaged")
        found.folders[1].served(None, [str(damaged.path)])
        wanted = begun(tmp_path / "two" / "data.bin", source)
        fetch(wanted, range(NUM_PIECES), found.addresses[::-1])
        assert wanted.path.read_bytes() == CONTENT
        monkeypatch.setattr(folder_server, "_AGAIN_S", 0.0)
        alone = begun(tmp_path / "three" / "data.bin", source)
        with pytest.raises(BiremeError, match="does not have the SHA-256"):
            fetch_pieces(alone, [0], lambda: found.addresses[1:], 0.2)
        with pytest.raises(BiremeError, match="no machine of the run that answers has it"):
            fetch_pieces(alone, [5], lambda: found.addresses[1:], 0.2)


def test_pieces_that_came_before_their_machine_died_stay(tmp_path: Path) -> None:
    source = placed(tmp_path / "there" / "data.bin")

    def die(talk: RequestConnection, asked: dict[str, Any]) -> None:
        talk.say({"pieces": asked["pieces"]})
        if asked["pieces"] == [[0, 2]]:
            talk.send(hashlib.sha256(CONTENT[:PIECE_BYTES]).digest(), CONTENT[:PIECE_BYTES])

    dying = RequestServer.__new__(RequestServer)
    dying.acts = {"pieces": die}
    RequestServer.__init__(dying, "dying", patience_s())
    with closing(dying):
        file = begun(tmp_path / "one" / "data.bin", source)
        with pytest.raises(BiremeError, match="cannot be fetched"):
            fetch_pieces(file, [0, 1], lambda: [dying.address], 0.2)
    assert file.missing() == [*range(1, NUM_PIECES)]


def test_a_machine_that_does_not_answer_is_not_asked_for_each_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, source = list[str](), placed(tmp_path / "there" / "data.bin")

    def note(address: KeeperAddress, *words: Any, **more: Any) -> AbstractContextManager[RequestConnection]:
        asked.append(address.address)
        return talk_to(address, *words, **more)

    monkeypatch.setattr(folder_server, "talk_to", note)
    with machines(tmp_path, 2, source) as found:
        file = begun(tmp_path / "one" / "data.bin", source)
        found.folders[1].close()
        fetch(file, [0], found.addresses)
        fetch(file, [1], found.addresses)
        assert asked.count(found.addresses[1].address) == 1
        found.folders[0].close()
        with pytest.raises(BiremeError, match="cannot be fetched"):
            fetch_pieces(file, [2], lambda: found.addresses, 0.2)
        assert asked.count(found.addresses[1].address) > 1


def test_a_piece_that_the_disk_has_no_room_for_ends_the_fetch_and_is_not_taken_for_here(
    tmp_path: Path,
) -> None:
    source = placed(tmp_path / "there" / "data.bin")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with machines(tmp_path, 1, source) as found:
        file = begun(tmp_path / "one" / "data.bin", source)
        resource.setrlimit(resource.RLIMIT_FSIZE, (PIECE_BYTES + 100, limits[1]))
        try:
            with pytest.raises(BiremeError, match="cannot be written"):
                fetch(file, [1], found.addresses)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert file.missing() == [*range(NUM_PIECES)]
        fetch(file, [1], found.addresses)
        assert file.missing([(PIECE_BYTES, 2 * PIECE_BYTES)]) == []


@pytest.mark.parametrize("damage", ["file", "length", "record"])
def test_a_file_that_was_deleted_or_whose_record_is_damaged_is_fetched_again(
    damage: str, tmp_path: Path
) -> None:
    source = placed(tmp_path / "there" / "data.bin")
    with machines(tmp_path, 1, source) as found:
        file = begun(tmp_path / "one" / "data.bin", source)
        fetch(file, [0, 1], found.addresses)
        match damage:
            case "file":
                file.path.unlink()
            case "length":
                os.truncate(file.path, 0)
            case "record":
                placed(tmp_path / "one" / ".data.bin.pieces", b"")
        again = begun(file.path, source)
        assert again.missing() == [*range(NUM_PIECES)]
        fetch(again, range(NUM_PIECES), found.addresses)
        assert again.path.read_bytes() == CONTENT


def test_pieces_of_an_earlier_file_are_not_written_into_a_later_one(tmp_path: Path) -> None:
    source = placed(tmp_path / "there" / "data.bin")
    before = begun(tmp_path / "one" / "data.bin", source)
    os.utime(source, ns=(1, 1))
    now = begun(before.path, source)
    before.put({0: (bytes(32), CONTENT[:PIECE_BYTES])})
    assert not before.finish()
    assert now.missing() == [*range(NUM_PIECES)]
    assert now.path.read_bytes() == bytes(len(CONTENT))


def test_a_file_that_is_begun_anew_meanwhile_is_not_served_as_the_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = placed(tmp_path / "there" / "data.bin")
    wanted = begun(tmp_path / "one" / "data.bin", source)
    opened = FolderServer._opened

    def begin_and_open(server: FolderServer, name: str) -> BinaryIO:
        PieceFile.begun(source, "root-0", FileIdentity(len(CONTENT), 1))
        return opened(server, name)

    monkeypatch.setattr(FolderServer, "_opened", begin_and_open)
    with machines(tmp_path, 1, source) as found, pytest.raises(BiremeError, match="has changed"):
        fetch_pieces(wanted, [0], lambda: found.addresses, 0.2)


def test_pieces_of_a_file_that_has_changed_are_not_kept(tmp_path: Path) -> None:
    source = placed(tmp_path / "there" / "data.bin")
    with machines(tmp_path, 1, source) as found:
        before = begun(tmp_path / "one" / "data.bin", source)
        fetch(before, [0, 1], found.addresses)
        placed(source, CONTENT[::-1])
        with pytest.raises(BiremeError, match="has changed on its machine"):
            fetch_pieces(before, [2], lambda: found.addresses, 0.2)
        now = begun(tmp_path / "one" / "data.bin", source)
        assert now.missing() == [*range(NUM_PIECES)]
        fetch(now, range(NUM_PIECES), found.addresses)
        assert now.path.read_bytes() == CONTENT[::-1]


def test_small_files_come_whole_and_again_only_if_they_have_changed(tmp_path: Path) -> None:
    folder = placed(tmp_path / "there" / "config.json", b"{}").parent
    placed(folder / "more" / "empty.txt", b"")
    paths = [f"/nowhere/{folder.name}"]
    with machines(tmp_path, 2, folder) as found:
        (here,) = found.take(1, paths)
        assert {one.relative_to(here).as_posix() for one in here.rglob("*.*")} == {
            "config.json",
            "more/empty.txt",
        }
        assert (here / "config.json").read_bytes() == b"{}"
        assert len(found.said) == 1
        found.take(1, paths)
        assert len(found.said) == 1
        placed(folder / "config.json", b"[1]")
        found.take(1, paths)
        assert (here / "config.json").read_bytes() == b"[1]"


def test_a_whole_file_is_that_of_the_first_machine_if_another_one_lies(tmp_path: Path) -> None:
    """It may be code. The other machine has a file of the same length and time of change, and its digests."""
    file = placed(tmp_path / "there" / "model.py")
    false = placed(tmp_path / "false" / "model.py", CONTENT[::-1])
    os.utime(false, ns=(file.stat().st_mtime_ns, file.stat().st_mtime_ns))
    with machines(tmp_path, 3, file) as found:
        found.folders[1].served(found.runs[1].path, [str(false)])
        (here,) = found.take(2, ["/nowhere/model.py"])
        assert here.read_bytes() == CONTENT
        assert any("other bytes" in one for one in found.said)


def test_files_that_the_first_machine_has_no_more_are_removed(tmp_path: Path) -> None:
    folder = placed(tmp_path / "there" / "texts" / "one.txt").parent
    placed(folder / "two.bin")
    file = placed(tmp_path / "there" / "book.txt")
    paths = ["/nowhere/texts"]
    with machines(tmp_path, 2, folder) as found:
        (here,) = found.take(1, paths)
        assert {one.name for one in here.iterdir()} == {"one.txt", "two.bin", ".two.bin.pieces"}
        placed(found.runs[1].path / "checkpoints" / "mine")
        bring(here / "two.bin")
        (folder / "two.bin").unlink()
        found.take(1, paths)
        assert [one.name for one in here.iterdir()] == ["one.txt"]
        found.folders[0].served(found.runs[0].path, [str(file)])
        assert found.take(1, paths) == [here]
        assert here.read_bytes() == CONTENT
        found.folders[0].served(found.runs[0].path, [str(folder)])
        found.take(1, paths)
        assert (here / "one.txt").read_bytes() == CONTENT
        assert (found.runs[1].path / "checkpoints" / "mine").exists()


def test_a_machine_fetches_the_tensors_of_its_stages_alone(tmp_path: Path) -> None:
    config = GPTConfig(layers=2, width=256, heads=2, vocab=512, context=8)
    model, ids = GPT(config), torch.zeros((1, 8), dtype=torch.int64)
    graph = capture(model, {"input_ids": ids, "labels": ids})
    folder = tmp_path / "there"
    folder.mkdir()
    states = {name: one.clone() for name, one in model.state_dict().items()}
    save_file(states, str(folder / "model.safetensors"))
    names = [one.name for one in graph.parameters if one.name.startswith("layers.1.")]
    assert names
    num_bytes = (folder / "model.safetensors").stat().st_size
    with machines(tmp_path, 2, folder) as found:
        (here,) = found.take(1, ["/nowhere/model"])
        with pytest.raises(BiremeError, match="only some pieces"):
            load_weights(graph, names, here)
        progress = FetchProgress(found.said.append, {})
        bring_weights(graph, names, here, progress=progress)
        assert sum(progress.from_machines.values()) < num_bytes / 2
        read = load_weights(graph, names, here)
        assert all(torch.equal(read[name], states[name]) for name in names)
        with pytest.raises(BiremeError, match="only some pieces"):
            load_weights(graph, [one.name for one in graph.parameters], here)
        bring_weights(graph, [one.name for one in graph.parameters], here, progress=progress)
        assert len(load_weights(graph, [one.name for one in graph.parameters], here)) == len(graph.parameters)
        assert "more are fetched if this machine needs them: model.safetensors" in found.said[-1]


def data_of(source: Path, **keys: Any) -> RunData:
    request = Data(source=str(source), length=64, tokenizer="bytes", **keys)
    return prepare_data(request, ModelSide({}, 257), 2)


@pytest.mark.parametrize("kind", ["text", "rows", "array", "signed array"])
def test_another_machine_reads_the_samples_of_the_first_one_and_only_pieces_of_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIREME_CACHE", str(tmp_path / "cache"))
    text = "".join(f"{number} is a number.\n" for number in range(25_000))
    if kind == "rows":
        rows = (f'{{"prompt": "{number}?", "completion": "{text[:100]!a}"}}' for number in range(4_000))
        source = placed(tmp_path / "there" / "rows.jsonl", "\n".join(rows).encode())
    elif kind == "text":
        source = placed(tmp_path / "there" / "book.txt", text.encode())
    elif kind == "array":
        source = placed(tmp_path / "there" / "ids.bin", bytes((np.arange(300_000) % 251).astype(np.uint16)))
    else:
        source = placed(tmp_path / "there" / "ids.npy", b"")
        np.save(source, (np.arange(300_000) % 251).astype(np.int64))
    wanted = data_of(source)
    folders = wanted.token_folders()
    assert len(folders) == (kind in ("text", "rows"))
    with machines(tmp_path, 2, Path(folders.get(str(source), source))) as found:
        (here,) = found.take(1, [f"/nowhere/{source.name}"])
        monkeypatch.setenv("BIREME_CACHE", str(tmp_path / "other"))
        data = data_of(here)
        assert (len(data.training), data.num_documents) == (len(wanted.training), wanted.num_documents)
        assert [(one.what, one.counted) for one in data.recognized] == [
            (one.what, one.counted) for one in wanted.recognized
        ]
        numbers = [len(data.training) - 1, 7]
        for name, tensor in data.training.take(numbers).items():
            assert torch.equal(tensor, wanted.training.take(numbers)[name])
        (partial,) = partial_files(here)
        assert 0 < len(partial.missing()) < partial.num_pieces
        assert partial.missing([(0, 1)]) == []
    assert not (tmp_path / "other").exists()


def test_data_of_this_machine_are_checked_though_its_model_was_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = bytes((np.arange(300_000) % 251).astype(np.uint16))
    own = placed(tmp_path / "own.bin", ids)
    model = placed(tmp_path / "there" / "model.safetensors", bytes(8) + CONTENT)
    with machines(tmp_path, 2, own, model) as found:
        fetched_ids, _ = found.take(1, ["/nowhere/ids.bin", "/nowhere/model.safetensors"])
        folder = found.runs[1]
        write_identity(folder.data, DataIdentity("elsewhere", 9, 9 * 64, "0" * 64, None))
        for source in (fetched_ids, own):
            run = RunFile().with_keys("data", source=str(source), length=64, tokenizer="bytes")
            monkeypatch.setattr(resume_checks, "data_of", lambda run, _model: data_of(Path(run.data.source)))
            monkeypatch.setattr(RunFolder, "load_run", lambda _folder, run=run: run)
            with pytest.raises(BiremeError, match="other data") if source == own else nullcontext():
                check_files_here(folder)
        assert len([*partial_files(folder.path)]) == 2


def test_a_folder_of_texts_may_have_a_file_of_the_name_that_describes_tokens(tmp_path: Path) -> None:
    folder = placed(tmp_path / "texts" / "source.json", b'{"title": "A book"}').parent
    placed(folder / "book.txt", b"It is a book." * 100)
    assert data_of(folder, pattern="*").num_documents == 2


def test_pieces_of_a_batch_are_fetched_at_once_and_nothing_is_asked_for_those_that_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = placed(tmp_path / "there" / "ids.bin", bytes((np.arange(300_000) % 251).astype(np.uint16)))
    asked = list[Sequence[int]]()

    def note(file: PieceFile, pieces: Sequence[int], *words: Any, **more: Any) -> None:
        asked.append(pieces)
        fetch_pieces(file, pieces, *words, **more)

    monkeypatch.setattr(fetched, "fetch_pieces", note)
    with machines(tmp_path, 2, source) as found:
        data = data_of(found.take(1, ["/nowhere/ids.bin"])[0])
        asked.clear()
        for _ in range(2):
            data.training.take([1_000, 1_001, 3_000])
    assert [sorted(one) for one in asked] == [[1, 5]]


def test_a_machine_that_leads_has_pieces_of_all_and_the_one_that_led_before_has_the_whole_file(
    tmp_path: Path,
) -> None:
    """Before the machine that leads now has told what this start needs, too."""
    source = placed(tmp_path / "there" / "data.bin")
    with machines(tmp_path, 3, source) as found:
        paths = [found.take(number, ["/nowhere/data.bin"])[0] for number in (1, 2)]
        bring(paths[1], [(3 * PIECE_BYTES, 4 * PIECE_BYTES)])
    folders = [MachineFolders() for _ in found.runs]
    with ExitStack() as stack:
        for one in folders:
            stack.callback(one.close)
        addresses = tuple(one.served(run.path) for one, run in zip(folders, found.runs, strict=True))
        note_machines(found.runs[1].path, MachinesNote((addresses[1], addresses[2]), 0))
        bring(paths[0], [(3 * PIECE_BYTES, 4 * PIECE_BYTES)])
        order = tuple(addresses[number] for number in (1, 0, 2))
        note_machines(found.runs[1].path, MachinesNote(order, 0))
        folders[1].serve_roots(found.runs[1], [str(paths[0])])
        for number, place, wanted in ((0, 1, source), (2, 2, paths[1])):
            note, progress = MachinesNote(order, place), FetchProgress(print, {})
            here = folders[number].take_files(
                found.runs[number], found.runs[1].path, [str(paths[0])], note, progress
            )
            assert here[str(paths[0])] == str(wanted)
            run = RunFile().with_keys("data", source="./files/0-data.bin")
            found.runs[number].write_run(run)
            assert found.runs[number].load_run().data.source == str(wanted)
            assert not progress.from_machines
        bring(paths[0])
        assert paths[0].read_bytes() == CONTENT


def test_copies_leave_room_for_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetched, "_COPIED_BYTES", PIECE_BYTES)
    free = iter([1000 + 2 * PIECE_BYTES, 1000 + PIECE_BYTES, 1000])
    monkeypatch.setattr(fetched, "free_bytes", lambda _path: next(free))
    source = placed(tmp_path / "there" / "data.bin")
    with machines(tmp_path, 2, source) as found:
        (path,) = found.take(1, ["/nowhere/data.bin"])
        assert len([*bring_copies([path], 1, RateLimit(1e12), room_bytes=1000)]) == 2
        assert "which checkpoints need" in capsys.readouterr().err


def test_the_other_machines_together_have_a_copy_of_each_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched, "_COPIED_BYTES", PIECE_BYTES)
    source = placed(tmp_path / "there" / "data.bin")
    with machines(tmp_path, 3, source) as found:
        paths = [found.take(number, ["/nowhere/data.bin"])[0] for number in (1, 2)]
        missing = []
        for path in paths:
            assert [*bring_copies([path], 1, RateLimit(1e12), room_bytes=0)]
            partial = PieceFile.at(path)
            assert partial is not None
            missing.append(set(partial.missing()))
        assert missing[0] | missing[1] | {0} == set(range(NUM_PIECES))
        assert not missing[0] & missing[1]
        found.folders[0].close()
        bring(paths[0])
        assert paths[0].read_bytes() == CONTENT
