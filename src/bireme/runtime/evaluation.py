"""Evaluation: batches through the pipeline forward, on the newest weights, in the model's evaluation mode."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.model.stage import StageFunction
from bireme.runtime.banks import WeightBanks
from bireme.runtime.batches import Batch
from bireme.runtime.courier import Courier
from bireme.runtime.interpreter import OnInstruction, micro_batch_of
from bireme.runtime.layout import Layout
from bireme.runtime.microbatches import Cutter, Feed, MicroBatch, Portion
from bireme.runtime.stage import LOSS
from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.lowering import lower
from bireme.schedule.program import Program, Track
from bireme.schedule.rule import Rule
from bireme.sync.group import Group

__all__ = ["Evaluation", "EvaluationStage", "Evaluator", "forward_program"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean loss over everything that counts in some batches, and how much that is.

    It is NaN where nothing counts.
    """

    loss: float
    weight: float
    num_samples: int


class Evaluator:
    """Runs batches through the stages of one rank. `group` has all ranks of all replicas."""

    def __init__(
        self,
        stages: "Mapping[int, EvaluationStage]",
        layout: Layout,
        courier: Courier,
        group: Group,
        cutter: Cutter,
        on_instruction: OnInstruction,
    ) -> None:
        self._stages = stages
        self._layout = layout
        self._group = group
        self._cutter = cutter
        self._courier = courier
        self._on_instruction = on_instruction
        self._actions: dict[Kind, Callable[[Instruction], None]] = {
            Kind.FORWARD: self._forward,
            Kind.SEND_FORWARD: courier.send,
            Kind.RECV_FORWARD: courier.receive,
        }

    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
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

    def _sums(self, batches: Iterable[Batch]) -> tuple[float, float, int]:
        """This rank's part of the weighted loss, the weight of all batches, and their samples."""
        loss = weight = 0.0
        num_samples = 0
        for number, given in enumerate(batches):
            portion = self._cutter.cut_to_evaluate(given, number)
            weight += portion.weight
            num_samples += portion.num_samples
            if portion.micro_batches:
                self._run(portion)
                loss += portion.weight * sum(stage.take_loss() for stage in self._stages.values())
        return loss, weight, num_samples

    def _run(self, portion: Portion) -> None:
        feed = self._courier.feed = Feed((), self._cutter, 0)
        feed.hold(0, portion)
        program = forward_program(self._layout.rank_of_stage, len(portion.micro_batches))
        for step in program.tracks[self._layout.pipeline_rank]:
            self._on_instruction(step)
            self._actions[step.kind](step)
        self._courier.drain()

    def _forward(self, step: Instruction) -> None:
        received = self._courier.take(step)
        micro_batch = micro_batch_of(step, self._courier.feed)
        self._courier.put(step, self._stages[step.stage].forward(micro_batch, received))


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

    def forward(self, micro_batch: MicroBatch, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run a micro-batch; gives what goes to the next stage."""
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


def forward_program(rank_of_stage: Sequence[int], num_microbatches: int) -> Program:
    """One batch forward through all stages, each rank's stages one after the other."""
    num_ranks = max(rank_of_stage) + 1
    program = Program(
        name="evaluation",
        rule=Rule.SYNCHRONOUS,
        rank_of_stage=tuple(rank_of_stage),
        num_microbatches=num_microbatches,
        num_batches=1,
        banks=(1,) * len(rank_of_stage),
        tracks=tuple(
            Track(
                tuple(
                    Instruction(Kind.FORWARD, stage, 0, microbatch, version=0)
                    for stage, owner in enumerate(rank_of_stage)
                    if owner == rank
                    for microbatch in range(num_microbatches)
                )
            )
            for rank in range(num_ranks)
        ),
    )
    return lower(program)
