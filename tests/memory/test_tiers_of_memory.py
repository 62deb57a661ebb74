"""What chunks lie in: slots beneath addresses, slots of a file, and pages of other sizes."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from bireme.errors import BiremeError
from bireme.memory import system_memory
from bireme.memory.disk_tier import DiskTier
from bireme.memory.system_memory import PAGE_BYTES, AddressRange, HostChunks, page_bytes
from bireme.plan.plan import Paging, Plan
from bireme.schedule.accesses import Sizes
from bireme.schedule.budgets import Budgets
from bireme.schedule.checker import check
from tests.support.poisoned import POISON, PoisonedChunks

SLOT = PAGE_BYTES


@pytest.mark.parametrize("slot_bytes", [SLOT, 40 * SLOT])  # mappings of the larger ones are moved
@pytest.mark.parametrize("moves", [True, False])
def test_a_slot_keeps_its_bytes_beneath_whichever_chunk_it_is(
    slot_bytes: int, monkeypatch: pytest.MonkeyPatch, *, moves: bool
) -> None:
    if not moves:
        monkeypatch.setattr(system_memory, "_can_move", lambda: True)
        monkeypatch.setattr(system_memory, "_MOVED", 1 << 6)  # the call fails
    memory = PoisonedChunks(2, slot_bytes)
    one, other = AddressRange(memory, 2), AddressRange(memory, 1)
    memory.map(one.chunk(1), 0)
    one.chunk(1).fill_(7)
    view = one.bytes[slot_bytes : slot_bytes + 8]
    memory.unmap(one.chunk(1))
    assert int(view[0]) == POISON
    memory.poisons = False  # so that mapping writes nothing
    memory.map(other.chunk(0), 0)
    assert bool((other.chunk(0) == 7).all())
    memory.map(one.chunk(1), 1)
    view.fill_(3)
    assert bool((other.chunk(0) == 7).all())
    memory.unmap(one.bytes[: 2 * slot_bytes])
    memory.map(one.chunk(0), 1)
    assert int(one.chunk(0)[0]) == 3


def test_pieces_of_a_range_are_aligned_and_what_is_beyond_its_chunks_is_counted() -> None:
    own = AddressRange(HostChunks(1, SLOT), 1)
    pieces = [own.carve(count, torch.float32, torch.device("cpu")) for count in (3, 5, SLOT // 4)]
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)
    assert own.beyond_bytes == 128
    apart = own.carve(2 * SLOT, torch.uint8, torch.device("cpu"))
    assert own.beyond_bytes == 128 + apart.nbytes
    own.clear()
    assert own.beyond_bytes == 0


def test_a_disk_that_moves_a_few_bytes_at_a_time_moves_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_few(call: Callable[..., int]) -> Callable[..., int]:
        def some(file: int, views: Sequence[memoryview], begin: int) -> int:
            return call(file, [views[0][: SLOT // 2 or 1]], begin)

        return some

    monkeypatch.setattr(os, "pwritev", by_few(os.pwritev))
    monkeypatch.setattr(os, "preadv", by_few(os.preadv))
    tier = DiskTier(tmp_path, 2 * SLOT)
    tier.grow(1)
    tier.grow(2)
    data = [torch.full((2 * SLOT,), value, dtype=torch.uint8) for value in (1, 2, 3)]
    for slot, one in enumerate(data):
        tier.write(slot, one)
    found = torch.empty(2 * SLOT, dtype=torch.uint8)
    for slot, one in enumerate(data):
        tier.read(slot, found)
        assert torch.equal(found, one)
    tier.close()


def test_a_disk_that_gets_full_amid_a_write_says_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_given: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tier = DiskTier(tmp_path, SLOT)
    tier.grow(1)
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(BiremeError, match=r"cannot be written: No space left on device. Training cannot"):
        tier.write(0, torch.zeros(SLOT, dtype=torch.uint8))
    assert not list(tmp_path.iterdir())
    tier.close()


def test_a_plan_made_elsewhere_has_chunks_of_whole_pages_where_it_runs() -> None:
    parts = (12_000.0,) * 4
    sizes = Sizes(parts, parts, (24_000.0,) * 4, parts, *((64.0,) * 4,) * 3)
    paging = Paging((Budgets(120_000),), sizes, chunk_bytes=(64 * 47,))
    plan = Plan((1, 2, 3), 4, "1f1b", stages_per_rank=4, paging=paging)
    assert plan.on_pages(64) is plan
    for page in (4096, 16384):
        fitting = plan.on_pages(page)
        assert fitting.paging is not None
        assert fitting.paging.chunk_bytes == (page,)
        program = fitting.program(4)
        assert check(program).ok
        assert any(program.tiers)


def test_chunks_that_are_no_whole_pages_are_refused_with_the_page_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(system_memory, "PAGE_BYTES", 16384)
    with pytest.raises(BiremeError, match="multiple of 16384 bytes"):
        HostChunks(1, 4096)
    assert page_bytes(torch.device("cpu")) == 16384
