"""The loop of a run on one rank: windows of batches, evaluations between them, checkpoints without a stop.

Every rank goes through it alike. What all decide together comes with the results of batches, which are the
same everywhere: when to stop, which steps did not count. Only rank 0 writes the log and speaks.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

from bireme.balance import StageWatch
from bireme.runtime.paging.rank_paging import TierMoves, together
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.updates import BatchResult
from bireme.schedule.program import Rule
from bireme.sync.coordinator.recoveries import HealTimes
from bireme.sync.exchange import SentBytes
from bireme.timeline.timeline import Timeline
from bireme.train.checkpoint.writer import CheckpointEvent, CheckpointSaved, CheckpointWriter
from bireme.train.data.loader import PartlyRead
from bireme.train.data.viewing import data_notes
from bireme.train.evaluating import RunEvaluations
from bireme.train.outcome import REPLAN, LinkBytes, LoadsOfRanks, Outcome, RankOutcome, Reason
from bireme.train.plan_search import RECORDED, has_room, recorded_first
from bireme.train.rank_part import RankPart, RunReading
from bireme.train.replica import AveragingReplica, LeaderLog, LeaderWriter
from bireme.train.run_checkpoints import RunCheckpoints, Tally, TellEvent
from bireme.train.run_log import RunLog
from bireme.train.shares import ReplicaNotes


@dataclass(frozen=True, slots=True)
class ScheduleSwitch:
    """A schedule switch after `step` batches: `make` makes the new pipeline, with any weights."""

    step: int
    make: Callable[[], Pipeline]


class Loop:
    """The steps of a run, from where its pipeline is; `later` takes over after the first schedule.

    Where replicas average weights, they meet at the end of each window. Rank 0 has a `log`. `watch` finds
    slow stages.
    """

    def __init__(
        self,
        part: RankPart,
        pipeline: Pipeline,
        writer: CheckpointWriter | LeaderWriter,
        *,
        log: RunLog | LeaderLog | None = None,
        later: ScheduleSwitch | None = None,
        watch: StageWatch | None = None,
    ) -> None:
        run, member = part.run, part.member
        self.run, self.pipeline, self._part = run, pipeline, part
        self.tell: TellEvent = _silent if log is None else log.tell
        self._copies, self._control = part.copies(), part.control()
        self._loads = LoadsOfRanks(part.world.store, part.world.rank, part.world.size)
        self.timeline: Timeline | None = None
        self._switch = later
        self._reason = Reason.NONE
        self._ends: int | None = None
        self._not_saved = part.in_base(pipeline.graph)
        self._evaluations = RunEvaluations(run, part.data)
        meta = part.meta(pipeline)
        self._checkpoints = RunCheckpoints(run, writer, meta, part.stops, member, self._not_saved)
        self._sent: list[LinkBytes] = []
        """By pipelines that are closed."""
        self._warnings: list[str] = []
        self._sum_bytes = SentBytes()
        """What sums sent before the schedule switch."""
        self._tiers: tuple[TierMoves, ...] = ()
        """What was paged before it."""
        self._averaging = member if isinstance(member, AveragingReplica) else None
        self._member = member
        self._replicas = ReplicaNotes(
            watch,
            self.tell,
            may_replan=run.balance.replan and part.start.may_replan,
            is_weighed=run.balance.replan and part.start.is_phase,
        )
        self._reading = RunReading(part)
        self._to_record = member is None or not member.has_come_late
        self._record_from = self._recorded_first()
        self._own_from = pipeline.num_trained + self._record_from - self.step
        """Where a replica trains batches of its own, the first that it records."""
        self._shared: tuple[list[int], list[int]] = ([], [])
        """Samples of each replica in the last window, and who met, where they meet."""
        self._first_step = self.step
        tokens = run.data.length if part.data.is_text else 0
        self._tally = Tally(run, tokens, self.tell, self.warn, self.step)

    @property
    def step(self) -> int:
        """Batches of the run trained so far."""
        return self.pipeline.num_trained if self._averaging is None else self._averaging.step

    def join(self) -> None:
        """Come to the first batch that this replica has a part in. Samples are read as soon as that one is
        known, while the weights still follow those of the others.
        """
        self.pipeline.join(partial(self._reading.begin, self.pipeline))
        self._tally.begin_at(self.step)

    def go(self) -> Outcome:
        """Train to the end, or until a stop is asked for."""
        steps, home = self.run.training.steps, self._part.home
        for text in data_notes(self._part.data) if self._part.world.rank == 0 else ():
            self.warn(text)
        if home is not None:
            self.tell("private", self.step, text=home.sentence, **home.placement)
        with closing(self._reading):
            while self._ends is None and self.step < steps:
                if self._switch is not None and self.step >= self._switch.step:
                    self._switch_schedule(self._switch)
                self._train_until(self._window_end())
                every = self.run.training.evaluate_every
                if self._ends is None and every and (self.step % every == 0 or self.step == steps):
                    self._evaluate()
        if self.step >= steps:
            self._reason = Reason.NONE  # who asked to stop has come too late
        is_done = self._reason in (Reason.NONE, Reason.TIME) and not self._is_to_replan
        if is_done and self._evaluations.step != self.step:
            self._evaluate()
        # With trial versions what is learned depends on where the pipeline is drained. A run that was stopped
        # then goes on from a moment when it was full, and drains where one does that never stopped.
        is_whole = self._averaging is not None or self.pipeline.plan.source.rule is not Rule.FRESH
        if self.run.checkpoint.at_end if is_done else is_whole:
            self._checkpoints.save(self.pipeline, self.step)
        self._checkpoints.finish(self.pipeline, self.step)
        if is_done and self.run.checkpoint.at_end:
            self._checkpoints.insist(self.pipeline, self.step, self.warn)
        if self.timeline is None and self.pipeline.recording is not None:
            self.timeline = self.pipeline.timeline()
        return self._outcome()

    def note_checkpoint(self, event: CheckpointEvent) -> None:
        """Handles an event of the checkpoint writer."""
        if isinstance(event, CheckpointSaved):
            self._checkpoints.newest = event.step
            self.tell(
                "checkpoint",
                event.step,
                stall_s=event.stall_s,
                write_s=event.write_s,
                num_bytes=event.num_bytes,
            )
        elif not self._checkpoints.tries_again:  # else the same is said many times
            self.warn(event.text, event.step)

    def warn(self, text: str, step: int | None = None) -> None:
        """Note a warning, and tell of it."""
        self._warnings.append(text)
        self.tell("warning", self.step if step is None else step, text=text)

    def _switch_schedule(self, later: ScheduleSwitch) -> None:
        """Go on with the other pipeline from where this one is, which is drained."""
        snapshot = self.pipeline.snapshot(all_held=True, but=self._not_saved)
        self._sum_bytes = self.pipeline.sum_bytes
        self._tiers = self.pipeline.tiers
        self._reading.close()
        self._sent += self._sent_by_pipeline()
        self.pipeline.close()
        del self.pipeline  # so that there need never be room for two
        gc.collect()  # its parts know each other
        self.pipeline, self._switch = later.make(), None
        self.pipeline.restore(snapshot)
        schedule = self.pipeline.plan.source.name
        self._checkpoints.meta = replace(self._checkpoints.meta, schedule=schedule)
        self._record_from = self._recorded_first()
        self._own_from = self.pipeline.num_trained + self._record_from - self.step
        self.tell("schedule", self.step, schedule=schedule)
        self._tally.forget_pace()  # what is told is the schedule that stays

    def _window_end(self) -> int:
        """The step at which the pipeline is drained next: for an evaluation, around what is recorded, or for
        the other pipeline.
        """
        every, steps = self.run.training.evaluate_every, self.run.training.steps
        end = steps if not every else min(steps, (self.step // every + 1) * every)
        if self._averaging is not None and (saves := self.run.checkpoint.every_steps):
            end = min(end, (self.step // saves + 1) * saves)
        if self._switch is not None:
            return min(end, self._switch.step)
        if self._averaging is not None:
            return end
        marks = (self._record_from, self._recorded_end) if self._recorded_end < steps else ()
        return min([end, *(mark for mark in marks if self._to_record and mark > self.step)])

    def _recorded_first(self) -> int:
        rule = self.pipeline.plan.source.rule
        return recorded_first(
            self.run, rule, step=self.step, delayed_from=self._part.start.first_delayed_step
        )

    @property
    def _recorded_end(self) -> int:
        return self._record_from + RECORDED

    @property
    def _records(self) -> bool:
        """Whether the next window is recorded: an early one of the schedule that stays."""
        is_early = self._record_from <= self.step < self._recorded_end
        is_due = self._to_record and self._switch is None and is_early
        return is_due and has_room(self.run, self._record_from)

    def _train_until(self, end: int) -> None:
        if self._averaging is not None:
            self._train_own(self._batches(end))
            self._meet(self._averaging)
            return
        records = self._records
        self._to_record = self._to_record and not records
        self._train(self._batches(end), records=records)
        if records and self._ends is None:
            self.timeline = self.pipeline.timeline()

    def _train_own(self, batches: Iterator[PartlyRead]) -> None:
        """Train a window of this replica's own batches. It drains around those that it records, and holds up
        no other replica.
        """
        if self._to_record and self._switch is None and has_room(self.run, self._record_from):
            self._train(islice(batches, max(self._own_from - self.pipeline.num_trained, 0)))
            first = self.pipeline.num_trained
            if first >= self._own_from:
                self._train(islice(batches, RECORDED), records=True)
            if self.pipeline.num_trained > first:
                self._to_record, self.timeline = False, self.pipeline.timeline()
        self._train(batches)

    def _train(self, batches: Iterator[PartlyRead], *, records: bool = False) -> None:
        stops = self._part.stops
        votes = stops.vote if self._member is None else self._member.votes(stops)
        if self._copies is not None and self._averaging is None:
            votes = self._copies.votes(votes)
        results = self.pipeline.train(batches, record=records, votes=votes)
        for number, result in enumerate(results):
            self._note(result, is_first=number == 0)

    def _meet(self, replica: AveragingReplica) -> None:
        """Make one mean of all replicas' weights, and do what is due then."""
        before, begin_s = self.step, perf_counter()
        meeting = replica.meet(self.pipeline)
        self._tally.add_meeting(perf_counter() - begin_s, meeting.num_samples)
        shared = list(meeting.shares), list(meeting.members)
        if shared != self._shared:
            self._shared = shared
            self.tell("shares", before, shares=shared[0], members=shared[1])
        self._tell_recoveries(meeting.healed, self.step)
        if meeting.reason > Reason.SAVE:
            self._reason, self._ends = meeting.reason, self.step
        elif meeting.reason is Reason.SAVE or self._checkpoints.is_due(self.step):
            self._checkpoints.save(self.pipeline, self.step)
        if self._copies is not None and replica.leads:
            ready = self.pipeline.gather([float(self._copies.is_ready)])
            if all(row[0] for row in ready):
                self._checkpoints.copy(self._copies, self.pipeline, self.step, ignored=0)

    def _tell_recoveries(self, healed: Mapping[int, HealTimes], step: int) -> None:
        for one in () if self._member is None else self._member.recoveries(healed, step):
            values = asdict(one)
            self.tell("recovery", values.pop("step"), **values)

    def _batches(self, end: int) -> Iterator[PartlyRead]:
        """The batches of a window. It ends early where the ranks have agreed to stop."""
        if self._averaging is not None:
            self._averaging.enter(end)
            yield from self._reading.window(self.pipeline)
            return
        first = self.step
        for number, batch in zip(
            range(first, end), self._reading.batches(self.pipeline, first), strict=False
        ):
            if self._ends is not None and number >= self._ends:
                return
            yield batch

    def _note(self, result: BatchResult, *, is_first: bool) -> None:
        """What follows from a batch: the log, a checkpoint, the request to stop."""
        step, num_samples = result.batch + 1, result.num_samples
        if self._member is not None:
            self._member.note(result)
        if self._averaging is not None:
            step, num_samples = self._averaging.step_after(result), self._averaging.num_samples(result)
        for change in () if self._member is None else self._member.changes():
            event, why = ("back", None) if change.why is None else ("gone", str(change.why))
            where = {"replica": change.replica, "host": change.host, "after_step": change.step}
            self.tell("membership", step, event=event, **where, why=why)
        self._tell_recoveries(result.healed, step)
        self._tally.add(result, num_samples, is_first=is_first)
        if not is_first and self._control is not None:
            self._control.note_batch()
        if self._copies is not None and self._copies.is_due(result.batch, result.votes):
            ignored = result.batch + self.pipeline.read_ahead
            self._checkpoints.copy(self._copies, self.pipeline, step, ignored=ignored)
        warning = self._replicas.note(result, self.pipeline.plan.source)
        if warning is not None:
            self.warn(warning, step)
        self._tally.note_outcome(result)
        if self._tally.is_to_log(step):
            self._log(result, step)
        if self._averaging is not None:
            return  # all else is agreed when all replicas meet
        reason = Reason.of(result.votes) if result.votes else Reason.NONE
        if reason > Reason.SAVE and self._ends is None:
            # No rank has read further than this, and what was read is still trained on.
            self._reason, self._ends = reason, step + self.pipeline.read_ahead
            if reason is not Reason.TIME:
                self._checkpoints.save(self.pipeline, self.step)  # now, for the time that is left is unknown
        elif self._checkpoints.is_due(step) or reason is Reason.SAVE:
            self._checkpoints.save(self.pipeline, self.step)
            if self._replicas.slow is not None and self._ends is None:
                self._ends = step + self.pipeline.read_ahead

    @property
    def _is_to_replan(self) -> bool:
        """Whether the run has ended early so that another plan takes over."""
        is_early = self._reason is Reason.NONE and self.step < self.run.training.steps
        return self._replicas.slow is not None and is_early

    def _log(self, result: BatchResult, step: int) -> None:
        batch = result.num_samples if self._averaging is None else self.run.training.batch_size
        self.tell(
            "train",
            step,
            **self._tally.line(result, batch),
            **self._loads_of_ranks(),
            **({} if self._copies is None else {"copy_age": self._copies.age(step)}),
        )
        if self._copies is not None and (trouble := self._copies.trouble()):
            self.warn(trouble, step)

    def _loads_of_ranks(self) -> dict[str, Any]:
        """The most bytes that each rank has had, and the bytes that it has sent since this start of the run,
        as far as rank 0 knows. A replica that may die lists its own ranks alone.
        """
        sums = self._sum_bytes.sent + self.pipeline.sum_bytes.sent
        sent = sums + sum(link.sent_bytes for link in (*self._sent, *self._sent_by_pipeline()))
        found = self._loads.latest(self._part.memory.peak_bytes(), sent)
        replica = {} if self._member is None else {"replica": self._member.number}
        return {
            "memory_bytes": [one and one[0] for one in found],
            "sent_bytes": [one and one[1] for one in found],
            **replica,
        }

    def _evaluate(self) -> None:
        if self._part.data.evaluation is None:
            return
        told = self._evaluations.evaluate(self.pipeline, self.step)
        if self._evaluations.figures is None:
            self.warn("The evaluation has no loss: nothing in its batches counts for one.")
        self.tell("evaluation", self.step, **told)

    def _sent_by_pipeline(self) -> list[LinkBytes]:
        return [
            LinkBytes(boundary, forward, one.raw_bytes, one.sent_bytes)
            for (forward, boundary), one in self.pipeline.traffic.items()
        ]

    def _outcome(self) -> Outcome:
        evaluated = self._evaluations.figures
        busy = None
        if self.timeline is not None:
            rank = self.pipeline.layout.pipeline_rank
            busy = self.timeline.ranks[rank].busy_s / self.timeline.makespan_s
        return Outcome(
            steps=self.step,
            reason=REPLAN if self._is_to_replan else str(self._reason),
            **self._tally.figures(),
            eval_loss=None if evaluated is None else evaluated.loss,
            eval_perplexity=None if evaluated is None else evaluated.perplexity,
            eval_bits_per_byte=None if evaluated is None else evaluated.bits_per_byte,
            eval_loss_through_codecs=self._evaluations.loss_through_codecs,
            checkpoint=self._checkpoints.newest,
            own=RankOutcome(
                self.pipeline.layout.rank,
                self._part.memory.peak_bytes(),
                busy,
                None if self._control is None else self._control.typical_s(),
                (*self._sent, *self._sent_by_pipeline()),
                self._sum_bytes.raw + self.pipeline.sum_bytes.raw,
                self._sum_bytes.sent + self.pipeline.sum_bytes.sent,
                together(self._tiers, self.pipeline.tiers),
                self._sum_bytes.gathered + self.pipeline.sum_bytes.gathered,
                self.step - self._first_step,
                0 if self._member is None else self._member.kept_bytes,
                0 if self._copies is None else self._copies.sent_bytes,
            ),
            warnings=tuple(self._warnings),
            slow=self._replicas.slow,
            placement=None if self._part.home is None else self._part.home.placement,
            copied_step=None if self._copies is None else self._copies.step,
            leads=self._member is None or (self._member.leads and self._checkpoints.has_led),
        )


def _silent(_kind: str, _step: int, **_values: Any) -> None:
    """Ranks other than 0 write no log."""
