"""Whether the planner keeps its word, and what its plans are worth compared with others, rehearsed with
the engine.

    python benchmarks/planner.py [--quick] [--json] [--cluster NAME …]

On emulated clusters of eight devices every stage is a process that sleeps for as long as it would compute,
and messages come through emulated links; schedule, weights, messages and sums are the real engine's. The
chosen plan is measured and compared with its prediction, with the best of a list of all other shapes,
schedules and partitions, and with the equal and Piper's cuts of the same shape. All take turns; figures are
medians. Three plans with stages of unequal width, made by hand, are measured and compared with what the
simulator predicts of them.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, log
from benchmarks.common.verdicts import Spread, Verdict, at_least, at_most, ratios
from benchmarks.made_up.models import unequal_units
from benchmarks.partitioners.baselines import BASELINES
from benchmarks.rehearsal.rehearsal import Effort, Rehearsal, rehearse
from benchmarks.rehearsal.rehearsed import rehearsed, simulated_s
from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import load_cluster
from bireme.cluster.symmetry import Symmetry
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer
from bireme.plan.partition.autopipe import Cuts, autopipe
from bireme.plan.partition.chain import chain_of
from bireme.plan.partition.loads import (
    DeviceRow,
    DeviceSlot,
    Loads,
    Recompute,
    RowLink,
    StageSetting,
    loads_of,
)
from bireme.plan.partition.partition import assess, exact
from bireme.plan.plan import Plan
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.search import find_plan, forecast_of
from bireme.profile.profile import Profile
from bireme.schedule.catalogue import generate, schedule_named
from bireme.schedule.program import Rule

CLUSTERS = ("emulated-8-equal", "emulated-8-one-slow", "emulated-two-servers", "emulated-two-memories")
QUICK_CLUSTERS = CLUSTERS[1:2]
SCHEDULES = ("1f1b", "2bw", "2bw-fresh", "gpipe", "zb-h1")
BATCH_SIZE = 16

MOST_ERROR = 0.05
MOST_FASTER = 0.03
LEAST_GAIN = 1.2
FAR_BEHIND = 1.25
"""Times the chosen plan's cost: a plan whose busiest device alone takes more is not simulated."""
NUM_RANDOM = 2
"""Random cuts of each shape, in addition to those of planners."""


@dataclass(frozen=True, slots=True)
class Other:
    """A plan of the list, its predicted seconds, and by whom it was cut."""

    name: str
    plan: Plan
    foretold_s: float

    @property
    def cost_s(self) -> float:
        """Seconds of a batch times the steps that its update rule takes for one."""
        return penalised(self.plan, self.foretold_s)


def penalised(plan: Plan, seconds: float) -> float:
    rule = schedule_named(plan.schedule).rule
    shape = plan.num_stages, plan.num_microbatches
    return PlanRequest(BATCH_SIZE).penalty(rule, "adamw", *shape, lookahead=plan.lookahead) * seconds


def orders_of(cluster: Cluster, count: int) -> list[tuple[int, ...]]:
    """Ways to put devices into a row: as they are, in turns, weak ones first, last, in the middle."""
    everyone = tuple(range(cluster.num_devices))
    half = len(everyone) // 2
    turns = tuple(one for pair in zip(everyone[:half], everyone[half:], strict=True) for one in pair)
    rows = [everyone, everyone[::-1], turns]
    devices = [placed.device for placed in cluster.devices()]
    best = max((one.speed, one.memory_bytes) for one in devices)
    weak = [number for number in everyone if (devices[number].speed, devices[number].memory_bytes) < best]
    strong = [number for number in everyone if number not in weak]
    for place in (0, len(strong) // 2, len(strong)):
        rows.append((*strong[:place], *weak, *strong[place:]))
    symmetry = Symmetry(cluster)
    return list(dict.fromkeys(symmetry.canonical(row[:count]) for row in rows))


def loads_for(
    profile: Profile, cluster: Cluster, rows: Sequence[Sequence[int]], size: int, setting: StageSetting
) -> Loads:
    """Those of a pipeline whose rank r runs on the devices `rows[r]`, the slowest of which counts."""
    devices = [[cluster.devices()[one].device for one in row] for row in rows]
    seats = [
        DeviceSlot(f"rank {rank}", min(one.speed for one in row), min(one.memory_bytes for one in row))
        for rank, row in enumerate(devices)
    ]
    links = [RowLink(cluster.bandwidth(a[0], b[0]), cluster.latency(a[0], b[0])) for a, b in pairwise(rows)]
    return loads_of(chain_of(profile, size), DeviceRow(tuple(seats), tuple(links)), setting)


def partitions(loads: Loads, random: np.random.Generator) -> Iterator[tuple[str, Cuts]]:
    """The last of equal ones gives the name."""
    for _ in range(NUM_RANDOM):
        cuts = random.choice(np.arange(1, loads.chain.num_units), loads.num_stages - 1, replace=False)
        yield "random", tuple(sorted(int(cut) for cut in cuts))
    for name, planner in BASELINES.items():
        yield name, planner(loads)
    if schedule_named(loads.setting.schedule).rule is Rule.SYNCHRONOUS:
        found = autopipe(loads)
        if found is not None:
            yield "autopipe", found.partition.cuts
    flattest = exact(loads)
    if flattest.fits:
        yield "exact", flattest.cuts


def settings_of(profile: Profile, cluster: Cluster) -> Iterator[tuple[int, int, int, str, tuple[int, ...]]]:
    """All depths, widths, micro-batch sizes, schedules and rows of devices."""
    for depth in range(1, cluster.num_devices + 1):
        for width in range(1, cluster.num_devices // depth + 1):
            for size in profile.micro_batches:
                if BATCH_SIZE % (width * size):
                    continue
                for schedule in SCHEDULES if depth > 1 else SCHEDULES[:2]:
                    for row in orders_of(cluster, depth * width):
                        yield depth, width, size, schedule, row


def every_plan(profile: Profile, cluster: Cluster, known_s: float) -> list[Other]:
    """All settings with all partitions, the cheapest first.

    Left out are those whose busiest device alone keeps them far behind the cost of a known plan.
    """
    random = np.random.default_rng(0)
    found: dict[Plan, Other] = {}
    names = [placed.name for placed in cluster.devices()]
    for depth, width, size, schedule, row in settings_of(profile, cluster):
        count = BATCH_SIZE // (width * size)
        rows = [row[rank::depth] for rank in range(depth)]
        try:
            generate(schedule, num_stages=depth, num_microbatches=count)
            loads = loads_for(
                profile, cluster, rows, size, StageSetting(schedule, count, Recompute.WHERE_NEEDED)
            )
        except BiremeError:
            continue  # too few micro-batches for the schedule
        for cuts, how in {cuts: how for how, cuts in partitions(loads, random)}.items():
            partition = assess(loads, cuts)
            plan = plan_of(loads, cuts, schedule, count, width, size, rows, names)
            if not partition.fits or penalised(plan, count * partition.pace_s) > FAR_BEHIND * known_s:
                continue
            try:
                seconds = simulated_s(rehearsed(profile, cluster, plan), cluster)
            except BiremeError:
                continue  # a device lacks a few bytes after all
            if width > 1:
                # Replicas meet on links, which the simulation of each alone does not see.
                seconds = forecast_of(plan, profile, cluster, PlanRequest(BATCH_SIZE)).batch_s
            found.setdefault(plan, Other(how, plan, seconds))
    return sorted(found.values(), key=lambda one: one.cost_s)


def plan_of(
    loads: Loads,
    cuts: Cuts,
    schedule: str,
    count: int,
    width: int,
    size: int,
    rows: Sequence[Sequence[int]],
    names: Sequence[str],
) -> Plan:
    bounds = loads.chain.bounds(cuts)
    again = tuple(s for s in range(loads.num_stages) if loads.is_recomputed(s, bounds[s], bounds[s + 1]))
    return Plan(
        cuts,
        count,
        schedule,
        width,
        recompute=again,
        micro_batch_sizes=(size,) * width,
        devices=tuple(tuple(names[one] for one in row) for row in rows),
    )


def alike(plan: Plan, cluster: Cluster) -> Plan:
    """The plan on the devices that represent all equal ones."""
    depth = len(plan.devices)
    row = [
        cluster.number_of(plan.devices[rank][replica])
        for replica in range(plan.width)
        for rank in range(depth)
    ]
    names = [cluster.devices()[number].name for number in Symmetry(cluster).canonical(row)]
    return replace(plan, devices=tuple(tuple(names[rank::depth]) for rank in range(depth)))


def baselines(profile: Profile, cluster: Cluster, chosen: Plan) -> dict[str, Plan]:
    """The chosen schedule on all devices in a row, cut by people's planners.

    They know one stage to a device; where the chosen one has several, theirs is 1f1b.
    """
    schedule = chosen.schedule if chosen.stages_per_rank == 1 else "1f1b"
    size = chosen.micro_batch_sizes[0] if chosen.micro_batch_sizes else profile.micro_batches[0]
    count = BATCH_SIZE // size
    rows = [(one,) for one in range(cluster.num_devices)]
    names = [placed.name for placed in cluster.devices()]
    setting = StageSetting(schedule, count, Recompute.WHERE_NEEDED)
    loads = loads_for(profile, cluster, rows, size, setting)
    return {
        name: plan_of(loads, BASELINES[name](loads), schedule, count, 1, size, rows, names)
        for name in ("uniform", "piper")
    }


@dataclass(frozen=True, slots=True)
class Row:
    """A plan that was measured."""

    cluster: str
    name: str
    schedule: str
    depth: int
    width: int
    micro_batches: int
    measured_s: Spread
    predicted_s: float
    error: float
    cost: Spread
    """The chosen one's penalised time over this one's: more than one says that this is the better plan."""

    def shown(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def row_of(cluster: str, name: str, one: Rehearsal, predicted_s: float, chosen: Rehearsal) -> Row:
    mine = [penalised(one.plan, seconds) for seconds in one.rounds_s]
    best = [penalised(chosen.plan, seconds) for seconds in chosen.rounds_s]
    return Row(
        cluster,
        name,
        one.plan.schedule,
        one.plan.num_stages,
        one.plan.width,
        one.plan.num_microbatches,
        one.measured_s,
        predicted_s,
        predicted_s / one.measured_s.median - 1,
        ratios(mine, best),
    )


def measure(name: str, profile: Profile, most: int, effort: Effort) -> list[Row]:
    """The chosen plan first."""
    cluster = load_cluster(name)
    request = PlanRequest(batch_size=BATCH_SIZE)
    answer = find_plan(profile, cluster, request)
    if not isinstance(answer, Answer):
        raise BiremeError(str(answer))
    chosen = answer.best
    known_s = penalised(chosen.plan, chosen.forecast.batch_s)
    same = alike(chosen.plan, cluster)
    others = [one for one in every_plan(profile, cluster, known_s) if one.plan not in (chosen.plan, same)]
    plans = {"chosen": chosen.plan, **baselines(profile, cluster, chosen.plan)}
    for one in answer.candidates[1 : 1 + most // 3]:
        plans[f"runner-up {len(plans)}"] = one.plan
    for other in spread_out(others, most - len(plans) + 3):
        plans[f"{other.name} {len(plans)}"] = other.plan
    log(
        f"{name}: the search judged {answer.num_tried} plans; {len(others)} others are listed, the best of "
        f"which costs {others[0].cost_s / known_s:.3f} of the chosen one; {len(plans)} are measured"
    )
    measured = rehearse(profile, cluster, list(plans.values()), effort=effort)
    rows = []
    for (title, plan), found in zip(plans.items(), measured, strict=True):
        predicted_s = forecast_of(plan, profile, cluster, request).batch_s
        rows.append(row_of(name, title, found, predicted_s, measured[0]))
    return rows


def spread_out(others: Sequence[Other], most: int) -> list[Other]:
    """The cheapest of all, and the cheapest of every schedule, depth and width, as many as are asked for."""
    kinds: dict[tuple[str, int, int], Other] = {}
    for one in others:
        kinds.setdefault((one.plan.schedule, one.plan.num_stages, one.plan.width), one)
    best = list(kinds.values())[: most - most // 2]
    for one in others:
        if len(best) >= most:
            break
        if one not in best:
            best.append(one)
    return best


def _places(*numbers: int, server: int = 0) -> tuple[str, ...]:
    return tuple(f"server{server}/emulated{number}" for number in numbers)


WIDE_PLANS = {
    "emulated-8-equal": Plan((13,), 12, "1f1b", devices=(_places(0, 1), _places(2)), stage_widths=(2, 1)),
    "emulated-8-one-slow": Plan(
        (4, 15),
        12,
        devices=(_places(0), _places(1, 2, 3), _places(4, 7)),
        stage_widths=(1, 3, 2),
        stage_shares=((12,), (4, 4, 4), (8, 4)),
    ),
    "emulated-two-servers": Plan(
        (15,), 12, devices=(_places(0, 1, 2), _places(0, server=1)), stage_widths=(3, 1)
    ),
}
"""Two devices beside one, a slow device with half the share of its neighbor, and a stage on each server."""
WIDE_UNITS = 20


def measure_wide(effort: Effort) -> Iterator[dict[str, Any]]:
    """Each plan with stages of unequal width, measured and predicted."""
    for name, plan in WIDE_PLANS.items():
        (found,) = rehearse(unequal_units(WIDE_UNITS), load_cluster(name), [plan], effort=effort)
        yield {
            "cluster": name,
            "schedule": plan.schedule,
            "widths": "-".join(map(str, plan.stage_widths)),
            "shares": " ".join("-".join(map(str, share)) for share in plan.shares),
            "measured_s": found.measured_s,
            "predicted_s": found.simulated_s,
            "error": found.error,
        }


def verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    for name in dict.fromkeys(row.cluster for row in rows):
        own = [row for row in rows if row.cluster == name]
        chosen, rest = own[0], own[1:]
        yield at_most(f"{name}: error of the prediction", abs(chosen.error), MOST_ERROR)
        fastest = max(rest, key=lambda row: row.cost.median)
        shape = f"{fastest.schedule}, {fastest.depth} x {fastest.width}"
        better = f"{name}: times that another plan ({fastest.name}, {shape}) is better than the chosen one"
        yield at_most(better, fastest.cost.median, 1 + MOST_FASTER)
        for row in rest:
            if row.name in ("uniform", "piper"):
                least = LEAST_GAIN if name == "emulated-8-one-slow" else 1.0 - MOST_FASTER
                yield at_least(f"{name}: times as fast as {row.name}", 1 / row.cost.median, least)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--cluster", action="append", choices=CLUSTERS, help="only this one; may be repeated")
    parser.add_argument("--most", type=int, help="how many other plans to measure on each cluster")
    parser.add_argument("--widths", action="store_true", help="only the plans with stages of unequal width")


def measured(asked: Namespace) -> Findings:
    most = asked.most or (2 if asked.quick else 24)
    effort = Effort(counted=2, rounds=1) if asked.quick else Effort(counted=4, rounds=3)
    names = asked.cluster or (QUICK_CLUSTERS if asked.quick else CLUSTERS)
    profile = unequal_units()
    rows = [] if asked.widths else [row for name in names for row in measure(name, profile, most, effort)]
    wide = list(measure_wide(effort))
    found = [
        at_most(f"stages on {row['widths']} ranks: error of the prediction", abs(row["error"]), MOST_ERROR)
        for row in wide
    ]
    sections = [Section("Seconds of a batch", [row.shown() for row in rows])] if rows else []
    sections.append(Section("Seconds of a batch with stages of unequal width", wide))
    return Findings(sections, [*verdicts(rows), *found])


if __name__ == "__main__":
    benchmark(__doc__, measured, quick="one cluster, fewer plans and rounds", options=options)
