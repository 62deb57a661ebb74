"""Between windows: chunks come to their places whatever is full, evaluations read them where they are."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import BiremeError
from bireme.memory.system_memory import PAGE_BYTES
from bireme.plan.plan import Plan
from bireme.runtime.paging.chunk_store import ChunkStore, PagingSettings
from bireme.runtime.paging.rank_paging import arrange
from bireme.runtime.paging.stage_memory import PagedStage
from bireme.schedule.instruction import Item
from bireme.schedule.program import Program, Rule, Track
from bireme.schedule.routes import Routes
from bireme.schedule.tiers import Chunk, RankTiers, Tier
from tests.support.engine_parity import Setting, pipeline_of
from tests.support.extent import examples
from tests.support.paged import paged, sizes_of
from tests.support.poisoned import poisoned
from tests.support.small_models import token_batches
from tests.support.tiny_text import tiny_text

NAMES = ("device", "host", "disk")


@dataclass(frozen=True)
class Places:
    """Where chunks lie and where a window wants them, by their numbers; of some nothing is there yet."""

    capacities: tuple[int, ...]
    now: dict[int, tuple[int, ...]]
    begin: dict[int, int]


@st.composite
def places(draw: st.DrawFn) -> Places:
    """Within the capacities before and after, often with no slot free anywhere."""
    capacities = tuple(draw(st.lists(st.integers(1, 3), min_size=2, max_size=3)))
    slots = [tier for tier, count in enumerate(capacities) for _ in range(count)]
    count = draw(st.integers(1, len(slots)))
    targets, origins = (draw(st.permutations(slots))[:count] for _ in range(2))
    begin = dict(enumerate(targets))
    num_new = draw(st.integers(0, min(count, 1)))
    now: dict[int, tuple[int, ...]] = {
        chunk: (tier,) for chunk, tier in enumerate(origins[: count - num_new])
    }
    if draw(st.booleans()):  # one that has a copy on a second tier too
        room = Counter(slots) - Counter(tier for tiers in now.values() for tier in tiers)
        for chunk in list(now)[:1]:
            now[chunk] += tuple(tier for tier in room if tier not in now[chunk])[:1]
    return Places(capacities, now, begin)


def store_of(one: Places, folder: Path, num_chunks: int | None = None) -> ChunkStore:
    tiers = tuple(
        Tier(name, count * PAGE_BYTES, count) for name, count in zip(NAMES, one.capacities, strict=False)
    )
    chunks = {(Item.OPTIMIZER, 0): num_chunks or sum(one.capacities)}
    cut = RankTiers(PAGE_BYTES, tiers, chunks, {}, master=False)
    program = Program(
        name="none",
        rule=Rule.SYNCHRONOUS,
        routes=Routes((0,)),
        num_microbatches=1,
        num_batches=1,
        banks=(1,),
        tracks=(Track(()),),
        tiers=(cut,),
    )
    return ChunkStore(program, 0, torch.device("cpu"), PagingSettings(folder))


def chunk(number: int) -> Chunk:
    return Chunk(Item.OPTIMIZER, 0, 0, number)


def fill(store: ChunkStore, number: int, tiers: tuple[int, ...]) -> None:
    where = store.where.setdefault(chunk(number), {})
    content = torch.full((PAGE_BYTES,), number, dtype=torch.uint8)
    for tier in tiers:
        where[tier] = store.take(chunk(number), tier)
        if tier == 0:
            store.ranges.place(chunk(number)).copy_(content)
        else:
            store.lower[tier - 1].write(where[tier], content)


def content_of(store: ChunkStore, number: int, tier: int) -> set[int]:
    found = torch.empty(PAGE_BYTES, dtype=torch.uint8)
    if tier == 0:
        found.copy_(store.ranges.place(chunk(number)))
    else:
        store.lower[tier - 1].read(store.where[chunk(number)][tier], found)
    return set(found.tolist())


@examples(300)
@given(places())
def test_every_chunk_comes_to_its_place_with_its_content_though_all_tiers_are_full(one: Places) -> None:
    with TemporaryDirectory() as folder:
        store = store_of(one, Path(folder))
        for number, tiers in one.now.items():
            fill(store, number, tiers)
        arrange(store, {chunk(number): tier for number, tier in one.begin.items()})
        for number, tier in one.begin.items():
            assert set(store.where[chunk(number)]) == {tier}
            if number in one.now:
                assert content_of(store, number, tier) == {number}
        for pool, capacity in zip(store.pools, one.capacities, strict=True):
            assert pool.num_slots <= capacity
        store.close()


def test_a_chunk_that_windows_forget_again_and_again_takes_one_slot_of_the_disk(tmp_path: Path) -> None:
    store = store_of(Places((2, 1, 9), {}, {}), tmp_path)
    fill(store, 0, (0,))
    for _ in range(5):
        arrange(store, {chunk(0): 0})
        arrange(store, {})
        assert set(store.where[chunk(0)]) == {2}
    assert store.pools[2].num_slots == 1


def test_what_is_written_between_windows_is_not_lost_where_a_tier_below_has_a_copy(tmp_path: Path) -> None:
    store = store_of(Places((1, 1), {}, {}), tmp_path, num_chunks=1)
    fill(store, 0, (0, 1))
    with PagedStage(store, 0, 1).opened(Item.OPTIMIZER):
        store.ranges.place(chunk(0)).fill_(9)
    (tier,) = store.where[chunk(0)]
    assert content_of(store, 0, tier) == {9}


def test_a_window_that_begins_with_more_than_fits_is_refused(tmp_path: Path) -> None:
    store = store_of(Places((1, 1), {}, {}), tmp_path)
    fill(store, 0, (0,))
    fill(store, 1, (1,))
    with pytest.raises(BiremeError, match="more chunks on device than the 1"):
        arrange(store, {chunk(0): 0, chunk(1): 0})


@pytest.mark.slow
def test_an_evaluation_reads_the_weights_of_a_stage_once_for_each_batch_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_text(evaluates=True)
    plan = Plan((2, 4, 6), 3, "2bw", stages_per_rank=4)
    within = paged(plan, sizes_of(model, plan, stash=40_000), 0.0, host=0.0, disk=True)
    expected = pipeline_of(model, Setting(plan), None)
    pipeline = pipeline_of(model, Setting(within, paging=PagingSettings(tmp_path, memory=poisoned)), None)
    data = token_batches(6, 4)
    for one in (expected, pipeline):
        list(one.train(data[:2]))
    brought: Counter[Chunk] = Counter()
    put = ChunkStore.put

    def counted(store: ChunkStore, one: Chunk, tier: int) -> None:
        brought[one] += tier == 0
        put(store, one, tier)

    monkeypatch.setattr(ChunkStore, "put", counted)
    assert pipeline.evaluate(data[:2]) == expected.evaluate(data[:2])
    assert brought
    assert max(brought.values()) <= 2, "once for each of two batches, of three micro-batches each"
    device = pipeline.tiers[0]
    assert device.budget_bytes is not None
    assert device.peak_bytes <= device.budget_bytes
    found, wanted = ([result.loss for result in one.train(data[2:])] for one in (pipeline, expected))
    assert found == wanted
    for one in (expected, pipeline):
        one.close()
