"""Weave versions and updates into a bare compute order.

A generator says in which order a rank runs its forwards and backwards. What follows from the update rule
is the same for all of them and is added here: the version each instruction runs on, RECOMPUTE before a
backward, REDUCE as soon as a batch's last gradient is there, and TRIAL and UPDATE as late as the first use
of what they make allows. Late, because the time between is where a slow network's all-reduce hides.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from bireme.schedule.instruction import BACKWARDS, SENDS, Instruction, Kind
from bireme.schedule.program import Program, Track
from bireme.schedule.rule import Rule, banks_needed, updates_per_batch

__all__ = ["Orders", "every_batch", "weave"]

Orders = list[list[Instruction]]
"""For each rank its forwards and backwards, without versions."""

GRADIENT_DONE = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
"""The kinds after which a micro-batch's gradient is in the accumulator."""


def every_batch(one_batch: Orders, num_batches: int) -> Orders:
    """The orders of a schedule that drains between batches: the first batch's, over and over."""
    return [[step.shifted(batch, 0) for batch in range(num_batches) for step in order] for order in one_batch]


def weave(
    name: str,
    rule: Rule,
    rank_of_stage: Sequence[int],
    orders: Orders,
    *,
    num_microbatches: int,
    num_batches: int,
    first_batch: int = 0,
    recompute: Iterable[int] = (),
) -> Program:
    """A program from compute orders whose batches count from 0; communication is still missing.

    Orders may already hold sends and receives (a file's may); they stay where they are.
    """
    num_stages = len(rank_of_stage)
    recomputed = frozenset(recompute)
    program = Program(
        name=name,
        rule=rule,
        rank_of_stage=tuple(rank_of_stage),
        num_microbatches=num_microbatches,
        num_batches=num_batches,
        banks=tuple(banks_needed(rule, stage, num_stages) for stage in range(num_stages)),
        tracks=(),
        first_batch=first_batch,
        recomputed=recomputed,
    )
    tracks = []
    for rank, order in enumerate(orders):
        stages = {
            stage: _StageWeaver(program, stage, recompute=stage in recomputed)
            for stage in program.stages_of(rank)
        }
        woven: list[Instruction] = []
        for step in order:
            moved = step.shifted(first_batch, 0) if first_batch else step
            if moved.kind in SENDS and woven and woven[-1].kind is Kind.REDUCE:
                # Another rank waits for the message, and nobody for the sum.
                woven.insert(-1, moved)
            elif moved.stage in stages:
                woven.extend(stages[moved.stage].weave(moved))
            else:
                woven.append(moved)
        for batch in program.batches:
            for weaver in stages.values():
                woven.extend(weaver.finish(batch))
        tracks.append(Track(tuple(woven), versions_per_batch=updates_per_batch(rule, num_microbatches)))
    return replace(program, tracks=tuple(tracks))


class _StageWeaver:
    """Walks through one stage's part of an order and says what belongs before and after each step."""

    def __init__(self, program: Program, stage: int, *, recompute: bool) -> None:
        self.program = program
        self.stage = stage
        self.recompute = recompute
        self.num_gradients: dict[int, int] = {}
        self.pending: list[Instruction] = []
        self.newest_trial = program.first_batch

    def weave(self, step: Instruction) -> Iterator[Instruction]:
        if step.microbatch is None or step.kind not in _COMPUTE_TO_WEAVE:
            yield step
            return
        version = self.program.version_of(step)
        if step.kind is Kind.FORWARD:
            yield from self._make(version, step.batch)
        if self.recompute and step.kind in BACKWARDS:
            yield Instruction(Kind.RECOMPUTE, self.stage, step.batch, step.microbatch, version)
        yield Instruction(step.kind, self.stage, step.batch, step.microbatch, version, step.half)
        if step.kind in GRADIENT_DONE:
            yield from self._gradient_done(step.batch, step.microbatch)

    def finish(self, batch: int) -> list[Instruction]:
        """The batch's updates that nothing in the window has asked for."""
        left = [update for update in self.pending if update.batch == batch]
        self.pending = [update for update in self.pending if update.batch != batch]
        return left

    def _make(self, version: int, batch: int) -> Iterator[Instruction]:
        """What must be done before the first instruction on `version`."""
        if self.program.rule is not Rule.FRESH:
            yield from self._updates_up_to(version)
        elif version > self.newest_trial:
            yield from self._updates_up_to(version - 1)
            seen = self.num_gradients.get(batch - 1, 0)
            yield Instruction(Kind.TRIAL, self.stage, batch, version=version, seen=seen)
            self.newest_trial = version

    def _updates_up_to(self, version: int) -> Iterator[Instruction]:
        while self.pending and (self.pending[0].version or 0) <= version:
            yield self.pending.pop(0)

    def _gradient_done(self, batch: int, microbatch: int) -> Iterator[Instruction]:
        m = self.program.num_microbatches
        done = self.num_gradients[batch] = self.num_gradients.get(batch, 0) + 1
        if self.program.rule is Rule.STASHED:
            yield Instruction(Kind.REDUCE, self.stage, batch, microbatch)
            made = batch * m + microbatch + 1
            self.pending.append(Instruction(Kind.UPDATE, self.stage, batch, microbatch, version=made))
        elif done == m:
            yield Instruction(Kind.REDUCE, self.stage, batch)
            self.pending.append(Instruction(Kind.UPDATE, self.stage, batch, version=batch + 1))


_COMPUTE_TO_WEAVE = GRADIENT_DONE | {Kind.FORWARD, Kind.BACKWARD_INPUT}
