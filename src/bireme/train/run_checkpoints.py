"""The checkpoints of a run while it trains: when one is due, what goes into it, and who writes it."""

from dataclasses import replace
from time import perf_counter

from bireme.runtime.pipeline import Pipeline
from bireme.train.checkpoint.manifest import SHARES, CheckpointMeta
from bireme.train.checkpoint.writer import CheckpointWriter
from bireme.train.replica import LeaderWriter, MortalReplica
from bireme.train.run_file import RunFile
from bireme.train.stops import Stops

__all__ = ["RunCheckpoints"]

MOST_TRIES = 3
"""To save what another replica was to save, whose processes may not be gone yet."""


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
        self._run, self._writer, self._stops, self._member = run, writer, stops, member
        self._not_saved = not_saved
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
