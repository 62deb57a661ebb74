"""How long the search takes, what it makes of the published models, whether constraints find faster plans,
what a sum over replicas costs after many micro-batches, how far forecasts of delayed updates are from long
simulations, and what stages of unequal width gain.

    python benchmarks/search.py [--quick] [--json]

Processor time of one process. The profile is of GPTs from arithmetic; its state is scaled so that what forces
a deep pipeline can be compared with what does not.

Six servers of one device each on 1 Gbit/s train a GPT of 355M with 512 samples a batch; what is asked of a
plan may only make it slower. Two replicas of two stages sum gradients for 1.0 s after the pipeline has
drained, however many micro-batches came before.

Random plans under `2bw` and `2bw-fresh` on up to nine devices, with messages and sums of very different
lengths, are forecast, and compared with the pace of batches 37 to 60 of a simulation of 62.

GPTs of 8B and 3B on machines whose devices do not hold their state are planned with offloading.

VGG16 on four servers of four V100 is planned with stages of any width and of equal width. PipeDream's own
plan for it must be among those found (`made_up/vgg16.py`). Equal widths cost at least 1.2 times as much under
synchronous updates, and under all schedules if each replica of 15 has one micro-batch in a batch. With two,
delayed updates of 15 replicas of the whole model have time to sum all gradients beside their work, so any
widths need not be better there, but they must not be worse.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark
from benchmarks.common.verdicts import at_least, at_most
from benchmarks.made_up.models import profile_of
from benchmarks.made_up.published_2bw import (
    GPT_1_3B,
    GPT_2_2B,
    GPT_355M,
    Model,
    p3_16xlarge,
    profile_of_model,
)
from benchmarks.made_up.vgg16 import MICRO_BATCH, PUBLISHED, cluster_a, vgg16
from bireme.bounds import widths_text
from bireme.cluster.cluster import Card, Cluster, Link, Mesh, Server
from bireme.cluster.device import Device
from bireme.plan.forecast import Answer
from bireme.plan.plan import Plan
from bireme.plan.plan_request import PlanRequest, TierLimits
from bireme.plan.search.search import find_plan, forecast_of, timeline_of
from bireme.profile.profile import Profile

GIB = 2**30
OFFLOADING_S = 15.0
"""Seconds of a processor that a plan which offloads may take."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is searched, and the seconds of a processor that it may take, if that was promised."""

    name: str
    profile: Profile
    cluster: Cluster
    batch_size: int
    most_s: float | None = None


def servers(count: int, *, unequal: bool) -> Cluster:
    """Of eight devices; unequal ones differ in speed, memory and network card."""
    found = []
    places = tuple(range(8))
    for number in range(count):
        device = Device("gpu", "cuda", 16 * GIB)
        rate = 1.2e9
        if unequal:
            speed = 1.0 if number % 2 else 0.6
            device = replace(device, memory_bytes=(16 + 8 * (number % 3)) * GIB, speed=speed)
            rate *= 1 + number % 2
        mesh = Mesh("nvlink", places, Link(100e9, 3e-6))
        card = Card("eth0", places, Link(rate, 20e-6))
        found.append(Server(f"server{number}", (device,) * 8, (), (mesh,), (card,)))
    return Cluster(tuple(found))


def even_profile(num_units: int, state_bytes: float) -> Profile:
    """Units that are all the same and hold so many bytes of parameters together."""
    each = round(state_bytes / num_units)
    return profile_of(
        [0.010] * num_units,
        [0.020] * num_units,
        sizes=(1, 2, 4),
        parameter_bytes=[each] * num_units,
        kept_bytes=[20 * 10**6] * num_units,
        boundary_bytes=[4 * 10**6] * num_units,
        update_s=[0.001] * num_units,
    )


def cases() -> list[Case]:
    """Those that are quick come first."""
    equal, unequal = servers(8, unequal=False), servers(128, unequal=True)
    return [
        Case("64 equal devices, 48 units, 4 GB", even_profile(48, 4e9), equal, 256, 1.0),
        Case("64 equal devices, 48 units, 20 GB", even_profile(48, 20e9), equal, 256, 1.0),
        Case("GPT 2.2B, 64 V100, batch 512", profile_of_model(GPT_2_2B), p3_16xlarge(8), 512),
        Case("GPT 2.2B, 8 V100, batch 64", profile_of_model(GPT_2_2B), p3_16xlarge(), 64),
        Case("GPT 1.3B, 8 V100, batch 256", profile_of_model(GPT_1_3B), p3_16xlarge(), 256),
        Case("1,024 unequal devices, 200 units, 8 GB", even_profile(200, 8e9), unequal, 4096, 5.0),
        Case("1,024 unequal devices, 200 units, 80 GB", even_profile(200, 80e9), unequal, 4096, 5.0),
    ]


def row_of(case: Case, **constraints: Any) -> dict[str, Any]:
    begin = time.process_time()
    answer = find_plan(case.profile, case.cluster, PlanRequest(case.batch_size, **constraints))
    spent_s = time.process_time() - begin
    if not isinstance(answer, Answer):
        return {"case": case.name, "processor_s": spent_s, "best_plan": str(answer)}
    plan, forecast = answer.best.plan, answer.best.forecast
    sizes = "/".join(map(str, sorted(set(plan.micro_batch_sizes))))
    shape = f"{plan.num_ranks // plan.width} deep, {plan.width} wide"
    if plan.stage_widths:
        shape = f"{widths_text(plan.stage_widths)}, cut at {', '.join(map(str, plan.cuts))}"
    return {
        "case": case.name,
        "processor_s": spent_s,
        "best_plan": f"{plan.schedule}, {shape}, micro-batches of {sizes}",
        "samples_per_s": forecast.samples_per_s,
        "cost_s_per_sample": forecast.cost_s_per_sample,
        "how": answer.origin.how,
    }


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "none": {},
    "--no-lookahead": {"lookahead": False},
    "--width 1": {"width": 1},
    "--depth 6": {"depth": 6},
    "--synchronous": {"synchronous": True},
    "--schedule 1f1b --depth 3": {"schedule": "1f1b", "depth": 3},
}


def alone(count: int, device: Device, bytes_per_s: float) -> Cluster:
    """Servers of one device each."""
    card = (Card("eth0", (0,), Link(bytes_per_s, 0.0)),)
    return Cluster(tuple(Server(f"server{number}", (device,), cards=card) for number in range(count)))


def machine(name: str, memory_gib: int, speed: float, host_gib: int, disk_gib: int = 0) -> Server:
    """One GPU with PCIe 3.0 × 16, on 1 Gbit/s."""
    device = Device("gpu", "cuda", memory_gib * GIB, speed=speed, host_bytes_per_s=12e9)
    card = Card("eth0", (0,), Link(0.12e9, 1e-3))
    return Server(
        name,
        (device,),
        cards=(card,),
        host_memory_bytes=host_gib * GIB,
        disk_bytes=disk_gib * GIB,
        disk_bytes_per_s=3.3e9,
    )


def offloading_rows(is_quick: bool) -> list[dict[str, Any]]:
    """Plans whose state does not fit the devices."""
    gpt_8b, gpt_3b = (profile_of_model(Model(f"{layers}", layers, 4096, 32)) for layers in (32, 12))
    large, middle = machine("a", 24, 1.0, 96), machine("b", 16, 0.5, 64)
    one, two = Cluster((machine("a", 24, 1.0, 64, 500),)), Cluster((large, middle))
    three = Cluster((large, middle, machine("c", 8, 0.3, 32)))
    asked: list[tuple[Case, dict[str, Any]]] = [
        (Case("3B, one device with host and disk", gpt_3b, one, 32), {}),
        (Case("3B, two unlike machines, 2bw", gpt_3b, two, 32), {"schedule": "2bw"}),
        (Case("3B, two unlike machines", gpt_3b, two, 32), {}),
        (Case("8B, three unlike machines", gpt_8b, three, 32), {}),
    ]
    chosen = asked[: 1 if is_quick else None]
    return [row_of(case, memory=TierLimits(), **constraints) for case, constraints in chosen]


def constrained_rows(names: Sequence[str]) -> list[dict[str, Any]]:
    """What the search finds with each constraint."""
    cluster = alone(6, Device("gpu", "cuda", 24 * GIB, speed=0.15), 0.117e9)
    profile = profile_of_model(GPT_355M)
    few_sizes = tuple(replace(unit, costs=unit.costs[:4]) for unit in profile.units)
    rows = []
    for name in names:
        case = Case(name, replace(profile, units=few_sizes), cluster, 512)
        rows.append(row_of(case, **CONSTRAINTS[name]))
    return rows


def sum_row(num_microbatches: int) -> dict[str, Any]:
    """What a sum costs that takes 1.0 s when it is alone on its links."""
    cluster = alone(4, Device("any", "emulated", 2**40), 1e8)
    profile = profile_of([0.01] * 2, [0.02] * 2, parameter_bytes=[10**8] * 2, boundary_bytes=[10**6, 0])
    names = [placed.name for placed in cluster.devices()]

    def batch_s(width: int) -> float:
        plan = Plan(
            cuts=(1,),
            num_microbatches=num_microbatches,
            schedule="1f1b",
            width=width,
            micro_batch_sizes=(1,) * width,
            devices=(tuple(names[:width]), tuple(names[2 : 2 + width])),
        )
        return forecast_of(plan, profile, cluster, PlanRequest(width * num_microbatches)).batch_s

    return {"micro_batches": num_microbatches, "sum_s": batch_s(2) - batch_s(1)}


def flowing_error(seed: int, schedule: str) -> float:
    """By how much the forecast of a random plan with delayed updates is too slow, relative to a long run."""
    draws, bytes_per_s = Random(f"{schedule} {seed}"), 1e8
    depth = draws.randint(1, 4)
    width = draws.randint(1 if depth > 1 else 2, 9 // depth)
    num_units, num_microbatches = depth + draws.randint(0, 4), draws.randint(depth, 2 * depth)
    forward_s = [draws.uniform(0.005, 0.03) for _ in range(num_units)]
    stage_s = sum(forward_s) / depth
    sum_bytes = bytes_per_s * num_microbatches * 3 * stage_s * 10 ** draws.uniform(-1.5, 0.6)
    profile = profile_of(
        forward_s,
        [2 * one for one in forward_s],
        parameter_bytes=[round(sum_bytes * draws.uniform(0.1, 0.9) * depth / num_units) for _ in forward_s],
        boundary_bytes=[round(bytes_per_s * stage_s * 10 ** draws.uniform(-2, 0.5)) for _ in forward_s],
        update_s=[0.001] * num_units,
    )
    cluster = alone(depth * width, Device("any", "emulated", 2**40), bytes_per_s)
    names = [placed.name for placed in cluster.devices()]
    plan = Plan(
        cuts=tuple(sorted(draws.sample(range(1, num_units), depth - 1))),
        num_microbatches=num_microbatches,
        schedule=schedule,
        width=width,
        micro_batch_sizes=(1,) * width,
        devices=tuple(tuple(names[stage * width : (stage + 1) * width]) for stage in range(depth)),
        lookahead=draws.choice((0, min(2, num_microbatches - depth))) if depth > 1 else 0,
    )
    request = PlanRequest(width * num_microbatches)
    ends = timeline_of(plan, profile, cluster, request, num_batches=62).batch_end_s()
    return forecast_of(plan, profile, cluster, request).batch_s * 24 / (ends[60] - ends[36]) - 1


def flowing_row(schedule: str, num_plans: int) -> dict[str, Any]:
    """How far the forecasts of random plans are from long runs."""
    errors = [flowing_error(seed, schedule) for seed in range(num_plans)]
    return {
        "schedule": schedule,
        "plans": num_plans,
        "within_0.1_percent": sum(abs(error) <= 1e-3 for error in errors),
        "within_1_percent": sum(abs(error) <= 1e-2 for error in errors),
        "too_fast_at_worst": max(0.0, -min(errors)),
        "too_slow_at_worst": max(0.0, *errors),
    }


LEAST_GAINS = {("1f1b", 30): 1.2, ("auto", 15): 1.2, ("auto", 30): 1.0, ("2bw", 30): 1.0}
"""By the schedule asked for and the micro-batches of a batch: what VGG16 costs at least with equal widths, by
its cost with any.
"""


def width_rows(schedule: str, num_microbatches: int) -> list[dict[str, Any]]:
    """VGG16 planned with stages of any width and of equal width."""
    case = Case("VGG16, 4 × 4 V100", vgg16(), cluster_a(), num_microbatches * MICRO_BATCH)
    return [
        {"schedule": schedule, "micro_batches": num_microbatches, "asked": widths}
        | row_of(case, schedule=schedule, stage_widths=widths)
        for widths in ("any", "equal")
    ]


def measure(asked: Namespace) -> Findings:
    chosen = cases()[: 3 if asked.quick else None]
    rows = [row_of(case) for case in chosen]
    verdicts = [
        at_most(f"{case.name}: seconds of processor", row["processor_s"], case.most_s)
        for case, row in zip(chosen, rows, strict=True)
        if case.most_s is not None
    ]
    offloading = offloading_rows(asked.quick)
    verdicts += [
        at_most(f"{row['case']}, offloading: seconds of processor", row["processor_s"], OFFLOADING_S)
        for row in offloading
    ]
    constrained = constrained_rows(list(CONSTRAINTS)[: 2 if asked.quick else None])
    free, *others = (row["cost_s_per_sample"] for row in constrained)
    verdicts.append(
        at_most("cost without constraints, as a share of the least with one", free / min(others), 1)
    )
    sums = [sum_row(count) for count in (25, 50, 100, 200)]
    verdicts.append(
        at_most("seconds of a sum that takes 1.0 s alone", max(row["sum_s"] for row in sums), 1.02)
    )
    flowing = [flowing_row(schedule, 100 if asked.quick else 500) for schedule in ("2bw", "2bw-fresh")]
    near = sum(row["within_1_percent"] for row in flowing) / sum(row["plans"] for row in flowing)
    worst = max(max(row["too_fast_at_worst"], row["too_slow_at_worst"]) for row in flowing)
    verdicts.append(at_least("delayed updates: share of forecasts within 1 % of a long run", near, 0.99))
    verdicts.append(at_most("delayed updates: error of a forecast, at worst", worst, 0.06))
    widths = []
    for (schedule, count), least in list(LEAST_GAINS.items())[: 1 if asked.quick else None]:
        widths += width_rows(schedule, count)
        any_cost, equal_cost = (row["cost_s_per_sample"] for row in widths[-2:])
        name = f"VGG16, {schedule}, {count} micro-batches: cost with equal widths, by that with any"
        verdicts.append(at_least(name, equal_cost / any_cost, least))
    found = [row["best_plan"] for row in widths if widths_text(PUBLISHED) in row["best_plan"]]
    verdicts.append(at_least("VGG16: plans of PipeDream's widths among those found", len(found), 1))
    sections = [
        Section("find_plan", rows),
        Section("Offloading", offloading),
        Section("Constraints", constrained),
        Section("Sums", sums),
        Section("Delayed updates", flowing),
        Section("Widths", widths),
    ]
    return Findings(sections, verdicts)


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="three of the cases")
