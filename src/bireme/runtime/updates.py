"""The end of a batch on one rank: sums over the replicas, the global norm, the optimizer, trial steps.

A batch ends on a rank when all its stages have their gradients. Its sums then run in the background until a
stage needs its new weights; they give every rank the same loss, the same norm and the same verdict whether
the batch counts.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from bireme.model.graph import ModelState
from bireme.model.units import Unit
from bireme.runtime.layout import Layout
from bireme.runtime.microbatches import Portion
from bireme.runtime.stage import Batches, Stage
from bireme.schedule.instruction import Instruction, Kind
from bireme.sync.coordinator.recoveries import HealTimes, healed_in
from bireme.sync.exchange import PieceNorms, piece_norms, squared_norm_of
from bireme.sync.reducer import OwnPart, Reduced, Reducer, Reduction


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """How gradients become updates: the factor on the learning rate by batch, and the largest norm, if
    any. If stages step apart, `own_limits` are the largest norms of each stage's own gradient instead.
    """

    lr_factor: Callable[[int], float] = field(default=lambda _batch: 1.0)
    clip_norm: float | None = None
    own_limits: Mapping[int, float] = field(default_factory=dict)


def own_limits(
    clip_norm: float | None, units: Sequence[Unit], states: Sequence[ModelState], layout: Layout
) -> dict[int, float]:
    """The shares of the limit of this rank's stages: their squares are in proportion to the elements that
    learn, so that those of all stages add up to the square of the limit.
    """
    elements = {state.name: state.num_elements for state in states if state.trainable}

    def num_elements(of: Iterable[Unit]) -> int:
        return sum(elements.get(name, 0) for unit in of for name in unit.parameters)

    if clip_norm is None:
        return {}
    whole = max(num_elements(units), 1)
    return {stage: clip_norm * math.sqrt(num_elements(own) / whole) for stage, own in layout.units.items()}


@dataclass(frozen=True, slots=True)
class FinishedBatch:
    """A batch that is done on this rank, with what all ranks have summed of it."""

    batch: int
    lr_factor: float
    reduced: Reduced


@dataclass(eq=False)
class Updates:
    """Makes the weight versions of one rank's stages; `batches` are those under way, which they write to.

    With `norms_of` the norm of each stage's gradients is taken when the stage has all of them, because they
    may be elsewhere, or be used up, when the last stage has its own.
    """

    _stages: Mapping[int, Stage]
    _batches: Batches
    _reducer: Reducer
    settings: UpdateSettings
    norms_of: Callable[[Mapping[str, Tensor]], PieceNorms] | None = None
    finished: list[FinishedBatch] = field(default_factory=list)
    """Batches that are done and not yet taken."""
    scale: float = 1.0
    """The last known factor that brings the gradient's norm down to the limit."""
    votes: Callable[[], float] = lambda: 0.0
    """What this rank gives along with a batch, to be summed over all."""
    more: Callable[[int], Sequence[float]] | None = None
    """What else it gives along with the batch of that number."""
    before_update: Callable[[Stage, int], None] | None = None
    """Is called before a stage makes the update of a batch."""

    def __post_init__(self) -> None:
        self._tries = any(stage.banks.is_fresh for stage in self._stages.values())

    def before_backward(self, step: Instruction, portion: Portion) -> None:
        """If a stage begins its last backward of a batch, its gradients go to sums as they come."""
        if self._reducer.arrivals is None:
            return
        part = self._stages[step.stage].part(step.batch)
        part.num_backwards += 1
        if part.num_backwards < len(portion.micro_batches):
            return
        end = self._batches[step.batch]
        if end.reduction is None:
            self._reducer.start(self._gathered(step.batch))
        assert end.gradients is not None, "they were gathered now or before"
        part.arrivals = end.gradients.arrivals

    def _gathered(self, batch: int) -> Reduction:
        """The reduction of a batch with its gradients, as far as they have come."""
        for stage in self._stages.values():
            stage.part(batch)
        reducer, end = self._reducer, self._batches[batch]
        gradients = end.gather(
            summed_apart=reducer.summed_apart,
            sums_gradients=reducer.sums_gradients,
            keep=self._tries,  # a trial step may still read what is this replica's own
            arrivals=reducer.arrivals,
        )
        end.reduction = Reduction(batch, gradients)
        return end.reduction

    def reduce(self, step: Instruction, portion: Portion) -> None:
        """A stage has all its gradients of a batch, of which this replica has that portion."""
        end = self._batches[step.batch]
        end.counts = self._reducer.weighs or portion.weight > 0
        end.num_ended += 1
        self._note_norms(step)
        if end.num_ended < len(self._stages):
            return
        is_under_way = end.reduction is not None
        reduction = end.reduction or self._gathered(step.batch)
        reduction.loss_sum, reduction.stamp, reduction.votes = end.loss(), portion.stamp, self.votes()
        if self.more is not None:
            reduction.more = partial(self.more, step.batch)
        reduction.own = OwnPart(portion.weight, portion.weights.nominal, portion.num_samples)
        if reduction.gradients.arrivals is not None:
            reduction.gradients.arrivals.end(end.held())
        if not is_under_way:
            self._reducer.start(reduction)

    def collect(self, step: Instruction) -> None:
        """Wait until this replica's parts of a stage's gradients are summed, as far as that has begun."""
        self._stages[step.stage].sum_parts(step.batch).end_sums()
        if step.stage in self._batches[step.batch].norms:
            self._note_norms(step)  # the last sums come after the stage's REDUCE

    def _note_norms(self, step: Instruction) -> None:
        """Look at a stage's gradients of a batch while they are on the device, if they may leave it."""
        if self.norms_of is not None:
            own = self._stages[step.stage].part(step.batch).sums()
            held = {name: view for name, view in own.items() if view is not None}
            # What replicas own pieces of has no other rank that counts it.
            norms = self.norms_of(held) if own.parts is None else piece_norms([*held.values()])
            self._batches[step.batch].norms[step.stage] = norms

    def wait(self, batch: int) -> None:
        """Wait until a batch's sums are there."""
        end = self._batches[batch]
        if end.reduced is None:
            assert end.reduction is not None, "a checked program reduces a batch before it updates"
            reduced = self._reducer.finish(end.reduction)
            end.spread()
            if not end.counts:
                # A mean of nothing is NaN; and a step with gradients of zero would decay weights and momenta.
                reduced = replace(reduced, loss=math.nan, grad_norm=0.0, is_finite=False)
            end.reduced = reduced
            if reduced.is_finite:
                self.scale = _scale_to(reduced.grad_norm, self.settings.clip_norm)

    def update(self, step: Instruction) -> None:
        """Make a stage's next weights from a batch's whole gradient, which must have been waited for. An
        update that is apart is skipped if a gradient is not finite that this rank has of the batch by then.
        If stages step apart, each is clipped by its own norm.
        """
        assert step.version is not None
        end = self._batches[step.batch]
        reduced, scale = end.reduced, self.scale
        if step.is_apart:
            is_finite = end.counts and math.isfinite(squared_norm_of(end.norms.values()))
        else:
            assert reduced is not None, "the interpreter waits first"
            is_finite = reduced.is_finite
        own_limit = self.settings.own_limits.get(step.stage)
        if own_limit is not None and is_finite:
            scale = _scale_to(math.sqrt(squared_norm_of([end.norms[step.stage]])), own_limit)
        stage = self._stages[step.stage]
        if self.before_update is not None:
            self.before_update(stage, step.batch)
        part = stage.part(step.batch)
        stage.banks.update(
            step.version,
            dict(part.whole_gradients()),
            lr_factor=self.settings.lr_factor(step.batch),
            scale=scale,
            skip=not is_finite,
        )
        if stage.banks.gradients.principal is not None:
            stage.banks.gradients.principal.settle(step.version, part.components() if is_finite else {})
        if not is_finite:
            stage.put_back_buffers(step.batch)
        part.release()
        end.num_updated += 1
        if end.num_updated == len(self._stages):
            assert reduced is not None, "the last update of a rank is not apart"
            self._batches.forget(step.batch)
            self.finished.append(FinishedBatch(step.batch, self.settings.lr_factor(step.batch), reduced))

    def follow(self, batch: int) -> None:
        """Make the next updates of all stages from the sum that others made of a batch, when nothing is under
        way.
        """
        end = self._batches[batch]
        with ExitStack() as stack:
            for stage in self._stages.values():
                stack.enter_context(stage.opened_gradients(batch))
                stage.part(batch)
            gradients = end.gather(summed_apart=self._reducer.summed_apart, sums_gradients=True, keep=False)
            end.reduction = Reduction(batch, gradients)
            self._reducer.start(end.reduction)
            self.wait(batch)
            for index, stage in sorted(self._stages.items()):
                with stage.opened_to_update(batch + 1):
                    self.update(Instruction(Kind.UPDATE, index, batch, None, batch + 1))
        self.finished.clear()

    def trial(self, step: Instruction) -> None:
        """Make a stage's weights for a batch from what is known of the gradient of the batch before."""
        assert step.version is not None
        stage = self._stages[step.stage]
        part = stage.part(step.batch - 1)
        flats = [arena.flat for arena in part.sums().arenas] if part.seen and stage.banks.shared else ()
        stage.banks.trial(
            step.version,
            dict(part.sums().all_items()) if part.seen else None,
            gradient_scale=1.0 / part.seen if part.seen else 1.0,
            lr_factor=self.settings.lr_factor(step.batch - 1),
            scale=self.scale,
            flats=flats,
        )

    def take_finished(self) -> Iterator[FinishedBatch]:
        """The batches that were finished since it was last asked."""
        while self.finished:
            yield self.finished.pop(0)


def _scale_to(norm: float, limit: float | None) -> float:
    """The factor that brings a gradient of that norm down to the limit."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


# What came of a batch, as a pipeline gives it to whoever trains.


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What came of a batch; the same on every rank, but for `seconds`, which passed here since the last
    one. `votes` is the sum of what the ranks gave along with it. `shares` are the samples of each replica;
    `busy_s` says for how long the batch kept each rank busy, where shares follow that. The replicas that have
    a part in it are in `order`, the one that has trained for longest first.

    `is_skipped` says that the weights stay as they were, but for those of stages that had stepped apart: the
    gradient was not finite, or nothing in the batch counts for the loss. Then its `weight`, how much counts
    in it, is 0, its loss NaN and its norm 0.
    """

    batch: int
    loss: float
    grad_norm: float
    lr_factor: float
    is_skipped: bool
    num_samples: int
    seconds: float
    votes: float
    weight: float
    shares: tuple[int, ...]
    busy_s: tuple[float, ...] = ()
    order: tuple[int, ...] = (0,)
    healed: Mapping[int, HealTimes] = field(default_factory=dict)
    """The replicas that have a part for the first time since they healed."""

    @property
    def leader(self) -> int:
        """The replica that has trained for longest."""
        return self.order[0]


def result_of(
    finished: FinishedBatch, portion: Portion, seconds: float, *, is_agreed: bool = False
) -> BatchResult:
    """The result of a batch that is finished, of which this replica had a portion.

    It `is_agreed` where a replica knows no more than its own portion: then what all gave along are the weight
    of the whole batch, the samples of each replica in it, the first batch of each, and how long each took to
    heal.
    """
    reduced = finished.reduced
    weight, shares, busy_s = portion.weight, portion.shares, reduced.more
    order: tuple[int, ...] = (0,)
    healed: Mapping[int, HealTimes] = {}
    if is_agreed:
        weight, *rest = reduced.more
        num = len(rest) // 4
        shares, firsts, busy_s = tuple(map(round, rest[:num])), rest[num : 2 * num], ()
        healed = healed_in(rest[2 * num :])
        parts = [one for one, num in enumerate(shares) if num]
        order = tuple(sorted(parts, key=lambda one: (firsts[one], one)))
    return BatchResult(
        batch=finished.batch,
        loss=reduced.loss,
        grad_norm=reduced.grad_norm,
        lr_factor=finished.lr_factor,
        is_skipped=not reduced.is_finite,
        num_samples=sum(shares) if is_agreed else portion.num_samples,
        seconds=seconds,
        votes=reduced.votes,
        weight=weight,
        shares=shares,
        busy_s=busy_s,
        order=order,
        healed=healed,
    )
