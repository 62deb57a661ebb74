"""Sums over replicas that begin while the last backward of a batch runs: the same bits, but earlier."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bireme.codec.sum_description import parse_sum_codec
from bireme.memory.arena import PLAIN, Arena, ArenaAllocator, Slots
from bireme.memory.system_memory import AddressRange, HostChunks
from bireme.plan.plan import Plan
from bireme.runtime.line_group import LineGroup
from bireme.runtime.paging.chunk_store import PagingSettings
from bireme.runtime.updates import Updates
from bireme.sync.arrivals import Arrivals, buckets_in_parts, buckets_of
from bireme.sync.coded import GradientSummation
from bireme.sync.exchange import BatchGradients
from bireme.sync.group import SingleRankGroup
from bireme.sync.reducer import GroupReducer, Reduction
from bireme.train.plan_search import flush_twin
from bireme.wire.connection import Bell
from tests.runtime.test_coded_sums import WIDTH, layers
from tests.runtime.test_line_group import on_threads
from tests.support.engine_parity import Setting, Trained, assert_equal, oracle, plan_for, train_on_threads
from tests.support.paged import CHUNK, paged, sizes_of
from tests.support.patience import patience_s
from tests.support.poisoned import poisoned
from tests.support.small_models import real_batches, token_batches
from tests.support.strict_mover import StrictMover
from tests.support.tiny_text import tiny_text

LAYERS = {f"layer {number}": 5000 for number in range(5)}
SIZES = {"first": 30_000, "small": 3, "middle": 9000, **LAYERS, "odd": 70_001, "last": 50_000}
"""Of gradients in the order of the layers. No member has the small one, and all but the first have the odd
one, which is summed long before the flags.
"""


class _Batch:
    """A batch of a member, in buckets of one gradient each, or of two where one is small."""

    def __init__(self, reducer: GroupReducer, seed: int) -> None:
        slots = Slots({name: (size,) for name, size in SIZES.items()})
        self.arena = Arena(slots, torch.float32, torch.device("cpu"))
        self.given = torch.randn(len(self.arena.flat), generator=torch.Generator().manual_seed(seed))
        held: set[str] = set()
        assert reducer.arrivals is not None
        views = dict(self.arena.views)
        self.arrivals = reducer.arrivals(views, [self.arena.flat], (), held)
        self.gradients = BatchGradients(views, held, [self.arena.flat], arrivals=self.arrivals)

    def come(self, names: Iterable[str]) -> None:
        for name in names:
            slot = self.arena.slots[name]
            self.arena.flat[slot.begin : slot.end] = self.given[slot.begin : slot.end]
            self.arrivals.note(name)


def _summed(group: LineGroup, codec: str, early: Callable[[_Batch], object]) -> tuple[Tensor, set[str]]:
    how = GradientSummation(parse_sum_codec(codec))
    reducer = GroupReducer(SingleRankGroup(), replicas=group, sums=how, slice_bytes=2**14, overlaps=True)
    batch = _Batch(reducer, seed=group.rank)
    reduction = Reduction(0, batch.gradients)
    reducer.start(reduction)
    try:
        early(batch)
        absent = {"small", *batch.gradients.held, *(() if group.rank else ("odd",))}
        batch.come(name for name in SIZES if name not in absent)
        batch.arrivals.end(batch.gradients.held)
        reducer.finish(reduction)
    finally:
        reducer.close()
    return batch.arena.flat, batch.gradients.held


@pytest.fixture
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LEAST_BUCKET_BYTES", "_LEAST_CODED_BYTES", "_NUM_BUCKETS"):
        monkeypatch.setattr(f"bireme.sync.slices.{name}", 64)


@pytest.mark.usefixtures("_small_buckets")
@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize("codec", ["none", "int8", "int2"])
def test_later_layers_are_summed_while_the_backward_makes_the_gradients_of_others(
    codec: str, num: int
) -> None:
    def waits_for_the_first_bucket(batch: _Batch) -> None:
        slot = batch.arena.slots["last"]
        own = batch.given[slot.begin : slot.end].view_as(batch.arena.views["last"])
        batch.come(["last"])
        ends_s = time.monotonic() + patience_s()
        while torch.equal(batch.arena.views["last"], own):
            assert time.monotonic() < ends_s, "nothing is summed before the backward is over"
            time.sleep(0.001)

    # Only lines add up while another bucket is waited for, so two members of dense sums cannot show it.
    early = waits_for_the_first_bucket if num > 2 or codec != "none" else lambda batch: batch.come(["last"])
    of_ranks = on_threads(num, lambda group: _summed(group, codec, early))
    # The others send all their messages before this one has its second bucket.
    alone = on_threads(
        num, lambda group: _summed(group, codec, early if group.rank == 0 else lambda _batch: None)
    )
    assert all(torch.equal(one, other) for (one, _), (other, _) in zip(alone, of_ranks, strict=True))
    late = on_threads(num, lambda group: _summed(group, codec, lambda _batch: None))
    for (flat, held), (expected, _) in zip(of_ranks, late, strict=True):
        assert torch.equal(flat, expected)
        assert torch.equal(flat, of_ranks[0][0])
        assert held == SIZES.keys() - {"small"}


def test_buckets_follow_from_the_layout_later_layers_first() -> None:
    one, other = torch.arange(10.0), torch.arange(6.0)
    places = {"a": (0, 0, (2,)), "b": (1, 0, (2, 3)), "c": (0, 2, (5,)), "empty": (0, 0, (0,))}
    first, second = buckets_of(places | {"d": (0, 7, (3,))}, [one, other], 8 * 4)
    assert first.names == ("c", "empty", "d")
    assert [run.tolist() for run in first.flats if len(run)] == [one[2:].tolist()]
    assert second.names == ("a", "b")
    assert [run.tolist() for run in second.flats] == [one[:2].tolist(), other.tolist()]


@pytest.mark.parametrize("is_paged", [False, True])
def test_buckets_are_those_of_the_memory_that_gradients_lie_in(is_paged: bool) -> None:
    """They are found by addresses. Buckets keep the memory, so that no later gradients get its addresses."""
    reducer = GroupReducer(SingleRankGroup(), in_background=False, overlaps=True)
    assert reducer.arrivals is not None
    chunks = HostChunks(1, CHUNK)
    for number in range(5):
        names = [f"batch {number}, {place}" for place in range(number + 1)]
        slots = Slots({name: (4 * CHUNK // len(names),) for name in names})
        memory: ArenaAllocator = AddressRange(chunks, 4 * 4) if is_paged else PLAIN
        arena = Arena(slots, torch.float32, torch.device("cpu"), memory)
        (bucket,) = reducer.arrivals(arena.views, [arena.flat], (), set())._buckets
        assert [*bucket.names] == names
        del arena, memory, bucket
    reducer.close()


def test_a_reducer_that_is_closed_waits_for_no_more_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, go_on = [threading.Event(), threading.Event()], LineGroup.go_on

    def noted(group: LineGroup, bell: Bell) -> None:
        waiting[group.rank].set()
        go_on(group, bell)

    def work(group: LineGroup) -> BaseException | None:
        reducer = GroupReducer(group, replicas=group, overlaps=True)
        reduction = Reduction(0, _Batch(reducer, 0).gradients)
        reducer.start(reduction)
        assert waiting[group.rank].wait(patience_s())
        reducer.close(patience_s())
        return reduction.error

    monkeypatch.setattr(LineGroup, "go_on", noted)
    assert all("closed before a batch was over" in str(error) for error in on_threads(2, work))


@pytest.mark.slow
@pytest.mark.usefixtures("_small_buckets")
@pytest.mark.parametrize(
    ("plan", "codec"),
    [
        (plan_for("1f1b", 2, width=2), "none"),
        (plan_for("interleaved", 4, width=2, stages_per_rank=2), "none"),
        (plan_for("zb-h1", 2, width=2), "int4"),
        (flush_twin(Plan((), 1, "2bw-fresh", width=3, micro_batch_sizes=(9, 5, 2))), "int2"),
        (Plan((2,), 2, "gpipe", width=3, micro_batch_sizes=(4, 3, 1), recompute_units=(1,)), "none"),
    ],
)
def test_a_run_has_the_same_bits_whether_sums_begin_early(
    plan: Plan, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_text = plan.num_stages > 1 and plan.width == 2
    model, data = (tiny_text(), token_batches(16, 3)) if is_text else (layers(), real_batches(16, 3, WIDTH))
    setting = Setting(plan, clip_norm=1.0, sum_codec=codec)
    complete, end = list[int](), Arrivals.end

    def noted(arrivals: Arrivals, held: Iterable[str]) -> None:
        complete.append(sum(not missing for missing in arrivals._missing))
        end(arrivals, held)

    monkeypatch.setattr(Arrivals, "end", noted)
    early = train_on_threads(model, setting, data)
    assert any(complete) == (plan.schedule != "zb-h1")
    monkeypatch.setattr(Updates, "before_backward", lambda *_: None)
    _same(train_on_threads(model, setting, data), early)
    if codec == "none":
        assert_equal(early, oracle(model, setting, data), tolerance=1e-12)


@pytest.mark.few(8)
@pytest.mark.slow
@pytest.mark.usefixtures("_small_buckets")
@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("per_rank", [1, 2])
def test_sums_begin_early_with_offloading_and_if_replicas_share_the_optimizer(
    shard: str, offloads: bool, per_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts, schedule = ((4,), "1f1b") if per_rank == 1 else ((2, 4, 6), "interleaved")
    plan, model = Plan(cuts, 4, schedule, width=2, stages_per_rank=per_rank), tiny_text()
    setting, data = Setting(plan, clip_norm=1.0, shard=shard), token_batches(16, 3)
    if offloads:
        sizes = sizes_of(model, plan, stash=40_000)
        setting = replace(
            setting,
            plan=paged(plan, sizes, 0.1, host=0.2, disk=True, is_summed=True),
            paging=PagingSettings(tmp_path, partial(StrictMover, seed=1), memory=poisoned),
        )
    begun, begin = list[bool](), Arrivals.end

    def noted(arrivals: Arrivals, held: Iterable[str]) -> None:
        begun.append(not arrivals._missing[0])
        begin(arrivals, held)

    monkeypatch.setattr(Arrivals, "end", noted)
    early = train_on_threads(model, setting, data)
    assert begun
    assert all(begun)
    monkeypatch.setattr(Updates, "before_backward", lambda *_: None)
    _same(train_on_threads(model, setting, data), early)


def test_buckets_in_parts_have_a_piece_of_every_part_and_later_layers_first() -> None:
    one, other = torch.arange(12.0), torch.arange(4.0)
    places = {"a": (0, 0, (4,)), "b": (1, 0, (4,)), "c": (0, 4, (8,)), "empty": (0, 0, (0,))}
    buckets = buckets_in_parts(places, [one, other], [(0, 6, 12), (0, 2, 4)], 2 * 2 * 4)
    assert [bucket.names for bucket in buckets] == [("c",), ("b",), ("a", "c"), ("a", "c"), ("empty",)]
    pieces = [[piece.tolist() for piece in bucket.flats] for bucket in buckets]
    assert pieces == [
        [[4, 5], [10, 11]],
        [[0, 1], [2, 3]],
        [[0, 1], [6, 7]],
        [[2, 3], [8, 9]],
        [],
    ]


def _same(found: Sequence[Trained], expected: Sequence[Trained]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.losses, one.norms) == (other.losses, other.norms)
        assert all(torch.equal(_of(other)[name], tensor) for name, tensor in _of(one).items())


def _of(trained: Trained) -> dict[str, Any]:
    return trained.weights[-1]
