"""What the batches of a run come to: seconds, samples, tokens, the training loss, skipped steps."""

import math
from collections.abc import Callable
from statistics import median
from typing import Any

from bireme.errors import BiremeError
from bireme.runtime.result import BatchResult
from bireme.train.run_file import RunFile

__all__ = ["Tally", "Tell"]

SMOOTHED = 20
"""Batches whose mean is the training loss that a run ends with."""

Tell = Callable[..., None]
"""Is told what happens: its kind, the step, and values by name. Does nothing but on rank 0."""


class Tally:
    """Sums over the batches since this start of the run, which was after `step` steps, and since the last
    line of the log. A sample has `tokens` tokens. Skipped steps are warned of.
    """

    def __init__(
        self, run: RunFile, tokens: int, tell: Tell, warn: Callable[[str, int | None], None], step: int
    ) -> None:
        self._run, self._tokens, self._tell, self._warn = run, tokens, tell, warn
        self.num_skipped = self._skipped_in_a_row = self._told_skipped = 0
        self._losses: list[float] = []
        self._batch_s: list[float] = []
        self._since = [0.0, 0.0, 0.0]  # seconds, samples, tokens since the last line
        self._all = [0.0, 0.0, 0.0]
        self._noted = step
        """The step of the last batch that was noted."""

    def begin_at(self, step: int) -> None:
        """The run went on to that step without this replica."""
        self._noted = step

    @property
    def train_loss(self) -> float | None:
        """The mean loss of the last batches that were not skipped."""
        return math.fsum(self._losses) / len(self._losses) if self._losses else None

    @property
    def batch_s(self) -> float | None:
        """The median of the seconds of a batch, under the schedule that stays."""
        return median(self._batch_s) if self._batch_s else None

    @property
    def samples_per_s(self) -> float | None:
        """Of all batches."""
        seconds, samples, _ = self._all
        return samples / seconds if seconds else None

    @property
    def tokens_per_s(self) -> float | None:
        """Of all batches; None where samples are no text."""
        seconds, _, tokens = self._all
        return tokens / seconds if seconds and tokens else None

    def add(self, result: BatchResult, num_samples: int, *, is_first: bool) -> None:
        """Count a batch. The first of a window fills the pipeline, so its seconds do not make `batch_s`."""
        for sums in (self._since, self._all):
            for place, value in enumerate((result.seconds, num_samples, num_samples * self._tokens)):
                sums[place] += value
        if not is_first:
            self._batch_s.append(result.seconds)

    def add_meeting(self, seconds: float, num_samples: int) -> None:
        """Count a meeting of replicas, and the samples that others trained meanwhile."""
        self._all[0] += seconds
        self._all[1] += num_samples
        self._all[2] += num_samples * self._tokens

    def forget_pace(self) -> None:
        """Leave the batches so far out of `batch_s`."""
        self._batch_s.clear()

    def note_outcome(self, result: BatchResult) -> None:
        """Note the loss of a batch, or that it was skipped; too many skipped in a row end the run."""
        self._note_skipped(result)
        if not result.is_skipped:
            self._losses = [*self._losses[1 - SMOOTHED :], result.loss]

    def is_to_log(self, step: int) -> bool:
        """Whether a line of the log is due. Where replicas train batches of their own, a slow one passes
        several steps of the run at once, and a fast one is at the same step twice.
        """
        every, before, self._noted = self._run.log.every_steps, self._noted, max(step, self._noted)
        return step > before and (step // every > before // every or step == self._run.training.steps)

    def line(self, result: BatchResult, batch_size: int) -> dict[str, Any]:
        """What a line of the log says of the batches since the one before."""
        seconds, samples, tokens = self._since
        self._since = [0.0, 0.0, 0.0]
        num_steps = max(1, round(samples / max(1, batch_size)))
        num_skipped, self._told_skipped = self.num_skipped - self._told_skipped, self.num_skipped
        return {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": self._run.training.learning_rate * result.lr_factor,
            "tokens_per_s": tokens / seconds if tokens and seconds else None,
            "samples_per_s": samples / seconds if seconds else None,
            "seconds": seconds / num_steps,
            "num_skipped": num_skipped,
        }

    def _note_skipped(self, result: BatchResult) -> None:
        self.num_skipped += result.is_skipped
        if not result.weight:
            self._warn(
                f"Step {result.batch + 1} is skipped: nothing in its batch counts for the loss.",
                result.batch + 1,
            )
            return
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.is_skipped else 0
        most = self._run.training.most_skipped_in_a_row
        if result.is_skipped:
            self._warn(f"Step {result.batch + 1} is skipped: its gradient is not finite.", result.batch + 1)
        if self._skipped_in_a_row > most:
            self._tell("stop", result.batch + 1, reason="not finite")
            raise BiremeError(
                f"The gradient was not finite in {self._skipped_in_a_row} steps in a row, up to step "
                f"{result.batch + 1}, so the run stops. Lower training.learning_rate, clip more, or check "
                f"the data of these steps. training.most_skipped_in_a_row = {most} is the limit."
            )
