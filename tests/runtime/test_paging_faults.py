"""Mistakes that paged memory invites: reading what has left, growing, losing count, copying wrongly."""

import gc
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bireme.errors import BiremeError
from bireme.memory.disk_tier import DiskTier
from bireme.memory.system_memory import AddressRange, HostChunks
from bireme.model.stage import StageFunction
from bireme.plan.plan import Plan
from bireme.runtime.paging.chunk_store import PagingSettings
from bireme.runtime.paging.stage_memory import PagedStash
from bireme.runtime.stage_messages import StageMessages
from bireme.schedule.instruction import Instruction
from tests.support.engine_parity import Setting, pipeline_of, train_on_threads
from tests.support.paged import CHUNK, paged, sizes_of
from tests.support.poisoned import poisoned
from tests.support.small_models import captured, real_batches, token_batches
from tests.support.strict_mover import StrictMover
from tests.support.tiny_text import tiny_text

WIDTH = 24


class Carrying(nn.Module):
    """What learns, and whole numbers, pass all layers as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        made = begin = torch.tanh(self.first(x))
        chosen = begin.argmax(-1, keepdim=True)
        for layer in self.layers:
            made = made + torch.tanh(layer(made))
        return {"loss": functional.mse_loss(self.last(made * begin) * chosen, wanted)}


@pytest.mark.slow
def test_what_passes_a_stage_as_it_is_lies_apart_from_what_the_stage_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, sent = StageMessages.put, list[int]()

    def noted(stage_messages: StageMessages, step: Instruction, tensors: dict[str, Tensor]) -> None:
        sent.extend(tensor.untyped_storage().nbytes() for tensor in tensors.values())
        put(stage_messages, step, tensors)

    monkeypatch.setattr(StageMessages, "put", noted)
    torch.manual_seed(3)
    model = captured(Carrying().double(), real_batches(2, 1, WIDTH)[0])
    num_units = len(model.units)
    plan = Plan(tuple(num_units * part // 4 for part in (1, 2, 3)), 3, "1f1b", stages_per_rank=4)
    data = real_batches(6, 2, WIDTH)
    (expected,) = train_on_threads(model, Setting(plan), data)
    settings = PagingSettings(tmp_path, StrictMover, memory=poisoned)
    within = paged(plan, sizes_of(model, plan, stash=CHUNK), 0.0)
    (found,) = train_on_threads(model, Setting(within, paging=settings), data)
    assert found.losses == expected.losses
    assert max(sent) < CHUNK, "ranges are whole chunks"
    for held, wanted in zip(found.weights, expected.weights, strict=True):
        assert all(torch.equal(held[name], wanted[name]) for name in wanted)


def one_rank(schedule: str, *, master: bool = False) -> Plan:
    plan = Plan((2, 4, 6), 3, schedule, stages_per_rank=4)
    sizes = replace(sizes_of(tiny_text(), plan, stash=20_000), master=master)
    return paged(plan, sizes, 0.1, host=0.0, disk=True)


@pytest.mark.slow
def test_all_that_is_copied_is_counted_when_a_window_ends(tmp_path: Path) -> None:
    settings = PagingSettings(tmp_path, StrictMover)
    setting = Setting(one_rank("2bw-fresh"), paging=settings)
    pipeline = pipeline_of(tiny_text(), setting, None)
    for first in range(2):
        list(pipeline.train(token_batches(6, 1, first)))
        assert all(tier.bytes_moved == tier.predicted_bytes_moved > 0 for tier in pipeline.tiers)
    pipeline.close()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are looked up in /proc")
def test_a_pipeline_that_is_forgotten_gives_its_disk_back(tmp_path: Path) -> None:
    def num_open() -> int:
        return sum(str(tmp_path) in str(one.readlink()) for one in files() if one.is_symlink())

    def files() -> list[Path]:
        return list(Path("/proc/self/fd").iterdir())

    setting = Setting(one_rank("1f1b"), paging=PagingSettings(tmp_path))
    pipeline = pipeline_of(tiny_text(), setting, None)
    list(pipeline.train(token_batches(6, 1)))
    assert num_open() == 1
    pipeline.close()
    del pipeline
    gc.collect()
    assert num_open() == 0


def test_weights_without_a_master_copy_are_refused_where_the_plan_counts_on_one(tmp_path: Path) -> None:
    setting = Setting(one_rank("2bw", master=True), paging=PagingSettings(tmp_path))
    with pytest.raises(BiremeError, match="master copy"):
        pipeline_of(tiny_text(), setting, None)


def test_conjugates_that_autograd_saves_are_conjugates_again() -> None:
    memory = HostChunks(2, CHUNK)
    own = AddressRange(memory, 2)
    for place in range(2):
        memory.map(own.chunk(place), place)
    stash = PagedStash(own, lambda _tensor: False)
    x, y = (torch.randn(8, dtype=torch.complex64, requires_grad=True) for _ in range(2))

    def loss() -> Tensor:
        return (x.conj() * y).exp().abs().sum()

    expected = torch.autograd.grad(loss(), (x, y))
    with stash.saving(()):
        made = loss()
    found = torch.autograd.grad(made, (x, y))
    assert own.used_bytes > 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_what_a_stash_has_no_room_for_is_counted_and_constants_stay_where_they_are() -> None:
    memory = HostChunks(1, CHUNK)
    own = AddressRange(memory, 1)
    memory.map(own.chunk(0), 0)
    left: list[int] = []
    stash = PagedStash(own, lambda _tensor: False, left.append)
    x, constant = torch.randn(CHUNK, requires_grad=True), torch.randn(CHUNK)
    with stash.saving((x, constant)):
        made = (x * constant).exp()  # which saves the constant and its own result
    assert left == [made.nbytes]
    assert own.used_bytes == 0
    (found,) = torch.autograd.grad(made.sum(), (x,))
    assert torch.equal(found, constant * (x * constant).exp())


class Scaling(nn.Module):
    """Its code holds numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        return {
            "loss": functional.mse_loss((self.layer(x) * torch.tensor([1.0, 3.0])).sum(-1), wanted[..., 0])
        }


def test_a_stage_names_the_constants_of_its_code() -> None:
    model = captured(Scaling(), {name: one.float() for name, one in real_batches(2, 1, 2)[0].items()})
    function = StageFunction(model.graph, model.units, outputs=("loss",))
    (constant,) = function.constants(torch.device("cpu"))
    assert constant.tolist() == [1.0, 3.0]


def test_a_folder_that_takes_no_file_is_refused_with_a_sentence_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with pytest.raises(BiremeError, match="Nothing can be offloaded to"):
        DiskTier(tmp_path / "gone", CHUNK)
    gc.collect()
    assert not told


def test_a_system_that_cannot_reserve_room_pages_to_a_disk_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.posix_fallocate", raising=False)
    tier, data = DiskTier(tmp_path, CHUNK), torch.arange(CHUNK).to(torch.uint8)
    tier.grow(2)
    tier.write(1, data)
    found = torch.empty_like(data)
    tier.read(1, found)
    assert torch.equal(found, data)
    tier.close()
