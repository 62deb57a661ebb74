"""The exported model: a tensor at a time, whole or not at all, and in the form that its package saves."""

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from bireme import files
from bireme.errors import BiremeError
from bireme.files import new_folder
from bireme.model.sources import load_source
from bireme.model.weights import load_weights
from bireme.runtime.snapshot import Snapshot
from bireme.train.checkpoint.checkpoint import Checkpoint, newest_good
from bireme.train.checkpoint.shard import SavedTensors
from bireme.train.export import NewestWeights, export_checkpoint
from bireme.train.run_file import RunFile, load_run_file
from tests.model.test_weights import graph_of, transformers_model
from tests.support.checkpoints import META, ranks
from tests.support.patience import patience_s

ROOT = Path(__file__).parents[2]


def saved(model: torch.nn.Module, folder: Path) -> Checkpoint:
    """A checkpoint of a model, of which two ranks have half of the tensors each."""
    graph, own = graph_of(model), {**dict(model.named_parameters()), **dict(model.named_buffers())}
    sections = (("weights", graph.parameters), ("buffers", graph.buffers))
    tensors = {
        f"{section}/{state.name}": own[state.name].detach()
        for section, states in sections
        for state in states
        if state.persistent
    }
    tensors["optimizer/step"] = torch.ones(())
    with ranks(folder) as run:
        for rank, writer in enumerate(run.writers):
            part = {name: tensors[name] for name in sorted(tensors)[rank::2]}
            writer.save(Snapshot(7, 1.0, part), META)
        run.wait()
        assert run.saved() == [7]
    found = newest_good(folder)
    assert found is not None
    return found


class Watch:
    """Counts the bytes of the tensors that were read and are still held by somebody."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.held = self.most = self.largest = self.total = 0
        read = SavedTensors.__getitem__

        def reading(tensors: SavedTensors, name: str) -> Tensor:
            tensor = read(tensors, name)
            size = tensor.nbytes
            self.held += size
            self.total += size
            self.most, self.largest = max(self.most, self.held), max(self.largest, size)
            # What is made of it without a copy, as bytes to write, holds its storage and not the tensor.
            weakref.finalize(tensor.untyped_storage(), self.let_go, size)
            return tensor

        patched.setattr(SavedTensors, "__getitem__", reading)

    def let_go(self, size: int) -> None:
        self.held -= size


@pytest.mark.parametrize(("shard_bytes", "num_files"), [(10**9, 1), (20_000, 6)])
def test_an_export_never_holds_more_than_two_tensors_and_cuts_large_models_into_files(
    shard_bytes: int, num_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    graph, checkpoint = graph_of(model), saved(model, tmp_path / "checkpoints")
    run = load_run_file(None, [f"export.shard_bytes={shard_bytes}"])
    gc.collect()
    with monkeypatch.context() as patched:
        watch = Watch(patched)
        export_checkpoint(run, graph, checkpoint, tmp_path / "model")
    assert watch.total == sum(parameter.nbytes for parameter in model.parameters())
    assert watch.most <= 2 * watch.largest < watch.total / 2
    written = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(written) == num_files
    assert all(path.stat().st_size < shard_bytes + 2000 for path in written)
    if num_files > 1:
        assert written[0].name == f"model-00001-of-0000{num_files}.safetensors"
        index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == watch.total
    own = dict(model.named_parameters())
    found = load_weights(graph, own, tmp_path / "model")
    assert all(torch.equal(found[name], own[name]) for name in own)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2"])
def test_a_transformers_model_is_exported_as_its_package_saves_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tied weights, and with experts that the model holds together and its files apart."""
    build = transformers_model(kind)
    model: Any = build()
    model.save_pretrained(tmp_path / "expected")
    graph, checkpoint = graph_of(model), saved(model, tmp_path / "checkpoints")
    run = load_run_file(None, [f"model.source=hf:{tmp_path / 'expected'}"])
    gc.collect()
    with monkeypatch.context() as patched:
        watch = Watch(patched)
        export_checkpoint(run, graph, checkpoint, tmp_path / "model")
    assert watch.most <= 2 * watch.largest
    assert watch.most < watch.total
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for name in ("config.json", "generation_config.json"):
        before = tmp_path / "expected" / name
        assert not before.exists() or json.loads(before.read_text()) == json.loads(
            (tmp_path / "model" / name).read_text()
        )


@pytest.mark.slow
def test_a_model_that_lacks_a_tensor_is_not_exported_and_the_old_one_stays(tmp_path: Path) -> None:
    model: Any = transformers_model("llama")()
    model.save_pretrained(tmp_path / "model")
    before = {path: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    checkpoint = saved(model.model, tmp_path / "checkpoints")  # without its head
    run = load_run_file(None, [f"model.source=hf:{tmp_path / 'model'}"])
    with pytest.raises(BiremeError, match="The checkpoint lacks"):
        export_checkpoint(run, graph_of(model.model), checkpoint, tmp_path / "model")
    assert {path: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "model"]


def test_weights_are_given_in_the_type_that_the_model_has_them() -> None:
    linear = torch.nn.Linear(4, 4).to(torch.bfloat16)
    graph = graph_of(linear)
    kept = {f"weights/{name}": tensor.float() for name, tensor in linear.named_parameters()}
    manifest = SimpleNamespace(extra={})
    checkpoint: Any = SimpleNamespace(
        snapshot=lambda: Snapshot(1, 1.0, kept), manifest=manifest, folder=Path("step-1")
    )
    weights = NewestWeights(RunFile(), graph, checkpoint)
    assert weights.num_bytes == 2 * 20
    assert all(torch.equal(weights[name], own) for name, own in linear.named_parameters())


KILLED = """
import ctypes, os, shutil, signal, sys
from pathlib import Path
from bireme import files

folder, can_swap, count = Path(sys.argv[1]), sys.argv[2] == "swap", 0

def dying(operation, number):
    def counted(*arguments, **named):
        global count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*arguments, **named)
    return counted

def write(word):
    with files.new_folder(folder) as draft:
        for place in range(3):
            (draft / str(place)).write_text(word)

def word():
    words = {(folder / str(place)).read_text() for place in range(3)}
    assert len(words) == 1 and len(list(folder.iterdir())) == 3, words
    return words.pop()

write("0")
seen, number, status, swapped = [], 0, -1, files._swapped
while status != 0:
    number += 1
    process = os.fork()
    if process == 0:
        Path.replace, Path.mkdir = dying(Path.replace, number), dying(Path.mkdir, number)
        Path.write_text = dying(Path.write_text, number)
        os.fsync, shutil.rmtree = dying(os.fsync, number), dying(shutil.rmtree, number)
        files._swapped = dying(swapped if can_swap else lambda *_: False, number)
        write(str(number))
        os._exit(0)
    status = os.waitpid(process, 0)[1]
    if not folder.exists():
        assert not can_swap, "between two renames there was no model"
        files._tidy_up(folder)
    seen.append(int(word()) == number)
    if not seen[-1]:
        write("0")
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
write("0")
assert [path.name for path in folder.parent.iterdir()] == [folder.name], list(folder.parent.iterdir())
assert seen == sorted(seen) and seen[-1] and seen.count(False) > 8, seen
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["swap", "rename twice"])
def test_a_folder_that_is_replaced_is_the_old_or_the_new_one_wherever_the_process_is_killed(
    way: str, tmp_path: Path
) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    if way == "swap" and not files._swapped(tmp_path / "one", tmp_path / "other"):
        pytest.skip("this file system cannot swap two folders in one step")
    where = tmp_path / "runs" / "model"
    told = subprocess.run(
        [sys.executable, "-c", KILLED, str(where), way],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{ROOT / 'src'}", "PATH": ""},
        timeout=patience_s(),
    )
    assert told.returncode == 0, told.stderr


def test_all_of_a_new_folder_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, done = tmp_path / "model", list[str]()
    path.mkdir()

    def sync(folder: Path) -> None:
        done.append(f"sync {len(list(folder.rglob('*')))}")

    def swap(one: Path, other: Path) -> bool:
        done.append("swap")
        return False

    monkeypatch.setattr("bireme.files._sync_tree", sync)
    monkeypatch.setattr("bireme.files._swapped", swap)
    with new_folder(path) as draft:
        (draft / "weights").write_text("1")
    assert done == ["sync 1", "swap"]
    assert [one.name for one in path.iterdir()] == ["weights"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_model_for_torch_s_distributed_checkpoint_goes_out_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = transformers_model("llama")()
    model.save_pretrained(tmp_path / "base")
    graph, checkpoint = graph_of(model), saved(model, tmp_path / "checkpoints")
    run = load_run_file(None, [f"model.source=hf:{tmp_path / 'base'}"])
    gc.collect()
    with monkeypatch.context() as patched:
        patched.setattr("bireme.model.dcp_weights._MOST_BYTES", 0)
        watch = Watch(patched)
        export_checkpoint(run, graph, checkpoint, tmp_path / "dcp", as_dcp=True)
    assert watch.most <= 2 * watch.largest
    own = model.state_dict()
    found = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(found[name], own[name]) for name in own)
    source = load_source(f"hf:{tmp_path / 'dcp'}")
    assert source.folder == tmp_path / "dcp"
    back = load_weights(graph, own, tmp_path / "dcp", model=source.model)
    assert all(torch.equal(back[name], own[name]) for name in back)
    assert len(back) == len(dict(model.named_parameters()))
