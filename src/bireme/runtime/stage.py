"""One stage on its rank: the forwards, backwards and recomputations of its micro-batches.

Between the passes of a micro-batch it keeps what the backward needs, and holds the weight version that the
micro-batch runs on. It knows no other rank: what it receives is given to it, what it sends it gives back.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bireme.model.fed_maps import GradientHook
from bireme.model.halves import Rest, backward_input
from bireme.model.segments import SegmentedFunction, untouched
from bireme.model.stage import StageFunction
from bireme.runtime.banks import WeightBanks
from bireme.runtime.batch_end import Batches, StagePart
from bireme.runtime.borders import Borders
from bireme.runtime.gradient_parts import GradientParts
from bireme.runtime.microbatches import MicroBatch
from bireme.runtime.sharers import Sharers
from bireme.runtime.stage_memory import UNPAGED, StageMemory, Stash

__all__ = ["LOSS", "AnyStageFunction", "Place", "Stage"]

LOSS = "loss"

MOST_SHARES = 256
"""Shares of a loss that are remembered; they are few where micro-batches are alike."""

Tensors = dict[str, Tensor]

AnyStageFunction = StageFunction | SegmentedFunction


@dataclass(frozen=True, slots=True)
class Place:
    """Which micro-batch of which batch."""

    batch: int
    microbatch: int


@dataclass(slots=True)
class _Pass:
    """A forward of a micro-batch or of half of one, and what its backward needs of it."""

    micro_batch: MicroBatch
    received: Tensors
    roots: Tensors = field(default_factory=dict)


@dataclass(slots=True)
class _Kept:
    """What is kept of a micro-batch from its first forward to its last backward."""

    version: int
    passes: list[_Pass] = field(default_factory=list)
    rest: list[Rest] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Begin:
    """The results that a backward starts from, and their gradients."""

    roots: list[Tensor]
    gradients: list[Tensor]


class Stage:
    """Runs one stage. `recomputes` says that a forward keeps only what comes in. What `function` feeds to the
    outlet belongs to the batch whose backward runs.
    """

    def __init__(
        self,
        index: int,
        function: AnyStageFunction,
        banks: WeightBanks,
        buffers: Tensors,
        borders: Borders,
        batches: Batches,
        *,
        device: torch.device,
        recomputes: bool,
        outlet: GradientHook | None = None,
        memory: StageMemory | None = None,
    ) -> None:
        self.index = index
        self.function = function
        self.banks = banks
        self.buffers = buffers
        self._borders = borders
        self._batches = batches
        self._device = device
        self._recomputes = recomputes
        self._outlet = outlet
        self._memory = memory or StageMemory()
        self._kept: dict[Place, _Kept] = {}
        self._loss_gradients: dict[float, Tensor] = {}
        """The gradients that losses begin their backward with, by their share in the batch."""
        self._sends_gradients = tuple(name for name in function.receives if name in borders.learned)
        self._gets_gradients = borders.gradients_into(index)

    @property
    def num_kept(self) -> int:
        """How many micro-batches wait for their backward."""
        return len(self._kept)

    def forward(
        self, place: Place, version: int, micro_batch: MicroBatch, received: Mapping[str, Tensor]
    ) -> Tensors:
        """Run a micro-batch, or half of one; gives what goes to the next stage."""
        kept = self._kept.get(place)
        if kept is None:
            self.banks.hold(version)
            kept = self._kept[place] = _Kept(version)
        self._note_buffers(place.batch)
        stash = self._memory.stash(place.batch, place.microbatch)
        one = _Pass(micro_batch, self._leaves(received, stash))
        kept.passes.append(one)
        with torch.set_grad_enabled(not self._recomputes):
            results = self._run(one, version, self.buffers, None if self._recomputes else stash)
        if LOSS in results and micro_batch.share:
            self._note_loss(place.batch, results[LOSS], micro_batch.share)
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

    def backward(self, place: Place, gradients: Mapping[str, Tensor]) -> Tensors:
        """Run the backward of a micro-batch; gives the gradients that go to the stage before."""
        kept = self._kept.pop(place)
        leaves = self.banks.leaves(kept.version)
        given = self._split(kept, gradients)
        sums = self.part(place.batch).sums()
        if self._outlet is not None and sums.streams is not None:
            self._outlet.feed = sums.streams.feed
        with sums.into(leaves):
            for one, own in zip(kept.passes, given, strict=True):
                begin = self._begin(one, own)
                if begin.roots:
                    torch.autograd.backward(begin.roots, begin.gradients)
        self._has_seen(place, kept)
        self.banks.release(kept.version)
        return self._gradients_back(kept, lambda one, name: one.received[name].grad)

    def backward_input(self, place: Place, gradients: Mapping[str, Tensor]) -> Tensors:
        """Run the half of the backward that gives the gradients for the stage before."""
        kept = self._kept[place]
        leaves = self.banks.leaves(kept.version)
        parameters = [leaves[name] for name in self.banks.trainable]
        found: list[dict[str, Tensor | None]] = []
        for one, own in zip(kept.passes, self._split(kept, gradients), strict=True):
            begin = self._begin(one, own)
            inputs = [one.received[name] for name in self._sends_gradients]
            rest = backward_input(begin.roots, begin.gradients, inputs, parameters)
            kept.rest.append(rest)
            found.append(dict(zip(self._sends_gradients, rest.input_gradients, strict=True)))
            rest.input_gradients = ()  # they are sent, and wait for nothing here
            one.roots = {}
        of_pass = {id(one): own for one, own in zip(kept.passes, found, strict=True)}
        return self._gradients_back(kept, lambda one, name: of_pass[id(one)][name])

    def backward_weight(self, place: Place) -> None:
        """Run the other half, which gives the gradients of the weights."""
        kept = self._kept.pop(place)
        sums = self.part(place.batch).sums()
        for rest in kept.rest:
            for name, gradient in zip(self.banks.trainable, rest.weight_gradients(), strict=True):
                if gradient is not None:
                    sums.add(name, gradient)
        self._has_seen(place, kept)
        self.banks.release(kept.version)

    def begin_sums(self, batch: int) -> None:
        """Begin to sum what a batch's gradients have come to over the replicas that share this stage's
        weights, each part where its owner is. All of them must call it.
        """
        parts, sharers = self._summed(batch)
        parts.begin_sums(self.part(batch).sums().held, sharers)

    def end_sums(self, batch: int) -> None:
        """Wait for that; this replica's part is added to what it has of the batch."""
        parts, sharers = self._summed(batch)
        parts.end_sums(sharers)

    def _summed(self, batch: int) -> tuple[GradientParts, Sharers]:
        """A batch's gradients in parts, and the replicas that have the others."""
        gathered, parts = self.banks.gathered, self.part(batch).sums().parts
        assert gathered is not None, "who sums parts shares weights"
        assert parts is not None, "who shares weights has parts of sums"
        return parts, gathered.sharers

    def put_back_buffers(self, batch: int) -> None:
        """Let a batch have written to no buffer. What later batches have written meanwhile goes as well."""
        before = self.part(batch).buffers_before or {}
        # Graphs of later batches may still hold the tensors that there were.
        self.buffers |= {name: tensor.clone() for name, tensor in before.items()}
        for part in self._batches.parts_of(self.index):
            if part.buffers_before is not None:
                part.buffers_before = before

    def settled_buffers(self) -> Tensors:
        """The buffers as they were before any batch that is under way. Not copies."""
        copies = (part.buffers_before for part in self._batches.parts_of(self.index))
        return {**self.buffers, **next((one for one in copies if one is not None), {})}

    def part(self, batch: int) -> StagePart:
        """What this stage has of a batch."""
        return self._batches.part(batch, self.index, self.banks.gradients)

    def _note_buffers(self, batch: int) -> None:
        """Keep what the stage's buffers are before a batch writes to them."""
        if self.function.writes:
            part = self.part(batch)
            if part.buffers_before is None:
                part.buffers_before = {name: self.buffers[name].clone() for name in self.function.writes}

    def _note_loss(self, batch: int, loss: Tensor, share: float) -> None:
        # On another device than the CPU a look at the number would wait for all that comes before it.
        self.part(batch).loss += loss.item() * share if loss.is_cpu else loss.detach().double() * share

    def _run(
        self, one: _Pass, version: int, buffers: Mapping[str, Tensor], stash: Stash | None = None
    ) -> Tensors:
        leaves, seed = self.banks.leaves(version), one.micro_batch.seed
        given = {**one.micro_batch.inputs, **one.received}
        if stash is None or stash is UNPAGED:
            return self.function(leaves, buffers, given, device=self._device, seed=seed)
        constants = self.function.constants(self._device)
        with stash.saving([*leaves.values(), *buffers.values(), *given.values(), *constants]):
            return self.function(leaves, buffers, given, device=self._device, seed=seed)

    def _leaves(self, received: Mapping[str, Tensor], stash: Stash) -> Tensors:
        """What came in as the begin of this stage's own autograd graph."""
        learned = self._borders.learned
        return {
            name: stash.keep(tensor.detach()).requires_grad_(name in learned)
            for name, tensor in received.items()
        }

    def _roots(self, results: Mapping[str, Tensor]) -> Tensors:
        """The results that a backward starts from."""
        return {name: results[name] for name in (*self._gets_gradients, LOSS) if name in results}

    def _begin(self, one: _Pass, gradients: Mapping[str, Tensor]) -> "_Begin":
        begin = _Begin([], [])
        for name, root in one.roots.items():
            if root.requires_grad and name in gradients:
                begin.roots.append(root)
                begin.gradients.append(gradients[name])
            elif root.requires_grad and name == LOSS and one.micro_batch.share:
                begin.roots.append(root)
                begin.gradients.append(self._loss_gradient(root, one.micro_batch.share))
        return begin

    def _loss_gradient(self, loss: Tensor, share: float) -> Tensor:
        found = self._loss_gradients.get(share)
        if found is None or found.dtype != loss.dtype or found.shape != loss.shape:
            if len(self._loss_gradients) >= MOST_SHARES:
                self._loss_gradients.clear()
            found = self._loss_gradients[share] = torch.full_like(loss.detach(), share)
        return found

    def _split(self, kept: _Kept, gradients: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """The gradients of a whole micro-batch, cut as its forwards were."""
        if len(kept.passes) == 1:
            return [gradients]
        parts: list[dict[str, Tensor]] = [{} for _ in kept.passes]
        for name, gradient in gradients.items():
            axis = self._borders.batch_axis(name) or 0
            lengths = [one.roots[name].shape[axis] for one in kept.passes]
            for part, piece in zip(parts, torch.split(gradient, lengths, axis), strict=True):
                part[name] = piece
        return list(parts)

    def _gradients_back(self, kept: _Kept, of: Callable[[_Pass, str], Tensor | None]) -> Tensors:
        """The gradients of what was received; zero where nothing came back."""
        back: Tensors = {}
        for name in self._sends_gradients:
            parts = []
            for one in kept.passes:
                found = of(one, name)
                parts.append(torch.zeros_like(one.received[name]) if found is None else found)
            back[name] = (
                parts[0] if len(parts) == 1 else torch.cat(parts, self._borders.batch_axis(name) or 0)
            )
        return back

    def _has_seen(self, place: Place, kept: _Kept) -> None:
        self.part(place.batch).seen += sum(one.micro_batch.share for one in kept.passes)
