"""Proofs about single stages: every pass once and in order, and always on the right weights.

Each stage is walked through on its own, in the order of its rank; a stage on several ranks once for each,
with that rank's micro-batches. What is proved: every micro-batch has one forward and one whole backward; both
run on the version that the update rule asks for; that version has been made and not been overwritten;
gradients are complete when their batch is reduced, in the order of batches, and reduced when it is updated;
trial steps see just the micro-batches they claim to see.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.program import Program, Rule, updates_per_batch

# Proof that a stage averages its weights once a batch, in order, and before anybody uses them.
#
# What is proved where replicas average: each update is offered to them right away, by one AVERAGE_START; the
# mean becomes part of the version that `Program.completed_by` says, by one AVERAGE_END; nobody runs on a
# version, steps from it or tries a step from it while a mean that belongs to it is still missing.


@dataclass(slots=True, eq=False)
class _StageAverages:
    """The averages of one stage while its instructions go by. `newest` is the newest version made so far."""

    program: Program
    stage: int
    num_started: int = 0
    num_ended: int = 0

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


class _RankAverages:
    """The averages of all stages of a rank while its instructions go by: the rank makes them at once.

    What is proved: a rank completes the average of a batch when all its stages have offered their weights,
    and does nothing else between the first and the last stage's AVERAGE_END of a batch, nor between their
    updates of it.
    """

    def __init__(self, stages: tuple[int, ...]) -> None:
        self.num_stages = len(stages)
        self.started: dict[int, int] = {}
        self.under_way: tuple[Kind, int] | None = None
        """The kind and the batch of instructions of which some stages have had theirs."""
        self.num_done = 0

    def step(self, step: Instruction) -> Iterator[str]:
        if self.num_stages <= 1:
            return
        if step.kind is Kind.AVERAGE_START:
            self.started[step.batch] = self.started.get(step.batch, 0) + 1
        if self.under_way is not None and self.under_way != (step.kind, step.batch):
            kind, batch = self.under_way
            yield (
                f"{step} comes between the {kind} of batch {batch} of one stage and that of another on the "
                "same rank, which averages all its stages at once."
            )
            self.under_way = None
        if step.kind not in (Kind.UPDATE, Kind.AVERAGE_END):
            return
        if step.kind is Kind.AVERAGE_END and self.started.get(step.batch, 0) < self.num_stages:
            yield f"{step} comes before each stage on its rank has offered its weights."
        self.num_done = self.num_done + 1 if self.under_way is not None else 1
        self.under_way = None if self.num_done == self.num_stages else (step.kind, step.batch)


_WHOLE = frozenset({0, 1})


def stage_problems(program: Program) -> Iterator[str]:
    """What is wrong with the passes and versions of any stage. Every instruction must be in its place."""
    proofs = {(stage, rank): _StageProof(program, stage, rank) for stage, rank in program.routes.places()}
    for rank, track in enumerate(program.tracks):
        averages = _RankAverages(() if program.average_lag is None else program.stages_of(rank))
        for instruction in track:
            yield from proofs[instruction.stage, rank].step(instruction)
            yield from averages.step(instruction)
    for proof in proofs.values():
        yield from proof.finish()


class _StageProof:
    """One stage's state on a rank while its instructions go by."""

    def __init__(self, program: Program, stage: int, rank: int) -> None:
        self.program = program
        self.stage = stage
        self.own = program.routes.microbatches_of(rank, program.num_microbatches)
        """The micro-batches of a batch that the rank takes through the stage."""
        self.recompute = stage in program.recomputed
        self.banks = program.banks[stage]
        self.newest = program.first_batch * updates_per_batch(program.rule, program.num_microbatches)
        self.newest_trial = program.first_batch
        self.oldest = max(self.newest - self.banks + 1, 0)
        self.halves: dict[tuple[int, int], frozenset[int]] = {}
        """Micro-batches under way, with the halves that have gone forward."""
        self.past: dict[tuple[int, int], set[Kind]] = {}
        """What else has been done to them: RECOMPUTE, BACKWARD_INPUT."""
        self.in_use: Counter[int] = Counter()
        """For each version the micro-batches between their forward and the end of their backward."""
        self.finished: dict[int, set[int]] = {}
        """For each batch that is not updated yet, the micro-batches whose gradient is accumulated."""
        self.newest_reduced = program.first_batch - 1
        self.reduced: set[tuple[int, int | None]] = set()
        self.updated: set[tuple[int, int | None]] = set()
        self.averages = _StageAverages(program, stage)

    def step(self, instruction: Instruction) -> Iterator[str]:
        match instruction.kind:
            case Kind.FORWARD:
                yield from self._forward(instruction)
            case Kind.RECOMPUTE:
                yield from self._recompute(instruction)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                yield from self._backward(instruction)
            case Kind.BACKWARD_WEIGHT:
                yield from self._backward_weight(instruction)
            case Kind.REDUCE:
                yield from self._reduce(instruction)
            case Kind.UPDATE:
                yield from self._update(instruction)
            case Kind.TRIAL:
                yield from self._trial(instruction)
            case Kind.AVERAGE_START | Kind.AVERAGE_END:
                yield from self.averages.step(instruction, self.newest)

    def finish(self) -> Iterator[str]:
        stashed = self.program.rule is Rule.STASHED
        for batch in self.program.batches:
            for k in self.own if stashed else (None,):
                if (batch, k) not in self.updated:
                    where = f"batch {batch}" if k is None else f"micro-batch {k} of batch {batch}"
                    yield from self._missing(batch, where)
        yield from self.averages.finish()

    def _missing(self, batch: int, where: str) -> Iterator[str]:
        finished = self.finished.get(batch, set())
        begun = {k for b, k in self.halves if b == batch}
        never = sorted(set(self.own) - finished - begun)
        if never:
            yield f"Stage {self.stage} never runs the forward of micro-batch {never[0]} of batch {batch}."
        for k in sorted(begun):
            yield f"Stage {self.stage} never finishes the backward of micro-batch {k} of batch {batch}."
        if not never and not begun:
            yield f"Stage {self.stage} never makes the update of {where}."

    def _forward(self, step: Instruction) -> Iterator[str]:
        key = _key(step)
        done = self.halves.get(key, frozenset())
        adds = _WHOLE if step.half is None else frozenset({step.half})
        is_updated = (key[0], None) in self.updated or key in self.updated
        if done & adds or key[1] in self.finished.get(key[0], ()) or is_updated:
            yield f"{step} runs a second time."
            return
        yield from self._wrong_version(step)
        yield from self._not_there(step)
        if not done and step.version is not None:
            self.in_use[step.version] += 1
        self.halves[key] = done | adds
        self.past.setdefault(key, set())

    def _recompute(self, step: Instruction) -> Iterator[str]:
        key = _key(step)
        yield from self._wrong_version(step)
        if self.halves.get(key) != _WHOLE:
            yield f"{step} comes before the forward that it repeats, or after the backward that needs it."
        elif Kind.RECOMPUTE in self.past[key] or Kind.BACKWARD_INPUT in self.past[key]:
            yield f"{step} runs a second time, or after the backward that needs it."
        else:
            self.past[key].add(Kind.RECOMPUTE)

    def _backward(self, step: Instruction) -> Iterator[str]:
        key = _key(step)
        yield from self._wrong_version(step)
        if self.halves.get(key) != _WHOLE:
            yield f"{step} comes before its forward, or a second time."
        elif Kind.BACKWARD_INPUT in self.past[key]:
            yield f"{step} runs a second time."
        elif self.recompute and Kind.RECOMPUTE not in self.past[key]:
            yield f"{step} comes before the recomputation of its forward."
        elif step.kind is Kind.BACKWARD_INPUT:
            self.past[key].add(Kind.BACKWARD_INPUT)
        else:
            yield from self._gradient(step)

    def _backward_weight(self, step: Instruction) -> Iterator[str]:
        yield from self._wrong_version(step)
        if Kind.BACKWARD_INPUT not in self.past.get(_key(step), ()):
            yield f"{step} comes before its input part, or a second time."
        else:
            yield from self._gradient(step)

    def _gradient(self, step: Instruction) -> Iterator[str]:
        key = _key(step)
        del self.halves[key], self.past[key]
        version = self.program.version_of(step)
        self.in_use[version] = max(self.in_use[version] - 1, 0)
        self.finished.setdefault(step.batch, set()).add(key[1])
        if (step.batch, None) in self.reduced:
            yield f"{step} comes after its batch has been reduced: its gradient would be lost."

    def _reduce(self, step: Instruction) -> Iterator[str]:
        key = (step.batch, step.microbatch)
        finished = self.finished.get(step.batch, set())
        if key in self.reduced or key in self.updated:
            yield f"{step} runs a second time."
        elif step.microbatch is None and len(finished) < len(self.own):
            yield (f"{step} comes when {len(finished)} of {len(self.own)} micro-batches have their gradient.")
        elif step.microbatch is not None and step.microbatch not in finished:
            yield f"{step} comes before the gradient that it reduces."
        elif step.microbatch is None and step.batch != self.newest_reduced + 1:
            yield (
                f"{step} follows that of batch {self.newest_reduced}: all ranks must sum up batches in their "
                "order."
            )
        self.newest_reduced = max(self.newest_reduced, step.batch)
        self.reduced.add(key)

    def _update(self, step: Instruction) -> Iterator[str]:
        key = (step.batch, step.microbatch)
        if key in self.updated:
            yield f"{step} runs a second time."
            return
        if key not in self.reduced:
            yield f"{step} comes before its gradients have been reduced."
        made = self._made_by(step)
        if step.version != made:
            yield f"{step} is labelled wrongly: that update makes version {made}."
        elif made != self.newest + 1:
            yield f"{step} steps from version {self.newest}, not {made - 1}: updates are out of order."
        else:
            yield from self.averages.missing(step, made - 1)
            if self.program.rule is not Rule.FRESH:
                yield from self._overwrite(step, made - self.banks)
        self.newest = max(self.newest, made)
        self.reduced.discard(key)
        self.updated.add(key)
        if step.microbatch is None:
            self.finished.pop(step.batch, None)

    def _trial(self, step: Instruction) -> Iterator[str]:
        before = step.batch - 1
        if self.program.rule is not Rule.FRESH:
            yield f"{step} has no place under the {self.program.rule} rule."
            return
        if step.version != step.batch:
            yield f"{step} is labelled wrongly: it makes version {step.batch}."
        if self.newest_trial != before:
            yield f"{step} follows the trial of batch {self.newest_trial}, not that of batch {before}."
        if self.newest != before:
            yield f"{step} steps from W({self.newest}), not from W({before})."
        yield from self.averages.missing(step, before)
        finished = self.finished.get(before, set())
        if step.seen != len(finished):
            yield f"{step}, but then {len(finished)} micro-batches of batch {before} have their gradient."
        elif finished != set(self.own[: len(finished)]):
            seen = ", ".join(map(str, sorted(finished)))
            yield f"{step} sees the gradients of micro-batches {seen}, not of the first {step.seen}."
        yield from self._overwrite(step, step.batch - self.banks)
        self.newest_trial = max(self.newest_trial, step.batch)

    def _overwrite(self, step: Instruction, version: int) -> Iterator[str]:
        if self.in_use[version]:
            yield (
                f"{step} overwrites version {version}, which {self.in_use[version]} micro-batches that have "
                "gone forward still need for their backward."
            )
        self.oldest = max(self.oldest, version + 1)

    def _wrong_version(self, step: Instruction) -> Iterator[str]:
        version = self.program.version_of(step)
        if step.version != version:
            yield f"{step} runs on the wrong version: the {self.program.rule} rule asks for {version}."

    def _not_there(self, step: Instruction) -> Iterator[str]:
        version = self.program.version_of(step)
        newest = self.newest_trial if self.program.rule is Rule.FRESH else self.newest
        if version > newest:
            yield f"{step} comes before version {version} has been made."
        elif version < self.oldest:
            yield f"{step} comes after version {version} has been overwritten."
        elif self.program.rule is not Rule.FRESH:
            yield from self.averages.missing(step, version)

    def _made_by(self, step: Instruction) -> int:
        if step.microbatch is None:
            return step.batch + 1
        return step.batch * self.program.num_microbatches + step.microbatch + 1


def _key(step: Instruction) -> tuple[int, int]:
    return step.batch, step.microbatch or 0
