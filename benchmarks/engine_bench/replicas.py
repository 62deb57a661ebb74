"""Two replicas of a pipeline on two hosts with a slow link: how much of the gradient sum overlaps with work.

Each host has one replica, so only the sums cross the link. A stage carries ballast: parameters whose
gradients cost nothing to make and much to send. The same pipeline is trained with ballast and without, in
turn, and the sums are timed alone; what the ballast adds to a batch is what was not hidden.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
import torch.distributed as dist

from benchmarks.common.hosts import CARD, Host, NoHosts, slow_hosts
from benchmarks.common.verdicts import Spread
from benchmarks.engine_bench.contenders import Contender, Ours, closing, say, take_turns
from benchmarks.engine_bench.emulated import StagePace, emulated_model
from bireme.plan.plan import Plan
from bireme.runtime.fabric import DistFabric
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.settings import PipelineSettings
from bireme.runtime.world import World

_ROOT = str(Path(__file__).resolve().parents[2])
"""The folder that `benchmarks` is imported from."""
_MEGABITS_PER_S = 100.0
_DEPTH, WIDTH, NUM_MICROBATCHES = 2, 2, 8
PACE = StagePace(0.010, 0.020)
BALLAST = 262_144
"""1 MiB in float32 for each stage."""
SCHEDULES = ("2bw", "1f1b")
_COUNTED, _ROUNDS = 4, 3
PORT = "29400"
"""On a host of its own every port is free."""
_LIMIT_S = 180.0


@dataclass(frozen=True, slots=True)
class _Hidden:
    """One schedule: what a batch takes with and without it, and the share of it that hides."""

    schedule: str
    with_sum_s: Spread
    without_sum_s: Spread
    hidden_share: Spread


@dataclass(frozen=True, slots=True)
class Replicas:
    """All of it, or why there is nothing. `sum_s` is how long the sum takes alone."""

    skipped: str | None
    megabits_per_s: float = _MEGABITS_PER_S
    sum_s: float = 0.0
    rows: tuple[_Hidden, ...] = ()


@dataclass(frozen=True, slots=True)
class _Times:
    """What a rank writes down: seconds of sums alone, and of batches by contender."""

    sums: list[float]
    batches: dict[str, list[float]]


def measure_replicas() -> Replicas:
    """Make the hosts, run the ranks on them, and put together what they found."""
    try:
        with slow_hosts(WIDTH, _MEGABITS_PER_S) as hosts, TemporaryDirectory() as folder:
            by_rank = _run_ranks(hosts, Path(folder))
    except NoHosts as reason:
        return Replicas(skipped=str(reason))
    sum_s = Spread.of(max(same) for same in zip(*(times.sums for times in by_rank), strict=True)).median
    slowest = {
        name: [max(same) for same in zip(*(times.batches[name] for times in by_rank), strict=True)]
        for name in by_rank[0].batches
    }
    rows = []
    for schedule in SCHEDULES:
        heavy, light = slowest[_name(schedule, is_heavy=True)], slowest[_name(schedule, is_heavy=False)]
        shown = [1 - (more - less) / sum_s for more, less in zip(heavy, light, strict=True)]
        rows.append(_Hidden(schedule, Spread.of(heavy), Spread.of(light), Spread.of(shown)))
    return Replicas(None, _MEGABITS_PER_S, sum_s, tuple(rows))


def run_replica_rank(folder: Path) -> None:
    """Be one rank, the one that the environment names, and leave what it found in the folder."""
    torch.set_num_threads(1)
    with World.from_environment() as world:
        found = _measure(world)
        half = folder / f"half of {world.rank}"
        half.write_text(json.dumps(asdict(found)))
        half.rename(folder / f"{world.rank}.json")


def _name(schedule: str, *, is_heavy: bool) -> str:
    return f"{schedule} {'with' if is_heavy else 'without'} ballast"


def _run_ranks(hosts: Sequence[Host], folder: Path) -> list[_Times]:
    """Ranks are dealt out replica by replica, so a host has a replica."""
    num_ranks = _DEPTH * WIDTH
    running = []
    try:
        for rank in range(num_ranks):
            host = rank // _DEPTH
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_RANK": str(rank % _DEPTH),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": PORT,
                "GLOO_SOCKET_IFNAME": CARD,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH")))),
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns that addresses have no names
            }
            code = (
                "from pathlib import Path; from benchmarks.engine_bench.replicas import run_replica_rank; "
                f"run_replica_rank(Path({str(folder)!r}))"
            )
            words = [*hosts[host].prefix, sys.executable, "-c", code]
            running.append(subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL))
        for process in running:
            process.wait(_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise NoHosts(f"the ranks on the hosts were not done after {_LIMIT_S:g} s") from error
    finally:
        for process in running:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
    failed = [rank for rank, process in enumerate(running) if process.returncode]
    if failed:
        raise NoHosts(f"rank {failed[0]} on the hosts failed; what it printed says why")
    return [_Times(**json.loads((folder / f"{rank}.json").read_text())) for rank in range(num_ranks)]


def _measure(world: World) -> _Times:
    """On every rank."""
    say(world, f"two replicas over {_MEGABITS_PER_S:g} Mbit/s")
    world.join_torch()
    fabric = DistFabric(world)
    contenders: list[Contender] = []
    for schedule in SCHEDULES:
        for is_heavy in (True, False):
            model = emulated_model(_DEPTH, PACE, num_ballast=BALLAST if is_heavy else 1)
            pipeline = Pipeline(
                model.graph,
                Plan(model.cuts, NUM_MICROBATCHES, schedule, width=WIDTH),
                fabric,
                weights=model.weights,
                optimizer="sgd",
                settings=PipelineSettings(resolve=model.resolve),
            )
            batch = model.batch(WIDTH * NUM_MICROBATCHES)
            contenders.append(Ours(_name(schedule, is_heavy=is_heavy), pipeline, batch))
    with closing(contenders):
        sums = _sums_alone(world)
        seconds = take_turns(contenders, counted=_COUNTED, rounds=_ROUNDS).seconds
    named = {one.name: own for one, own in zip(contenders, seconds, strict=True)}
    return _Times(sums, named)


def _sums_alone(world: World) -> list[float]:
    """How long it takes all ranks at once to sum up a stage's gradients with their replicas."""
    groups = [dist.new_group([stage, stage + _DEPTH]) for stage in range(_DEPTH)]
    own = groups[world.rank % _DEPTH]
    found = []
    for _ in range(1 + _ROUNDS):
        gradients = torch.zeros(BALLAST)
        dist.barrier()
        begin_s = perf_counter()
        dist.all_reduce(gradients, group=own)
        found.append(perf_counter() - begin_s)
    return found[1:]
