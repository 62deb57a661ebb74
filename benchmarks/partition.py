"""How well chains are cut and how long it takes, beside other planners and the published figures.

    python benchmarks/partition.py [--quick]

The profiles are of arithmetic alone, as in the published example: GPT-2 with 1,024 tokens and 50,304 words,
in MFLOPs, a backward three times the forward. The embedding looks up and multiplies nothing, which counts as
one. Times of planning are processor time, the least of several, as the machine has other work too.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from bireme.plan.partition.autopipe import autopipe
from bireme.plan.partition.balance import balance_of, sigma_ratio
from bireme.plan.partition.baselines import BASELINES
from bireme.plan.partition.chain import Chain, chain_of_numbers, layer_bounds
from bireme.plan.partition.exact import exact
from bireme.plan.partition.line import Line, Link
from bireme.plan.partition.loads import Loads, Recompute, Setting, loads_of
from bireme.plan.partition.partition import Partition, assess
from bireme.plan.partition.recurrence import iterate

WORDS, TOKENS = 50_304, 1_024
LIMIT_MS = 50


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
    return loads_of(chain, Line.equal(num_stages), Setting("1f1b", 2 * num_stages))


def batch_s(partition: Partition, num_microbatches: int) -> float:
    forward_s = np.array([stage.forward_s for stage in partition.stages])
    backward_s = np.array([stage.backward_s for stage in partition.stages])
    return float(iterate(forward_s, backward_s, num_microbatches).seconds[0])


def granularity(console: Console) -> None:
    table = Table(
        title="1F1B, twice as many micro-batches as stages: T / ideal (the released one, and how far)",
        title_justify="left",
        box=None,
    )
    for heading in ("model", "stages", "layers, pace", "layers, search", "halves, pace", "halves, search"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for model in MODELS:
        halves, p = halves_of(model), model.num_stages
        work = float((halves.forward_s + halves.backward_s).sum())
        ideal_s = (2 * p + p - 1) * work / p
        ratios = []
        for chain in (halves.merged(layer_bounds(halves.names)), halves):
            found = autopipe(loads_for(chain, p))
            if found is not None:
                ratios += [found.start_batch_s / ideal_s, found.batch_s / ideal_s]
        pairs = zip(ratios, model.known, strict=True)
        cells = [f"{ours:.4f} ({known:.3f}, {ours / known - 1:+.1%})" for ours, known in pairs]
        table.add_row(model.name, str(p), *cells)
    console.print(table)


def planners(console: Console, depths: Sequence[int]) -> None:
    table = Table(
        title="Planners that cut at layers, beside ours at half-layers: both objectives",
        title_justify="left",
        box=None,
    )
    ours = ("σ / σ of exact", "σ / σ of autopipe", "T / T of autopipe")
    for heading in ("model", "stages", "planner", "σ / mean", *ours):
        table.add_column(heading, justify="left" if heading in ("model", "planner") else "right")
    for model in MODELS:
        halves = halves_of(model)
        bounds = layer_bounds(halves.names)
        for p in depths:
            loads = loads_for(halves, p)
            layers = loads_for(halves.merged(bounds), p)
            found, flattest = autopipe(loads), exact(loads)
            if found is None or not isinstance(flattest, Partition):
                continue
            cut = {name: tuple(bounds[c] for c in planner(layers)) for name, planner in BASELINES.items()}
            every = {name: assess(loads, cuts) for name, cuts in cut.items()}
            every |= {"exact": flattest, "autopipe": found.partition}
            for name, partition in every.items():
                table.add_row(
                    model.name,
                    str(p),
                    name,
                    f"{balance_of(partition).variation:.3f}",
                    f"{sigma_ratio(partition, flattest):.2f}×",
                    f"{sigma_ratio(partition, found.partition):.2f}×",
                    f"{batch_s(partition, 2 * p) / found.batch_s:.3f}",
                )
    console.print(table)


def least_ms(action: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        begin = time.process_time()
        action()
        taken.append(time.process_time() - begin)
    return min(taken) * 1e3


def planning_times(console: Console, repeats: int) -> None:
    table = Table(
        title=f"Planning, processor time; the limit is {LIMIT_MS} ms", title_justify="left", box=None
    )
    for heading in ("units", "stages", "devices", "tables", "exact", "autopipe", "tables + exact"):
        table.add_column(heading, justify="left" if heading == "devices" else "right")
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
        unequal = Line.equal(num_stages, speeds=speeds, memory_bytes=3e4, link=Link(1e3))
        for what, line in (("equal", Line.equal(num_stages)), ("unequal, short of memory", unequal)):
            setting = Setting("1f1b", 2 * num_stages, Recompute.WHERE_NEEDED)
            loads = loads_of(chain, line, setting)  # the schedule's program is made once and kept
            taken = [
                least_ms(partial(loads_of, chain, line, setting), repeats),
                least_ms(partial(exact, loads), repeats),
                least_ms(partial(autopipe, loads), repeats),
            ]
            cells = [f"{ms:.1f} ms" for ms in (*taken, taken[0] + taken[1])]
            table.add_row(str(num_units), str(num_stages), what, *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and depths")
    quick = parser.parse_args().quick
    console = Console(width=140)
    granularity(console)
    console.print()
    planners(console, (8,) if quick else (4, 8, 12))
    console.print()
    planning_times(console, 3 if quick else 9)


if __name__ == "__main__":
    main()
