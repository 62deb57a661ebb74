"""Offloading on one rank: its instructions with what they use, its windows, and what each tier has moved."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from bireme.devices import is_accelerator
from bireme.errors import BiremeError
from bireme.memory.system_memory import give_back_large_blocks
from bireme.runtime.paging.chunk_store import ChunkStore, PagingSettings
from bireme.runtime.paging.stage_memory import PagedStage, StageMemory
from bireme.schedule.instruction import Instruction
from bireme.schedule.program import Program
from bireme.schedule.residency import copied_in_bytes, keeps_last_gradients
from bireme.schedule.tiers import Chunk, RankTiers


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


_SUMMED = ("predicted_bytes_moved", "bytes_moved", "copied_bytes", "copied_s", "waited_s", "window_s")


def together(one: Sequence[TierMoves], other: Sequence[TierMoves]) -> tuple[TierMoves, ...]:
    """The tiers of two pipelines of a rank, one after the other."""
    if not (one and other):
        return tuple(one or other)
    found = []
    for a, b in zip(one, other, strict=True):
        sums = {name: getattr(a, name) + getattr(b, name) for name in _SUMMED}
        found.append(replace(a, peak_bytes=max(a.peak_bytes, b.peak_bytes), **sums))
    return tuple(found)


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
        self._program, self._rank, self._window = settled, rank, settled
        self._begin_s = self._window_s = 0.0
        self._waited_s = 0.0
        """For how long instructions have waited for chunks."""
        if not is_accelerator(device):
            give_back_large_blocks()
        self._store = ChunkStore(settled, rank, device, settings)
        self.move: Callable[[Instruction], None] = self._store.move
        """Runs a FETCH or an EVICT: posts what it copies."""
        self._predicted_bytes = [0] * len(self._store.tiers.tiers)

    @property
    def keeps_last_gradients(self) -> bool:
        """As the function of that name says."""
        return keeps_last_gradients(self._program, self._rank)

    def stage(self, stage: int) -> StageMemory:
        """The memory of a stage."""
        return PagedStage(self._store, stage, self._program.num_microbatches)

    def around(
        self, action: Callable[[Instruction], None], begins: Callable[[], None]
    ) -> Callable[[Instruction], None]:
        """The action with what it uses where it uses it; `begins` is told when the work begins."""
        store = self._store

        def run(step: Instruction) -> None:
            before_s = store.waited_s
            store.use(step)
            self._waited_s += store.waited_s - before_s
            lent = store.lend_used(step) if store.tiers.host_updates else ()
            begins()
            action(step)
            for place in lent:
                store.memory.unmap(place)
            store.end(step)

        return run

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
        return tuple(
            TierMoves(
                tier.name,
                tier.budget_bytes,
                store.peak_bytes(number),
                self._predicted_bytes[number],
                store.bytes_into(number),
                *store.wire_above(number),
                waited_s=0.0 if number else self._waited_s,
                window_s=0.0 if number else self._window_s,
            )
            for number, tier in enumerate(store.tiers.tiers)
        )

    def close(self) -> None:
        """End what copies."""
        self._store.close()


# Between windows: every chunk is put where the next one begins.


def arrange(store: ChunkStore, begin: Mapping[Chunk, int]) -> None:
    """Put every chunk on the tier where a window begins with it, and on no other.

    A chunk that the window does not know stays, on the lowest tier, in a slot besides those that the window
    counts with. Of one that there is not yet, only a slot is there. No tier ever holds more than it can:
    where nothing else helps, two chunks change places.
    """
    lowest = len(store.pools) - 1
    unknown = store.where.keys() - begin.keys()
    store.keep_slots(lowest, len(unknown))
    target = dict.fromkeys(unknown, lowest) | dict(begin)
    for chunk, tier in target.items():
        where = store.where.setdefault(chunk, {})
        if len(where) > 1:
            store.carry(chunk, min(where, key=lambda one: abs(one - tier)))
    waiting = sorted(target, key=lambda chunk: (-target[chunk], chunk))
    while waiting:
        left = []
        for chunk in waiting:
            if target[chunk] in store.where[chunk] or store.has_room(target[chunk]):
                store.carry(chunk, target[chunk])
            else:
                left.append(chunk)
        if len(left) == len(waiting):
            # All full. Each time one more comes to its place, so this ends.
            _let_in(store, left, target)
        waiting = left


def _let_in(store: ChunkStore, left: Sequence[Chunk], target: Mapping[Chunk, int]) -> None:
    """Bring the first chunk to its tier, which is full: another that is there on its way elsewhere goes."""
    chunk = left[0]
    tier = target[chunk]
    other = next((one for one in left if tier in store.where[one]), None)
    room = next((free for free in reversed(range(len(store.pools))) if store.has_room(free)), None)
    here = next(iter(store.where[chunk]), room)
    if other is None or here is None:
        name, capacity = store.tiers.tiers[tier].name, store.tiers.tiers[tier].capacity
        raise BiremeError(
            f"A window begins with more chunks on {name} than the {capacity} that it has room for. "
            "`bireme schedule --check` proves programs."
        )
    if room is not None:
        store.carry(other, room)
        store.carry(chunk, tier)
    else:
        store.lift(other)
        store.carry(chunk, tier)
        store.put_down(other, here)
