"""One stage on its rank: the forwards, backwards and recomputations of its micro-batches.

Between the passes of a micro-batch it keeps what the backward needs, and holds the weight version that the
micro-batch runs on. It knows no other rank: what it receives is given to it, what it sends it gives back.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from bireme.codec.lowrank import Components, PrincipalStream, Product
from bireme.model.halves import GradientHook, Rest, backward_input
from bireme.model.stage import SegmentedFunction, StageFunction, untouched
from bireme.model.torch_private import accumulate_gradients, set_grad_enabled
from bireme.runtime.banks import WeightBanks
from bireme.runtime.gradients import GradientParts, GradientPool, GradientSums
from bireme.runtime.message_format import Boundaries
from bireme.runtime.microbatches import MicroBatch
from bireme.runtime.paging.stage_memory import PagedStash, StageMemory
from bireme.schedule.instruction import Item
from bireme.sync.arrivals import Arrivals, Parts
from bireme.sync.exchange import BatchGradients, PieceNorms
from bireme.sync.reducer import ArrivalsOf, Reduced, Reduction

# A batch on one rank, from its first forward to its last update: all that is known of it so far.


@dataclass(slots=True)
class _StagePart:
    """What one stage has of a batch.

    `own` are the gradients of this replica, and `whole` the sums that the update is made from, which are
    others only where both are needed. `seen` is the share of the batch, by weight, whose gradients are there.
    `num_backwards` have begun. If the last one has, `arrivals` are told of the gradients that it makes final.
    `loss` is this replica's part of the batch's loss, if it is made here. `buffers_before` are copies of the
    buffers that the stage writes to, as they were before its first forward. When it `is_applied`, its
    gradients are gone.
    """

    pool: GradientPool
    batch: int = 0
    own: GradientSums | None = None
    whole: GradientSums | None = None
    seen: float = 0.0
    num_backwards: int = 0
    arrivals: Arrivals | None = None
    loss: float | Tensor = 0.0
    buffers_before: dict[str, Tensor] | None = None
    is_applied: bool = False

    def sums(self) -> GradientSums:
        """The gradients of this replica; they take memory from the first call on."""
        if self.own is None:
            self.own = self.whole = self.pool.open(self.batch)
        return self.own

    def whole_gradients(self) -> Iterator[tuple[str, Tensor | Product | None]]:
        """What the update is made from."""
        assert self.whole is not None, "it was gathered before"
        return self.whole.all_items()

    def components(self) -> Mapping[str, Components]:
        """The principal components of the whole batch's gradients, where any are kept so."""
        assert self.whole is not None, "it was gathered before"
        return (self.whole.streams and self.whole.streams.components) or {}

    def release(self) -> None:
        """The gradients have been applied."""
        for sums in {id(one): one for one in (self.own, self.whole) if one is not None}.values():
            self.pool.release(sums)
        self.own = self.whole = None
        self.is_applied = True


@dataclass(slots=True)
class _BatchEnd:
    """A batch under way, with a part for each stage. `counts` says whether its loss is of anything."""

    parts: dict[int, _StagePart] = field(default_factory=dict)
    counts: bool = True
    num_ended: int = 0
    num_updated: int = 0
    norms: dict[int, PieceNorms] = field(default_factory=dict)
    """Those of each stage, where they are taken apart."""
    gradients: BatchGradients | None = None
    reduction: Reduction | None = None
    reduced: Reduced | None = None

    def loss(self) -> float | Tensor:
        """This rank's part of the loss."""
        return sum((part.loss for part in self.parts.values()), 0.0)

    def held(self) -> set[str]:
        """The parameters that have a gradient."""
        return {name for part in self._with_gradients() for name in part.sums().held}

    @torch.no_grad()
    def gather(
        self,
        *,
        summed_apart: Set[str],
        sums_gradients: bool,
        keep: bool,
        arrivals: ArrivalsOf | None = None,
    ) -> BatchGradients:
        """The gradients of all stages, to be summed up; those in `summed_apart` not with the arenas.

        A parameter that several of the rank's stages share is there once, with the sum of their gradients.
        With `keep` the gradients of this replica stay as they are where sums would change them. With
        `arrivals` gradients may still be coming.
        """
        parts = self._with_gradients()
        names = [name for part in parts for name in part.sums().views]
        has_streams = any(part.sums().streams is not None for part in parts)
        if keep and (sums_gradients or has_streams or len({*names}) < len(names)):
            for part in parts:
                part.whole = part.pool.open_copy(part.sums())
        views: dict[str, Tensor] = {}
        held: set[str] = set()
        flats: list[Tensor] = []
        streams: dict[str, PrincipalStream] = {}
        parts_of_flats: list[Parts] = []
        cuts: dict[str, Sequence[slice]] = {}
        owned: dict[str, Tensor] = {}
        owned_flats: list[Tensor] = []
        for part in parts:
            assert part.whole is not None, "sums() has opened it"
            own = part.whole.parts
            if own is not None:  # they are summed up already
                owned |= own.views
                owned_flats += own.flats
                held |= own.held
            else:
                together = [summed_apart.isdisjoint(arena.views) for arena in part.whole.arenas]
                flats += [arena.flat for arena in compress(part.whole.arenas, together)]
                for arena, cut in compress(zip(part.whole.arenas, part.pool.parts, strict=False), together):
                    parts_of_flats.append(cut.parts)
                    cuts |= cut.cuts
                    owned |= cut.views(arena.flat)
                    owned_flats.append(cut.of(arena.flat))
            for name, view in part.whole.whole_views.items():
                known = views.setdefault(name, view)
                if known is not view and name in part.whole.held:
                    known.add_(view) if name in held else known.copy_(view)
            held |= part.whole.held
            if part.whole.streams is not None:
                streams |= part.whole.streams.streams
        norms = [self.norms[stage] for stage in sorted(self.norms)]
        self.gradients = BatchGradients(
            views,
            held,
            flats,
            norms,
            streams,
            parts=parts_of_flats,
            cuts=cuts,
            owned=owned,
            owned_flats=owned_flats,
            arrivals=None if arrivals is None else arrivals(views, flats, parts_of_flats, held),
        )
        return self.gradients

    @torch.no_grad()
    def spread(self) -> None:
        """Give every stage the whole gradients, once they have been summed up."""
        assert self.gradients is not None, "they were gathered before"
        views, held = self.gradients.views, self.gradients.held
        for part in self._with_gradients():
            assert part.whole is not None, "they were gathered from here"
            part.whole.held = held & part.whole.whole_views.keys()
            if part.whole.parts is not None:
                part.whole.parts.held = held.intersection(part.whole.parts.names)
            if part.whole.streams is not None:
                part.whole.streams.components = self.gradients.components
            for name in part.whole.held:
                if part.whole.views[name] is not views[name]:
                    part.whole.views[name].copy_(views[name])

    def _with_gradients(self) -> list[_StagePart]:
        """The parts that are not applied yet."""
        parts = (self.parts[stage] for stage in sorted(self.parts))
        return [part for part in parts if not part.is_applied]


class Batches:
    """The batches under way on one rank, by their numbers."""

    def __init__(self) -> None:
        self._ends = defaultdict[int, _BatchEnd](_BatchEnd)

    def __getitem__(self, batch: int) -> _BatchEnd:
        """A batch; it begins when it is first asked for."""
        return self._ends[batch]

    def part(self, batch: int, stage: int, pool: GradientPool) -> _StagePart:
        """A stage's part of a batch; it begins when it is first asked for."""
        parts = self[batch].parts
        found = parts.get(stage)
        if found is None:
            found = parts[stage] = _StagePart(pool, batch)
        return found

    def parts_of(self, stage: int) -> Iterator[_StagePart]:
        """A stage's parts of all batches under way, the first batch first."""
        ends = (self._ends[batch] for batch in sorted(self._ends))
        return (end.parts[stage] for end in ends if stage in end.parts)

    def forget(self, batch: int) -> None:
        """A batch is done with."""
        del self._ends[batch]


LOSS = "loss"

_MOST_SHARES = 256
"""Shares of a loss that are remembered; they are few where micro-batches are alike."""

_Tensors = dict[str, Tensor]

AnyStageFunction = StageFunction | SegmentedFunction


class Place(NamedTuple):
    """Which micro-batch of which batch."""

    batch: int
    microbatch: int


@dataclass(slots=True)
class _Pass:
    """A forward of a micro-batch or of half of one, and what its backward needs of it."""

    micro_batch: MicroBatch
    received: _Tensors
    roots: _Tensors = field(default_factory=dict)


@dataclass(slots=True)
class _Kept:
    """What is kept of a micro-batch from its first forward to its last backward."""

    version: int
    passes: list[_Pass] = field(default_factory=list)
    rest: list[Rest] = field(default_factory=list)


class Stage:
    """Runs one stage. `recomputes` says that a forward keeps only what comes in. What `function` feeds to the
    gradient hook belongs to the batch whose backward runs.
    """

    def __init__(
        self,
        index: int,
        function: AnyStageFunction,
        banks: WeightBanks,
        buffers: _Tensors,
        boundaries: Boundaries,
        batches: Batches,
        *,
        device: torch.device,
        recomputes: bool,
        gradient_hook: GradientHook | None = None,
        memory: StageMemory | None = None,
    ) -> None:
        self.index = index
        self.function = function
        self.banks = banks
        self.buffers = buffers
        self._boundaries = boundaries
        self._batches = batches
        self._device = device
        self._recomputes = recomputes
        self._gradient_hook = gradient_hook
        self._memory = memory or StageMemory()
        self._kept: dict[Place, _Kept] = {}
        self._loss_gradients: dict[float, Tensor] = {}
        """The gradients that losses begin their backward with, by their share in the batch."""
        self._sends_gradients = tuple(name for name in function.receives if name in boundaries.learned)
        self._gets_gradients = boundaries.gradients_into(index)

    @property
    def num_kept(self) -> int:
        """How many micro-batches wait for their backward."""
        return len(self._kept)

    def forward(
        self, place: Place, version: int, micro_batch: MicroBatch, received: Mapping[str, Tensor]
    ) -> _Tensors:
        """Run a micro-batch, or half of one; gives what goes to the next stage."""
        kept = self._kept.get(place)
        if kept is None:
            self.banks.hold(version)
            kept = self._kept[place] = _Kept(version)
        if self.function.writes:
            self._note_buffers(place.batch)
        stash = self._memory.stash(place.batch, place.microbatch)
        one = _Pass(micro_batch, self._leaves(received, stash))
        kept.passes.append(one)
        before = torch.is_grad_enabled()
        set_grad_enabled(not self._recomputes)
        try:
            results = self._run(one, version, self.buffers, None if self._recomputes else stash)
        finally:
            set_grad_enabled(before)
        if LOSS in results and (share := micro_batch.share):
            self._note_loss(place.batch, results[LOSS], share)
        if not self._recomputes:
            one.roots = self._roots(results)
        return {name: self._memory.lasting(results[name].detach()) for name in self.function.sends}

    def recompute(self, place: Place, version: int) -> None:
        """Run the forwards of a micro-batch again, for what the backward needs of them."""
        # What a forward writes to its buffers it wrote the first time.
        buffers = untouched(self.buffers, self.function.writes)
        for one in self._kept[place].passes:
            with torch.enable_grad():
                one.roots = self._roots(self._run(one, version, buffers))

    def backward(self, place: Place, gradients: Mapping[str, Tensor]) -> _Tensors:
        """Run the backward of a micro-batch; gives the gradients that go to the stage before."""
        kept = self._kept.pop(place)
        leaves = self.banks.leaves(kept.version)
        given = self._split(kept, gradients)
        part = self.part(place.batch)
        sums = part.sums()
        if self._gradient_hook is not None and sums.streams is not None:
            self._gradient_hook.feed = sums.streams.feed
        with part.pool.lend(sums, leaves, part.arrivals if len(kept.passes) == 1 else None):
            for one, own in zip(kept.passes, given, strict=True):
                roots, begin = self._begin(one, own)
                if roots:
                    accumulate_gradients(roots, begin)
        self._has_seen(part, kept)
        names = self._sends_gradients
        return self._gradients_back(
            kept, [[one.received[name].grad for name in names] for one in kept.passes]
        )

    def backward_input(self, place: Place, gradients: Mapping[str, Tensor]) -> _Tensors:
        """Run the half of the backward that gives the gradients for the stage before."""
        kept = self._kept[place]
        leaves = self.banks.leaves(kept.version)
        parameters = [leaves[name] for name in self.banks.trainable]
        found: list[Sequence[Tensor | None]] = []
        for one, own in zip(kept.passes, self._split(kept, gradients), strict=True):
            roots, begin = self._begin(one, own)
            inputs = [one.received[name] for name in self._sends_gradients]
            rest = backward_input(roots, begin, inputs, parameters)
            kept.rest.append(rest)
            found.append(rest.input_gradients)
            rest.input_gradients = ()  # they are sent, and wait for nothing here
            one.roots = {}
        return self._gradients_back(kept, found)

    def backward_weight(self, place: Place) -> None:
        """Run the other half, which gives the gradients of the weights."""
        kept, part = self._kept.pop(place), self.part(place.batch)
        sums = part.sums()
        for rest in kept.rest:
            for name, gradient in zip(self.banks.trainable, rest.weight_gradients(), strict=True):
                if gradient is not None:
                    sums.add(name, gradient)
        self._has_seen(part, kept)

    def sum_parts(self, batch: int) -> GradientParts:
        """What there is of a batch's gradients in parts, which replicas that share this stage's weights add
        up.
        """
        parts = self.part(batch).sums().parts
        assert parts is not None, "who shares weights has parts of sums"
        return parts

    def begin_sums(self, batch: int) -> None:
        """Begin to sum what a batch's gradients have come to over the replicas that share this stage's
        weights, each part where its owner is. All of them must call it.
        """
        self.sum_parts(batch).begin_sums(batch, self.part(batch).sums().held)

    @contextmanager
    def opened_to_update(self, version: int) -> Iterator[None]:
        """Within this context the version can be made between windows."""
        memory, banks = self._memory, self.banks
        with memory.opened(Item.OPTIMIZER), ExitStack() as stack:
            for bank in {banks.bank_of(version - 1), banks.bank_of(version)}:
                stack.enter_context(memory.opened(Item.WEIGHTS, bank))
            yield

    @contextmanager
    def opened_gradients(self, batch: int) -> Iterator[None]:
        """Within this context a batch's gradients can be written between windows; then they are gone."""
        with self._memory.opened(Item.GRADIENT, batch):
            yield
        self._memory.end(Item.GRADIENT, batch)

    def put_back_buffers(self, batch: int) -> None:
        """Let a batch have written to no buffer. What later batches have written meanwhile goes as well."""
        before = self.part(batch).buffers_before or {}
        # Graphs of later batches may still hold the tensors that there were.
        self.buffers |= {name: tensor.clone() for name, tensor in before.items()}
        for part in self._batches.parts_of(self.index):
            if part.buffers_before is not None:
                part.buffers_before = before

    def settled_buffers(self) -> _Tensors:
        """The buffers as they were before any batch that is under way. Not copies."""
        copies = (part.buffers_before for part in self._batches.parts_of(self.index))
        return {**self.buffers, **next((one for one in copies if one is not None), {})}

    def part(self, batch: int) -> _StagePart:
        """What this stage has of a batch."""
        return self._batches.part(batch, self.index, self.banks.gradients)

    def _note_buffers(self, batch: int) -> None:
        """Keep what the stage's buffers are before a batch writes to them."""
        part = self.part(batch)
        if part.buffers_before is None:
            part.buffers_before = {name: self.buffers[name].clone() for name in self.function.writes}

    def _note_loss(self, batch: int, loss: Tensor, share: float) -> None:
        # On another device than the CPU a look at the number would wait for all that comes before it.
        self.part(batch).loss += loss.item() * share if loss.is_cpu else loss.detach().double() * share

    def _run(
        self, one: _Pass, version: int, buffers: Mapping[str, Tensor], stash: PagedStash | None = None
    ) -> _Tensors:
        leaves, seed = self.banks.leaves(version), one.micro_batch.seed
        given = {**one.micro_batch.inputs, **one.received}
        if stash is None:
            return self.function(leaves, buffers, given, device=self._device, seed=seed)
        constants = self.function.constants(self._device)
        with stash.saving([*leaves.values(), *buffers.values(), *given.values(), *constants]):
            return self.function(leaves, buffers, given, device=self._device, seed=seed)

    def _leaves(self, received: Mapping[str, Tensor], stash: PagedStash | None) -> _Tensors:
        """What came in as the begin of this stage's own autograd graph."""
        kept = {name: tensor.detach() for name, tensor in received.items()}
        if stash is not None:
            kept = {name: stash.keep(tensor) for name, tensor in kept.items()}
        learned = self._boundaries.learned
        return {name: tensor.requires_grad_(name in learned) for name, tensor in kept.items()}

    def _roots(self, results: Mapping[str, Tensor]) -> _Tensors:
        """The results that a backward starts from."""
        return {name: results[name] for name in (*self._gets_gradients, LOSS) if name in results}

    def _begin(self, one: _Pass, gradients: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The results that a backward starts from, and their gradients."""
        roots: list[Tensor] = []
        begin: list[Tensor] = []
        for name, root in one.roots.items():
            if root.requires_grad and name in gradients:
                roots.append(root)
                begin.append(gradients[name])
            elif root.requires_grad and name == LOSS and one.micro_batch.share:
                roots.append(root)
                begin.append(self._loss_gradient(root, one.micro_batch.share))
        return roots, begin

    def _loss_gradient(self, loss: Tensor, share: float) -> Tensor:
        found = self._loss_gradients.get(share)
        if found is None or found.dtype != loss.dtype or found.shape != loss.shape:
            if len(self._loss_gradients) >= _MOST_SHARES:
                self._loss_gradients.clear()
            found = self._loss_gradients[share] = torch.full_like(loss.detach(), share)
        return found

    def _split(self, kept: _Kept, gradients: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """The gradients of a whole micro-batch, cut as its forwards were."""
        if len(kept.passes) == 1:
            return [gradients]
        parts: list[dict[str, Tensor]] = [{} for _ in kept.passes]
        for name, gradient in gradients.items():
            axis = self._boundaries.batch_axis(name) or 0
            lengths = [one.roots[name].shape[axis] for one in kept.passes]
            for part, piece in zip(parts, torch.split(gradient, lengths, axis), strict=True):
                part[name] = piece
        return list(parts)

    def _gradients_back(self, kept: _Kept, found: Sequence[Sequence[Tensor | None]]) -> _Tensors:
        """The gradients of what was received, which are those found for each pass; zero where nothing came
        back.
        """
        back: _Tensors = {}
        for index, name in enumerate(self._sends_gradients):
            parts = []
            for one, own in zip(kept.passes, found, strict=True):
                gradient = own[index]
                parts.append(torch.zeros_like(one.received[name]) if gradient is None else gradient)
            back[name] = (
                parts[0] if len(parts) == 1 else torch.cat(parts, self._boundaries.batch_axis(name) or 0)
            )
        return back

    def _has_seen(self, part: _StagePart, kept: _Kept) -> None:
        """A micro-batch has all its gradients."""
        part.seen += sum(one.micro_batch.share for one in kept.passes)
        self.banks.release(kept.version)
