"""Evaluation: batches through the pipeline forward, on the newest weights, in the model's evaluation mode."""

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bireme.codec.border import NO_CODECS, LinkCodecs
from bireme.model.stage import StageFunction
from bireme.runtime.batches import Batch
from bireme.runtime.interpreter import Interpreter
from bireme.runtime.layout import Layout
from bireme.runtime.microbatches import Cutter, Feed, MicroBatch, Portion
from bireme.runtime.stage import LOSS, Place
from bireme.schedule.generators.forward_only import forward_only
from bireme.sync.group import Group

__all__ = ["Evaluation", "EvaluationStage", "Evaluator", "HoldsWeights"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean loss over everything that counts in some batches, and how much that is.

    It is NaN where nothing counts.
    """

    loss: float
    weight: float
    num_samples: int


class Evaluator:
    """Runs batches through the stages of one rank. `group` has all ranks of all replicas. Where replicas
    share weights, this one `gathers` them with the others, whether it has samples of a batch or not.
    """

    def __init__(
        self,
        stages: "Mapping[int, EvaluationStage]",
        layout: Layout,
        interpreter: Interpreter,
        group: Group,
        cutter: Cutter,
        *,
        gathers: bool = False,
    ) -> None:
        self._gathers = gathers
        self._stages = stages
        self._layout = layout
        self._group = group
        self._cutter = cutter
        self._interpreter = interpreter

    def evaluate(self, batches: Iterable[Batch], codecs: LinkCodecs = NO_CODECS) -> Evaluation:
        """The loss over some batches, each of any size down to one sample; what crosses borders goes through
        `codecs`.
        """
        lending = Lending()
        for stage in self._stages.values():
            stage.begin(lending)
        try:
            loss, weight, num_samples = self._sums(batches, codecs)
        finally:
            lending.close()
        total = torch.tensor([loss], dtype=torch.float64)
        self._group.all_reduce(total).wait()
        return Evaluation(float(total) / weight if weight else math.nan, weight, num_samples)

    def _sums(self, batches: Iterable[Batch], codecs: LinkCodecs) -> tuple[float, float, int]:
        """This rank's part of the weighted loss, the weight of all batches, and their samples."""
        loss = weight = 0.0
        num_samples = 0
        for number, given in enumerate(batches):
            portion = self._cutter.cut_to_evaluate(given, number)
            weight += portion.weight
            num_samples += portion.num_samples
            if portion.micro_batches:
                self._run(portion, codecs)
                loss += portion.weight * sum(stage.take_loss() for stage in self._stages.values())
            elif self._gathers:
                for _, stage in sorted(self._stages.items()):
                    stage.take_part()
        return loss, weight, num_samples

    def _run(self, portion: Portion, codecs: LinkCodecs) -> None:
        feed = Feed((), self._cutter, 0)
        feed.hold(0, portion)
        program = forward_only(self._layout.rank_of_stage, len(portion.micro_batches))
        blocks = program.tracks[self._layout.pipeline_rank].blocks()
        for _ in self._interpreter.run(blocks, feed, forwards=self._stages, codecs=codecs):
            raise AssertionError("an evaluation finishes no batch of training")


class HoldsWeights(Protocol):
    """Where an evaluation takes a stage's weights from."""

    def lent(self) -> AbstractContextManager[Mapping[str, Tensor] | None]:
        """The newest weights by name, in the type that the stage computes with, to be read within this
        context; None if they are paged and the device has no room for them.
        """

    def newest_to_compute_with(self) -> Mapping[str, Tensor]:
        """The same, as copies where they are paged."""


class Lending:
    """The weights that an evaluation reads: of all stages where the device has room for them, else of some.

    A rank takes all micro-batches of a batch through a stage before the next, so weights are read once for
    each batch. Those that came last go first: the first of the next batch are there then.
    """

    def __init__(self) -> None:
        self._lent: list[tuple[HoldsWeights, ExitStack, Mapping[str, Tensor]]] = []

    def of(self, banks: HoldsWeights) -> Mapping[str, Tensor]:
        """The weights of a stage."""
        for owner, _, weights in self._lent:
            if owner is banks:
                return weights
        while True:
            stack = ExitStack()
            found = stack.enter_context(banks.lent())
            if found is None and self._lent:
                stack.close()
                self._lent.pop()[1].close()
                continue
            weights = banks.newest_to_compute_with() if found is None else found
            self._lent.append((banks, stack, weights))
            return weights

    def close(self) -> None:
        """Let go of all."""
        while self._lent:
            self._lent.pop()[1].close()


class EvaluationStage:
    """A stage that only runs forward, and keeps nothing but the loss."""

    def __init__(
        self,
        function: StageFunction,
        banks: HoldsWeights,
        buffers: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.function = function
        self._banks = banks
        self._buffers = buffers
        self._device = device
        self._loss = 0.0
        self._lending = Lending()

    def begin(self, lending: Lending) -> None:
        """An evaluation begins, which lends the newest weights."""
        self._loss, self._lending = 0.0, lending

    def forward(
        self, _place: Place, _version: int, micro_batch: MicroBatch, received: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run a micro-batch on the newest weights; gives what goes to the next stage."""
        given = {**micro_batch.inputs, **received}
        weights = self._lending.of(self._banks)
        with torch.no_grad():
            results = self.function(weights, self._buffers, given, device=self._device)
        if LOSS in results and micro_batch.share:
            self._loss += float(results[LOSS]) * micro_batch.share
        return {name: results[name] for name in self.function.sends}

    def take_part(self) -> None:
        """Have the weights that the others run a batch on."""
        self._lending.of(self._banks)

    def take_loss(self) -> float:
        """The sum of the losses since it was last asked, each by its share."""
        loss, self._loss = self._loss, 0.0
        return loss
