"""Weights in the format of torch.distributed.checkpoint: what torch writes is read, and the reverse."""

import os
import pickle
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from bireme.errors import BiremeError
from bireme.model.dcp_weights import DcpWeights, write_dcp_weights
from bireme.model.shapes import METADATA
from bireme.model.weights import check_weights, load_weights, weight_files
from tests.model.test_weights import graph_of
from tests.support.patience import patience_s
from tests.support.ranks import start_script

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def a_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 20))
    model[3].weight = model[0].weight
    model[1].to(torch.bfloat16)
    return model


def saved_by_torch(folder: Path, state: dict[str, Any]) -> Path:
    save(state, checkpoint_id=folder, no_dist=True)
    return folder


def check_read(model: nn.Module, folder: Path) -> None:
    graph, own = graph_of(model), model.state_dict()
    names = [state.name for state in (*graph.parameters, *graph.buffers)]
    check_weights(graph, folder)
    found = load_weights(graph, names, folder)
    assert found.keys() == set(names)
    for name, tensor in found.items():
        assert tensor.dtype == own[name].dtype
        assert torch.equal(tensor, own[name])


def test_a_state_dict_that_torch_wrote_is_read(tmp_path: Path) -> None:
    model = a_model()
    check_read(model, saved_by_torch(tmp_path / "dcp", model.state_dict()))


def test_the_model_of_a_checkpoint_with_an_optimizer_is_read(tmp_path: Path) -> None:
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.arange(8)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 3,
        "0.weight": torch.ones(1),
    }
    folder = saved_by_torch(tmp_path / "dcp", state)
    assert set(DcpWeights(folder / METADATA).names) == set(model.state_dict())
    check_read(model, folder)


@pytest.mark.slow
def test_a_tensor_in_pieces_is_put_together(tmp_path: Path) -> None:
    """As after training with FSDP, whose ranks each write a part."""
    script = """
import os, sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor
rank, folder, address = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=2)
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
whole = torch.arange(15.0).reshape(5, 3)
dcp.save({"weight": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=folder)
dist.barrier()
os._exit(0)  # threads of gloo may end the process while it leaves
"""
    folder = tmp_path / "dcp"
    words = [str(folder), str(tmp_path / "meeting")]
    with ExitStack() as ending:
        both = [start_script(script, tmp_path, str(rank), *words) for rank in range(2)]
        for one in both:
            ending.callback(one.close)
        assert [one.wait(patience_s()) for one in both] == [0, 0]
    found = DcpWeights(folder / METADATA)
    assert len(found.files) == 2
    assert torch.equal(found.read("weight"), torch.arange(15.0).reshape(5, 3))


def test_torch_loads_what_is_written_one_tensor_at_a_time(tmp_path: Path) -> None:
    own = a_model().state_dict()
    asked: list[str] = []

    class Tensors(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            asked.append(name)
            return super().__getitem__(name)

    blanks = {name: tensor.to("meta") for name, tensor in own.items()}
    write_dcp_weights(tmp_path / "dcp", blanks, Tensors(own))
    assert sorted(asked) == sorted(own)
    found = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(found[name], own[name]) for name in own)
    files = weight_files(tmp_path / "dcp")
    assert sorted(path.name for path in files) == sorted(path.name for path in (tmp_path / "dcp").iterdir())


def test_damage_is_a_sentence(tmp_path: Path) -> None:
    model = a_model()
    folder = saved_by_torch(tmp_path / "dcp", model.state_dict())
    [file] = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(BiremeError, match=r"is damaged: .* Fetch it again"):
        load_weights(graph_of(model), ["1.weight"], folder)
    file.unlink()
    with pytest.raises(BiremeError, match="is damaged"):
        load_weights(graph_of(model), ["1.weight"], folder)
    (folder / METADATA).write_bytes(b"\x80\x04nothing")
    with pytest.raises(BiremeError, match="Fetch the folder again"):
        check_weights(graph_of(model), folder)
    (folder / METADATA).write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(BiremeError, match="is not the metadata"):
        check_weights(graph_of(model), folder)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ((os.mkdir, ("ran",)), "it holds .*mkdir"),
        ((getattr, (Path, "home")), "it reads home of Path"),
        ((getattr, (torch.Size([1]), "numel")), "must be a class"),
    ],
)
def test_metadata_that_would_run_code_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: tuple[Any, ...], why: str
) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return call

    monkeypatch.chdir(tmp_path)
    (tmp_path / METADATA).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(BiremeError, match=why):
        DcpWeights(tmp_path / METADATA)
    assert not (tmp_path / "ran").exists()


def test_members_of_an_enum_are_read_as_early_python_3_11_writes_them(tmp_path: Path) -> None:
    class Early:
        def __reduce__(self) -> Any:
            return getattr, (_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")

    (tmp_path / METADATA).write_bytes(pickle.dumps(Early()))
    with pytest.raises(BiremeError, match="is not the metadata"):  # and not: is damaged
        DcpWeights(tmp_path / METADATA)


def test_weights_of_another_model_are_named(tmp_path: Path) -> None:
    folder = saved_by_torch(tmp_path / "dcp", {"1.weight": torch.ones(2, 2)})
    with pytest.raises(BiremeError, match=r"holds 1.weight with the shape \(2, 2\)"):
        load_weights(graph_of(a_model()), ["1.weight"], folder)
    with pytest.raises(BiremeError, match=r"holds no tensor 0\.weight"):
        load_weights(graph_of(a_model()), ["0.weight"], folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DcpWeights(folder / METADATA).read("1.weight").sum() == 4
