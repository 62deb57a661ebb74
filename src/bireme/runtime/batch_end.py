"""A batch on one rank, from its first forward to its last update: all that is known of it so far."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor

from bireme.codec.principal import Components, PrincipalStream, Product
from bireme.runtime.gradients import GradientPool, GradientSums
from bireme.sync.gradients import BatchGradients, Parts
from bireme.sync.norm import PieceNorms
from bireme.sync.reduced import Reduced
from bireme.sync.reducer import Reduction

__all__ = ["BatchEnd", "Batches", "StagePart"]


@dataclass(slots=True)
class StagePart:
    """What one stage has of a batch.

    `own` are the gradients of this replica, and `whole` the sums that the update is made from, which are
    others only where both are needed. `seen` is the share of the batch, by weight, whose gradients are there.
    `loss` is this replica's part of the batch's loss, if it is made here. `buffers_before` are copies of the
    buffers that the stage writes to, as they were before its first forward. When it `is_applied`, its
    gradients are gone.
    """

    pool: GradientPool
    batch: int = 0
    own: GradientSums | None = None
    whole: GradientSums | None = None
    seen: float = 0.0
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
class BatchEnd:
    """A batch under way, with a part for each stage. `counts` says whether its loss is of anything."""

    parts: dict[int, StagePart] = field(default_factory=dict)
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

    @torch.no_grad()
    def gather(self, *, summed_apart: Set[str], sums_gradients: bool, keep: bool) -> BatchGradients:
        """The gradients of all stages, to be summed up; those in `summed_apart` not with the arenas.

        A parameter that several of the rank's stages share is there once, with the sum of their gradients.
        With `keep` the gradients of this replica stay as they are where sums would change them.
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
        cuts: list[Parts] = []
        owned: dict[str, Tensor] = {}
        for part in parts:
            assert part.whole is not None, "sums() has opened it"
            own = part.whole.parts
            if own is not None:  # they are summed up already
                owned |= own.views
                held |= own.held
            else:
                together = [summed_apart.isdisjoint(arena.views) for arena in part.whole.arenas]
                flats += [arena.flat for arena in compress(part.whole.arenas, together)]
                for arena, cut in compress(zip(part.whole.arenas, part.pool.parts, strict=False), together):
                    cuts.append(cut.parts)
                    owned |= cut.views(arena.flat)
            for name, view in part.whole.whole_views.items():
                known = views.setdefault(name, view)
                if known is not view and name in part.whole.held:
                    known.add_(view) if name in held else known.copy_(view)
            held |= part.whole.held
            if part.whole.streams is not None:
                streams |= part.whole.streams.streams
        norms = [self.norms[stage] for stage in sorted(self.norms)]
        self.gradients = BatchGradients(views, held, flats, norms, streams, parts=cuts, owned=owned)
        return self.gradients

    @torch.no_grad()
    def spread(self) -> None:
        """Give every stage the whole gradients, once they have been summed up."""
        assert self.gradients is not None, "they were gathered before"
        views, held = self.gradients.views, self.gradients.held
        for part in self._with_gradients():
            assert part.whole is not None, "they were gathered from here"
            part.whole.held = held & part.whole.whole_views.keys()
            if part.whole.streams is not None:
                part.whole.streams.components = self.gradients.components
            for name in part.whole.held:
                if part.whole.views[name] is not views[name]:
                    part.whole.views[name].copy_(views[name])

    def _with_gradients(self) -> list[StagePart]:
        """The parts that are not applied yet."""
        parts = (self.parts[stage] for stage in sorted(self.parts))
        return [part for part in parts if not part.is_applied]


class Batches:
    """The batches under way on one rank, by their numbers."""

    def __init__(self) -> None:
        self._ends: dict[int, BatchEnd] = {}

    def __getitem__(self, batch: int) -> BatchEnd:
        """A batch; it begins when it is first asked for."""
        return self._ends.setdefault(batch, BatchEnd())

    def part(self, batch: int, stage: int, pool: GradientPool) -> StagePart:
        """A stage's part of a batch; it begins when it is first asked for."""
        parts = self[batch].parts
        if stage not in parts:
            parts[stage] = StagePart(pool, batch)
        return parts[stage]

    def parts_of(self, stage: int) -> Iterator[StagePart]:
        """A stage's parts of all batches under way, the first batch first."""
        ends = (self._ends[batch] for batch in sorted(self._ends))
        return (end.parts[stage] for end in ends if stage in end.parts)

    def forget(self, batch: int) -> None:
        """A batch is done with."""
        del self._ends[batch]
