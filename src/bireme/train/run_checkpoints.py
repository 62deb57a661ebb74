"""The checkpoints of a run while it trains: when one is due, what goes into it, and who writes it."""

import math
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from statistics import median
from time import monotonic, perf_counter, sleep
from typing import Any

from bireme.bounds import bytes_text, seconds_text
from bireme.errors import BiremeError
from bireme.files import free_bytes
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.snapshot import Snapshot
from bireme.runtime.updates import BatchResult
from bireme.train.checkpoint.manifest import SHARES, CheckpointMeta
from bireme.train.checkpoint.writer import CheckpointWriter
from bireme.train.replica import LeaderWriter, MortalReplica
from bireme.train.run_copies import RunCopies
from bireme.train.run_file import RunFile
from bireme.train.stops import Reason, Stops

# What the batches of a run come to: seconds, samples, tokens, the training loss, skipped steps.

_SMOOTHED = 20
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
            self._losses = [*self._losses[1 - _SMOOTHED :], result.loss]

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


_MOST_TRIES = 3
"""To save what another replica was to save, whose processes may not be gone yet."""
LOOK_S = 0.5
"""Between two looks for room on the disk."""
AGAIN_S = 30.0
"""Between two tries to write where the disk seems to have room, as under a quota."""


class _Wish(IntEnum):
    """What a rank wants while the last checkpoint waits for room; the largest wish of all ranks counts."""

    WAIT = 0
    TRY = 1
    GIVE_UP = 2
    DONE = 3


class RunCheckpoints:
    """`newest` is the step of the last one that was written, `has_led` whether no other replica led to the
    end of the run, as far as is known here. `meta` is what each of them says of the run.
    """

    def __init__(
        self,
        run: RunFile,
        writer: CheckpointWriter | LeaderWriter,
        meta: CheckpointMeta,
        stops: Stops,
        member: MortalReplica | None,
        not_saved: frozenset[str],
    ) -> None:
        self.meta = meta
        self.newest: int | None = None
        self.has_led = True
        self.tries_again = False
        """Whether the last checkpoint failed before, and waits for room."""
        self._run, self._writer, self._stops, self._member = run, writer, stops, member
        self._not_saved = not_saved
        self._snapshot_bytes = 0
        """Of this rank's part of the last checkpoint that was asked for."""
        self._asked: int | None = None
        """The step of the last checkpoint that was asked for."""

    def is_due(self, step: int) -> bool:
        """Whether so many steps have passed that a checkpoint is due."""
        every = self._run.checkpoint.every_steps
        return bool(every) and step % every == 0 and step < self._run.training.steps

    def save(self, pipeline: Pipeline, step: int) -> None:
        """Save the pipeline as it is after so many steps, if it is for this replica to do."""
        self._stops.saved()
        self._asked = step
        if self._member is not None and not self._member.leads:
            self._writer.close()
            return
        begin_s = perf_counter()
        snapshot, meta = self._taken(pipeline, step)
        self._snapshot_bytes = sum(tensor.nbytes for tensor in snapshot.tensors.values())
        self._writer.save(snapshot, meta, copied_s=perf_counter() - begin_s)
        if not self._run.checkpoint.background:
            self._writer.wait()

    def copy(self, copies: RunCopies, pipeline: Pipeline, step: int, *, ignored: int) -> None:
        """Begin a second copy of the pipeline as it is after `step` steps."""
        begin_s = perf_counter()
        snapshot, meta = self._taken(pipeline, step)
        copies.begin(snapshot, meta, copied_s=perf_counter() - begin_s, ignored=ignored)

    def _taken(self, pipeline: Pipeline, step: int) -> tuple[Snapshot, CheckpointMeta]:
        snapshot = replace(pipeline.snapshot(but=self._not_saved), num_trained=step)
        extra = dict(self.meta.extra)
        if snapshot.shares is not None:
            extra[SHARES] = dict(snapshot.shares)
        return snapshot, replace(self.meta, next_batch=snapshot.num_trained, extra=extra)

    def finish(self, pipeline: Pipeline, step: int) -> None:
        """Wait until all is written. Save what the replica that led was asked to save last, if it died
        before it had.
        """
        self._writer.wait()
        member, writer = self._member, self._writer
        if self._asked is None or member is None or member.leads:
            return
        assert isinstance(writer, LeaderWriter), "replicas that may die write in turns"
        member.succeed()
        for place in range(_MOST_TRIES):
            # All ranks of a replica do alike, whatever each of them sees.
            if pipeline.gather([float(writer.has(self._asked))])[0][0]:
                self.newest, self.has_led = self._asked, place > 0
                return
            self.save(pipeline, step)
            writer.wait()

    def insist(self, pipeline: Pipeline, step: int, warn: Callable[[str], None]) -> None:
        """Have the checkpoint after the last step written: without it all since the one before is lost.

        If it failed, all ranks wait until there is room, at most `checkpoint.wait_for_room_s`, or until
        a signal asks the run to stop. If there is room, they try a few times more: another cause stays.
        """
        if self._has(step) or (self._member is not None and not self._member.leads):
            return
        ends_s = monotonic() + self._run.checkpoint.wait_for_room_s
        needed, num_tries, was_short, again_s = 0, 0, False, monotonic() + AGAIN_S
        while True:
            free = free_bytes(self._writer.folder)
            is_short = free is not None and free <= needed
            wish = _Wish.WAIT
            if self._has(step):
                wish = _Wish.DONE
            elif self._stops.vote() >= Reason.SIGNAL or monotonic() > ends_s or num_tries == _MOST_TRIES:
                wish = _Wish.GIVE_UP
            elif needed and not is_short and (was_short or monotonic() > again_s):
                wish = _Wish.TRY
            rows = pipeline.gather([self._snapshot_bytes, float(wish)])
            agreed = _Wish(int(max(row[1] for row in rows)))
            if agreed >= _Wish.GIVE_UP:
                return
            if not needed:
                needed = int(sum(row[0] for row in rows))
                warn(self._about_waiting(needed, free))
            self.tries_again = True
            if agreed is _Wish.TRY:
                again_s, num_tries = monotonic() + AGAIN_S, num_tries + 1
                self.save(pipeline, step)
                self._writer.wait()
            num_tries = 0 if is_short else num_tries
            was_short = is_short
            sleep(LOOK_S)

    def _has(self, step: int) -> bool:
        return self.newest == step or self._writer.has(step)

    def _about_waiting(self, needed: int, free: int | None) -> str:
        limit_s = self._run.checkpoint.wait_for_room_s
        limit = f"{limit_s / 3600:.3g} hours" if limit_s >= 3600 else seconds_text(limit_s)
        folder = self._writer.folder
        if free is not None and free > needed:
            return (
                f"The last checkpoint is not written, though {folder} has room for it "
                f"({bytes_text(free)}). The run tries {_MOST_TRIES} times more, every {AGAIN_S:g} s, and "
                "then ends without it."
            )
        room = "" if free is None else f", and {bytes_text(free)} is free"
        return (
            f"The last checkpoint is not written: it needs {bytes_text(needed)} in {folder}{room}. The run "
            f"waits up to {limit} for room and keeps what it has learned. Free space there. To end without "
            "it, press Ctrl-C, or send SIGTERM."
        )
