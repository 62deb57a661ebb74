"""The checkpoints of a run while it trains: when one is due, what goes into it, and who writes it."""

from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from time import monotonic, perf_counter, sleep

from bireme.bounds import bytes_text
from bireme.files import free_bytes
from bireme.report.units import seconds_text
from bireme.runtime.pipeline import Pipeline
from bireme.train.checkpoint.manifest import SHARES, CheckpointMeta
from bireme.train.checkpoint.writer import CheckpointWriter
from bireme.train.replica import LeaderWriter, MortalReplica
from bireme.train.run_file import RunFile
from bireme.train.stops import Reason, Stops

__all__ = ["RunCheckpoints"]

MOST_TRIES = 3
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
        snapshot = replace(pipeline.snapshot(but=self._not_saved), num_trained=step)
        extra = dict(self.meta.extra)
        if snapshot.shares is not None:
            extra[SHARES] = dict(snapshot.shares)
        meta = replace(self.meta, next_batch=snapshot.num_trained, extra=extra)
        self._snapshot_bytes = sum(tensor.nbytes for tensor in snapshot.tensors.values())
        self._writer.save(snapshot, meta, copied_s=perf_counter() - begin_s)
        if not self._run.checkpoint.background:
            self._writer.wait()

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
        for place in range(MOST_TRIES):
            # All ranks of a replica do alike, whatever each of them sees.
            if pipeline.gather([float(writer.has(self._asked))])[0][0]:
                self.newest, self.has_led = self._asked, place > 0
                return
            self.save(pipeline, step)
            writer.wait()

    def insist(self, pipeline: Pipeline, step: int, warn: Callable[[str], None]) -> None:
        """Have the checkpoint after the last step written: without it all since the one before is lost.

        If it failed, all ranks wait until there is room, at most `checkpoint.wait_for_room_s`, or until
        somebody asks the run to stop.
        """
        if self._has(step) or (self._member is not None and not self._member.leads):
            return
        ends_s = monotonic() + self._run.checkpoint.wait_for_room_s
        needed, was_short, again_s = 0, False, monotonic() + AGAIN_S
        while True:
            free = free_bytes(self._writer.folder)
            is_short = free is not None and free <= needed
            wish = _Wish.WAIT
            if self._has(step):
                wish = _Wish.DONE
            elif self._stops.vote() >= Reason.SIGNAL or monotonic() > ends_s:
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
                again_s = monotonic() + AGAIN_S
                self.save(pipeline, step)
                self._writer.wait()
            was_short = is_short
            sleep(LOOK_S)

    def _has(self, step: int) -> bool:
        return self.newest == step or self._writer.has(step)

    def _about_waiting(self, needed: int, free: int | None) -> str:
        limit_s = self._run.checkpoint.wait_for_room_s
        limit = f"{limit_s / 3600:.3g} hours" if limit_s >= 3600 else seconds_text(limit_s)
        room = "" if free is None else f", and {bytes_text(free)} is free"
        return (
            f"The last checkpoint is not written: it needs {bytes_text(needed)} in {self._writer.folder}"
            f"{room}. The run waits up to {limit} for room and keeps what it has learned. Free space there. "
            "To end without it, press Ctrl-C, or send SIGTERM."
        )
