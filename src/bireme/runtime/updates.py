"""The end of a batch on one rank: sums over the replicas, the global norm, the optimiser, trial steps.

A batch ends on a rank when all its stages have their gradients. Its sums then run in the background until a
stage needs its new weights; they give every rank the same loss, the same norm and the same verdict whether
the batch counts.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from bireme.runtime.stage import Stage
from bireme.schedule.instruction import Instruction
from bireme.sync.inline_reducer import InlineReducer
from bireme.sync.reduced import Reduced
from bireme.sync.reducer import Reducer

__all__ = ["AnyReducer", "Finished", "Settings", "Updates"]

AnyReducer = Reducer | InlineReducer


@dataclass(frozen=True, slots=True)
class Settings:
    """How gradients become updates: the factor on the learning rate by batch, and the largest norm, if
    any.
    """

    lr_factor: Callable[[int], float] = field(default=lambda _batch: 1.0)
    clip_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """What came of a batch, the same on all ranks. `is_skipped` says that there was no step, for its gradient
    was not finite or nothing in it counts; in the latter case the loss is NaN and the norm 0.
    """

    batch: int
    loss: float
    grad_norm: float
    lr_factor: float
    is_skipped: bool
    votes: float


class Updates:
    """Makes the weight versions of one rank's stages."""

    def __init__(self, stages: Mapping[int, Stage], reducer: AnyReducer, settings: Settings) -> None:
        self._stages = stages
        self._reducer = reducer
        self.settings = settings
        self._ended: dict[int, set[int]] = {}
        self._empty: set[int] = set()
        self._reduced: dict[int, Reduced] = {}
        self._updated: dict[int, set[int]] = {}
        self.finished: list[Finished] = []
        """Batches that are done and not yet taken."""
        self.scale = 1.0
        """The last known factor that brings the gradient's norm down to the limit."""
        self.votes: Callable[[], float] = lambda: 0.0
        """What this rank gives along with a batch, to be summed over all."""

    def reduce(self, step: Instruction, stamp: int, *, counts: bool) -> None:
        """A stage has all its gradients of a batch, which has this stamp on all ranks.

        `counts` says whether anything in the batch counts for the loss.
        """
        ended = self._ended.setdefault(step.batch, set())
        ended.add(step.stage)
        if len(ended) < len(self._stages):
            return
        del self._ended[step.batch]
        if not counts:
            self._empty.add(step.batch)
        gradients: dict[str, Tensor | None] = {}
        for stage in self._stages.values():
            _merge(gradients, stage.gradients(step.batch))
        loss_sum = sum(stage.loss(step.batch) for stage in self._stages.values())
        self._reducer.start(step.batch, gradients, loss_sum=loss_sum, stamp=stamp, votes=self.votes())

    def wait(self, batch: int) -> None:
        """Wait until a batch's sums are there."""
        if batch not in self._reduced:
            reduced = self._reducer.finish(batch)
            if batch in self._empty:
                self._empty.remove(batch)
                # A mean of nothing is NaN; and a step with gradients of zero would decay weights and momenta.
                reduced = replace(reduced, loss=math.nan, grad_norm=0.0, is_finite=False)
            self._reduced[batch] = reduced
            self.scale = self._scale(reduced)

    def update(self, step: Instruction) -> None:
        """Make a stage's next weights from a batch's whole gradient, which must have been waited for."""
        assert step.version is not None
        reduced = self._reduced[step.batch]
        stage = self._stages[step.stage]
        own = {name: reduced.gradients[name] for name in stage.gradients(step.batch)}
        stage.banks.update(
            step.version,
            own,
            lr_factor=self.settings.lr_factor(step.batch),
            scale=self.scale,
            skip=not reduced.is_finite,
        )
        stage.forget(step.batch)
        updated = self._updated.setdefault(step.batch, set())
        updated.add(step.stage)
        if len(updated) == len(self._stages):
            del self._updated[step.batch], self._reduced[step.batch]
            self.finished.append(
                Finished(
                    batch=step.batch,
                    loss=reduced.loss,
                    grad_norm=reduced.grad_norm,
                    lr_factor=self.settings.lr_factor(step.batch),
                    is_skipped=not reduced.is_finite,
                    votes=reduced.votes,
                )
            )

    def trial(self, step: Instruction) -> None:
        """Make a stage's weights for a batch from what is known of the gradient of the batch before."""
        assert step.version is not None
        stage = self._stages[step.stage]
        before = step.batch - 1
        seen = stage.seen_share(before)
        stage.banks.trial(
            step.version,
            stage.gradients(before) if seen else None,
            gradient_scale=1.0 / seen if seen else 1.0,
            lr_factor=self.settings.lr_factor(before),
            scale=self.scale,
        )

    def take_finished(self) -> Iterator[Finished]:
        """The batches that were finished since it was last asked."""
        while self.finished:
            yield self.finished.pop(0)

    def _scale(self, reduced: Reduced) -> float:
        limit = self.settings.clip_norm
        if limit is None or not reduced.is_finite:
            return 1.0 if limit is None else self.scale
        return min(1.0, limit / (reduced.grad_norm + 1e-6))


def _merge(gradients: dict[str, Tensor | None], own: Mapping[str, Tensor | None]) -> None:
    """Add a stage's gradients to those of the rank's other stages, which may share a parameter."""
    for name, gradient in own.items():
        known = gradients.get(name)
        if known is not None and gradient is not None:
            known += gradient
        elif known is None:
            gradients[name] = gradient
