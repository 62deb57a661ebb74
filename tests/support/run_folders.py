"""Run folders made up for tests: with real plans and timelines, and curves that look like training."""

import json
import math
import os
import random
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import load_cluster, save_cluster
from bireme.plan.forecast import Forecast, StageForecast
from bireme.plan.plan import Plan
from bireme.plan.plan_file import PlannedUnit, SavedPlan, write_plan
from bireme.report.timeline_document import write_recorded
from bireme.simulate.costs import Costs
from bireme.simulate.links import cluster_network
from bireme.simulate.simulator import simulate
from bireme.timeline.timeline import RankTimeline, Timeline

__all__ = [
    "DEVICES",
    "LEARNS",
    "RECOVERY",
    "WRITTEN_S",
    "lines_of",
    "make_run",
    "plan_of",
    "run_with_replicas",
    "timelines_of",
    "write_lines",
]

GIB = 2**30
WRITTEN_S = 1_790_000_000.0
"""When every made-up run wrote its last line."""

DEVICES = ("fast/gpu0", "fast/gpu1", "slow/gpu0", "slow/gpu1")
NUM_UNITS = 12
BATCH_S = 0.24
STAGES = ((0, 4, 0.21), (4, 8, 0.19), (8, 10, 0.22), (10, 12, 0.16))
"""First unit, end, and the busy seconds of a batch."""

LEARNS: dict[str, Any] = {
    "sources": ["texts/of/the/run.txt", "hf:owner/name"],
    "num_files": 12,
    "num_tokens": 123_456_789,
    "num_samples": 98_765,
    "num_evaluation_samples": 1234,
    "epochs": 1.25,
    "num_parameters": 7_000_000_000,
    "num_learning_parameters": 20_000_000,
    "tokenizer": "owner/tokenizer",
    "length": 1024,
    "loss_on": "answers only",
}
"""What a run learns from, as its start lists it."""

RECOVERY = {"replica": 1, "detect_s": 2.1, "transfer_s": 0.8, "catch_up_s": 1.5}

RUN_FILE = """format = 1

[model]
source = "gpt:layers=12,width=512"
dtype = "float32"

[training]
steps = 300
batch_size = 32
learning_rate = 0.001
"""


def make_run(
    folder: Path,
    *,
    seed: int = 0,
    steps: int = 300,
    evaluated: bool = True,
    killed: bool = False,
    recorded: bool = True,
    with_plan: bool = True,
) -> Path:
    """A run folder. One that was killed has half a last line, and neither a stop nor a summary."""
    folder.mkdir(parents=True)
    lines = list(lines_of(steps, seed=seed, evaluated=evaluated, killed=killed))
    write_lines(folder, lines, half_line=killed)
    (folder / "run.toml").write_text(RUN_FILE)
    if with_plan:
        write_plan(folder / "plan.json", plan_of())
        save_cluster(_cluster(), folder / "cluster.toml")
    if recorded and with_plan:
        predicted, measured = timelines_of(seed)
        write_recorded(predicted, folder / "timeline-predicted.json")
        write_recorded(measured, folder / "timeline-measured.json")
    if not killed:
        (folder / "summary.json").write_text(json.dumps(_summary(folder, steps, evaluated=evaluated)))
    return folder


def run_with_replicas(folder: Path) -> Path:
    """Two replicas of a pipeline of four stages, of which one was lost and came back, and one was lost."""
    make_run(folder, recorded=False)
    saved = plan_of()
    devices = tuple((first, f"a-server-with-a-long-name/{first[5:]}") for first in DEVICES)
    write_plan(folder / "plan.json", replace(saved, plan=replace(saved.plan, devices=devices, width=2)))
    start, *lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    start |= {"width": 2, "devices": [names[replica] for replica in range(2) for names in devices]}
    shares = [(0, [16, 16]), (100, [32, 0]), (160, [20, 12]), (250, [0, 32])]
    changed = [
        {"kind": "shares", "step": step, "time_s": step / 4 + 0.1, "shares": own} for step, own in shares
    ]
    back = {"kind": "recovery", "step": 161, "time_s": 40.2, **RECOVERY}
    write_lines(folder, [start | {"learns": LEARNS}, *changed, back, *lines])
    return folder


def write_lines(folder: Path, lines: list[dict[str, Any]], *, half_line: bool = False) -> None:
    """A metrics file, written at a known time."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path = folder / "metrics.jsonl"
    path.write_text(text + ('{"kind":"train","step":1' if half_line else ""))
    os.utime(path, (WRITTEN_S, WRITTEN_S))


def lines_of(
    steps: int, *, seed: int = 0, evaluated: bool = True, killed: bool = False
) -> Iterator[dict[str, Any]]:
    """What a run writes down step by step."""
    draw = random.Random(seed)
    yield {
        "kind": "start",
        "step": 0,
        "time_s": 0.0,
        "version": "0.1.0",
        "torch": "2.13.0",
        "schedule": "2bw",
        "num_stages": 4,
        "width": 1,
        "devices": list(DEVICES),
        "predicted_batch_s": BATCH_S,
    }
    for step in range(1, steps + 1):
        time_s = step * BATCH_S * 1.04
        yield _training_line(step, time_s, steps, draw, speed=1 + 0.1 * seed)
        if evaluated and step % max(steps // 10, 1) == 0:
            loss = _loss(step, steps, 1 + 0.1 * seed) + 0.05
            yield {"kind": "evaluation", "step": step, "time_s": time_s, "loss": loss, "num_samples": 64}
        if step % max(steps // 5, 1) == 0:
            what = {"stall_s": 0.012, "write_s": 0.8, "num_bytes": 612_000_000}
            yield {"kind": "checkpoint", "step": step, "time_s": time_s, **what}
        if step == steps // 3:
            text = "fast/gpu1 was 31% slower than planned for 20 s <again>."
            yield {"kind": "warning", "step": step, "time_s": time_s, "text": text}
    if not killed:
        time_s = steps * BATCH_S * 1.04
        yield {"kind": "stop", "step": steps, "time_s": time_s, "reason": "finished"}


def _training_line(step: int, time_s: float, steps: int, draw: random.Random, speed: float) -> dict[str, Any]:
    warm = min(step / (0.1 * steps), 1.0)
    rate = 1e-3 * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    seconds = BATCH_S * 1.04 * draw.uniform(0.97, 1.05) * (1.6 if draw.random() < 0.01 else 1.0)
    return {
        "kind": "train",
        "step": step,
        "time_s": time_s,
        "loss": _loss(step, steps, speed) + draw.gauss(0, 0.08),
        "grad_norm": 4 / (1 + step / (0.05 * steps)) + draw.uniform(0.4, 0.8),
        "learning_rate": rate,
        "tokens_per_s": 32 * 512 / seconds,
        "samples_per_s": 32 / seconds,
        "seconds": seconds,
        "num_skipped": 1 if step in (steps // 7, steps // 2) else 0,
        "memory_bytes": [int(share * GIB) for share in (5.9, 4.6, 6.4, 5.3)],
    }


def _loss(step: int, steps: int, speed: float) -> float:
    return 1.6 + 4.2 * math.exp(-6 * speed * step / steps) + 0.6 * math.exp(-2 * step / steps)


def plan_of() -> SavedPlan:
    """Four stages on four devices of two servers."""
    plan = Plan(
        cuts=tuple(begin for begin, _, _ in STAGES[1:]),
        num_microbatches=4,
        schedule="2bw",
        devices=tuple((name,) for name in DEVICES),
    )
    stages = tuple(
        StageForecast(begin, end, (device,), False, busy_s, peak * GIB, limit * GIB)
        for (begin, end, busy_s), device, peak, limit in zip(
            STAGES, DEVICES, (6.0, 4.7, 6.2, 5.4), (8, 8, 8, 8), strict=True
        )
    )
    share = sum(busy_s for _, _, busy_s in STAGES) / len(STAGES) / BATCH_S
    forecast = Forecast(BATCH_S, 32 / BATCH_S, 1.0, share, "slow/gpu0", stages)
    units = tuple(
        PlannedUnit(f"blocks.{place // 2}.{'ab'[place % 2]}", "0" * 8) for place in range(NUM_UNITS)
    )
    return SavedPlan(plan, forecast, units=units)


def timelines_of(seed: int = 0, num_batches: int = 4) -> tuple[Timeline, Timeline]:
    """What a simulator foretold of a few batches, and a made-up measurement of them."""
    cluster = _cluster()
    program = plan_of().plan.program(num_batches)
    costs = Costs.per_stage(
        4,
        forward_s=[busy_s / 12 for _, _, busy_s in STAGES],
        backward_s=[busy_s / 6 for _, _, busy_s in STAGES],
        update_s=0.004,
        message_bytes=4e6,
        weight_bytes=0.9e9,
        gradient_bytes=0.9e9,
        optimizer_bytes=1.8e9,
        stash_bytes=0.3e9,
        input_bytes=4e6,
    )
    network = cluster_network(cluster, program, [cluster.number_of(name) for name in DEVICES])
    predicted = simulate(program, costs, network, agree=True)
    return predicted, _slower(predicted, random.Random(seed))


def _slower(timeline: Timeline, draw: random.Random) -> Timeline:
    """The same order of events with a clock that runs unevenly, and no messages, as the engine measures."""
    moments = sorted({moment for rank in timeline.ranks for moment in (*rank.start_s, *rank.end_s)})
    later: dict[float, float] = {}
    before = at = 0.0
    for moment in moments:
        at += (moment - before) * draw.uniform(0.95, 1.16)
        before = moment
        later[moment] = at
    ranks = tuple(
        RankTimeline(
            rank.rank,
            rank.track,
            array("d", (later[moment] for moment in rank.start_s)),
            array("d", (later[moment] for moment in rank.end_s)),
        )
        for rank in timeline.ranks
    )
    return replace(timeline, ranks=ranks, transfers=(), source="measured")


def _cluster() -> Cluster:
    return load_cluster("two-unequal-servers")


def _summary(folder: Path, steps: int, *, evaluated: bool) -> dict[str, Any]:
    parts = {"weights": 0.15, "gradients": 0.15, "optimizer": 0.3, "activations": 0.34, "buffers": 0.06}
    stages = [
        {
            "units": [begin, end - 1],
            "device": device,
            "predicted_peak_bytes": peak * GIB,
            "measured_peak_bytes": seen * GIB,
            "busy_share": busy_s / BATCH_S * 0.95,
            "predicted_busy_share": busy_s / BATCH_S,
            "bytes": {name: share * peak * GIB for name, share in parts.items()},
        }
        for (begin, end, busy_s), device, peak, seen in zip(
            STAGES, DEVICES, (6.0, 4.7, 6.2, 5.4), (5.9, 4.6, 6.4, 5.3), strict=True
        )
    ]
    return {
        "steps": steps,
        "train_loss": 1.713,
        "eval_loss": 1.742 if evaluated else None,
        "tokens_per_s": 65_432.1,
        "predicted_batch_s": BATCH_S,
        "measured_batch_s": BATCH_S * 1.04,
        "stages": stages,
        "run_dir": str(folder),
        "schedule": "2bw",
        "why": ["2bw keeps all four devices busy; gpipe would take 1.6 times as long."],
        "sample": "def main():\n    return 0  # <end>",
    }
