"""The engine pages: the numbers are those of a resident run, the bytes those of the program."""

import errno
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch

from bireme.bounds import rate_text
from bireme.cluster.cluster import Cluster, Server
from bireme.cluster.device import Device
from bireme.errors import BiremeError
from bireme.memory.disk_tier import DiskTier
from bireme.plan.plan import Plan
from bireme.runtime.paging.chunk_store import PagingSettings, SlotPool
from bireme.runtime.paging.mover import CopyJob, ThreadMover, Wire
from bireme.runtime.pipeline import Pipeline
from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.residency import resident
from bireme.train.outcome import Outcome, RankOutcome
from bireme.train.summary import slow_tiers
from tests.support.engine_parity import ALL, Setting, assert_equal, oracle, pipeline_of, train_on_threads
from tests.support.paged import CHUNK, assert_same, paged, sizes_of
from tests.support.poisoned import poisoned
from tests.support.small_models import Batch, Model, token_batches
from tests.support.strict_mover import StrictMover
from tests.support.tiny_text import tiny_text

STASH = 40_000
"""Bytes that a micro-batch of two samples keeps on a stage of one layer, about."""


def batches(num_samples: int, count: int = 3) -> list[Batch]:
    """Batches of which the second does not count, so that its step is skipped."""
    made = token_batches(num_samples, count)
    made[1]["labels"] = torch.full_like(made[1]["labels"], -100)
    return made


@dataclass(frozen=True)
class Case:
    """A plan, the share of the way from the least budget to all, and what lies below the device."""

    plan: Plan
    share: float = 0.0
    host: float | None = None
    disk: bool = False
    tied: bool = False
    dtype: str = "float64"
    bank_dtype: torch.dtype | None = None
    is_summed: bool = False
    windows: tuple[int, ...] = ()
    evaluates: bool = False
    clip_norm: float | None = 0.5
    shard: str = "none"
    gradient: str = "whole"
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def of(self) -> Model:
        return tiny_text(tied=self.tied, dtype=self.dtype, evaluates=self.evaluates)

    def paged(self) -> Plan:
        sizes = sizes_of(self.of, self.plan, bank_dtype=self.bank_dtype, stash=STASH)
        more = dict(self.more) | {"is_summed": self.is_summed}
        return paged(self.plan, sizes, self.share, host=self.host, disk=self.disk, **more)

    def setting(self, plan: Plan, paging: PagingSettings | None = None) -> Setting:
        return Setting(
            plan,
            clip_norm=self.clip_norm,
            bank_dtype=self.bank_dtype,
            windows=self.windows,
            paging=paging,
            shard=self.shard,
            gradient=self.gradient,
        )


def parts(schedule: str, per_rank: int = 2, **more: Any) -> Plan:
    return Plan((2, 4, 6), 3, schedule, stages_per_rank=per_rank, **more)


HALFWAY = {"width": 2, "updates_halfway": True}
APART = (("updates_apart", True),)
SHARED: dict[str, Any] = {"is_summed": True, "shard": "optimizer"}

CASES = {
    "an optimizer that replicas share": Case(parts("1f1b", 4, width=2), host=0.2, disk=True, **SHARED),
    "a shared optimizer of tied weights": Case(parts("2bw", **HALFWAY), windows=(1, 2), tied=True, **SHARED),
    "a shared optimizer with master weights": Case(
        parts("1f1b", width=2), 0.1, dtype="bfloat16", bank_dtype=torch.bfloat16, **SHARED
    ),
    "a shared optimizer with trial steps": Case(
        parts("2bw-fresh", **HALFWAY), host=0.0, disk=True, windows=(2, 1), **SHARED
    ),
    "weights that replicas share": Case(
        parts("1f1b", 4, width=2, whole_weights=2), host=0.2, disk=True, windows=(1, 2), shard="weights"
    ),
    "shared weights in sweeps on a disk": Case(
        replace(parts("gpipe", 4, width=2, whole_weights=1), sweep=3), host=0.0, disk=True, shard="weights"
    ),
    "shared weights with masters, two batches at once": Case(
        parts("2bw", width=2, whole_weights=2),
        0.1,
        dtype="bfloat16",
        bank_dtype=torch.bfloat16,
        windows=(1, 2),
        shard="weights",
    ),
    "shared weights, tied and recomputed": Case(
        parts("1f1b", 4, width=2, whole_weights=2, recompute=(0, 1, 2, 3)),
        tied=True,
        is_summed=True,
        shard="weights",
    ),
    "shared weights that are updated on the host": Case(
        parts("zb-h1", width=2, whole_weights=2), more=(("host_updates", True),), shard="weights"
    ),
    "stages of unequal width": Case(
        Plan((3, 5), 4, "2bw", stage_widths=(1, 2, 1)), host=0.0, disk=True, windows=(1, 2), is_summed=True
    ),
    "all micro-batches of a wide stage at once": Case(
        Plan((4,), 4, "gpipe", stage_widths=(2, 1), stage_shares=((3, 1), (4,))), is_summed=True, tied=True
    ),
    "one rank on its host": Case(parts("1f1b", 4)),
    "one rank on a disk, in sweeps": Case(replace(parts("gpipe", 4), sweep=3), host=0.0, disk=True),
    "2bw on three tiers": Case(parts("2bw"), host=0.3, disk=True, windows=(1, 2)),
    "2bw with bfloat16 banks": Case(
        parts("2bw"), 0.2, dtype="bfloat16", bank_dtype=torch.bfloat16, windows=(1, 1, 1)
    ),
    "fresh updates in two replicas": Case(parts("2bw-fresh", width=2), is_summed=True),
    "fresh updates of one": Case(parts("2bw-fresh"), 0.1, host=0.0, disk=True, windows=(2, 1)),
    "tied weights and recomputed stages": Case(
        parts("1f1b", recompute=(0, 1, 2, 3)), 0.1, tied=True, is_summed=True
    ),
    "updates on the host of one rank": Case(parts("1f1b", 4), more=(("host_updates", True),)),
    "updates on the host, which offloads to a disk": Case(
        parts("2bw"), host=0.7, disk=True, windows=(1, 2), more=(("host_updates", True),)
    ),
    "updates on the host of bfloat16 banks": Case(
        parts("2bw"),
        0.2,
        dtype="bfloat16",
        bank_dtype=torch.bfloat16,
        windows=(1, 1, 1),
        more=(("host_updates", True), ("updates_together", True)),
    ),
    "updates apart of one rank on a disk": Case(
        parts("1f1b", 4), host=0.0, disk=True, clip_norm=None, more=APART, windows=(2, 1)
    ),
    "updates apart of bfloat16 banks": Case(
        parts("interleaved", recompute=(0, 3)),
        0.1,
        dtype="bfloat16",
        bank_dtype=torch.bfloat16,
        clip_norm=None,
        more=APART,
    ),
    "updates apart on the host": Case(
        parts("gpipe", 4), clip_norm=None, more=(("updates_apart", True), ("host_updates", True))
    ),
    "backwards in halves": Case(parts("zb-h1")),
    "micro-batches in halves": Case(Plan((4,), 3, "1f1b-sliced"), 0.3),
    "recomputed units": Case(parts("interleaved", recompute_units=(1, 4)), 0.2),
    "there and back on three tiers": Case(parts("zbv", 2), host=0.3, disk=True),
    "one micro-batch after the other": Case(parts("sequential", recompute=(1, 2)), host=0.0, disk=True),
    "tied weights in two replicas on three tiers": Case(
        parts("2bw", width=2), host=0.3, disk=True, tied=True, is_summed=True, windows=(1, 2)
    ),
    "sweeps of two replicas with bfloat16 banks": Case(
        parts("1f1b", width=2, sweep=3, recompute=(0, 3)),
        0.1,
        host=0.0,
        disk=True,
        dtype="bfloat16",
        bank_dtype=torch.bfloat16,
        is_summed=True,
    ),
    "gradients as principal components": Case(
        parts("2bw", recompute=(0, 2)), host=0.3, disk=True, windows=(1, 2), gradient="principal:2"
    ),
    "principal components of two replicas, in sweeps": Case(
        replace(parts("1f1b", 4, width=2), sweep=3), 0.2, is_summed=True, gradient="principal:2"
    ),
    "principal components of trial steps": Case(
        parts("2bw-fresh", width=2), host=0.0, disk=True, is_summed=True, gradient="principal:2"
    ),
    "fresh updates of bfloat16 banks": Case(
        parts("2bw-fresh", recompute=(0, 2)),
        0.1,
        dtype="bfloat16",
        bank_dtype=torch.bfloat16,
        windows=(1, 1, 1),
    ),
}


def test_paging_is_tried_with_every_schedule_tier_and_feature() -> None:
    """At the least budget too; what each case has besides is clipping, a skipped batch, the strict mover."""
    cases = CASES.values()
    plans = [case.plan for case in cases]
    assert {plan.schedule for plan in plans} == set(ALL)
    least = {(case.host is None or case.host > 0, case.disk) for case in cases if not case.share}
    assert least == {(True, False), (True, True), (False, True)}
    for rule in ("1f1b", "2bw", "2bw-fresh"):
        own = [case for case in cases if case.plan.schedule == rule]
        assert any(case.plan.width > 1 for case in own)
        assert any(case.bank_dtype is not None for case in own)
    assert any(plan.width > 1 and plan.sweep > 1 for plan in plans)
    assert any(case.tied and case.plan.width > 1 for case in cases)
    assert any(plan.recompute for plan in plans)
    assert any(plan.recompute_units for plan in plans)


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_paged_run_is_the_resident_run_to_the_last_bit(name: str, tmp_path: Path) -> None:
    """Under a mover that copies as late as it may, with NaN where a chunk is not."""
    case = CASES[name]
    data = batches(6 * case.plan.width)
    expected = train_on_threads(case.of, case.setting(case.plan), data)
    plan = case.paged()
    settings = PagingSettings(tmp_path, partial(StrictMover, seed=len(name)), memory=poisoned)
    pipelines: list[Pipeline] = []
    found = train_on_threads(case.of, case.setting(plan, settings), data, between=pipelines.append)
    assert_same(found, expected)
    assert_moved_as_predicted(case, plan, set(pipelines), len(data))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_ranks_that_sweep_compute_what_one_process_computes(schedule: str) -> None:
    model, data = tiny_text(), batches(8)
    setting = Setting(Plan((2, 4, 6), 4, schedule, stages_per_rank=2, sweep=2), clip_norm=0.5)
    found = train_on_threads(model, setting, data)
    assert_equal(found, oracle(model, setting, data, norms=dict(enumerate(found[0].norms))))


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
    # A rank may fit although the others do not.
    assert any(tier.bytes_moved for pipeline in pipelines for tier in pipeline.tiers)


# --- what is read and written between instructions


def one_rank(folder: Path, **more: Any) -> tuple[Case, Callable[[], Pipeline]]:
    """A case of one rank on a disk, and what makes its pipelines."""
    case = Case(parts("2bw", 4), host=0.0, disk=True, **more)
    setting = case.setting(case.paged(), PagingSettings(folder))
    return case, lambda: pipeline_of(case.of, setting, None)


@pytest.mark.slow
def test_snapshots_and_evaluations_read_every_tier(tmp_path: Path) -> None:
    case, make = one_rank(tmp_path, evaluates=True)
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


@pytest.mark.parametrize("more", [{"tied": True}, {"clip_norm": None, "gradient": "principal:2"}])
def test_stages_that_update_apart_do_not_sum(more: dict[str, Any], tmp_path: Path) -> None:
    case = Case(parts("1f1b", 4), host=0.0, disk=True, more=APART, **more)
    with pytest.raises(BiremeError, match="before the others have their gradients"):
        pipeline_of(case.of, case.setting(case.paged(), PagingSettings(tmp_path)), None)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one rank", "two ranks", "two ranks, one offloads"])
def test_stages_that_update_apart_are_clipped_by_their_own_norms(case: str, tmp_path: Path) -> None:
    """Also on a rank that has room for everything while another offloads."""
    of = Case(parts("1f1b", 4 if case == "one rank" else 2), disk=True, clip_norm=0.6, more=APART)
    plan = of.paged()
    if case == "two ranks, one offloads":
        assert plan.paging is not None
        budgets = (replace(plan.paging.budgets[0], device_bytes=1 << 30), *plan.paging.budgets[1:])
        plan = replace(plan, paging=replace(plan.paging, budgets=budgets))
        assert [tiers is None for tiers in plan.source.settled().tiers] == [True, False]
    data = token_batches(6, 4)
    setting = of.setting(plan, PagingSettings(tmp_path, partial(StrictMover, seed=1), memory=poisoned))
    found = train_on_threads(of.of, setting, data)
    expected = oracle(of.of, of.setting(of.plan), data, clips_apart=True)
    assert max(found[0].norms) > 0.6  # or nothing is clipped
    assert_equal(found, expected, tolerance=1e-12)
    exact = oracle(of.of, of.setting(of.plan), data)
    assert found[0].losses[-1] != pytest.approx(exact[-1].loss, rel=1e-9)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_skips_the_stages_that_have_not_stepped_apart(tmp_path: Path) -> None:
    case = Case(parts("1f1b", 4), host=0.0, disk=True, clip_norm=None, more=APART)

    def overflow(step: Instruction) -> None:
        if step.kind is Kind.REDUCE and step.stage == 1:
            for _, gradient in pipeline.stages[1].part(step.batch).sums().items():
                assert gradient is not None
                gradient.fill_(torch.inf)

    setting = case.setting(case.paged(), PagingSettings(tmp_path))
    pipeline = pipeline_of(case.of, setting, None, overflow)
    before = {name: pipeline.state_dict()[name].clone() for name in case.of.weights}
    (result,) = pipeline.train(token_batches(6, 1))
    after = pipeline.state_dict()
    stepped = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert result.is_skipped
    assert stepped == {name for stage in (2, 3) for name in pipeline.stages[stage].banks.trainable}
    pipeline.close()


def test_a_slot_that_is_free_now_is_taken_before_one_that_is_still_copied_from() -> None:
    pool = SlotPool(3)
    slots = [pool.take()[0] for _ in range(3)]
    busy, later, done = (CopyJob((0, True), 1, lambda: None) for _ in range(3))
    done.do()
    for slot, job in zip(slots, (busy, later, done), strict=True):
        pool.give(slot, job)
    assert [pool.take() for _ in range(3)] == [(slots[2], done), (slots[0], busy), (slots[1], later)]


# --- faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "error", "said"),
    [("preadv", errno.EIO, "read: Input/output"), ("pwritev", errno.ENOSPC, "written: No space left")],
)
def test_a_disk_that_fails_ends_training_with_a_sentence_and_a_checkpoint_goes_on(
    call: str, error: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, make = one_rank(tmp_path)
    data, pipeline = token_batches(6, 3), make()
    list(pipeline.train(data[:1]))
    saved = pipeline.snapshot()

    def fail(*_given: object) -> int:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as broken:
        broken.setattr(f"bireme.memory.disk_tier.os.{call}", fail)
        with pytest.raises(BiremeError, match=f"cannot be {said}"):
            list(pipeline.train(data[1:]))
    pipeline.close()
    assert not list(tmp_path.iterdir())
    again, whole = make(), make()
    again.restore(saved)
    assert [one.loss for one in again.train(data[1:])] == [one.loss for one in whole.train(data)][1:]
    for one in (again, whole):
        one.close()


@pytest.mark.slow
def test_a_disk_that_is_slow_and_stalls_changes_no_number_and_is_named_with_its_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, make = one_rank(tmp_path)
    data = token_batches(6, 2)
    expected = [one.loss for one in pipeline_of(case.of, case.setting(case.plan), None).train(data)]
    pipeline, calls = make(), count(1)

    def slow(call: Callable[..., int]) -> Callable[..., int]:
        def late(*given: Any) -> int:
            sleep(0.2 if next(calls) % 100 == 0 else 0.002)
            return call(*given)

        return late

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(f"bireme.memory.disk_tier.os.{name}", slow(getattr(os, name)))
    assert [one.loss for one in pipeline.train(data)] == expected
    own = RankOutcome(0, None, None, tiers=pipeline.tiers)
    outcome = Outcome(2, "", None, None, None, None, None, 0, None, own)
    device = Device("any", "emulated", 10**9)
    cluster = Cluster((Server("a", (device,), disk_bytes=10**10, disk_bytes_per_s=2e9),))
    (sentence,) = slow_tiers(case.paged(), cluster, [outcome])
    assert re.match(r"Rank 0 waited for chunks for \d+% of its .* and the disk is what limits", sentence)
    assert "where the plan counts on 2 GB/s. A faster disk" in sentence
    moves = pipeline.tiers[1]
    assert f"ran at {rate_text(moves.copied_bytes / moves.copied_s)}," in sentence
    assert slow_tiers(case.plan, cluster, [replace(outcome, own=replace(own, tiers=()))]) == []
    pipeline.close()


def test_a_full_disk_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("bireme.memory.disk_tier.os.posix_fallocate", fail)
    _, make = one_rank(tmp_path)
    with pytest.raises(BiremeError, match="has no room for"):
        make()


def test_the_file_of_a_disk_has_no_name(tmp_path: Path) -> None:
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


def test_the_time_of_a_copy_is_told_once_it_is_complete_on_the_device() -> None:
    events: list[str] = []
    job = CopyJob((0, True), 1, lambda: events.append("posted"), note=lambda _s: events.append("told"))
    job.do(lambda: events.append("complete"))
    assert events == ["posted", "complete", "told"]
    failed = CopyJob((0, True), 1, lambda: events.remove("nothing"), note=lambda _s: events.append("told"))
    failed.do()
    assert isinstance(failed.error, ValueError)
    assert len(events) == 3


def test_a_rank_copies_small_chunks_itself_unless_they_must_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of many small chunks took twice the time that its copies and its work take."""
    posted: list[tuple[Wire, int]] = []
    post = ThreadMover.post

    def counted(mover: ThreadMover, job: CopyJob) -> None:
        posted.append((job.wire, len(job.needs)))
        post(mover, job)

    monkeypatch.setattr(ThreadMover, "post", counted)
    case = Case(parts("2bw", 4), host=0.3, disk=True)
    pipeline = pipeline_of(case.of, case.setting(case.paged(), PagingSettings(tmp_path)), None)
    list(pipeline.train(token_batches(6, 3)))
    moved = pipeline.tiers[0].bytes_moved // CHUNK
    pipeline.close()
    to_host = [num_needs for (tier, _), num_needs in posted if tier == 0]
    assert len(to_host) < moved  # how many must wait depends on the disk
    assert all(to_host), "each waits for a copy of the disk"


def test_a_plan_that_pages_to_a_disk_needs_a_folder(tmp_path: Path) -> None:
    case, _ = one_rank(tmp_path)
    with pytest.raises(BiremeError, match=r"Set memory.disk"):
        pipeline_of(case.of, case.setting(case.paged()), None)
