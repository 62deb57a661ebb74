"""Checkpoints as files: every bit comes back, and every damage is found, named and passed over."""

import gc
import json
import random
import shutil
import subprocess
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from bireme.errors import BiremeError
from bireme.files import FileDigest
from bireme.train.checkpoint import disk, shard
from bireme.train.checkpoint.checkpoint import find_checkpoints, newest_good, open_checkpoint
from bireme.train.checkpoint.manifest import FileEntry, read_manifest
from bireme.train.checkpoint.shard import SavedTensors, write_shard
from tests.support.checkpoints import META, bits_equal, fill, is_step, open_files, random_tensor
from tests.support.extent import examples

IN_THE_FORMAT = tuple(shard.CODES)
OTHERS = (
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
SHAPES = ((), (1,), (0, 3), (7, 1, 3))


def assert_passed_over(folder: Path, *words: str) -> None:
    """The newest of two is found damaged, told of in sentences with these words, and the other is used."""
    told: list[str] = []
    found = newest_good(folder, told.append)
    assert found is not None
    assert found.manifest.step == 100
    assert is_step(found.snapshot().tensors, 100)
    assert found.passed_over == (folder / "step-00000200",)
    assert len(told) == 1
    assert all(word in told[0] for word in words), told


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two good checkpoints, only to be read."""
    folder = tmp_path_factory.mktemp("whole") / "checkpoints"
    fill(folder, [100, 200])
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(whole, tmp_path / "checkpoints")


def newest_files(folder: Path) -> list[Path]:
    return sorted((folder / "step-00000200").iterdir())


@pytest.mark.parametrize("dtype", IN_THE_FORMAT + OTHERS, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_type_and_shape_comes_back_bit_by_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {f"weights/{shape}": random_tensor(dtype, shape, 5) for shape in SHAPES}
    entry = write_shard(tmp_path / "rank-0000.safetensors", tensors)
    found = SavedTensors(tmp_path, [entry])
    assert set(found) == set(tensors)
    assert len(found) == len(SHAPES)
    assert all(bits_equal(found[name], tensors[name]) for name in tensors)


def test_types_mixed_in_one_file_come_back_and_those_not_contiguous_too(tmp_path: Path) -> None:
    tensors = {
        f"{dtype}/{shape}": random_tensor(dtype, shape, 1) for dtype in IN_THE_FORMAT for shape in SHAPES
    }
    tensors["transposed"] = random_tensor(torch.float32, (4, 6), 2).t()
    tensors["every second"] = random_tensor(torch.int16, (9,), 3)[::2]
    tensors["conjugate"] = random_tensor(torch.complex128, (3,), 4).conj()
    tensors["it learns, ünd häs ä näme"] = torch.ones(2, requires_grad=True)
    found = SavedTensors(tmp_path, [write_shard(tmp_path / "rank-0000.safetensors", tensors)])
    for name, tensor in tensors.items():
        assert bits_equal(found[name], tensor.detach().resolve_conj()), name


def test_the_safetensors_package_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {
        f"{dtype}/{shape}": random_tensor(dtype, shape, 1) for dtype in IN_THE_FORMAT for shape in SHAPES
    }
    path = tmp_path / "rank-0000.safetensors"
    write_shard(path, tensors)
    found = load_file(path)
    assert set(found) == set(tensors)
    assert all(bits_equal(found[name], tensors[name]) for name in tensors)


def test_a_rank_that_holds_nothing_writes_an_empty_file_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0000.safetensors"
    entry = write_shard(path, {})
    assert entry.tensors == []
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == []


def test_large_tensors_are_written_and_summed_up_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "CHUNK_BYTES", 64)
    tensors = {"a": random_tensor(torch.float32, (100,), 1), "b": random_tensor(torch.int8, (65,), 2)}
    entry = write_shard(tmp_path / "rank-0000.safetensors", tensors)
    found = disk.digest_of(tmp_path / "rank-0000.safetensors", from_disk=True)
    assert (entry.num_bytes, entry.sha256) == (found.num_bytes, found.sha256)
    assert is_equal_to_sha256sum(tmp_path / "rank-0000.safetensors", entry)
    assert all(bits_equal(SavedTensors(tmp_path, [entry])[name], tensors[name]) for name in tensors)


def is_equal_to_sha256sum(path: Path, entry: FileEntry) -> bool:
    told = subprocess.run(["sha256sum", str(path)], capture_output=True, text=True, check=True)
    return told.stdout.split()[0] == entry.sha256


def test_the_manifest_says_what_the_checkpoint_is(whole: Path) -> None:
    manifest = read_manifest(whole / "step-00000200")
    assert (manifest.format, manifest.step, manifest.next_batch, manifest.clip_scale) == (1, 200, 7, 0.1)
    assert (manifest.seed, manifest.schedule, manifest.num_stages, manifest.width) == (3, "2bw", 2, 1)
    assert (manifest.graph_hash, manifest.extra) == ("abc", META.extra)
    assert manifest.torch_version == torch.__version__
    assert [file.name for file in manifest.files] == ["rank-0000.safetensors", "rank-0001.safetensors"]
    dtypes = {entry.name: (entry.dtype, entry.shape) for entry in manifest.files[1].tensors}
    assert dtypes["weights/block.1.bfloat16"] == ("bfloat16", [5, 3])
    assert dtypes["optimizer/block.1/step"] == ("float32", [])
    sizes = [(whole / "step-00000200" / file.name).stat().st_size for file in manifest.files]
    assert [file.num_bytes for file in manifest.files] == sizes
    assert json.loads((whole / "step-00000200" / "manifest.json").read_bytes())["step"] == 200


def test_another_plan_reads_its_names_from_several_files_and_nothing_else(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = newest_good(whole)
    assert found is not None
    num_read = 0

    def counting(file: FileIO, into: memoryview) -> int:
        nonlocal num_read
        num_read += len(into)
        return read(file, into)

    read = disk.read
    monkeypatch.setattr(disk, "read", counting)
    tensors = found.snapshot().tensors
    assert (found.snapshot().num_trained, found.snapshot().clip_scale) == (200, 0.1)
    assert len(tensors) == 10
    assert num_read == 0
    wanted = ["weights/block.0.bfloat16", "weights/block.1.float32"]
    assert [tensors[name].dtype for name in wanted] == [torch.bfloat16, torch.float32]
    headers = [header_bytes(found.folder / file.name) for file in found.manifest.files]
    assert num_read == sum(headers) + 5 * 3 * (2 + 4)
    assert "weights/block.2.float32" not in tensors
    assert tensors.get("weights/block.2.float32") is None
    with pytest.raises(TypeError):
        tensors["new"] = torch.ones(1)  # type: ignore[index]  # that it cannot be set is the claim


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_a_tensor_read_is_the_readers_own(whole: Path) -> None:
    tensors = open_checkpoint(whole / "step-00000200").snapshot().tensors
    name = "weights/block.0.float32"
    tensors[name].zero_()
    assert is_step(tensors, 200)


def test_reading_leaves_no_file_open(whole: Path) -> None:
    found = newest_good(whole)
    assert found is not None
    gc.collect()
    before = open_files()
    kept = dict(found.snapshot().tensors)
    assert open_files() == before
    assert "rank-0000" not in Path("/proc/self/maps").read_text()
    assert kept


@pytest.mark.slow
def test_any_flipped_bit_of_any_file_is_found(folder: Path) -> None:
    draws = random.Random(0)
    for path in newest_files(folder):
        data = path.read_bytes()
        ends = [0, 1, 7, 8, 9, len(data) - 70, len(data) - 4, len(data) - 1]
        for place in ends + draws.sample(range(len(data)), 60):
            damaged = bytearray(data)
            damaged[place] ^= 1 << draws.randrange(8)
            path.write_bytes(damaged)
            assert_passed_over(folder, path.name, "is damaged")
        path.write_bytes(data)
    found = newest_good(folder)
    assert found is not None
    assert found.manifest.step == 200


@pytest.mark.slow
def test_truncation_at_any_length_is_found(folder: Path) -> None:
    draws = random.Random(1)
    for path in newest_files(folder):
        data = path.read_bytes()
        for length in [0, 1, len(data) - 1, *draws.sample(range(len(data)), 25)]:
            path.write_bytes(data[:length])
            assert_passed_over(folder, path.name, "truncated")
        path.write_bytes(data)


def test_a_file_that_grew_is_found(folder: Path) -> None:
    for path in newest_files(folder):
        data = path.read_bytes()
        path.write_bytes(data + b"\n")
        assert_passed_over(folder, path.name, "is ")
        path.write_bytes(data)


@pytest.mark.parametrize("name", ["rank-0000.safetensors", "rank-0001.safetensors", "manifest.json"])
def test_a_missing_file_is_found_and_named(folder: Path, name: str) -> None:
    (folder / "step-00000200" / name).unlink()
    assert_passed_over(folder, f"step-00000200/{name} is missing")


def test_an_exchanged_file_is_found(folder: Path) -> None:
    for name in ("rank-0000.safetensors", "rank-0001.safetensors"):
        shutil.copy(folder / "step-00000100" / name, folder / "step-00000200" / name)
        assert (folder / "step-00000100" / name).stat().st_size == (
            folder / "step-00000200" / name
        ).stat().st_size
    told: list[str] = []
    found = newest_good(folder, told.append)
    assert found is not None
    assert found.manifest.step == 100
    assert len(told) == 2


def test_an_exchanged_manifest_is_found(folder: Path) -> None:
    shutil.copy(folder / "step-00000100" / "manifest.json", folder / "step-00000200" / "manifest.json")
    assert_passed_over(folder, "holds the checkpoint of step 100")


def test_a_checkpoint_under_another_steps_name_is_found(folder: Path) -> None:
    (folder / "step-00000200").rename(folder / "step-00000300")
    with pytest.raises(BiremeError, match="was renamed"):
        open_checkpoint(folder / "step-00000300")


def test_a_file_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path) -> FileDigest:
        if path.parent.name == "step-00000200" and path.name == "rank-0001.safetensors":
            raise OSError(5, "Input/output error")
        return digest_of(path)

    digest_of = disk.digest_of
    monkeypatch.setattr(disk, "digest_of", failing)
    assert_passed_over(folder, "rank-0001.safetensors cannot be read: Input/output error")


def test_none_that_is_good_is_an_error_that_says_why_of_the_newest(folder: Path) -> None:
    (folder / "step-00000100" / "manifest.json").write_bytes(b"{}")
    (folder / "step-00000200" / "rank-0000.safetensors").unlink()
    told: list[str] = []
    with pytest.raises(
        BiremeError, match=r"No checkpoint in .* is intact. The newest: .*rank-0000.* is missing"
    ):
        newest_good(folder, told.append)
    assert len(told) == 2


def test_no_checkpoint_at_all_is_none(tmp_path: Path) -> None:
    assert newest_good(tmp_path) is None
    assert newest_good(tmp_path / "not there") is None
    (tmp_path / ".draft-1").mkdir()
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-00000001").write_text("a file")
    assert find_checkpoints(tmp_path) == ()
    assert newest_good(tmp_path) is None


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BiremeError, match="cannot be read"):
        newest_good(tmp_path / "file")


def test_checkpoints_come_in_the_order_of_their_steps(tmp_path: Path) -> None:
    steps = [5, 99999999, 100000000, 1234567890]
    for step in random.Random(0).sample(steps, len(steps)):
        (tmp_path / f"step-{step:08d}").mkdir()
    assert [int(path.name[5:]) for path in find_checkpoints(tmp_path)] == steps


def test_a_tensor_of_a_type_unknown_to_this_torch_is_refused_in_a_sentence(tmp_path: Path) -> None:
    entry = write_shard(tmp_path / "rank-0000.safetensors", {"a": torch.ones(2)})
    future = entry.model_copy(update={"tensors": [entry.tensors[0].model_copy(update={"dtype": "float3"})]})
    with pytest.raises(BiremeError, match="has the type float3"):
        SavedTensors(tmp_path, [future])["a"]


def damage_header(data: bytes) -> bytes:
    return data[:8] + b"?" * (len(data) - 8)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_header, "another header"),
        (lambda data: b"\xff" * len(data), "another header"),
        (lambda data: data[:-1], "ends inside"),
        (lambda data: data.replace(b'"a"', b'"b"'), "another header"),
        (lambda _data: b"", "another header"),
    ],
)
def test_damage_since_it_was_checked_is_an_error_in_words(
    damage: Callable[[bytes], bytes], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "rank-0000.safetensors"
    entry = write_shard(path, {"a": torch.ones(2)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BiremeError, match=words):
        SavedTensors(tmp_path, [entry])["a"]
    path.unlink()
    with pytest.raises(BiremeError, match="cannot be read: No such file"):
        SavedTensors(tmp_path, [entry])["a"]


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300))
def test_whatever_a_manifest_holds_there_is_a_sentence_and_no_crash(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir(exist_ok=True)
    (tmp_path / "step-00000001" / "manifest.json").write_bytes(data)
    with pytest.raises(BiremeError):
        newest_good(tmp_path)
