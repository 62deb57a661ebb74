"""Offloading on one rank: what FETCH and EVICT do, and what every other instruction waits for.

It keeps the same account as `schedule/residency.py`, which proves programs, with slots and jobs in it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from bireme.devices import is_accelerator
from bireme.errors import BiremeError
from bireme.memory.system_memory import give_back_large_blocks
from bireme.runtime.paging.chunk_store import ChunkStore, CopyJob, HeldChunk, PagingSettings
from bireme.runtime.paging.stage_memory import StageMemory, paged_memory
from bireme.schedule.accesses import ChunkUses, Mode
from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.program import Program
from bireme.schedule.residency import chunk_of, copied_in_bytes
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
        tiers = settled.tiers_of(rank)
        assert tiers is not None, "the rank pages"
        self._program, self._rank, self._window = settled, rank, settled
        self._uses = ChunkUses(settled, tiers)
        self._predicted_bytes = [0] * len(tiers.tiers)
        self._begin_s = self._window_s = 0.0
        self._waited_s = 0.0
        """For how long instructions have waited for chunks."""
        self._lent: list[Tensor] = []
        """The places of chunks that lie on the host for the instruction under way."""
        if not is_accelerator(device):
            give_back_large_blocks()
        self._store = ChunkStore(settled, rank, tiers, device, settings)

    def stage(self, stage: int) -> StageMemory:
        """The memory of a stage."""
        return paged_memory(self._store, stage, self._program.num_microbatches)

    def around(
        self, action: Callable[[Instruction], None], begins: Callable[[], None]
    ) -> Callable[[Instruction], None]:
        """The action with what it uses where it uses it; `begins` is told when the work begins."""
        store = self._store

        def run(step: Instruction) -> None:
            used, before_s = self._uses.of(step), store.waited_s
            for use, chunks in used:
                bring = self._use_on_host if use.tier else self._use
                for chunk in chunks:
                    bring(step, chunk, use.mode)
            self._waited_s += store.waited_s - before_s
            begins()
            action(step)
            while self._lent:
                store.memory.unmap(self._lent.pop())
            for use, _ in used:
                if use.ends:
                    store.end(use.item, use.stage, use.number)

        return run

    def move(self, step: Instruction) -> None:
        """Run a FETCH or an EVICT: post what it copies."""
        assert step.page is not None, "FETCH and EVICT have a page"
        chunk, tier = chunk_of(self._program, step), step.page.tier
        held = self._store.held(chunk)
        if step.kind is Kind.FETCH:
            self._fetch(chunk, held, tier)
        elif step.page.is_copied:
            self._write_back(chunk, held, tier)
        else:
            self._store.drop(chunk, held, (tier,))

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

    def _use_on_host(self, step: Instruction, chunk: Chunk, mode: Mode) -> None:
        """Have the host's slot of a chunk beneath its place, unless the chunk is on the device too."""
        store = self._store
        held = store.held(chunk)
        store.wait(held.last)
        if mode is not Mode.READ:
            store.drop(chunk, held, [tier for tier in held.where if tier != 1])
        if 1 not in held.where:
            if mode is not Mode.MAKE:
                raise RuntimeError(f"{step} needs chunk {chunk.chunk} of its {chunk.item} on the host.")
            slot, after = store.take(1)
            store.wait(after)
            held.where[1] = slot
        if 0 not in held.where:
            self._lent.append(store.lend_host(chunk))

    def _use(self, step: Instruction, chunk: Chunk, mode: Mode) -> None:
        """Have a chunk on the device."""
        store = self._store
        held = store.chunks.get(chunk)
        if held is None:
            if mode not in (Mode.MAKE, Mode.ADD):
                raise RuntimeError(
                    f"{step} needs chunk {chunk.chunk} of its {chunk.item}, which no tier has."
                )
            held = store.held(chunk)
        if held.arrival is not None:
            store.wait(held.arrival)
            held.arrival = None
        if mode is not Mode.READ:
            store.drop(chunk, held, [tier for tier in held.where if tier])
        if 0 not in held.where:
            if held.where or mode is Mode.READ or mode is Mode.CHANGE:
                raise RuntimeError(f"{step} needs chunk {chunk.chunk} of its {chunk.item} on the device.")
            store.map_new(chunk, held)

    def _fetch(self, chunk: Chunk, held: HeldChunk, tier: int) -> None:
        store = self._store
        lower, source = store.lower[tier], held.where[tier + 1]
        slot, after = store.take(tier)
        place = store.ranges.place(chunk) if tier == 0 else store.host.bytes_of(slot)

        def copy() -> None:
            if tier == 0:
                store.memory.map(place, slot)
            lower.read(source, place)

        job = self._copied(held, tier, after, copy, is_fetch=True)
        held.where[tier] = slot
        if tier == 0:
            held.arrival = job

    def _write_back(self, chunk: Chunk, held: HeldChunk, tier: int) -> None:
        store = self._store
        lower, source = store.lower[tier], held.where.pop(tier)
        slot, after = store.take(tier + 1)
        place = store.ranges.place(chunk) if tier == 0 else store.host.bytes_of(source)

        def copy() -> None:
            lower.write(slot, place)
            if tier == 0:
                store.memory.unmap(place)

        job = self._copied(held, tier, after, copy, is_fetch=False)
        held.where[tier + 1] = slot
        store.pools[tier].give(source, job)

    def _copied(
        self, held: HeldChunk, tier: int, after: CopyJob | None, copy: Callable[[], None], *, is_fetch: bool
    ) -> CopyJob | None:
        """Have a chunk copied between a tier and the one below, once its slot is free and the chunk's last
        job is done; gives the job. A small chunk that waits for nothing is copied at once, without a job.
        """
        store, into = self._store, tier if is_fetch else tier + 1
        is_disk = store.tiers.tiers[tier + 1].name == "disk"
        needs = tuple(job for job in (after, held.last) if job is not None and not job.is_through)
        if store.copies_itself and not is_disk and not needs:
            begin_s = perf_counter()
            copy()
            store.note(into, is_fetch, perf_counter() - begin_s)
            held.last = store.last_read = None
            return None
        note = partial(store.note, into, is_fetch)
        job = CopyJob((tier, is_fetch and not is_disk), store.tiers.chunk_bytes, copy, needs, note=note)
        store.post(held, job)
        return job


# Between windows: every chunk is put where the next one begins.


def arrange(store: ChunkStore, begin: Mapping[Chunk, int]) -> None:
    """Put every chunk on the tier where a window begins with it, and on no other.

    A chunk that the window does not know stays, on the lowest tier, in a slot besides those that the window
    counts with. Of one that there is not yet, only a slot is there. No tier ever holds more than it can:
    where nothing else helps, two chunks change places.
    """
    lowest = len(store.pools) - 1
    unknown = store.chunks.keys() - begin.keys()
    store.keep_slots(lowest, len(unknown))
    target = dict.fromkeys(unknown, lowest) | dict(begin)
    for chunk in target:
        _leave_but_one(store, chunk, target[chunk])
    waiting = sorted(target, key=lambda chunk: (-target[chunk], chunk))
    while waiting:
        left = [chunk for chunk in waiting if not _carried(store, chunk, target[chunk])]
        if len(left) == len(waiting):
            # All full. Each time one more comes to its place, so this ends.
            _let_in(store, left, target)
        waiting = left


def _leave_but_one(store: ChunkStore, chunk: Chunk, target: int) -> None:
    """Give back a chunk's slots but the one nearest to its target."""
    where = store.held(chunk).where
    if len(where) > 1:
        store.carry(chunk, min(where, key=lambda tier: abs(tier - target)))


def _carried(store: ChunkStore, chunk: Chunk, tier: int) -> bool:
    if tier not in store.chunks[chunk].where and not store.has_room(tier):
        return False
    store.carry(chunk, tier)
    return True


def _let_in(store: ChunkStore, left: Sequence[Chunk], target: Mapping[Chunk, int]) -> None:
    """Bring the first chunk to its tier, which is full: another that is there on its way elsewhere goes."""
    chunk = left[0]
    tier = target[chunk]
    other = next((one for one in left if tier in store.held(one).where), None)
    room = next((free for free in reversed(range(len(store.pools))) if store.has_room(free)), None)
    here = next(iter(store.held(chunk).where), room)
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
