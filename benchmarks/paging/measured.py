"""Paging as it runs: training state on a disk under a limit of memory, and an emulated wire to the host.

Every run is in a process of its own. The kernel says what was resident at most. A disk is as fast as its
files are in the same process right before and after training, with the same chunks.
"""

import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any
from weakref import WeakKeyDictionary

import torch

from benchmarks.common.verdicts import resident_bytes
from bireme.cluster.device import EngineCost
from bireme.memory.disk_tier import DiskTier
from bireme.memory.system_memory import pages
from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.model.sources import load_source
from bireme.model.units import units_of
from bireme.model.weights import materialize
from bireme.plan.plan import Paging, Plan
from bireme.runtime.paging.chunk_store import PagingSettings
from bireme.runtime.paging.mover import CopyJob, ThreadMover, Wire
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.settings import PipelineSettings, named_optimizer
from bireme.schedule.accesses import Sizes
from bireme.schedule.budgets import Budgets
from bireme.schedule.instruction import PAGING, Kind
from bireme.schedule.tiers import best_chunk_bytes
from bireme.simulate.copies import TierLinks
from bireme.simulate.costs import Costs
from bireme.simulate.simulator import simulate

__all__ = ["BATCHES", "Case", "Trained", "on_disk", "over_a_wire", "without_paging"]

AHEAD = (0, 1, 2, 4)
"""Instructions ahead of their use that chunks are fetched, of which the simulator takes the best."""
BATCHES = 5
TESTED_BYTES = 2**29
"""That the speed of the disk is taken with, each way and time."""
PLENTY = 1 << 50


@dataclass(frozen=True, slots=True)
class Case:
    """A GPT of layers that are a stage each, all on one rank, trained in float32 by AdamW."""

    num_layers: int
    width: int
    context: int
    samples: int
    device_bytes: int

    @property
    def source(self) -> str:
        return f"gpt:layers={self.num_layers},width={self.width},heads=8,vocab=256,context={self.context}"

    def graph(self) -> Graph:
        made = load_source(f"{self.source},tied=false", batch=self.samples, dtype="float32")
        return capture(made.model, made.example_inputs)

    def plan(self, graph: Graph) -> Plan:
        num_units = len(units_of(graph))
        cuts = tuple(range(3, num_units - 2, 2))[: self.num_layers - 1]
        num = len(cuts) + 1
        return Plan(cuts, 1, "1f1b", stages_per_rank=num, recompute=tuple(range(num)))

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(BATCHES):
            generator = torch.Generator().manual_seed(number)
            ids = torch.randint(256, (self.samples, self.context), generator=generator)
            yield {"input_ids": ids, "labels": ids}


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run measured. `processor_s` are of a step, all threads together; `seconds` are those of each
    kind of instruction, by stage; `instruction_s` is what one takes that only posts a copy.
    """

    step_s: float
    processor_s: float
    resident_bytes: int
    before_bytes: int
    losses: tuple[float, ...]
    seconds: dict[str, tuple[float, ...]]
    moved: tuple[dict[str, Any], ...] = ()
    instruction_s: float = 0.0
    predicted_s: float = 0.0
    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0


def without_paging(case: Case, clip_norm: float | None) -> Trained:
    """The resident run."""
    torch.set_num_threads(1)
    graph = case.graph()
    return _trained(case, graph, case.plan(graph), PagingSettings(), clip_norm)


def on_disk(
    case: Case, resident: Trained, most_bytes: int | None, clip_norm: float | None, *, is_apart: bool
) -> Trained:
    """The run with the disk right beneath the device tier; with no more private memory than given. Stages
    step together, or apart.
    """
    torch.set_num_threads(1)
    graph = case.graph()
    plan = case.plan(graph)
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        sizes = _sizes(graph, plan)
        chunk_bytes = _chunk_bytes(max(sizes.version))
        before = _disk_speed(Path(folder), chunk_bytes)
        links = TierLinks(disk_bytes_per_s=2 / (1 / before[0] + 1 / before[1]))
        budgets = Budgets(case.device_bytes, 0, PLENTY)
        paged, predicted_s = _best(plan, sizes, budgets, chunk_bytes, resident, links, is_apart=is_apart)
        trained = _trained(case, graph, paged, PagingSettings(Path(folder)), clip_norm)
        after = _disk_speed(Path(folder), chunk_bytes)
    return replace(
        trained,
        predicted_s=predicted_s,
        read_bytes_per_s=fmean((before[0], after[0])),
        write_bytes_per_s=fmean((before[1], after[1])),
    )


def over_a_wire(case: Case, bytes_per_s: float) -> Trained:
    """The run with a host at the end of an emulated wire, and what the simulator makes of it by the seconds
    that its own instructions took.
    """
    torch.set_num_threads(1)
    graph = case.graph()
    plan = case.plan(graph)
    sizes, links = _sizes(graph, plan), TierLinks(host_bytes_per_s=bytes_per_s)
    budgets = Budgets(case.device_bytes)
    chunk_bytes = _chunk_bytes(median(sizes.version))
    paging = Paging((budgets,), sizes, chunk_bytes=(chunk_bytes,), ahead=1, stashes=False)
    paged = replace(plan, paging=paging)
    mover = partial(_PacedMover, links=links)
    trained = _trained(case, graph, paged, PagingSettings(mover=mover))
    return replace(trained, predicted_s=_simulated(paged, trained, links))


def _trained(
    case: Case, graph: Graph, plan: Plan, paging: PagingSettings, clip_norm: float | None = None
) -> Trained:
    made = load_source(f"{case.source},tied=false", batch=case.samples, dtype="float32")
    before = resident_bytes("VmHWM")
    pipeline = Pipeline(
        graph,
        plan,
        weights=lambda names: materialize(made.base, names, seed=1),
        optimizer=named_optimizer("adamw", lr=1e-3),
        settings=PipelineSettings(clip_norm=clip_norm, paging=paging),
    )
    worked_s = time.process_time()
    results = list(pipeline.train(case.batches(), record=True))
    worked_s = time.process_time() - worked_s
    timeline = pipeline.timeline()
    found: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    (rank,) = timeline.ranks
    for step, start_s, end_s in zip(rank.track, rank.start_s, rank.end_s, strict=True):
        if step.batch:  # the first is slow
            key = (Kind.FETCH, 0) if step.kind in PAGING else (step.kind, step.stage)
            found[key].append(end_s - start_s)
    pipeline.close()
    stages = range(plan.num_stages)
    return Trained(
        step_s=timeline.steady_batch_s,
        processor_s=worked_s / BATCHES,
        resident_bytes=resident_bytes("VmHWM"),
        before_bytes=before,
        losses=tuple(result.loss for result in results),
        seconds={
            kind.name: tuple(fmean(found[kind, stage]) for stage in stages)
            for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.UPDATE, Kind.REDUCE)
        },
        instruction_s=fmean(found[Kind.FETCH, 0] or [0.0]),
        moved=tuple(
            {
                "tier": tier.tier,
                "peak_bytes": tier.peak_bytes,
                "predicted_bytes_moved": tier.predicted_bytes_moved,
                "bytes_moved": tier.bytes_moved,
            }
            for tier in pipeline.tiers
        ),
    )


def _sizes(graph: Graph, plan: Plan) -> Sizes:
    """What the stages keep; activations are left out, which recomputation makes few."""
    units, shapes = units_of(graph), {state.name: state.shape for state in graph.parameters}
    weights = []
    for stage in range(plan.num_stages):
        names = {name for index in plan.units_of(stage, len(units)) for name in units[index].parameters}
        weights.append(4.0 * sum(torch.Size(shapes[name]).numel() for name in names))
    nothing = (0.0,) * plan.num_stages
    doubled = tuple(2 * one for one in weights)
    each = tuple(weights)
    return Sizes(each, each, doubled, nothing, nothing, nothing, nothing)


def _chunk_bytes(bank_bytes: float) -> int:
    """A bank of that size is two chunks, so that a program stays short."""
    return best_chunk_bytes({bank_bytes / 2: 1})


def _best(
    plan: Plan,
    sizes: Sizes,
    budgets: Budgets,
    chunk_bytes: int,
    resident: Trained,
    links: TierLinks,
    *,
    is_apart: bool,
) -> tuple[Plan, float]:
    """The plan whose copies cost least time by the simulator, and its seconds a step."""
    best, best_s = plan, float("inf")
    for ahead, together in product(AHEAD, (False,) if is_apart else (False, True)):
        paging = Paging(
            (budgets,), sizes, (chunk_bytes,), ahead, together, stashes=False, updates_apart=is_apart
        )
        tried = replace(plan, paging=paging)
        seconds = _simulated(tried, resident, links)
        if seconds < best_s:
            best, best_s = tried, seconds
    return best, best_s


def _simulated(plan: Plan, trained: Trained, links: TierLinks) -> float:
    """Seconds a step by the clock, with instructions that take what they took."""
    seconds = trained.seconds
    costs = Costs.per_stage(
        plan.num_stages,
        forward_s=seconds["FORWARD"],
        recompute_s=seconds["RECOMPUTE"],
        backward_s=seconds["BACKWARD"],
        update_s=seconds["UPDATE"],
        reduce_busy_s=seconds["REDUCE"],
        engine=EngineCost(instruction_s=trained.instruction_s),
    )
    return simulate(plan.source.program(BATCHES), costs, tier_links=links).steady_batch_s


def _disk_speed(folder: Path, chunk_bytes: int) -> tuple[float, float]:
    """Bytes a second read and written."""
    disk, memory = DiskTier(folder, chunk_bytes), pages(chunk_bytes)
    memory.fill_(1)
    num = max(TESTED_BYTES // chunk_bytes, 1)
    disk.grow(num)
    found = []
    calls: tuple[Callable[[int, torch.Tensor], None], ...] = (disk.write, disk.read)
    for call in calls:
        begin = time.perf_counter()
        for slot in range(num):
            call(slot, memory)
        found.append(num * chunk_bytes / (time.perf_counter() - begin))
    disk.close()
    return found[1], found[0]


class _PacedMover(ThreadMover):
    """Copies that end when they would over a wire: one after the other, each after what it needs.

    A thread that is woken late makes up for it, as a wire would not have waited.
    """

    def __init__(self, device: torch.device, *, links: TierLinks) -> None:
        super().__init__(device)
        self._links = links
        self._free_s: dict[Wire, float] = {}
        self._ends: WeakKeyDictionary[CopyJob, float] = WeakKeyDictionary()

    def post(self, job: CopyJob) -> None:
        copy, needs, posted_s = job.run, job.needs, time.perf_counter()

        def run() -> None:
            begin = max([posted_s, self._free_s.get(job.wire, 0.0), *(self._ends[one] for one in needs)])
            copy()
            end = begin + self._links.seconds("host", job.num_bytes)
            self._free_s[job.wire] = self._ends[job] = end
            time.sleep(max(0.0, end - time.perf_counter()))

        job.run = run
        super().post(job)
