"""Paging of one rank: the face of this package to the engine."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from bireme.devices import is_accelerator
from bireme.memory.address_range import ALIGNED
from bireme.memory.carver import PLAIN, ArenaAllocator
from bireme.memory.system_memory import give_back_large_blocks
from bireme.runtime.paging.between import arrange, lent, opened, read
from bireme.runtime.paging.chunk_store import ChunkStore
from bireme.runtime.paging.pager import Pager
from bireme.runtime.paging.settings import PagingSettings
from bireme.runtime.paging.stash import PagedStash
from bireme.runtime.stage_memory import StageMemory, Stash
from bireme.schedule.instruction import Instruction, Item
from bireme.schedule.program import Program
from bireme.schedule.residency import copied_in_bytes
from bireme.schedule.tiers import RankTiers

__all__ = ["RankPaging", "TierMoves", "together"]


@dataclass(frozen=True, slots=True)
class TierMoves:
    """A tier of a rank: the most that its chunks took, and the bytes that instructions copied into it, by the
    programs of the windows that have ended and as counted where they were copied.

    `copied_bytes` went between a lower tier and the one above it, both ways, and took `copied_s`. Of the
    device's tier, `waited_s` is for how long instructions waited for chunks, in windows of `window_s` in all.
    """

    tier: str
    budget_bytes: int | None
    peak_bytes: int
    predicted_bytes_moved: int
    bytes_moved: int
    copied_bytes: int = 0
    copied_s: float = 0.0
    waited_s: float = 0.0
    window_s: float = 0.0


def together(one: Sequence[TierMoves], other: Sequence[TierMoves]) -> tuple[TierMoves, ...]:
    """The tiers of two pipelines of a rank, one after the other."""
    if not (one and other):
        return tuple(one or other)
    return tuple(
        replace(
            a,
            peak_bytes=max(a.peak_bytes, b.peak_bytes),
            predicted_bytes_moved=a.predicted_bytes_moved + b.predicted_bytes_moved,
            bytes_moved=a.bytes_moved + b.bytes_moved,
            copied_bytes=a.copied_bytes + b.copied_bytes,
            copied_s=a.copied_s + b.copied_s,
            waited_s=a.waited_s + b.waited_s,
            window_s=a.window_s + b.window_s,
        )
        for a, b in zip(one, other, strict=True)
    )


class RankPaging:
    """Chunks, tiers and copies of a rank. `settled` is a window that shows all that longer ones do.

    `keeps_gradients` where a batch's gradients of all stages are on the device when the last of them is, and
    no stage is updated before.
    """

    def __init__(
        self,
        settled: Program,
        rank: int,
        device: torch.device,
        settings: PagingSettings,
        *,
        keeps_gradients: bool,
    ) -> None:
        self.keeps_gradients = keeps_gradients
        tiers = settled.tiers_of(rank)
        assert tiers is not None, "the rank pages"
        self._program, self._rank, self._window = settled, rank, settled
        self._predicted_bytes = [0] * len(tiers.tiers)
        self._begin_s = self._window_s = 0.0
        if not is_accelerator(device):
            give_back_large_blocks()
        self._store = ChunkStore(settled, rank, tiers, device, settings)
        self._pager = Pager(settled, self._store)
        self._memory: dict[int, PagedStage] = {}

    def stage(self, stage: int) -> "PagedStage":
        """The memory of a stage."""
        return self._memory.setdefault(stage, PagedStage(self._store, stage, self._program.num_microbatches))

    def around(
        self, action: Callable[[Instruction], None], begins: Callable[[], None]
    ) -> Callable[[Instruction], None]:
        """The action with what it uses on the device; `begins` is told when the work begins."""

        def run(step: Instruction) -> None:
            self._pager.start(step)
            begins()
            action(step)
            self._pager.end(step)

        return run

    def move(self, step: Instruction) -> None:
        """Run a FETCH or an EVICT."""
        self._pager.move(step)

    def begin(self, window: Program, tiers: RankTiers) -> None:
        """A window begins, with chunks on these tiers; nothing is under way."""
        self._window = window
        arrange(self._store, tiers.begin)
        self._begin_s = perf_counter()

    def note(self, num_batches: int) -> None:
        """The window has ended, after so many batches."""
        if num_batches:
            self._window_s += perf_counter() - self._begin_s
            for number, num_bytes in enumerate(copied_in_bytes(self._window, self._rank, num_batches)):
                self._predicted_bytes[number] += num_bytes

    def tiers(self) -> tuple[TierMoves, ...]:
        """What there is to tell of each tier, the device's first, once all copies are made."""
        store = self._store
        store.settle()
        device, *lower = store.tiers.tiers
        found = [
            TierMoves(
                device.name,
                device.budget_bytes,
                store.peak_bytes(0),
                self._predicted_bytes[0],
                store.bytes_into(0),
                waited_s=self._pager.waited_s,
                window_s=self._window_s,
            )
        ]
        for number, tier in enumerate(lower, 1):
            peak_bytes, into = store.peak_bytes(number), store.bytes_into(number)
            predicted = self._predicted_bytes[number]
            copied = store.wire_below(number - 1)
            found.append(TierMoves(tier.name, tier.budget_bytes, peak_bytes, predicted, into, *copied))
        return tuple(found)

    def close(self) -> None:
        """End what copies."""
        self._store.close()


class PagedStage(StageMemory):
    """Memory of a stage in ranges of addresses, for the items that are paged."""

    is_paged = True

    def __init__(self, store: ChunkStore, stage: int, num_microbatches: int) -> None:
        self._store, self._stage = store, stage
        self._num_microbatches = num_microbatches
        self.has_master = store.tiers.master

    def bank(self, number: int) -> ArenaAllocator:
        """As `StageMemory` says."""
        return self._store.ranges.carver(Item.WEIGHTS, self._stage, number)

    def optimizer(self) -> ArenaAllocator:
        """As `StageMemory` says."""
        return self._store.ranges.carver(Item.OPTIMIZER, self._stage)

    def gradients(self) -> ArenaAllocator:
        """As `StageMemory` says."""
        return self._store.ranges.more(Item.GRADIENT, self._stage)

    def frozen(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """As `StageMemory` says."""
        carver = self._store.ranges.carver(Item.FROZEN, self._stage)
        if carver is PLAIN:
            return weights
        # Those that leave a gap after them come last.
        names = sorted(weights, key=lambda name: weights[name].nbytes % ALIGNED != 0)
        flat = {
            name: carver.carve(one.numel(), one.dtype, one.device)
            for name, one in ((name, weights[name]) for name in names)
        }
        with self.opened(Item.FROZEN):
            for name, one in flat.items():
                one.view(weights[name].shape).copy_(weights[name])
        return {name: flat[name].view(weights[name].shape) for name in weights}

    def before_gradients(self, reserve: Callable[[], ArenaAllocator]) -> None:
        """As `StageMemory` says."""
        self._store.ranges.reserve_gradients[self._stage] = reserve

    def stash(self, batch: int, microbatch: int) -> Stash:
        """As `StageMemory` says."""
        ranges = self._store.ranges
        if not ranges.has(Item.STASH, self._stage):
            return super().stash(batch, microbatch)
        number = batch * self._num_microbatches + microbatch
        key = Item.STASH, self._stage, number
        return PagedStash(ranges.of(key), ranges.holds, partial(ranges.leave, key))

    def lasting(self, tensor: Tensor) -> Tensor:
        """As `StageMemory` says: what passes a stage unchanged lies in its activations."""
        return tensor.clone() if self._store.ranges.holds(tensor) else tensor

    def opened(self, item: Item, number: int = 0) -> AbstractContextManager[None]:
        """As `StageMemory` says."""
        return opened(self._store, item, self._stage, number)

    def lent(self, items: Sequence[tuple[Item, int]]) -> AbstractContextManager[bool]:
        """As `StageMemory` says."""
        return lent(self._store, [(item, self._stage, number) for item, number in items])

    def read(self, tensor: Tensor) -> Tensor:
        """As `StageMemory` says."""
        return read(self._store, tensor)
