"""Every schedule on emulated devices, compared with its limit, what the simulator says, and torch's own
schedules.

d are the devices, m the micro-batches of a batch, f and b the seconds of a device's forward and backward, v
the stages of a device. A batch takes at least

    m·(f+b)                      without a bubble: every device is busy all the time
    (m + d−1)·(f+b)              1f1b, gpipe: the pipeline fills and drains in every batch
    m·(f+b) + (d−1)·(f+b)/v      interleaved: it fills and drains in smaller steps
    m·(f+b) + (d−1)·f            zb-h1: it drains during the weights' gradients
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import torch

from benchmarks.common.verdicts import Spread, ratios
from benchmarks.engine_bench.contenders import (
    Contender,
    Ours,
    TorchFeed,
    TorchRun,
    closing,
    say,
    take_turns,
    torch_run,
)
from benchmarks.engine_bench.effort import BenchEffort, BenchShape
from benchmarks.engine_bench.emulated import (
    FEATURES,
    INPUT,
    EmulatedModel,
    StagePace,
    emulated_model,
    square_loss,
)
from bireme.plan.plan import Plan
from bireme.runtime.fabric import DistFabric
from bireme.runtime.launch import launch
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.settings import PipelineSettings
from bireme.runtime.world import World
from bireme.schedule.instruction import BACKWARDS, RECEIVES, SENDS, Kind
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network
from bireme.simulate.simulator import pairs_that_talk, simulate
from bireme.timeline.timeline import Interval, Timeline

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


# What the engine itself takes, read off a timeline that it has measured, so that predictions can count it.
#
# On a CPU the rank's own thread packs and sends, waits, unpacks, and calls what computes. None of that is in
# the seconds of a stage, and a tenth of a step can go there. One recorded run of one schedule tells it for
# all.

_SURELY_S = 1e-3
"""A message that was sent so long before has come, and one that is sent so long after has not."""


@dataclass(frozen=True, slots=True)
class EngineOverhead:
    """Seconds: of each pass besides its work, of sending and of taking a message, of a batch's end.

    `late_s` is how long after it is sent a message lets a rank go on that waits for it.
    """

    forward_s: float
    backward_s: float
    send_s: float
    take_s: float
    batch_s: float
    late_s: float

    def costs(self, num_stages: int, pace: StagePace, *, num_backwards: int = 1) -> Costs:
        """The costs of equal stages of that pace; `num_backwards` is 2 where backwards run in halves."""
        last = num_stages - 1
        forward, backward, halves = [], [], []
        for stage in range(num_stages):
            after_s, ahead_s = (self.send_s, self.take_s) if stage < last else (0.0, 0.0)
            into_s, back_s = (self.take_s, self.send_s) if stage else (0.0, 0.0)
            forward.append(pace.forward_s + self.forward_s + into_s + after_s)
            backward.append(pace.backward_s + num_backwards * self.backward_s + ahead_s + back_s)
            # Nothing that comes into the first stage has a gradient.
            halves.append(pace.backward_s / 2 + self.backward_s + ahead_s + back_s if stage else 0.0)
        return Costs.per_stage(
            num_stages,
            forward_s=forward,
            backward_s=backward,
            backward_input_s=halves,
            update_s=self.batch_s,
        )


def own_cost(timeline: Timeline, pace: StagePace) -> EngineOverhead:
    """What came on top of the pace in a measured run of at least two batches, one stage to a rank."""
    sent_s = {
        interval.instruction.carries(): interval.end_s
        for rank in timeline.ranks
        for interval in rank.intervals()
        if interval.instruction.kind in SENDS
    }
    num_stages = timeline.program.num_stages
    steps = [pair for rank in timeline.ranks for pair in pairwise(_steady(timeline, rank.intervals()))]

    def lasts(*kinds: Kind) -> float:
        return _median(one.end_s - one.start_s for one, _ in steps if one.instruction.kind in kinds)

    taken, late = [], []
    for before, one in steps:
        message = one.instruction.needs(num_stages)
        if message is None or message not in sent_s:
            continue
        if sent_s[message] < before.end_s - _SURELY_S:
            taken.append(one.start_s - before.end_s)
        elif sent_s[message] > before.end_s + _SURELY_S:
            late.append(one.start_s - sent_s[message])
    take_s = _median(taken)
    between = _median(
        one.start_s - before.end_s
        for before, one in steps
        if before.instruction.kind is Kind.UPDATE and one.instruction.needs(num_stages) is None
    )
    return EngineOverhead(
        forward_s=max(lasts(Kind.FORWARD) - pace.forward_s, 0.0),
        backward_s=max(lasts(*BACKWARDS) - pace.backward_s, 0.0),
        send_s=lasts(*SENDS),
        take_s=take_s + lasts(*RECEIVES),
        batch_s=lasts(Kind.REDUCE) + lasts(Kind.UPDATE) + between,
        late_s=max(_median(late) - take_s, 0.0),
    )


def _steady(timeline: Timeline, intervals: Iterator[Interval]) -> list[Interval]:
    """Without the first batch, in which much happens for the first time."""
    return [one for one in intervals if one.instruction.batch > timeline.program.first_batch]


def _median(values: Iterator[float] | list[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0


SCHEDULES = ("2bw", "2bw-fresh", "1f1b", "gpipe", "zb-h1", "interleaved")
_PEERS = {
    "2bw": ("Schedule1F1B", "1f1b"),
    "2bw-fresh": ("Schedule1F1B", "1f1b"),
    "1f1b": ("Schedule1F1B", "1f1b"),
    "gpipe": ("ScheduleGPipe",),
    "zb-h1": ("ScheduleInterleavedZeroBubble", "zb-h1"),
    "interleaved": ("ScheduleInterleaved1F1B",),
}
"""What of torch's each is compared with: the fastest of these. Our names are programs in torch's runtime."""

_BUBBLE_FREE = ("2bw", "2bw-fresh")
"""Every device is busy all the time."""

_SIMULATED_BATCHES = 8

_PROBED, _PROBED_BATCHES = "1f1b", 6
"""What is recorded, after everything else, to measure the engine's own time."""


@dataclass(frozen=True, slots=True)
class EmulationRow:
    """One schedule at one shape: seconds for a batch.

    `predicted_s` is the simulator's, told what the engine itself took in a recorded run of 1f1b.
    `torch_s` is that of the fastest of torch's schedules of the same kind. `lead` is torch's time over ours,
    of the same round. Other programs had `others_share` of the cores.
    """

    schedule: str
    stages: int
    microbatches: int
    measured_s: Spread
    predicted_s: float
    limit_s: float
    torch_s: Spread
    torch_schedule: str
    lead: Spread
    others_share: float | None = None

    @property
    def share_of_limit(self) -> float:
        """How near the limit it comes; 1 is there."""
        return self.limit_s / self.measured_s.median

    @property
    def error(self) -> float:
        """By which part of the measured time the prediction misses it."""
        return self.predicted_s / self.measured_s.median - 1

    @property
    def best_error(self) -> float:
        """The error at the time nearest to the prediction, between those of the fastest and slowest round."""
        nearest_s = min(max(self.predicted_s, self.measured_s.least), self.measured_s.greatest)
        return self.predicted_s / nearest_s - 1


def measure_emulated(effort: BenchEffort) -> list[EmulationRow]:
    """All schedules at all shapes; one launch of processes for each number of devices."""
    rows: list[EmulationRow] = []
    for num_ranks in dict.fromkeys(shape.num_ranks for shape in effort.shapes):
        shapes = [shape for shape in effort.shapes if shape.num_ranks == num_ranks]
        by_rank = launch(_measure, num_ranks, shapes, effort, threads_per_process=1)
        for place, shape in enumerate(shapes):
            rows += _rows(shape, effort.pace, [found[place] for found in by_rank])
    return rows


def stages_per_rank(schedule: str) -> int:
    """How many stages a device has; together they take the device's time."""
    return 2 if schedule == "interleaved" else 1


def limit_s(schedule: str, shape: BenchShape, pace: StagePace) -> float:
    """The least that a batch can take."""
    d, m, v = shape.num_ranks, shape.num_microbatches, stages_per_rank(schedule)
    fills_s = pace.forward_s if schedule == "zb-h1" else pace.whole_s / v
    return m * pace.whole_s + (0.0 if schedule in _BUBBLE_FREE else (d - 1) * fills_s)


def predicted_s(schedule: str, shape: BenchShape, pace: StagePace, own: EngineOverhead) -> float:
    """What the simulator says a batch takes, with what the engine itself takes."""
    v = stages_per_rank(schedule)
    num_stages = shape.num_ranks * v
    program = _plan(schedule, tuple(range(1, num_stages)), shape.num_microbatches).program(_SIMULATED_BATCHES)
    costs = own.costs(num_stages, pace.cut(v), num_backwards=2 if program.splits_backward else 1)
    network = Network.dedicated(pairs_that_talk(program), latency_s=own.late_s)
    return simulate(program, costs, network, agree=True).steady_batch_s


def _plan(schedule: str, cuts: tuple[int, ...], num_microbatches: int) -> Plan:
    return Plan(cuts, num_microbatches, schedule)


@dataclass(frozen=True, slots=True)
class _Measured:
    """What a contender's batches took on a rank, round by round."""

    name: str
    seconds: list[float]


@dataclass(frozen=True, slots=True)
class _Shaped:
    """What was measured at one shape on a rank. `own` is what the engine itself took in a run of 1f1b."""

    own: EngineOverhead
    measured: list[_Measured]
    others_share: float | None


def _measure(world: World, shapes: Sequence[BenchShape], effort: BenchEffort) -> list[_Shaped]:
    """On every rank: the contenders of each shape in turn."""
    world.join_torch()
    fabric = DistFabric(world)
    models = {v: emulated_model(world.size * v, effort.pace.cut(v)) for v in (1, 2)}
    found = []
    for shape in shapes:
        m = shape.num_microbatches
        say(world, f"emulated devices, {world.size} of them, {m} micro-batches")
        contenders: list[Contender] = []
        for schedule in SCHEDULES:
            model = models[stages_per_rank(schedule)]
            pipeline = Pipeline(
                model.graph,
                _plan(schedule, model.cuts, m),
                fabric,
                weights=model.weights,
                optimizer="sgd",
                settings=PipelineSettings(resolve=model.resolve),
            )
            contenders.append(Ours(schedule, pipeline, model.batch(m)))
        for peer in dict.fromkeys(peer for peers in _PEERS.values() for peer in peers):
            contenders.append(_torch(peer, world, models, m))
        with closing(contenders):
            turns = take_turns(contenders, counted=effort.counted, rounds=effort.rounds)
            own = own_cost(_recorded(contenders), effort.pace)
        measured = [_Measured(one.name, own_s) for one, own_s in zip(contenders, turns.seconds, strict=True)]
        found.append(_Shaped(own, measured, turns.others_share))
    return found


def _recorded(contenders: Sequence[Contender]) -> Timeline:
    ours = next(one for one in contenders if isinstance(one, Ours) and one.name == _PROBED)
    for _ in ours.pipeline.train([ours.batch] * _PROBED_BATCHES, record=True):
        pass
    return ours.pipeline.timeline()


def _torch(peer: str, world: World, models: dict[int, EmulatedModel], num_microbatches: int) -> TorchRun:
    v = 2 if peer == "ScheduleInterleaved1F1B" else 1
    model = models[v]
    stages = [_torch_stage(model, world.rank + turn * world.size) for turn in range(v)]
    given = model.batch(num_microbatches)[INPUT]
    is_ours = peer in SCHEDULES
    kind = _plan(peer, model.cuts, num_microbatches).program(1) if is_ours else peer
    return torch_run(kind, stages, num_microbatches, square_loss, TorchFeed((given,), given))


def _torch_stage(model: EmulatedModel, stage: int) -> "PipelineStage":
    """Shapes are given: torch would run each stage once to learn them."""
    from torch.distributed.pipelining import PipelineStage

    def like(learns: bool) -> torch.Tensor:
        return torch.empty(1, FEATURES, device="meta", requires_grad=learns)

    return PipelineStage(
        model.modules[stage],
        stage,
        len(model.modules),
        torch.device("cpu"),
        input_args=(like(stage > 0),),
        output_args=(like(True),),
    )


def _rows(shape: BenchShape, pace: StagePace, by_rank: Sequence[_Shaped]) -> list[EmulationRow]:
    # The slowest rank's batch is the pipeline's.
    slowest = {
        same[0].name: [max(seconds) for seconds in zip(*(one.seconds for one in same), strict=True)]
        for same in zip(*(rank.measured for rank in by_rank), strict=True)
    }
    rows = []
    for schedule in SCHEDULES:
        ours = slowest[schedule]
        names = [f"runtime with {peer}" if peer in SCHEDULES else peer for peer in _PEERS[schedule]]
        best = min(names, key=lambda name: Spread.of(slowest[name]).median)
        rows.append(
            EmulationRow(
                schedule=schedule,
                stages=shape.num_ranks * stages_per_rank(schedule),
                microbatches=shape.num_microbatches,
                measured_s=Spread.of(ours),
                predicted_s=predicted_s(schedule, shape, pace, by_rank[0].own),
                limit_s=limit_s(schedule, shape, pace),
                torch_s=Spread.of(slowest[best]),
                torch_schedule=best,
                lead=ratios(ours, slowest[best]),
                others_share=by_rank[0].others_share,
            )
        )
    return rows
