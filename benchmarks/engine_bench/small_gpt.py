"""Real compute: a small GPT on two ranks of one thread each, compared with torch's runtime and with one
process.

The stages that torch's runtime is given run the same functions as ours, so that what differs is the runtime.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common.verdicts import Spread, ratios
from benchmarks.engine_bench.contenders import (
    LR,
    Contender,
    CountedWindow,
    Ours,
    TorchFeed,
    closing,
    say,
    take_turns,
    torch_run,
)
from benchmarks.engine_bench.effort import BenchEffort
from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.model.sources import load_source
from bireme.model.stage import StageFunction
from bireme.model.units import Unit, units_of
from bireme.model.weights import materialize
from bireme.plan.plan import Plan
from bireme.runtime.fabric import DistFabric
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.world import World

GPT_RANKS = 2
GPT_SAMPLES = 4
"""In a micro-batch."""
_VOCAB, _CONTEXT = 256, 128
MODEL = f"gpt:layers=8,width=256,heads=8,vocab={_VOCAB},context={_CONTEXT}"
SCHEDULES = ("2bw", "1f1b", "gpipe")
_PEERS = ("Schedule1F1B", "1f1b", "ScheduleGPipe")
_ALONE = "one process, two threads"
_COUNTED, _ROUNDS = 2, 5

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _SmallGpt:
    """The model, captured, and where it is cut in two."""

    graph: Graph
    units: tuple[Unit, ...]
    cuts: tuple[int, ...]
    model: nn.Module

    def weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Its first weights, the same on every rank."""
        return materialize(self.model, names, seed=0)

    def batch(self, num_microbatches: int) -> dict[str, Tensor]:
        """Tokens drawn at random, the same on every rank."""
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(_VOCAB, (GPT_SAMPLES * num_microbatches, _CONTEXT), generator=draw)
        return {"input_ids": ids, "labels": ids}

    def function(self, first: int, end: int) -> StageFunction:
        """The function of some of its units."""
        return StageFunction(self.graph, self.units[first:end], outputs=("loss",))


@dataclass(frozen=True, slots=True)
class GptTimes:
    """One rank's seconds for a batch of so many micro-batches: every contender's, round by round."""

    num_microbatches: int
    names: tuple[str, ...]
    seconds: tuple[tuple[float, ...], ...]
    others_share: float | None


@dataclass(frozen=True, slots=True)
class GptRow:
    """Tokens a second of a contender, and as multiples of torch's best schedule, of its 1F1B and of one
    process. Other programs had `others_share` of the cores.
    """

    name: str
    num_microbatches: int
    tokens_per_s: Spread
    over_torch: Spread
    over_1f1b: Spread
    over_alone: Spread
    others_share: float | None = None


def load_small_gpt() -> _SmallGpt:
    """The model, cut where both halves multiply as much."""
    source = load_source(MODEL, batch=GPT_SAMPLES)
    graph = capture(source.model, source.example_inputs, name=MODEL)
    units = units_of(graph)
    flops = [sum(graph.operators[place].flops for place in unit.operators) for unit in units]
    cut = min(range(1, len(units)), key=lambda place: max(sum(flops[:place]), sum(flops[place:])))
    return _SmallGpt(graph, units, (cut,), source.model)


def measure_gpt(world: World, effort: BenchEffort) -> list[GptTimes]:
    """On both ranks: every contender, in turn."""
    if not effort.small_gpt:
        return []
    gpt = load_small_gpt()
    fabric = DistFabric(world)
    found = []
    for m in effort.small_gpt:
        say(world, f"small GPT, {m} micro-batches")
        batch = gpt.batch(m)
        contenders: list[Contender] = []
        # Who is compared goes right after the other: a machine that others use is another one soon.
        for schedule, peer in zip(SCHEDULES, _PEERS, strict=True):
            plan = Plan(gpt.cuts, m, schedule)
            contenders.append(Ours(schedule, Pipeline(gpt.graph, plan, fabric, weights=gpt.weights), batch))
            contenders.append(_torch(peer, world, gpt, m))
        contenders.append(_Alone(_ALONE, world, _OneStage(gpt, 0, len(gpt.units)), m, batch))
        with closing(contenders):
            turns = take_turns(contenders, counted=_COUNTED, rounds=_ROUNDS)
        names = tuple(contender.name for contender in contenders)
        found.append(GptTimes(m, names, tuple(map(tuple, turns.seconds)), turns.others_share))
    return found


def gpt_rows(first: Sequence[GptTimes], second: Sequence[GptTimes]) -> list[GptRow]:
    """Both ranks' times together, the slower one's."""
    rows = []
    for one, two in zip(first, second, strict=True):
        slower = {
            name: [max(pair) for pair in zip(mine, yours, strict=True)]
            for name, mine, yours in zip(one.names, one.seconds, two.seconds, strict=True)
        }
        peers = [name for name in slower if name not in (*SCHEDULES, _ALONE)]
        best = min(peers, key=lambda name: Spread.of(slower[name]).median)
        tokens = one.num_microbatches * GPT_SAMPLES * _CONTEXT
        rows += [
            GptRow(
                name,
                one.num_microbatches,
                Spread.of(tokens / taken for taken in seconds),
                ratios(seconds, slower[best]),
                ratios(seconds, slower[_PEERS[0]]),
                ratios(seconds, slower[_ALONE]),
                one.others_share,
            )
            for name, seconds in slower.items()
        ]
    return rows


class _OneStage(nn.Module):
    """Some units of the model as torch wants a stage: tensors that come in by position, inputs by name."""

    def __init__(self, gpt: _SmallGpt, first: int, end: int) -> None:
        super().__init__()
        self.function = gpt.function(first, end)
        self.held = nn.ParameterList(gpt.weights(self.function.parameters).values())
        self.tables = gpt.weights(self.function.buffers)

    def forward(self, *received: Tensor, **inputs: Tensor) -> Tensor:
        """The loss, or what goes to the next stage."""
        given = dict(zip(self.function.receives, received, strict=False)) | inputs
        parameters = dict(zip(self.function.parameters, self.held, strict=True))
        (made,) = self.function(parameters, self.tables, given, device=CPU).values()
        return made


def _torch(kind: str, world: World, gpt: _SmallGpt, num_microbatches: int) -> Contender:
    from torch.distributed.pipelining import PipelineStage

    (cut,) = gpt.cuts
    batch = gpt.batch(num_microbatches)
    is_last = world.rank == 1
    module = _OneStage(gpt, cut, len(gpt.units)) if is_last else _OneStage(gpt, 0, cut)
    width = next(iter(gpt.weights([gpt.graph.parameters[0].name]).values())).shape[-1]
    crossing = torch.empty(GPT_SAMPLES, _CONTEXT, width, device="meta", requires_grad=True)
    ids = torch.empty(GPT_SAMPLES, _CONTEXT, device="meta", dtype=torch.int64)
    stage = PipelineStage(
        _ById(module) if not is_last else module,
        world.rank,
        GPT_RANKS,
        CPU,
        input_args=(crossing if is_last else ids,),
        output_args=(torch.empty((), device="meta", requires_grad=True) if is_last else crossing,),
    )
    keywords = {name: batch[name] for name in module.function.inputs} if is_last else {}
    feed = TorchFeed((batch["input_ids"],), batch["labels"], keywords)
    is_class = kind not in SCHEDULES
    chosen = kind if is_class else Plan(gpt.cuts, num_microbatches, kind).program(1)
    return torch_run(chosen, [stage], num_microbatches, _as_it_is, feed, optimizer=torch.optim.AdamW)


class _ById(nn.Module):
    """The first stage, which takes the tokens by position."""

    def __init__(self, inside: _OneStage) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, input_ids: Tensor) -> Tensor:
        """What goes to the next stage."""
        made: Tensor = self.inside(input_ids=input_ids)
        return made


def _as_it_is(loss: Tensor, _target: Tensor) -> Tensor:
    return loss


@dataclass(frozen=True, slots=True)
class _Alone:
    """The whole model on the first rank with two threads, while the other one waits."""

    name: str
    world: World
    stage: _OneStage
    num_microbatches: int
    batch: Mapping[str, Tensor]

    def window(self, counted: int) -> CountedWindow:
        return CountedWindow(1, counted)

    def ends_s(self, num_batches: int) -> list[float]:
        ends: list[float] = []
        if self.world.rank == 0:
            torch.set_num_threads(GPT_RANKS)
            ends = self._train(num_batches)
            torch.set_num_threads(1)
        shared = [ends]
        dist.broadcast_object_list(shared, 0)
        return shared[0]

    def _train(self, num_batches: int) -> list[float]:
        optimizer = torch.optim.AdamW(self.stage.parameters(), lr=LR)
        ends = []
        for _ in range(num_batches):
            for place in range(self.num_microbatches):
                rows = slice(place * GPT_SAMPLES, (place + 1) * GPT_SAMPLES)
                loss = self.stage(**{name: value[rows] for name, value in self.batch.items()})
                (loss / self.num_microbatches).backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(perf_counter())
        return ends
