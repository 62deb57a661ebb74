"""What a program computes, as formulas: the judge of generators, lowering and checker.

The machine here executes a lowered program on terms instead of numbers: a forward's value is the term
"forward of this stage, with these weights, on this value", and so on up to the weights that the updates
make. Two programs compute the same where their terms are the same. The machine knows buffers, banks,
channels and accumulators, and that no rank updates before all have a batch's gradients; it believes no
label: what a receive brings is whatever the other rank sent, what a backward runs on is whatever lies in the
bank. It may not use the checker or the clock, so that it can judge them. `expected` writes down the same
terms from the update rules alone, without any order.

Terms are numbers that stand for tuples; equal tuples have equal numbers, so comparing is cheap however
deep a term is.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from bireme.schedule.instruction import Instruction, Kind, Message
from bireme.schedule.program import Program, Rule

__all__ = ["Made", "Outcome", "expected", "outcome"]

Term = int

_numbers: dict[tuple[object, ...], Term] = {}
_parts: list[tuple[object, ...]] = []


def _term(*parts: object) -> Term:
    """The number of a term; equal parts have equal numbers."""
    if parts not in _numbers:
        _numbers[parts] = len(_parts)
        _parts.append(parts)
    return _numbers[parts]


def _joined(first: Term, second: Term) -> Term:
    """A whole micro-batch's value from those of its halves."""
    return _term("whole", first, second)


def _half_of(whole: Term, half: int) -> Term:
    parts = _parts[whole]
    part = parts[1 + half] if parts[0] == "whole" else None
    return part if isinstance(part, int) else _term("half", whole, half)


@dataclass(frozen=True, slots=True)
class _Microbatch:
    """A micro-batch of a batch: what a value belongs to."""

    batch: int
    number: int

    def data(self) -> Term:
        return _joined(_term("data", self, 0), _term("data", self, 1))


def _forward(stage: int, at: _Microbatch, half: int, weights: Term, value: Term) -> Term:
    return _term("forward", stage, at, half, weights, value)


def _stash(weights: Term, value: Term) -> Term:
    return _term("stash", weights, value)


def _saved(stash: Term, weights: Term, gradient: Term) -> Term:
    """What the second part of a backward takes over from the first."""
    return _term("saved", stash, weights, gradient)


def _input_gradient(stage: int, at: _Microbatch, saved: Term) -> Term:
    return _term("input gradient", stage, at, saved)


def _weight_gradient(stage: int, at: _Microbatch, saved: Term, weights: Term) -> Term:
    return _term("weight gradient", stage, at, saved, weights)


def _loss(at: _Microbatch) -> Term:
    return _term("loss", at)


def _updated(weights: Term, gradients: Iterable[Term]) -> Term:
    return _term("updated", weights, *sorted(gradients))


def _trial(weights: Term, seen: int, gradients: Iterable[Term]) -> Term:
    """`seen` is what the mean is taken over."""
    return _term("trial", weights, seen, *sorted(gradients))


def _start(stage: int, version: int) -> Term:
    return _term("start", stage, version)


@dataclass(frozen=True, slots=True)
class Made:
    """A weight version that a stage's updates made."""

    version: int
    weights: Term


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run: for each stage the weights its updates made, in their order, and all losses.

    The losses count because a run reports them: where the last stage recomputes, its forward could run on
    any weights without harm to a gradient. `problems` says what nobody can give a meaning to, `stuck`
    which ranks never came to their end, and `cycle` which of them wait for each other in a ring.
    """

    made: tuple[tuple[Made, ...], ...]
    losses: frozenset[Term]
    problems: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    cycle: tuple[int, ...] = ()

    @property
    def broken(self) -> str | None:
        """Why the run means nothing, if it does."""
        return next(iter(self.problems + self.stuck), None)

    @property
    def weights(self) -> tuple[Term, ...]:
        """Each stage's weights at the end."""
        return tuple(stage[-1].weights for stage in self.made if stage)


def outcome(program: Program) -> Outcome:
    """What a lowered program computes."""
    return _Machine(program).run()


def expected(program: Program) -> Outcome:
    """What a program of this rule and shape must compute, whatever its order."""
    rules = _Rules(program)
    return Outcome(rules.made(), rules.losses())


def _first_version(program: Program) -> int:
    return program.first_batch * (program.num_microbatches if program.rule is Rule.STASHED else 1)


class _Rules:
    """The update rules as equations between terms."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.first = _first_version(program)
        self.last_stage = program.num_stages - 1
        self.weights = cache(self._weights)
        self.output = cache(self._output)
        self.saved = cache(self._saved)
        self.fresh = cache(self._fresh)

    def made(self) -> tuple[tuple[Made, ...], ...]:
        updates = self.program.num_batches
        if self.program.rule is Rule.STASHED:
            updates *= self.program.num_microbatches
        stages: list[list[Made]] = [[] for _ in self.program.rank_of_stage]
        for version in range(self.first + 1, self.first + 1 + updates):
            for stage, made in enumerate(stages):
                made.append(Made(version, self.weights(stage, version)))
        return tuple(map(tuple, stages))

    def losses(self) -> frozenset[Term]:
        numbers = range(self.program.num_microbatches)
        outputs = [
            self.output(self.last_stage, _Microbatch(t, k)) for t in self.program.batches for k in numbers
        ]
        return frozenset(_half_of(output, half) for output in outputs for half in (0, 1))

    def _weights(self, stage: int, version: int) -> Term:
        """W(version)."""
        if version <= self.first:
            return _start(stage, version)
        m = self.program.num_microbatches
        if self.program.rule is Rule.STASHED:
            summed = [_Microbatch(*divmod(version - 1, m))]
        else:
            summed = [_Microbatch(version - 1, k) for k in range(m)]
        return _updated(self.weights(stage, version - 1), [self.gradient(stage, at) for at in summed])

    def used(self, stage: int, at: _Microbatch) -> Term:
        """The weights a micro-batch runs on, forward and backward."""
        match self.program.rule:
            case Rule.SYNCHRONOUS:
                return self.weights(stage, at.batch)
            case Rule.DELAYED:
                return self.weights(stage, at.batch - 1 if at.batch else 0)
            case Rule.FRESH:
                return self.fresh(stage, at.batch)
            case Rule.STASHED:
                done = at.batch * self.program.num_microbatches + at.number - (self.last_stage - stage)
                return self.weights(stage, max(done, self.first))

    def _fresh(self, stage: int, batch: int) -> Term:
        if batch == self.first:
            return self.weights(stage, batch)
        ranks = self.program.rank_of_stage
        seen = self.program.num_microbatches - (ranks[self.last_stage] - ranks[stage])
        gradients = [self.gradient(stage, _Microbatch(batch - 1, k)) for k in range(seen)]
        return _trial(self.weights(stage, batch - 1), seen, gradients)

    def input(self, stage: int, at: _Microbatch) -> Term:
        return self.output(stage - 1, at) if stage else at.data()

    def _output(self, stage: int, at: _Microbatch) -> Term:
        weights, value = self.used(stage, at), self.input(stage, at)
        return _joined(*(_forward(stage, at, half, weights, _half_of(value, half)) for half in (0, 1)))

    def _saved(self, stage: int, at: _Microbatch) -> Term:
        weights, value = self.used(stage, at), self.input(stage, at)
        stash = _joined(*(_stash(weights, _half_of(value, half)) for half in (0, 1)))
        if stage == self.last_stage:
            return _saved(stash, weights, _loss(at))
        return _saved(stash, weights, _input_gradient(stage + 1, at, self.saved(stage + 1, at)))

    def gradient(self, stage: int, at: _Microbatch) -> Term:
        return _weight_gradient(stage, at, self.saved(stage, at), self.used(stage, at))


@dataclass(slots=True)
class _Channel:
    """From one rank to another: the k-th send meets the k-th receive, whatever their labels."""

    source: int
    sent: list[Term] = field(default_factory=list)
    num_posted: int = 0


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Where a posted receive's value arrives: the `index`-th of its channel."""

    channel: _Channel
    index: int


@dataclass(frozen=True, slots=True)
class _Sum:
    """Which accumulator: a batch's, or a micro-batch's where each has its own update."""

    batch: int
    microbatch: int | None


@dataclass(slots=True)
class _Stage:
    """All that a stage holds. Values by half are kept under (micro-batch, half); None is the whole."""

    newest: Term
    banks: dict[int, Term]
    recomputed: bool
    forwarded: set[tuple[_Microbatch, int]] = field(default_factory=set)
    inputs: dict[tuple[_Microbatch, int], Term] = field(default_factory=dict)
    stashes: dict[tuple[_Microbatch, int], Term] = field(default_factory=dict)
    outputs: dict[tuple[_Microbatch, int | None], Term] = field(default_factory=dict)
    input_gradients: dict[_Microbatch, Term] = field(default_factory=dict)
    saved: dict[_Microbatch, Term] = field(default_factory=dict)
    gradients: defaultdict[_Sum, list[Term]] = field(default_factory=lambda: defaultdict(list))
    reduced: set[_Sum] = field(default_factory=set)
    updated: set[_Sum] = field(default_factory=set)
    tried: set[int] = field(default_factory=set)
    made: list[Made] = field(default_factory=list)


_PEER = {Kind.SEND_FORWARD: 1, Kind.RECV_BACKWARD: 1, Kind.SEND_BACKWARD: -1, Kind.RECV_FORWARD: -1}
"""Where the other side of a message is, in stages from the instruction's own."""
_HALVED = {Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD}
_OF_BATCH = {Kind.REDUCE, Kind.UPDATE, Kind.TRIAL}
_ON_WEIGHTS = {
    Kind.FORWARD,
    Kind.BACKWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Kind.RECOMPUTE,
    Kind.UPDATE,
    Kind.TRIAL,
}
_BACKWARDS = {Kind.BACKWARD, Kind.BACKWARD_INPUT}


class _Machine:
    """Runs every rank as far as it comes. What is undefined is noted, and its value fits nothing."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.tracks = [list(track) for track in program.tracks]
        self.positions = [0] * len(self.tracks)
        self.channels: dict[tuple[int, int], _Channel] = {}
        self.buffers: list[dict[Message, _Buffer]] = [{} for _ in self.tracks]
        self.posted: set[Message] = set()
        self.losses: set[Term] = set()
        self.problems: list[str] = []
        recomputed = {i.stage for track in self.tracks for i in track if i.kind is Kind.RECOMPUTE}
        self.stages = [self._stage(stage, stage in recomputed) for stage in range(program.num_stages)]

    def _stage(self, stage: int, recomputed: bool) -> _Stage:
        first = _first_version(self.program)
        kept = [first]
        if self.program.rule is Rule.DELAYED and first:
            kept = [first - 1, first]
        banks = {version % self.program.banks[stage]: _start(stage, version) for version in kept}
        return _Stage(newest=_start(stage, first), banks=banks, recomputed=recomputed)

    def run(self) -> Outcome:
        while any(self._advance(rank) for rank in range(len(self.tracks))):
            pass
        waits = self._waits()
        if not waits:
            for rank, buffers in enumerate(self.buffers):
                self.problems.extend(f"rank {rank} never uses the {message}" for message in buffers)
        stuck = [f"rank {rank} waits for ever at {self.tracks[rank][self.positions[rank]]}" for rank in waits]
        made = tuple(tuple(stage.made) for stage in self.stages)
        return Outcome(made, frozenset(self.losses), tuple(self.problems), tuple(stuck), _ring(waits))

    def _advance(self, rank: int) -> bool:
        """Run a rank until it waits; whether it came any further."""
        before = self.positions[rank]
        track = self.tracks[rank]
        while self.positions[rank] < len(track):
            instruction = track[self.positions[rank]]
            wrong = self._out_of_place(rank, instruction)
            if wrong is None and self._waits_for(rank, instruction) is not None:
                break
            if wrong is None:
                self._execute(rank, instruction)
            else:
                self._undefined(instruction, wrong)
            self.positions[rank] += 1
        return self.positions[rank] > before

    def _waits(self) -> dict[int, int]:
        """Which rank each unfinished rank waits for."""
        waits = {}
        for rank, position in enumerate(self.positions):
            if position < len(self.tracks[rank]):
                other = self._waits_for(rank, self.tracks[rank][position])
                assert other is not None
                waits[rank] = other
        return waits

    def _undefined(self, instruction: Instruction, why: str) -> Term:
        self.problems.append(f"{instruction}: {why}")
        return _term("undefined", len(self.problems))

    def _out_of_place(self, rank: int, i: Instruction) -> str | None:
        """Why an instruction can have no meaning on this rank at any time."""
        stages = range(self.program.num_stages)
        if i.stage not in stages or self.program.rank_of_stage[i.stage] != rank:
            return "the stage is not here"
        if i.batch not in self.program.batches:
            return "no such batch"
        has_microbatch = i.kind not in _OF_BATCH or (
            self.program.rule is Rule.STASHED and i.kind is not Kind.TRIAL
        )
        if has_microbatch != (i.microbatch in range(self.program.num_microbatches)):
            return "no such micro-batch"
        if i.half is not None and (i.half not in (0, 1) or i.kind not in _HALVED):
            return "no such half"
        if i.kind in _ON_WEIGHTS and i.version is None:
            return "no version"
        if i.kind in _PEER:
            peer = i.stage + _PEER[i.kind]
            if peer not in stages or self.program.rank_of_stage[peer] == rank:
                return "there is no other side"
        return None

    def _waits_for(self, rank: int, i: Instruction) -> int | None:
        """The rank without which this instruction cannot go on at the moment."""
        if i.kind is Kind.UPDATE and self.program.rule is not Rule.STASHED:
            which = _Sum(i.batch, None)
            late = [at for at, stage in enumerate(self.stages) if which not in stage.reduced]
            return self.program.rank_of_stage[late[0]] if late else None
        if i.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            peer = self.program.rank_of_stage[i.stage + _PEER[i.kind]]
            channel = self._channel(rank, peer)
            return None if channel.num_posted > len(channel.sent) else peer
        message = self._needed(i)
        buffer = None if message is None else self.buffers[rank].get(message)
        if buffer is not None and len(buffer.channel.sent) <= buffer.index:
            return buffer.channel.source
        return None

    def _channel(self, source: int, target: int) -> _Channel:
        return self.channels.setdefault((source, target), _Channel(source))

    def _needed(self, i: Instruction) -> Message | None:
        """What a compute instruction takes from the stage before or behind."""
        if i.kind is Kind.FORWARD and i.stage > 0:
            return Message(True, i.stage, i.batch, i.microbatch, i.half)
        if i.kind in _BACKWARDS and i.stage < self.program.num_stages - 1:
            return Message(False, i.stage, i.batch, i.microbatch, None)
        return None

    def _execute(self, rank: int, i: Instruction) -> None:
        match i.kind:
            case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                peer = self.program.rank_of_stage[i.stage + _PEER[i.kind]]
                self._channel(rank, peer).sent.append(self._handed_over(i, i.stage, _at(i), i.half))
            case Kind.RECV_FORWARD | Kind.RECV_BACKWARD:
                self._post(rank, i)
            case Kind.FORWARD:
                self._forward(rank, i)
            case Kind.RECOMPUTE:
                self._recompute(i)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                self._backward_input(rank, i)
                if i.kind is Kind.BACKWARD:
                    self._backward_weight(i)
            case Kind.BACKWARD_WEIGHT:
                self._backward_weight(i)
            case Kind.REDUCE:
                self._reduce(i)
            case Kind.UPDATE:
                self._update(i)
            case Kind.TRIAL:
                self._trial(i)

    def _handed_over(self, i: Instruction, stage: int, at: _Microbatch, half: int | None) -> Term:
        """What `i` takes from where `stage` left it: an output for the next stage, or a gradient."""
        left = self.stages[stage]
        if i.kind is Kind.SEND_BACKWARD or i.kind in _BACKWARDS:
            if at not in left.input_gradients:
                return self._undefined(i, "there is no such gradient")
            return left.input_gradients.pop(at)
        if (at, half) in left.outputs:
            return left.outputs.pop((at, half))
        if half is None and (at, 0) in left.outputs and (at, 1) in left.outputs:
            return _joined(left.outputs.pop((at, 0)), left.outputs.pop((at, 1)))
        return self._undefined(i, "there is no such output")

    def _post(self, rank: int, i: Instruction) -> None:
        message = Message(i.kind is Kind.RECV_FORWARD, i.stage, i.batch, i.microbatch, i.half)
        channel = self._channel(self.program.rank_of_stage[i.stage + _PEER[i.kind]], rank)
        if message in self.posted:
            self._undefined(i, "received twice")
        self.posted.add(message)
        self.buffers[rank][message] = _Buffer(channel, channel.num_posted)
        channel.num_posted += 1

    def _taken(self, rank: int, i: Instruction) -> Term:
        """What the neighboring stage made for `i`, from a receive or from the same rank."""
        message = self._needed(i)
        if message is None:
            return _at(i).data() if i.kind is Kind.FORWARD else _loss(_at(i))
        neighbor = i.stage - 1 if i.kind is Kind.FORWARD else i.stage + 1
        if self.program.rank_of_stage[neighbor] == rank:
            return self._handed_over(i, neighbor, _at(i), i.half)
        if message not in self.buffers[rank]:
            return self._undefined(i, "no receive was posted for it")
        buffer = self.buffers[rank].pop(message)
        return buffer.channel.sent[buffer.index]

    def _weights(self, i: Instruction) -> Term:
        banks = self.stages[i.stage].banks
        assert i.version is not None
        bank = i.version % self.program.banks[i.stage]
        return banks[bank] if bank in banks else self._undefined(i, f"bank {bank} is empty")

    def _forward(self, rank: int, i: Instruction) -> None:
        stage, at = self.stages[i.stage], _at(i)
        value, weights = self._taken(rank, i), self._weights(i)
        if i.stage == 0 and i.half is not None:
            value = _half_of(value, i.half)
        outputs = []
        for half in (0, 1) if i.half is None else (i.half,):
            part = _half_of(value, half) if i.half is None else value
            if (at, half) in stage.forwarded:
                self._undefined(i, "forwarded twice")
            stage.forwarded.add((at, half))
            if stage.recomputed:
                stage.inputs[at, half] = part
            else:
                stage.stashes[at, half] = _stash(weights, part)
            outputs.append(_forward(i.stage, at, half, weights, part))
        if i.stage == self.program.num_stages - 1:
            self.losses.update(outputs)
        stage.outputs[at, i.half] = outputs[0] if i.half is not None else _joined(*outputs)

    def _recompute(self, i: Instruction) -> None:
        stage, at, weights = self.stages[i.stage], _at(i), self._weights(i)
        for half in (0, 1):
            if (at, half) in stage.inputs:
                stage.stashes[at, half] = _stash(weights, stage.inputs.pop((at, half)))
            else:
                self._undefined(i, "there is no input to start from")

    def _backward_input(self, rank: int, i: Instruction) -> None:
        stage, at = self.stages[i.stage], _at(i)
        gradient, weights = self._taken(rank, i), self._weights(i)
        if (at, 0) not in stage.stashes or (at, 1) not in stage.stashes:
            self._undefined(i, "there is no stash")
            return
        stash = _joined(stage.stashes.pop((at, 0)), stage.stashes.pop((at, 1)))
        stage.saved[at] = _saved(stash, weights, gradient)
        stage.input_gradients[at] = _input_gradient(i.stage, at, stage.saved[at])

    def _backward_weight(self, i: Instruction) -> None:
        stage, at = self.stages[i.stage], _at(i)
        if at not in stage.saved:
            self._undefined(i, "there is no first part to go on from")
            return
        gradient = _weight_gradient(i.stage, at, stage.saved.pop(at), self._weights(i))
        into = _Sum(i.batch, i.microbatch if self.program.rule is Rule.STASHED else None)
        if into not in stage.reduced:
            stage.gradients[into].append(gradient)

    def _reduce(self, i: Instruction) -> None:
        stage, which = self.stages[i.stage], _Sum(i.batch, i.microbatch)
        if which in stage.reduced:
            self._undefined(i, "reduced twice")
        if i.microbatch is None and any(other.batch > i.batch for other in stage.reduced):
            self._undefined(i, "sums are made in the order of batches")
        stage.reduced.add(which)

    def _update(self, i: Instruction) -> None:
        stage, which = self.stages[i.stage], _Sum(i.batch, i.microbatch)
        assert i.version is not None
        if which not in stage.reduced or which in stage.updated:
            self._undefined(i, "there is no sum for it")
        stage.updated.add(which)
        stage.newest = _updated(stage.newest, stage.gradients.pop(which, []))
        stage.made.append(Made(i.version, stage.newest))
        if self.program.rule is not Rule.FRESH:
            stage.banks[i.version % self.program.banks[i.stage]] = stage.newest

    def _trial(self, i: Instruction) -> None:
        stage, source = self.stages[i.stage], _Sum(i.batch - 1, None)
        assert i.version is not None
        if self.program.rule is not Rule.FRESH or i.seen is None:
            self._undefined(i, "no trial can be made")
            return
        if i.batch in stage.tried or source in stage.updated:
            self._undefined(i, "the gradients of the batch before are gone")
        stage.tried.add(i.batch)
        made = _trial(stage.newest, i.seen, stage.gradients[source])
        stage.banks[i.version % self.program.banks[i.stage]] = made


def _at(i: Instruction) -> _Microbatch:
    assert i.microbatch is not None
    return _Microbatch(i.batch, i.microbatch)


def _ring(waits: dict[int, int]) -> tuple[int, ...]:
    """The ranks that wait for each other, from the least on; empty where none do."""
    for rank in sorted(waits):
        ring = [rank]
        while waits.get(ring[-1]) not in (None, *ring):
            ring.append(waits[ring[-1]])
        if waits.get(ring[-1]) == rank:
            return tuple(ring)
    return ()
