"""How well chains are cut and how long it takes, compared with other planners and the published figures.

    python benchmarks/partition.py [--quick] [--json]

The profiles are of arithmetic alone, as in the published example: GPT-2 with 1,024 tokens and 50,304 words,
in MFLOPs, a backward three times the forward. The embedding looks up and multiplies nothing, which counts as
one. Times of planning are processor time, the least of several, as the machine has other work too.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark
from benchmarks.common.verdicts import Verdict, at_least, at_most
from benchmarks.made_up.chains import chain_of_numbers, equal_devices
from benchmarks.partitioners.balance import balance_of, sigma_ratio
from benchmarks.partitioners.baselines import BASELINES
from bireme.plan.partition.autopipe import autopipe, iterate
from bireme.plan.partition.chain import Chain, layer_bounds
from bireme.plan.partition.loads import Loads, Recompute, RowLink, StageSetting, loads_of
from bireme.plan.partition.partition import Partition, assess, exact

WORDS, TOKENS = 50_304, 1_024
MOST_MS = 50.0
MOST_WORSE = 0.002
LEAST_BALANCE = 2.73
"""The least that AutoPipe's paper reports."""
GRAINS = (("layers", "pace"), ("layers", "search"), ("half-layers", "pace"), ("half-layers", "search"))


@dataclass(frozen=True, slots=True)
class Model:
    """A GPT-2, its depth, and T / ideal of the released planner for layers (pace, search) and half-layers."""

    name: str
    layers: int
    width: int
    num_stages: int
    known: tuple[float, ...]


MODELS = (
    Model("GPT-2 345M", 24, 1_024, 8, (1.100, 1.051, 1.024, 1.017)),
    Model("GPT-2 1.3B", 24, 2_048, 12, (1.255, 1.160, 1.135, 1.073)),
    Model("GPT-2 762M", 36, 1_280, 12, (1.153, 1.076, 1.068, 1.038)),
)


def halves_of(model: Model) -> Chain:
    width = model.width
    attention = TOKENS * (8 * width**2 + 4 * TOKENS * width) // 10**6
    feed_forward = TOKENS * 16 * width**2 // 10**6
    head = TOKENS * 2 * WORDS * width // 10**6
    forward = [1, *([attention, feed_forward] * model.layers), head]
    halves = [f"layers.{k}.{half}" for k in range(model.layers) for half in ("attention", "feed_forward")]
    table = 2 * WORDS * width
    return chain_of_numbers(
        forward,
        [3 * one for one in forward],
        names=["embedding", *halves, "head"],
        parameter_bytes=[table, *([8 * width**2, 16 * width**2] * model.layers), table],
        boundary_bytes=2 * TOKENS * width,
    )


def loads_for(chain: Chain, num_stages: int) -> Loads:
    return loads_of(chain, equal_devices(num_stages), StageSetting("1f1b", 2 * num_stages))


def batch_s(partition: Partition, num_microbatches: int) -> float:
    forward_s = np.array([stage.forward_s for stage in partition.stages])
    backward_s = np.array([stage.backward_s for stage in partition.stages])
    return float(iterate(forward_s, backward_s, num_microbatches).seconds[0])


def granularity() -> Section:
    """1F1B, twice as many micro-batches as stages; `known` is what the released planner gives."""
    rows = []
    for model in MODELS:
        halves, p = halves_of(model), model.num_stages
        work = float((halves.forward_s + halves.backward_s).sum())
        ideal_s = (2 * p + p - 1) * work / p
        ratios = []
        for chain in (halves.merged(layer_bounds(halves.names)), halves):
            found = autopipe(loads_for(chain, p))
            if found is not None:
                ratios += [found.start_batch_s / ideal_s, found.batch_s / ideal_s]
        for (cut_at, searched), ours, known in zip(GRAINS, ratios, model.known, strict=True):
            rows.append(
                {
                    "model": model.name,
                    "stages": p,
                    "cut_at": cut_at,
                    "search": searched,
                    "time_over_ideal": ours,
                    "known": known,
                    "error": ours / known - 1,
                }
            )
    return Section("AutoPipe's search: seconds of a batch over the ideal", rows)


def planners(depths: Sequence[int]) -> Section:
    """Planners that cut at layers, compared with ours at half-layers."""
    rows = []
    for model in MODELS:
        halves = halves_of(model)
        bounds = layer_bounds(halves.names)
        for p in depths:
            loads = loads_for(halves, p)
            layers = loads_for(halves.merged(bounds), p)
            found, flattest = autopipe(loads), exact(loads)
            if found is None or not flattest.fits:
                continue
            cut = {name: tuple(bounds[c] for c in planner(layers)) for name, planner in BASELINES.items()}
            every = {name: assess(loads, cuts) for name, cuts in cut.items()}
            every |= {"exact": flattest, "autopipe": found.partition}
            for name, partition in every.items():
                rows.append(
                    {
                        "model": model.name,
                        "stages": p,
                        "planner": name,
                        "sigma_over_mean": balance_of(partition).variation,
                        "sigma_over_exact": sigma_ratio(partition, flattest),
                        "sigma_over_autopipe": sigma_ratio(partition, found.partition),
                        "time_over_autopipe": batch_s(partition, 2 * p) / found.batch_s,
                    }
                )
    return Section("Planners that cut at layers, compared with ours at half-layers: both objectives", rows)


def least_ms(action: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        begin = time.process_time()
        action()
        taken.append(time.process_time() - begin)
    return min(taken) * 1e3


def planning_times(repeats: int) -> Section:
    rows = []
    random = np.random.default_rng(0)
    for num_units, num_stages in ((50, 8), (100, 16), (200, 32)):
        forward_s = random.uniform(0.5, 2, num_units)
        chain = chain_of_numbers(
            forward_s.tolist(),
            (2 * forward_s).tolist(),
            parameter_bytes=1_000,
            kept_bytes=100,
            boundary_bytes=10,
        )
        speeds = random.uniform(0.5, 1, num_stages).tolist()
        unequal = equal_devices(num_stages, speeds=speeds, memory_bytes=3e4, link=RowLink(1e3))
        for what, line in (("equal", equal_devices(num_stages)), ("unequal, short of memory", unequal)):
            setting = StageSetting("1f1b", 2 * num_stages, Recompute.WHERE_NEEDED)
            loads = loads_of(chain, line, setting)  # the schedule's program is made once and kept
            tables_ms, exact_ms, autopipe_ms = (
                least_ms(action, repeats)
                for action in (
                    partial(loads_of, chain, line, setting),
                    partial(exact, loads),
                    partial(autopipe, loads),
                )
            )
            rows.append(
                {
                    "devices": what,
                    "units": num_units,
                    "stages": num_stages,
                    "tables_ms": tables_ms,
                    "exact_ms": exact_ms,
                    "autopipe_ms": autopipe_ms,
                    "tables_and_exact_ms": tables_ms + exact_ms,
                }
            )
    return Section("Planning, processor time", rows)


def verdicts(grains: Section, cuts: Section, times: Section) -> Iterator[Verdict]:
    worse = max(row["error"] for row in grains.rows)
    yield at_most("time over the ideal, above that of the released planner", worse, MOST_WORSE)
    for planner in ("dapple", "piper"):
        worse = min(row["sigma_over_autopipe"] for row in cuts.rows if row["planner"] == planner)
        yield at_least(f"times that {planner} is less balanced than autopipe, at least", worse, LEAST_BALANCE)
    for row in times.rows:
        if row["units"] == 200:
            for what in ("tables_and_exact_ms", "autopipe_ms"):
                yield at_most(f"200 units on 32 devices, {row['devices']}: {what}", row[what], MOST_MS)


def measure(asked: Namespace) -> Findings:
    grains = granularity()
    cuts = planners((8,) if asked.quick else (4, 8, 12))
    times = planning_times(3 if asked.quick else 9)
    return Findings([grains, cuts, times], list(verdicts(grains, cuts, times)))


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="fewer repeats and depths")
