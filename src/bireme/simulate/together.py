"""Several replicas of one program on one clock, each at its own speed, and who agrees with whom.

`simulate` follows one replica through every message. Here each rank of every replica goes through its own
track, and where replicas meet is asked of an `Agreement`: who may go on, with whom, how many samples a
replica trains of a batch. It hears of everything in the order of time, so a real coordinator can be one.

    replica 0:  F B F B REDUCE · UPDATE  AVERAGE_START … AVERAGE_END
                           │       ▲           │             ▲
                     contributed   │        offered       complete
                           ▼    complete       ▼             │
                    ─────────────────── Agreement ─────────────────── wake_at, woke
                           ▲                   ▲
    replica 1:      F B F B REDUCE · UPDATE  AVERAGE_START … AVERAGE_END

Replicas may begin again. Chance is drawn for each rank by itself, so one seed gives the same draws whatever
the agreement. Links between replicas are not shared.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from random import Random

from bireme.errors import BiremeError
from bireme.schedule.catalogue import generate
from bireme.schedule.grid import providers
from bireme.schedule.instruction import COMPUTE, Instruction, Kind
from bireme.schedule.program import Program
from bireme.schedule.weave import UpdateTiming

# What several replicas on one clock are like, and what comes of their run: the nouns of `together.py`.

_FORWARD_TICKS = frozenset({Kind.FORWARD, Kind.RECOMPUTE})


@dataclass(frozen=True, slots=True)
class Speed:
    """With a `deviation` each forward or backward of a replica takes longer or shorter, by that standard
    deviation as a share of its time.
    """

    deviation: float = 0.0

    def slowness_at(self, now_s: float) -> float:
        """How many times as long everything takes."""
        return 1.0

    def seconds(self, work_s: float, now_s: float, random: Random) -> float:
        """How long a computation takes that begins now."""
        times = self.slowness_at(now_s)
        return work_s * (times * max(random.gauss(1.0, self.deviation), 0.0) if self.deviation else times)


@dataclass(frozen=True, slots=True)
class SampleWork:
    """What a sample costs on each stage, and what a batch costs besides.

    `message_s` is a micro-batch's way to the next stage, `agree_s` the time in which the ranks of a replica
    agree on a batch.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: float = 0.0
    message_s: float = 0.0
    agree_s: float = 0.0

    def seconds(self, step: Instruction, samples: float) -> float:
        """Of a computation with so many samples."""
        forward, backward = self.forward_s[step.stage], self.backward_s[step.stage]
        if step.kind in _FORWARD_TICKS:
            return samples * forward * (1.0 if step.half is None else 0.5)
        return samples * backward * (1.0 if step.kind is Kind.BACKWARD else 0.5)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What it takes to average or sum the same bytes on several replicas, stage by stage at the same time.

    Two swap them; more form a ring. `control_s` is the way of a few integers to the coordinator and back.
    """

    num_bytes: float = 0.0
    bytes_per_s: float = float("inf")
    latency_s: float = 0.0
    control_s: float = 0.0

    def seconds(self, num_members: int) -> float:
        """In a group of so many."""
        if num_members < 2:
            return 0.0
        if num_members == 2:
            return self.latency_s + self.num_bytes / self.bytes_per_s
        part_s = self.num_bytes / num_members / self.bytes_per_s
        return 2 * (num_members - 1) * (self.latency_s + part_s)


@dataclass(frozen=True, slots=True)
class Trained:
    """Samples that count, and when they did: of a replica's batch, or of a round of several replicas."""

    batch: int
    replicas: tuple[int, ...]
    samples: int
    at_s: float


@dataclass(frozen=True, slots=True)
class _Averaged:
    """The weights of a stage were averaged over `members`, each after its own batch."""

    stage: int
    members: Mapping[int, int]
    at_s: float


@dataclass(slots=True)
class Ran:
    """What came of a run until `until_s`."""

    until_s: float
    trained: list[Trained] = field(default_factory=list)
    averages: list[_Averaged] = field(default_factory=list)

    def samples_per_s(self, begin_s: float = 0.0) -> float:
        """From a moment on until the end."""
        found = sum(one.samples for one in self.trained if begin_s < one.at_s <= self.until_s)
        return found / (self.until_s - begin_s)


def one_stage(average_lag: int | None) -> Callable[[int, int], Program]:
    """What makes the programs of replicas that are followed whole: one stage, one micro-batch, under 1f1b."""

    def make(num_batches: int, first_batch: int) -> Program:
        return generate(
            "1f1b",
            num_stages=1,
            num_microbatches=1,
            num_batches=num_batches,
            first_batch=first_batch,
            timing=UpdateTiming(average_lag=average_lag),
        )

    return make


class Agreement:
    """Who agrees with whom: told what happens, it tells a run who may go on. This one lets everybody.

    With `average_lag` replicas average weights; without, they sum gradients. Nobody updates a batch before
    `Together.update` says so, or uses an average before `Together.complete`.
    """

    average_lag: int | None = None

    def begin(self, run: "Together") -> None:
        """The run that is about to begin; replicas start at once, with equal shares."""
        self.run = run
        for replica in range(run.num_replicas):
            run.start(replica, 0, 0.0)

    def share(self, replica: int, batch: int) -> int:
        """How many samples a replica trains of a batch."""
        return self.run.equal_share

    def contributed(self, replica: int, batch: int, now_s: float) -> None:
        """All stages of a replica have the gradient of a batch."""
        self.run.count(Trained(batch, (replica,), self.run.equal_share, now_s))
        self.run.update(replica, batch, now_s)

    def offered(self, replica: int, stage: int, batch: int, now_s: float) -> None:
        """A rank has come to AVERAGE_START."""
        self.run.complete(stage, {replica: batch}, now_s)

    def woke(self, now_s: float) -> None:
        """A moment has come that was asked for."""


class _Pipeline:
    """One replica in one of its lives: how far its ranks have got, and what is there for them."""

    def __init__(self, replica: int, program: Program, begin_s: float) -> None:
        self.replica = replica
        self.program = program
        self.rest: list[Iterator[Instruction]] = [iter(track) for track in program.tracks]
        self.current = [next(rest, None) for rest in self.rest]
        self.now_s = [begin_s] * program.num_ranks
        self.ready: dict[Hashable, float] = {}
        """What is there, and since when: messages, updates that may be made, averages."""
        self.waiting: dict[Hashable, list[int]] = {}
        self.reduced: dict[int, list[float]] = {}
        self.busy_s: dict[int, list[float]] = {}
        """By batch, for how long each rank computed."""


@dataclass(eq=False)
class Together:
    """A run of several replicas. `make` gives the program of so many batches from a first one on."""

    make: Callable[[int, int], Program]
    work: SampleWork
    speeds: Sequence[Speed]
    agreement: Agreement
    exchange: Exchange
    batch_size: int = field(kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        self.num_replicas = len(self.speeds)
        self.equal_share, left = divmod(self.batch_size, self.num_replicas)
        if left:
            raise BiremeError(
                f"A batch of {self.batch_size} samples has no equal shares for {self.num_replicas} replicas. "
                f"Give a batch_size that {self.num_replicas} divides."
            )
        self.num_batches = 0
        self.random: dict[tuple[int, int], Random] = {}
        self.pipelines: dict[int, _Pipeline] = {}
        self.agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self.num_events = 0
        self.result = Ran(0.0)

    def until(self, until_s: float, num_batches: int) -> Ran:
        """Run so long. `num_batches` is more than any replica trains meanwhile."""
        self.num_batches = num_batches
        self.result = Ran(until_s)
        self.agreement.begin(self)
        while self.agenda and self.agenda[0][0] <= until_s:
            now_s, _, event = heappop(self.agenda)
            event(now_s)
        return self.result

    # What an agreement may ask for.

    def at(self, when_s: float, event: Callable[[float], None]) -> None:
        """Let something happen at a moment; of one moment, what was asked for first is first."""
        self.num_events += 1
        heappush(self.agenda, (when_s, self.num_events, event))

    def wake_at(self, when_s: float) -> None:
        """Tell the agreement when that moment has come."""
        self.at(when_s, self.agreement.woke)

    def start(self, replica: int, batch: int, at_s: float) -> None:
        """A replica begins to train with a batch."""
        pipeline = _Pipeline(replica, self.make(self.num_batches - batch, batch), at_s)
        self.pipelines[replica] = pipeline
        for rank in range(pipeline.program.num_ranks):
            self.at(at_s, partial(self._run, pipeline, rank))

    def update(self, replica: int, batch: int, at_s: float) -> None:
        """From then on a replica may update a batch."""
        self._set(replica, ("update", batch), at_s)

    def complete(self, stage: int, members: Mapping[int, int], at_s: float) -> None:
        """From then on the members of a group have a stage's mean, each after its own batch."""
        self.result.averages.append(_Averaged(stage, dict(members), at_s))
        for replica, batch in members.items():
            self._set(replica, ("average", stage, batch), at_s)

    def count(self, trained: Trained) -> None:
        """These samples count."""
        self.result.trained.append(trained)

    def busy_s(self, replica: int, batch: int) -> float:
        """For how long the busiest rank of a replica computed a batch."""
        pipeline = self.pipelines.get(replica)
        return 0.0 if pipeline is None else max(pipeline.busy_s.get(batch, (0.0,)))

    def is_alive(self, replica: int) -> bool:
        """Whether a replica trains."""
        return replica in self.pipelines

    # How replicas go on.

    def _set(self, replica: int, key: Hashable, at_s: float) -> None:
        pipeline = self.pipelines.get(replica)
        if pipeline is not None:
            pipeline.ready[key] = at_s
            for rank in pipeline.waiting.pop(key, ()):
                self.at(at_s, partial(self._run, pipeline, rank))

    def _run(self, pipeline: _Pipeline, rank: int, _now_s: float) -> None:
        """Let a rank go on as far as it can, or past the end of the run."""
        if self.pipelines.get(pipeline.replica) is not pipeline:
            return
        now_s = pipeline.now_s[rank]
        while (step := pipeline.current[rank]) is not None and now_s <= self.result.until_s:
            key = self._need(pipeline, step)
            if key is not None:
                ready_s = pipeline.ready.get(key)
                if ready_s is None:
                    pipeline.waiting.setdefault(key, []).append(rank)
                    break
                now_s = max(now_s, ready_s)
            now_s = self._done(pipeline, rank, step, now_s)
            pipeline.current[rank] = next(pipeline.rest[rank], None)
        pipeline.now_s[rank] = now_s

    def _need(self, pipeline: _Pipeline, step: Instruction) -> tuple[Hashable, ...] | None:
        """What must be there before a rank can go on with a step."""
        if step.kind in COMPUTE:
            message = step.needs(pipeline.program.num_stages)
            return None if message is None else ("message", message)
        if step.kind is Kind.UPDATE:
            return ("update", step.batch)
        if step.kind is Kind.AVERAGE_END:
            return ("average", step.stage, step.batch)
        return None

    def _done(self, pipeline: _Pipeline, rank: int, step: Instruction, now_s: float) -> float:
        """Do a step from now on; when it is done."""
        replica = pipeline.replica
        if step.kind in COMPUTE:
            samples = self.agreement.share(replica, step.batch)
            work_s = self.work.seconds(step, samples / pipeline.program.num_microbatches)
            if samples:
                busy_s = self.speeds[replica].seconds(work_s, now_s, self._random(replica, rank))
                now_s += busy_s
                own = pipeline.busy_s.setdefault(step.batch, [0.0] * pipeline.program.num_ranks)
                own[rank] += busy_s
            for message in providers(step, pipeline.program.num_stages):
                is_near = pipeline.program.ends_of(message)[1] == rank
                arrives_s = now_s if is_near or not samples else now_s + self.work.message_s
                self._set(replica, ("message", message), arrives_s)
        elif step.kind is Kind.REDUCE:
            self._reduced(pipeline, step.batch, now_s)
        elif step.kind in (Kind.UPDATE, Kind.TRIAL):
            now_s += self.work.update_s * self.speeds[replica].slowness_at(now_s)
        elif step.kind is Kind.AVERAGE_START:
            self._tell(pipeline, now_s, partial(self.agreement.offered, replica, step.stage, step.batch))
        return now_s

    def _reduced(self, pipeline: _Pipeline, batch: int, now_s: float) -> None:
        times = pipeline.reduced.setdefault(batch, [])
        times.append(now_s)
        if len(times) == pipeline.program.num_stages:
            ready_s = max(pipeline.reduced.pop(batch)) + self.work.agree_s
            self._tell(pipeline, ready_s, partial(self.agreement.contributed, pipeline.replica, batch))

    def _tell(self, pipeline: _Pipeline, when_s: float, tell: Callable[[float], None]) -> None:
        """Tell the agreement when that moment comes, if the replica still lives then."""

        def event(now_s: float) -> None:
            if self.pipelines.get(pipeline.replica) is pipeline:
                tell(now_s)

        self.at(when_s, event)

    def _random(self, replica: int, rank: int) -> Random:
        found = self.random.get((replica, rank))
        if found is None:
            found = self.random[replica, rank] = Random(f"{self.seed} {replica} {rank}")
        return found
