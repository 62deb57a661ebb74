"""The engine pages: the numbers are those of a resident run, the bytes those of the program."""

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bireme.errors import BiremeError
from bireme.memory.disk_tier import PREFIX, DiskTier
from bireme.model.part import Part
from bireme.plan.plan import Plan
from bireme.runtime.paging.settings import PagingSettings
from bireme.runtime.pipeline import Pipeline
from bireme.schedule.residency import resident
from tests.support.engine_parity import (
    Setting,
    Trained,
    assert_equal,
    oracle,
    pipeline_of,
    train_on_threads,
)
from tests.support.paged import CHUNK, paged, sizes_of
from tests.support.small_models import Batch, Model, gpt, token_batches
from tests.support.strict_mover import StrictMover

STASH = 20_000
"""Bytes that a micro-batch of two samples keeps on a stage of one layer, about."""


def batches(num_samples: int, count: int = 3) -> list[Batch]:
    """Batches of which the second does not count, so that its step is skipped."""
    made = token_batches(num_samples, count)
    made[1]["labels"] = torch.full_like(made[1]["labels"], -100)
    return made


def assert_same(found: list[Trained], expected: list[Trained]) -> None:
    """Losses, norms, verdicts, weights and optimiser states after every batch, to the last bit."""
    for one, other in zip(found, expected, strict=True):
        assert repr(one.losses) == repr(other.losses)
        assert one.norms == other.norms
        assert one.skipped == other.skipped
        for held, wanted in zip(one.weights, other.weights, strict=True):
            assert held.keys() == wanted.keys()
            assert all(torch.equal(held[name], wanted[name]) for name in held)
        for states, wanted_states in zip(one.states, other.states, strict=True):
            assert states.keys() == wanted_states.keys()
            for name, state in states.items():
                assert all(torch.equal(state[key], wanted_states[name][key]) for key in state)


@dataclass(frozen=True)
class Case:
    """A plan, the share of the way from the least budget to all, and what lies below the device."""

    plan: Plan
    share: float = 0.0
    host: float | None = None
    disk: bool = False
    model: str = "layers=3,tied=false"
    dtype: str = "float64"
    bank_dtype: torch.dtype | None = None
    is_summed: bool = False
    windows: tuple[int, ...] = ()
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def of(self) -> Model:
        return gpt(self.model, self.dtype)

    def paged(self) -> Plan:
        sizes = sizes_of(self.of, self.plan, bank_dtype=self.bank_dtype, stash=STASH)
        more = dict(self.more) | {"is_summed": self.is_summed}
        return paged(self.plan, sizes, self.share, host=self.host, disk=self.disk, **more)

    def setting(self, plan: Plan, paging: PagingSettings | None = None) -> Setting:
        return Setting(plan, clip_norm=0.5, bank_dtype=self.bank_dtype, windows=self.windows, paging=paging)


def parts(schedule: str, per_rank: int = 2, **more: Any) -> Plan:
    return Plan((2, 4, 6), 3, schedule, stages_per_rank=per_rank, **more)


CASES = {
    "one rank on its host": Case(parts("1f1b", 4)),
    "one rank on a disk, in sweeps": Case(replace(parts("gpipe", 4), sweep=3), host=0.0, disk=True),
    "2bw on three tiers": Case(parts("2bw"), host=0.3, disk=True, windows=(1, 2)),
    "2bw with bfloat16 banks": Case(
        parts("2bw"), 0.2, dtype="bfloat16", bank_dtype=torch.bfloat16, windows=(1, 1, 1)
    ),
    "fresh updates in two replicas": Case(parts("2bw-fresh", width=2), is_summed=True),
    "fresh updates of one": Case(parts("2bw-fresh"), 0.1, host=0.0, disk=True, windows=(2, 1)),
    "tied weights and recomputed stages": Case(
        parts("1f1b", recompute=(0, 1, 2, 3)), 0.1, model="layers=3", is_summed=True
    ),
    "backwards in halves": Case(parts("zb-h1")),
    "micro-batches in halves": Case(Plan((4,), 3, "1f1b-sliced"), 0.3),
    "recomputed units": Case(parts("interleaved", recompute_units=(1, 4)), 0.2),
}


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_paged_run_is_the_resident_run_to_the_last_bit(name: str, tmp_path: Path) -> None:
    """Under a mover that copies as late as it may, with NaN where a chunk is not."""
    case = CASES[name]
    data = batches(6 * case.plan.width)
    expected = train_on_threads(case.of, case.setting(case.plan), data)
    plan = case.paged()
    settings = PagingSettings(tmp_path, partial(StrictMover, seed=len(name)), poisons=True)
    pipelines: list[Pipeline] = []
    found = train_on_threads(case.of, case.setting(plan, settings), data, between=pipelines.append)
    assert_same(found, expected)
    assert_moved_as_predicted(case, plan, set(pipelines), len(data))


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_ranks_that_sweep_compute_what_one_process_computes(schedule: str) -> None:
    model, data = gpt("layers=3,tied=false", "float64"), batches(8)
    setting = Setting(Plan((2, 4, 6), 4, schedule, stages_per_rank=2, sweep=2), clip_norm=0.5)
    assert_equal(train_on_threads(model, setting, data), oracle(model, setting, data))


def assert_moved_as_predicted(case: Case, plan: Plan, pipelines: set[Pipeline], num_batches: int) -> None:
    """Bytes are those of the programs, to the byte, and no tier was ever above its budget."""
    windows, first = [], 0
    for window in case.windows or (num_batches,):
        windows.append(plan.source.program(window, min(first, 1)))
        first += window
    for pipeline in pipelines:
        rank = pipeline.layout.pipeline_rank
        predicted = [resident(window, rank).tiers for window in windows]
        for number, tier in enumerate(pipeline.tiers):
            found = sum(one[number].copied_in_bytes for one in predicted)
            assert tier.bytes_moved == tier.predicted_bytes_moved == found
            assert tier.budget_bytes is None or tier.peak_bytes <= tier.budget_bytes
        assert any(tier.bytes_moved for tier in pipeline.tiers)


# --- what is read and written between instructions


def one_rank(folder: Path, **more: Any) -> tuple[Case, Callable[[], Pipeline]]:
    """A case of one rank on a disk, and what makes its pipelines."""
    case = Case(parts("2bw", 4), host=0.0, disk=True, **more)
    setting = case.setting(case.paged(), PagingSettings(folder))
    return case, lambda: pipeline_of(case.of, setting, None)


@pytest.mark.slow
def test_snapshots_and_evaluations_read_every_tier(tmp_path: Path) -> None:
    case, make = one_rank(tmp_path)
    data = token_batches(6, 4)
    resident_one = pipeline_of(case.of, case.setting(case.plan), None)
    results = resident_one.train(data)
    first = make()
    for _ in zip(first.train(data[:2]), range(2), strict=True):
        next(results)
    before = first.tiers
    saved, wanted = first.snapshot(), resident_one.snapshot()
    assert saved.tensors.keys() == wanted.tensors.keys()
    assert all(torch.equal(saved.tensors[name], tensor) for name, tensor in wanted.tensors.items())
    whole = {name: tensor for name, tensor in first.state_dict().items() if name in case.of.weights}
    alone = pipeline_of(case.of, case.setting(case.plan), None)
    alone.restore(saved)
    assert first.evaluate(data[:1]) == alone.evaluate(data[:1])
    assert all(torch.equal(tensor, alone.state_dict()[name]) for name, tensor in whole.items())
    assert first.tiers == before
    second = make()
    second.restore(saved)
    assert [one.loss for one in second.train(data[2:])] == [one.loss for one in results]
    for pipeline in (first, second, alone, resident_one):
        pipeline.close()


# --- faults


def test_a_disk_that_fails_ends_training_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, make = one_rank(tmp_path)
    pipeline = make()

    def fail(*_given: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("bireme.memory.disk_tier.os.preadv", fail)
    with pytest.raises(BiremeError, match=r"cannot be read: Input/output error. Training cannot go on"):
        list(pipeline.train(token_batches(6, 2)))
    pipeline.close()


def test_a_full_disk_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("bireme.memory.disk_tier.os.posix_fallocate", fail)
    _, make = one_rank(tmp_path)
    with pytest.raises(BiremeError, match="has no room for"):
        make()


def test_the_file_of_a_disk_has_no_name_and_a_leftover_is_removed(tmp_path: Path) -> None:
    leftover = tmp_path / f"{PREFIX}0123"
    leftover.write_bytes(b"of a process that was killed")
    tier = DiskTier(tmp_path, CHUNK)
    tier.grow(2)
    data = torch.arange(CHUNK, dtype=torch.uint8)
    tier.write(1, data)
    assert not list(tmp_path.iterdir())
    found = torch.empty_like(data)
    tier.read(1, found)
    assert torch.equal(found, data)
    tier.close()


def test_a_process_that_is_killed_amid_a_write_leaves_no_file(tmp_path: Path) -> None:
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        tier = DiskTier(tmp_path, 64 * CHUNK)
        tier.grow(1)
        data = torch.zeros(64 * CHUNK, dtype=torch.uint8)
        while True:
            tier.write(0, data)
            os.write(told, b".")
    try:
        os.read(ready, 3)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_frozen_weights_are_not_paged(tmp_path: Path) -> None:
    case, _ = one_rank(tmp_path)
    part = Part(train=("*.bias",))
    setting = case.setting(case.paged(), PagingSettings(tmp_path))
    with pytest.raises(BiremeError, match=r"Rank 0 has \d+ bytes of frozen weights, which stay"):
        pipeline_of(gpt(case.model, case.dtype, part), setting, None)


def test_a_plan_that_pages_to_a_disk_needs_a_folder(tmp_path: Path) -> None:
    case, _ = one_rank(tmp_path)
    with pytest.raises(BiremeError, match=r"Set memory.disk"):
        pipeline_of(case.of, case.setting(case.paged()), None)
