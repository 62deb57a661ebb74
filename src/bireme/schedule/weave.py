"""Weave versions and updates into a bare compute order.

A generator says in which order a rank runs its forwards and backwards. What follows from the update rule
is the same for all generators and is added here: the version each instruction runs on, RECOMPUTE before a
backward, REDUCE as soon as a batch's last gradient is there, and TRIAL and UPDATE as late as the first use
of what they make allows. Late, because the time between hides the all-reduce of a slow network.

Where no gradients are summed over ranks, a sum is a few numbers, and an `early` update gives back memory for
nothing. The first stage has the last backward of every micro-batch, so when it comes to a batch's REDUCE all
others have. It updates before the first backward of the next batch, and so keeps one set of gradients where
it kept two. The other stages cannot without waiting for it: they update before the first micro-batch that
the first stage sends after its update. So the delay that an update is goes down the pipeline once, and no
stage waits for the sum.

Where replicas share an optimizer (`halfway`), what an update makes travels too. Under the DELAYED
rule an update comes when half of the forwards between its REDUCE and the first use of its result have run:
sums hide before it, and the weights after it.

Where replicas average weights (`average_lag`), the sum stays inside the pipeline too. AVERAGE_START follows
each update, and AVERAGE_END comes as late as the first use of the version allows: the next batch hides the
exchange. With a lag the mean becomes part of the version of a later update. A rank with several stages
averages all of them at once: its updates of a batch follow each other, and so do their starts and their ends.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bireme.errors import BiremeError
from bireme.schedule.grid import clock
from bireme.schedule.instruction import (
    AVERAGES,
    BACKWARDS,
    COMPUTE,
    GRADIENT_DONE,
    SENDS,
    Instruction,
    Kind,
    Message,
    instruction_of,
)
from bireme.schedule.program import Program, Rule, Track, banks_needed, updates_per_batch
from bireme.schedule.routes import Routes

# Lowering: put the communication into a compute-only program.
#
# A send comes right after the instruction that makes the message. Its receive is posted on the other rank
#
# * before the instruction that is under way there, on the clock of `ticks.py`, when the message is sent, so
#   that the transfer never waits for the receiver, and
# * at the latest one compute instruction before the one that uses it, so that the transfer overlaps.
#
# Why that cannot deadlock, even where a send completes only once it is received: everything before the
# posted receive on its rank ends strictly before the send starts on the made-up clock, so all instructions
# run in the order of that clock. Why it needs few buffers: a receive is not posted before the clock comes
# near it, whatever the number of micro-batches.
#
# Messages from one rank to another are received in the order they are sent, whichever stages they belong
# to. A transport may rely on that instead of tags.


_Transfer = tuple[Message, int, int]
"""A message that must cross from one rank to another: the places where it is made and where it is used."""

_FORWARDS = Kind.RECV_FORWARD, Kind.SEND_FORWARD
_BACKWARDS = Kind.RECV_BACKWARD, Kind.SEND_BACKWARD


def lower(program: Program) -> Program:
    """The same program with sends and receives. It must hold none yet."""
    if program.is_lowered:
        raise BiremeError(f"{program.name} already has its sends and receives.")
    tracks = [list(track) for track in program.tracks]
    ticks = clock(tracks, program.routes)
    ends = ticks.ends
    receives: list[dict[int, list[Instruction]]] = [{} for _ in tracks]
    sends: list[dict[int, Instruction]] = [{} for _ in tracks]
    for (from_rank, to_rank), channel in _channels(ticks.made, ticks.used).items():
        track, track_ends, made_ends = tracks[to_rank], ends[to_rank], ends[from_rank]
        sent_here, received_here = sends[from_rank], receives[to_rank]
        position = len(track)
        for message, made_at, used_at in reversed(channel):
            position = bisect_left(track_ends, made_ends[made_at], 0, position)
            before = used_at - 1
            while before > 0 and track[before].kind not in COMPUTE:
                before -= 1
            if before < position:
                position = max(before, 0)
            forward, to_stage, batch, microbatch, half = message
            receive, send = _FORWARDS if forward else _BACKWARDS
            received_here.setdefault(position, []).append(
                instruction_of((receive, to_stage, batch, microbatch, None, half, None, None, False))
            )
            from_stage = message.from_stage
            sent_here[made_at] = instruction_of(
                (send, from_stage, batch, microbatch, None, half, None, None, False)
            )
    lowered = []
    for rank, track in enumerate(tracks):
        woven: list[Instruction] = []
        sent_here, received_here = sends[rank], receives[rank]
        for index, instruction in enumerate(track):
            if index in received_here:
                woven.extend(reversed(received_here[index]))
            woven.append(instruction)
            if index in sent_here:
                woven.append(sent_here[index])
        lowered.append(Track(tuple(woven), versions_per_batch=program.tracks[rank].versions_per_batch))
    return replace(program, tracks=tuple(lowered))


def _channels(
    made: Sequence[Sequence[tuple[int, Message]]], used: Mapping[Message, tuple[int, int]]
) -> dict[tuple[int, int], list[_Transfer]]:
    """For each pair of ranks the transfers between them, in the order they are made."""
    channels: dict[tuple[int, int], list[_Transfer]] = {}
    for rank, own in enumerate(made):
        for index, message in own:
            to_rank, used_at = used.get(message, (rank, index))
            if to_rank != rank:
                channels.setdefault((rank, to_rank), []).append((message, index, used_at))
    return channels


@dataclass(frozen=True, slots=True)
class UpdateTiming:
    """When updates come, if not as late as the first use of their result allows: `early` or `halfway`. With
    `average_lag` replicas average their weights after each update, and the mean may come so many updates
    late.
    """

    early: bool = False
    halfway: bool = False
    average_lag: int | None = None


LATE_UPDATES = UpdateTiming()

Orders = list[list[Instruction]]
"""For each rank its forwards and backwards, without versions."""


def every_batch(one_batch: Orders, num_batches: int) -> Orders:
    """The orders of a schedule that drains between batches: the first batch's, over and over."""
    return [[step.shifted(batch, 0) for batch in range(num_batches) for step in order] for order in one_batch]


def weave(
    name: str,
    rule: Rule,
    routes: Routes,
    orders: Orders,
    *,
    num_microbatches: int,
    num_batches: int,
    first_batch: int = 0,
    recompute: Iterable[int] = (),
    timing: UpdateTiming = LATE_UPDATES,
) -> Program:
    """A program from compute orders whose batches count from 0; communication is still missing.

    Orders may already hold sends and receives (a file's may); they stay where they are.
    """
    average_lag = timing.average_lag
    if average_lag is not None:
        _check_average(name, rule, average_lag)
    if routes.shares and (timing.early or timing.halfway or average_lag is not None):
        raise BiremeError(
            f"In {name} stages are on several ranks, which sum their gradients. They cannot update early or "
            "halfway, or average weights with replicas. Leave out updates_early, updates_halfway and the "
            "lag, or give each stage one rank."
        )
    num_stages = routes.num_stages
    program = Program(
        name=name,
        rule=rule,
        routes=routes,
        num_microbatches=num_microbatches,
        num_batches=num_batches,
        banks=tuple(banks_needed(rule, stage, num_stages) for stage in range(num_stages)),
        tracks=(),
        first_batch=first_batch,
        recomputed=frozenset(recompute),
        average_lag=average_lag,
    )
    # Where gradients of weights come later, the first stage is not the last one to have them.
    are_whole = all(step.kind is not Kind.BACKWARD_WEIGHT for order in orders for step in order)
    is_early = timing.early and rule in (Rule.DELAYED, Rule.FRESH) and are_whole
    markers = _markers(orders[routes.rank_of_stage[0]]) if is_early else None
    is_halfway = timing.halfway and rule is Rule.DELAYED and not is_early
    tracks = []
    for rank, order in enumerate(orders):
        early = _Early(first_batch, markers, is_halfway=is_halfway)
        stages = {stage: _StageWeaver(program, rank, stage, early) for stage in program.stages_of(rank)}
        woven: list[Instruction] = []
        for step in order:
            moved = step.shifted(first_batch, 0) if first_batch else step
            if moved.kind in SENDS and woven and woven[-1].kind is Kind.REDUCE:
                # Another rank waits for the message, and nobody for the sum.
                woven.insert(-1, moved)
            elif moved.stage in stages:
                for made in stages[moved.stage].weave(moved):
                    if made.kind is Kind.UPDATE:
                        # A rank ends a batch on all its stages before it ends the next on any.
                        for weaver in stages.values():
                            woven.extend(weaver.finish(made.batch - 1))
                    woven.append(made)
            else:
                woven.append(moved)
        for batch in program.batches:
            for weaver in stages.values():
                woven.extend(weaver.finish(batch))
        for weaver in stages.values():
            woven.extend(weaver.last_averages())
        if average_lag is not None and len(stages) > 1:
            woven = _averaged_at_once(woven, average_lag)
        tracks.append(Track(tuple(woven), versions_per_batch=updates_per_batch(rule, num_microbatches)))
    return replace(program, tracks=tuple(tracks))


def _averaged_at_once(track: Iterable[Instruction], lag: int) -> list[Instruction]:
    """The track of a rank with several stages, with the averages of all of them in one place.

    The first update of a batch takes along those of the other stages, and all that follows an update up to
    the start of its average. The first end of an average takes along the other ends. All gradients of the
    batch are there by the first update, so no micro-batch needs the versions that the others overwrite.
    """
    order = (Kind.UPDATE, Kind.AVERAGE_END, Kind.AVERAGE_START)
    at_once: dict[tuple[bool, int], list[Instruction]] = {}
    places: list[list[Instruction]] = []
    for step in track:
        if step.kind is not Kind.UPDATE and step.kind not in AVERAGES:
            places.append([step])
            continue
        assert step.version is not None, "updates and averages have one"
        is_before_use = step.kind is Kind.AVERAGE_END and (not lag or step.version <= step.batch + lag)
        key = is_before_use, step.batch if is_before_use else step.version
        if key not in at_once:
            at_once[key] = []
            places.append(at_once[key])
        at_once[key].append(step)
    return [
        step
        for place in places
        for step in (place if len(place) == 1 else sorted(place, key=lambda one: order.index(one.kind)))
    ]


def _check_average(name: str, rule: Rule, lag: int) -> None:
    if rule is Rule.STASHED:
        raise BiremeError(
            f"Replicas cannot average their weights under {name}, which updates after every micro-batch. "
            "1f1b, 2bw and 2bw-fresh update once a batch."
        )
    if lag < 0:
        raise BiremeError(f"The lag of averages is {lag}; it must be 0 or more batches.")


@dataclass(slots=True)
class _Early:
    """When a rank updates early. `markers` are the forwards that the first stage runs first after an update,
    each with the update's batch; batches in it count from the window's first. Without, nobody is early.
    """

    first_batch: int
    markers: Mapping[tuple[int, int | None], int] | None
    is_halfway: bool = False
    """Whether updates come halfway between their sum and their use instead."""
    num_reduced: int = 0
    """Batches of which the first stage has all gradients, as far as its rank has been woven."""

    def version(self, step: Instruction) -> int:
        """The version that has been made when a step begins; 0 if any will do."""
        batch = step.batch - self.first_batch
        if self.markers is None:
            return 0
        if step.kind is Kind.BACKWARD and batch <= self.num_reduced:
            return step.batch
        if step.kind is Kind.FORWARD and (batch, step.microbatch) in self.markers:
            return self.first_batch + self.markers[batch, step.microbatch] + 1
        return 0


def _markers(order: Iterable[Instruction]) -> dict[tuple[int, int | None], int]:
    """The markers of `_Early`, from the order of the first stage's rank: it updates a batch before the first
    backward of the next.
    """
    found: dict[tuple[int, int | None], int] = {}
    opened = updated = -1
    for step in order:
        if step.stage == 0 and step.kind is Kind.BACKWARD:
            opened = max(opened, step.batch)
        elif step.stage == 0 and step.kind is Kind.FORWARD and opened - 1 > updated:
            updated = opened - 1
            found[step.batch, step.microbatch] = updated
    return found


@dataclass(eq=False)
class _StageWeaver:
    """Walks through a rank's steps of one stage and gives the instructions before and after each step."""

    program: Program
    rank: int
    stage: int
    early: _Early

    def __post_init__(self) -> None:
        program = self.program
        self.num_own = len(program.routes.microbatches_of(self.rank, program.num_microbatches))
        """The micro-batches of a batch that the rank takes through the stage."""
        self.recompute = self.stage in program.recomputed
        self.num_gradients: dict[int, int] = {}
        self.pending: list[Instruction] = []
        self.newest_trial = program.first_batch
        self.num_forwards = 0
        self.halfway: dict[int, int] = {}
        """For each update that is to come halfway, by its version, after how many forwards it comes."""

    def weave(self, step: Instruction) -> list[Instruction]:
        """The step on its version, with what comes before and after it."""
        if step.microbatch is None or step.kind not in _COMPUTE_TO_WEAVE:
            return [step]
        version = self.program.version_of(step)
        is_forward = step.kind not in _BACKWARD_PARTS
        woven: list[Instruction] = []
        if self.pending:
            woven += self._updates_halfway()
        if is_forward:
            if self.pending or version > self.newest_trial:
                woven += self._make(version, step.batch)
            self.num_forwards += 1
        if self.pending:
            woven += self._updates_early(self.early.version(step))
        if self.recompute and step.kind in BACKWARDS:
            woven.append(Instruction(Kind.RECOMPUTE, self.stage, step.batch, step.microbatch, version))
        woven.append(
            instruction_of(
                (step.kind, self.stage, step.batch, step.microbatch, version, step.half, None, None, False)
            )
        )
        if step.kind in GRADIENT_DONE:
            woven += self._gradient_done(step.batch, step.microbatch)
        return woven

    def finish(self, batch: int) -> list[Instruction]:
        """The batch's updates that nothing in the window has asked for."""
        left = [step for step in self.pending if _ends(step) == batch]
        self.pending = [step for step in self.pending if _ends(step) != batch]
        return left

    def last_averages(self) -> Iterator[Instruction]:
        """The means that come after the window's last update."""
        batches = self.program.batches
        for batch in batches[max(len(batches) - (self.program.average_lag or 0), 0) :]:
            yield self._average_end(batch)

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

    def _updates_halfway(self) -> Iterator[Instruction]:
        while self.pending and self.num_forwards >= self.halfway.get(self.pending[0].version or 0, math.inf):
            yield self.pending.pop(0)

    def _updates_early(self, version: int) -> Iterator[Instruction]:
        """The same, without the means of the last of these updates: they may still be on their way."""
        made = [place for place, step in enumerate(self.pending) if (step.version or 0) <= version]
        while made and _follows_its_start(self.pending[made[-1]]):
            made.pop()
        for _ in made:
            yield self.pending.pop(0)

    def _average_end(self, batch: int) -> Instruction:
        return Instruction(Kind.AVERAGE_END, self.stage, batch, version=self.program.completed_by(batch))

    def _averages(self, batch: int) -> Iterator[Instruction]:
        """What follows the update of a batch where replicas average."""
        lag = self.program.average_lag
        if lag is None:
            return
        if lag and batch - lag in self.program.batches:
            yield self._average_end(batch - lag)
        yield Instruction(Kind.AVERAGE_START, self.stage, batch, version=batch + 1)
        if not lag:
            yield self._average_end(batch)

    def _gradient_done(self, batch: int, microbatch: int) -> Iterator[Instruction]:
        done = self.num_gradients[batch] = self.num_gradients.get(batch, 0) + 1
        if self.program.rule is Rule.STASHED:
            yield Instruction(Kind.REDUCE, self.stage, batch, microbatch)
            made = batch * self.num_own + microbatch + 1
            self.pending.append(Instruction(Kind.UPDATE, self.stage, batch, microbatch, version=made))
        elif done == self.num_own:
            yield Instruction(Kind.REDUCE, self.stage, batch)
            self.early.num_reduced += self.stage == 0
            self.pending.append(Instruction(Kind.UPDATE, self.stage, batch, version=batch + 1))
            if self.early.is_halfway:
                # Forwards of the batch after the next are the first to use it.
                left = (batch + 2 - self.program.first_batch) * self.num_own - self.num_forwards
                self.halfway[batch + 1] = self.num_forwards + -(-left // 2)
            self.pending.extend(self._averages(batch))


def _ends(step: Instruction) -> int:
    """The batch at whose end a pending instruction belongs."""
    return (step.version or 1) - 1 if step.kind is Kind.AVERAGE_END else step.batch


def _follows_its_start(step: Instruction) -> bool:
    """Whether this is the end of an average without lag, whose start comes right before it."""
    return step.kind is Kind.AVERAGE_END and step.version == step.batch + 1


_BACKWARD_PARTS = GRADIENT_DONE | {Kind.BACKWARD_INPUT}
_COMPUTE_TO_WEAVE = _BACKWARD_PARTS | {Kind.FORWARD}
