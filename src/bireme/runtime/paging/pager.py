"""The pager: what FETCH and EVICT do, and what every other instruction waits for.

An update on the host finds the host's slots beneath its chunks, where they otherwise are on the device.

It keeps the same account as `schedule/residency.py`, which proves programs, with slots and jobs in it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.memory.system_memory import AddressRange
from bireme.model.torch_private import storage_id, storage_watch, version_of
from bireme.runtime.optimizers import Stash
from bireme.runtime.paging.chunk_store import ChunkStore, CopyJob, HeldChunk
from bireme.schedule.accesses import Mode, Use, chunks_of, uses
from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.program import Program
from bireme.schedule.residency import chunk_of
from bireme.schedule.tiers import Chunk

# What a micro-batch keeps between its passes, in a range that chunks come and go in.
#
# Autograd is asked through `saved_tensors_hooks` to put what it saves there, memory by memory, so that
# several views of one memory take room once; what it saves comes back as views of the range, with the strides
# that it had. What lies in a range already, as weights do, and what is always there, as buffers, stays where
# it is.


@dataclass(frozen=True, slots=True)
class _Copied:
    """A tensor whose memory was copied to `flat`."""

    flat: Tensor
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        memory = self.flat.view(self.dtype)
        return memory.as_strided(self.shape, self.stride, memory.storage_offset() + self.offset)


class PagedStash(Stash):
    """Room in a range. `is_paged` tells of memory by its tensor whether it lies in any range; `leave` is told
    the bytes of what stays with torch because the range has no room for it.
    """

    def __init__(
        self,
        own: AddressRange,
        is_paged: Callable[[Tensor], bool],
        leave: Callable[[int], None] = lambda _num_bytes: None,
    ) -> None:
        self._own = own
        self._is_paged = is_paged
        self._leave = leave

    def keep(self, tensor: Tensor) -> Tensor:
        """As `Stash` says; what there is no room for stays where it is."""
        flat = self._room(tensor.nbytes) if tensor.is_contiguous() else None
        if flat is None:
            self._leave(tensor.untyped_storage().nbytes())
            return tensor
        return flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    @contextmanager
    def saving(self, _others: Iterable[Tensor]) -> Iterator[None]:
        """As `Stash` says."""
        apart = {storage_id(tensor) for tensor in _others}
        copies: dict[tuple[int, int], tuple[object, Tensor | None]] = {}

        def pack(tensor: Tensor) -> Tensor | _Copied:
            # Itself it would hold the node that holds it, for ever.
            saved = tensor.detach()
            if not self._may_move(saved) or storage_id(saved) in apart or self._is_paged(saved):
                return saved
            storage = saved.untyped_storage()
            key = storage_id(saved), version_of(saved)
            if key not in copies:
                flat = self._room(storage.nbytes())
                if flat is None:
                    self._leave(storage.nbytes())
                else:
                    flat.copy_(torch.empty(0, dtype=torch.uint8, device=saved.device).set_(storage))
                copies[key] = storage_watch(saved), flat
            copy = copies[key][1]
            if copy is None:
                return saved
            return _Copied(copy, saved.dtype, saved.shape, saved.stride(), int(saved.storage_offset()))

        def unpack(saved: Tensor | _Copied) -> Tensor:
            return saved.tensor() if isinstance(saved, _Copied) else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _may_move(self, tensor: Tensor) -> bool:
        """Whether a tensor is its bytes on the device, read with strides; others stay as they are."""
        is_plain = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
        return is_plain and tensor.device == self._own.bytes.device and tensor.numel() > 0

    @torch.no_grad()
    def _room(self, num_bytes: int) -> Tensor | None:
        """So many bytes of the range, if its chunks have them."""
        if not num_bytes or not self._own.has_room(num_bytes):
            return None
        return self._own.carve(num_bytes, torch.uint8, self._own.bytes.device)


class Pager:
    """Pages the chunks of a store as the instructions of a program like this one say."""

    def __init__(self, program: Program, store: ChunkStore) -> None:
        self._program = program
        self._store = store
        self.waited_s = 0.0
        """For how long instructions have waited for chunks."""
        self._lent: list[Tensor] = []
        """The places of chunks that lie on the host for the instruction under way."""

    def start(self, step: Instruction) -> None:
        """Return when all chunks that a step uses are where it uses them."""
        before_s = self._store.waited_s
        for use in self._uses(step):
            for chunk in chunks_of(self._store.tiers, use):
                if use.tier:
                    self._use_on_host(step, chunk, use.mode)
                else:
                    self._use(step, chunk, use.mode)
        self.waited_s += self._store.waited_s - before_s

    def end(self, step: Instruction) -> None:
        """A step has ended, and with it what nobody needs any more."""
        store = self._store
        while self._lent:
            store.memory.unmap(self._lent.pop())
        for use in self._uses(step):
            if use.ends:
                store.end(use.item, use.stage, use.number)

    def _uses(self, step: Instruction) -> Iterator[Use]:
        tiers = self._store.tiers
        return uses(self._program, step, master=tiers.master, host_updates=tiers.host_updates)

    def _use_on_host(self, step: Instruction, chunk: Chunk, mode: Mode) -> None:
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

    def _fetch(self, chunk: Chunk, held: HeldChunk, tier: int) -> None:
        store = self._store
        lower, source = store.lower[tier], held.where[tier + 1]
        slot, after = store.take(tier)
        place = store.ranges.place(chunk) if tier == 0 else store.host.bytes_of(slot)

        def copy() -> None:
            if tier == 0:
                store.memory.map(place, slot)
            lower.read(source, place)

        job = self._post(held, tier, after, copy, is_fetch=True)
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

        job = self._post(held, tier, after, copy, is_fetch=False)
        held.where[tier + 1] = slot
        store.pools[tier].give(source, job)

    def _post(
        self, held: HeldChunk, tier: int, after: CopyJob | None, copy: Callable[[], None], *, is_fetch: bool
    ) -> CopyJob:
        """Have a copy between a tier and the one below made, once its slot is free and the chunk's last job
        is done; what it has copied is counted.
        """
        store = self._store
        num_bytes, moved, copied_s = store.tiers.chunk_bytes, store.moved_bytes, store.copied_s
        counted = tier if is_fetch else tier + 1, is_fetch

        def note(seconds: float) -> None:
            copied_s[counted] = copied_s.get(counted, 0.0) + seconds
            moved[counted] = moved.get(counted, 0) + num_bytes

        is_disk = store.tiers.tiers[tier + 1].name == "disk"
        needs = tuple(job for job in (after, held.last) if job is not None)
        job = CopyJob((tier, is_fetch and not is_disk), num_bytes, copy, needs, note=note)
        job.is_quick = not is_disk and store.copies_itself
        store.post(held, job)
        return job
