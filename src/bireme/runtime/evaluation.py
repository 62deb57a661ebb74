"""Evaluation: batches through the pipeline forward, on the newest weights, in the model's evaluation mode."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bireme.model.stage import StageFunction
from bireme.plan.program_plan import ProgramPlan
from bireme.runtime.banks import WeightBanks
from bireme.runtime.interpreter import Interpreter
from bireme.runtime.layout import Layout
from bireme.runtime.microbatches import Cutter, Feed, MicroBatch, checked, num_samples_of
from bireme.runtime.stage import LOSS, Place
from bireme.schedule.generators.forward_only import forward_only
from bireme.sync.group import Group

__all__ = ["Evaluation", "EvaluationStage", "Evaluator"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean loss over everything that counts in some batches, and how much that is."""

    loss: float
    weight: float
    num_samples: int


class Evaluator:
    """Runs batches through the stages of one rank. `group` has all ranks of all replicas."""

    def __init__(
        self,
        stages: "Mapping[int, EvaluationStage]",
        layout: Layout,
        plan: ProgramPlan,
        interpreter: Interpreter,
        group: Group,
        cutter: Cutter,
    ) -> None:
        self._stages = stages
        self._layout = layout
        self._plan = plan
        self._group = group
        self._cutter = cutter
        self._interpreter = interpreter

    def evaluate(self, batches: Iterable[Mapping[str, Tensor]]) -> Evaluation:
        """The loss over some batches, each of any size down to one sample."""
        for stage in self._stages.values():
            stage.load()
        try:
            loss, weight, num_samples = self._sums(batches)
        finally:
            for stage in self._stages.values():
                stage.unload()
        total = torch.tensor([loss], dtype=torch.float64)
        self._group.all_reduce(total).wait()
        return Evaluation(float(total) / weight if weight else math.nan, weight, num_samples)

    def _sums(self, batches: Iterable[Mapping[str, Tensor]]) -> tuple[float, float, int]:
        """This rank's part of the weighted loss, the weight of all batches, and their samples."""
        loss = weight = 0.0
        num_samples = 0
        most = self._plan.width * self._plan.source.num_microbatches
        for number, given in enumerate(batches):
            batch = checked(given, number, self._cutter.required)
            size = num_samples_of(batch)
            pieces = min(size, most)
            # One replica's cutter gives all pieces; the replicas take turns at them.
            cutter = replace(
                self._cutter, width=1, replica=0, num_microbatches=pieces, num_sliced=0, shares=()
            )
            feed = Feed([batch], cutter, 0)
            feed.has(1)
            weight += feed.portion(0).weight
            num_samples += size
            own = range(self._layout.replica, pieces, self._plan.width)
            if len(own):
                self._run(feed, own)
                loss += feed.portion(0).weight * sum(stage.take_loss() for stage in self._stages.values())
        return loss, weight, num_samples

    def _run(self, feed: Feed, own: range) -> None:
        feed.take(0, own)
        program = forward_only(self._layout.rank_of_stage, len(own))
        blocks = program.tracks[self._layout.pipeline_rank].blocks()
        for _ in self._interpreter.run(blocks, feed, forwards=self._stages):
            raise AssertionError("an evaluation finishes no batch of training")


class EvaluationStage:
    """A stage that only runs forward, and keeps nothing but the loss."""

    def __init__(
        self,
        function: StageFunction,
        banks: WeightBanks,
        buffers: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.function = function
        self._banks = banks
        self._buffers = buffers
        self._device = device
        self._loss = 0.0
        self._weights: Mapping[str, Tensor] = {}

    def load(self) -> None:
        """Take the newest weights, in what the stage computes with."""
        self._loss = 0.0
        self._weights = self._banks.newest_to_compute_with()

    def unload(self) -> None:
        """Let go of them."""
        self._weights = {}

    def forward(
        self, _place: Place, _version: int, micro_batch: MicroBatch, received: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run a micro-batch on the newest weights; gives what goes to the next stage."""
        given = {**micro_batch.inputs, **received}
        with torch.no_grad():
            results = self.function(self._weights, self._buffers, given, device=self._device)
        if LOSS in results and micro_batch.share:
            self._loss += float(results[LOSS]) * micro_batch.share
        return {name: results[name] for name in self.function.sends}

    def take_loss(self) -> float:
        """The sum of the losses since it was last asked, each by its share."""
        loss, self._loss = self._loss, 0.0
        return loss
