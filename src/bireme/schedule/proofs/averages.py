"""Proof that a stage averages its weights once a batch, in order, and before anybody uses them.

What is proved where replicas average: each update is offered to them right away, by one AVERAGE_START; the
mean becomes part of the version that `Program.completed_by` says, by one AVERAGE_END; nobody runs on a
version, steps from it or tries a step from it while a mean that belongs to it is still missing.
"""

from collections.abc import Iterator

from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.program import Program

__all__ = ["StageAverages"]


class StageAverages:
    """The averages of one stage while its instructions go by. `newest` is the newest version made so far."""

    def __init__(self, program: Program, stage: int) -> None:
        self.program = program
        self.stage = stage
        self.num_started = 0
        self.num_ended = 0

    def step(self, step: Instruction, newest: int) -> Iterator[str]:
        """Take an AVERAGE_START or AVERAGE_END in; say what is wrong with it."""
        if step.kind is Kind.AVERAGE_START:
            yield from self._start(step, newest)
        else:
            yield from self._end(step, newest)

    def missing(self, step: Instruction, version: int) -> Iterator[str]:
        """What is wrong if a step relies on a version."""
        lag = self.program.average_lag
        if lag is None:
            return
        begin = self.program.first_batch
        if self.num_ended < version - lag - begin:
            yield f"{step} comes before the mean of batch {begin + self.num_ended} is part of its weights."

    def finish(self) -> Iterator[str]:
        """What is missing at the end of the window."""
        if self.program.average_lag is not None:
            begin, num_batches = self.program.first_batch, self.program.num_batches
            for what, num in (("offers", self.num_started), ("completes", self.num_ended)):
                if num < num_batches:
                    yield f"Stage {self.stage} never {what} the average of batch {begin + num}."

    def _start(self, step: Instruction, newest: int) -> Iterator[str]:
        batch = self.program.first_batch + self.num_started
        if step.batch != batch:
            yield f"{step} is not the average of batch {batch}, whose turn it is."
        elif step.version != newest or step.version != step.batch + 1:
            yield f"{step} offers version {step.version}, but the update before it made version {newest}."
        elif self.program.average_lag:
            yield from self.missing(step, newest)
        self.num_started += 1

    def _end(self, step: Instruction, newest: int) -> Iterator[str]:
        batch = self.program.first_batch + self.num_ended
        completed = self.program.completed_by(step.batch)
        if step.batch != batch:
            yield f"{step} is not the average of batch {batch}, whose turn it is."
        elif self.num_started <= self.num_ended:
            yield f"{step} comes before its AVERAGE_START."
        elif step.version != completed:
            yield f"{step} is labelled wrongly: that mean completes version {completed}."
        elif newest != completed:
            yield f"{step} completes version {completed}, but version {newest} is the newest."
        self.num_ended += 1
