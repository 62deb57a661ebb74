"""Where to cut for a mapping: the partitioners of `plan/partition`, for replicas on unequal devices.

All replicas are cut alike, so a stage is as slow as its slowest replica and must fit the tightest. Where a
rank has several stages, `plan/partition` has no account of its bytes: there stages are cut to equal seconds,
each within its part of the memory, and the plan evaluator counts what they really take.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from bireme.plan.partition.autopipe import autopipe
from bireme.plan.partition.chain import Chain
from bireme.plan.partition.loads import (
    DEEP,
    DeviceRow,
    DeviceSlot,
    Loads,
    Recompute,
    StageSetting,
    loads_of,
    overflows,
)
from bireme.plan.partition.partition import exact, least_max
from bireme.plan.search.contention import links_between
from bireme.plan.search.draft import Draft, Grid
from bireme.plan.search.mapping import keeps_home
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.shapes import Outline
from bireme.schedule.catalogue import schedule_named
from bireme.schedule.program import Rule

_RECKONED_AS = {"1f1b-sliced": "1f1b"}
"""Whose bytes and times are taken for a schedule until it is evaluated."""


def all_drafts(problem: PlanningProblem, outline: Outline, grid: Grid) -> Iterator[Draft]:
    """All ways to cut, and all sets of stages that could run again."""
    for cuts in combinations(problem.bounds[1:-1], outline.num_stages - 1):
        if keeps_pins(problem, outline, grid, cuts) and keeps_home(problem, outline, grid, cuts):
            for recompute in recompute_sets(problem, outline.num_stages):
                yield Draft(outline, grid, cuts, recompute)


def num_cuts_and_sets(problem: PlanningProblem, outline: Outline) -> int:
    """How many of them there are for a mapping."""
    num_sets = 2**outline.num_stages if problem.request.recompute is Recompute.WHERE_NEEDED else 1
    count = 1
    for place in range(outline.num_stages - 1):
        count = count * (problem.num_units - 1 - place) // (place + 1)
    return count * num_sets


def recompute_sets(problem: PlanningProblem, num_stages: int) -> Iterator[tuple[int, ...]]:
    """All sets of stages that may run their forward again."""
    match problem.request.recompute:
        case Recompute.NEVER:
            yield ()
        case Recompute.ALWAYS:
            yield tuple(range(num_stages))
        case Recompute.WHERE_NEEDED:
            for count in range(num_stages + 1):
                yield from combinations(range(num_stages), count)


def keeps_pins(problem: PlanningProblem, outline: Outline, grid: Grid, cuts: tuple[int, ...]) -> bool:
    """Whether every pinned unit is on its device."""
    if not problem.pins:
        return True
    ranks = outline.rank_of_stage
    for place, device in problem.pins.items():
        stage = sum(cut <= problem.bounds[place] for cut in cuts)
        if device not in grid[ranks[stage]]:
            return False
    return True


_ENOUGH_ROUNDS = 16
"""So many micro-batches for each rank show where a schedule that drains is best cut."""


def promising_drafts(problem: PlanningProblem, outline: Outline, grid: Grid) -> list[Draft]:
    """The cuts that the partitioners would make, best first; none if they see no way to fit."""
    found = _promising_drafts(problem, outline, grid)
    return [draft for draft in found if keeps_home(problem, outline, grid, draft.cuts)]


def _promising_drafts(problem: PlanningProblem, outline: Outline, grid: Grid) -> list[Draft]:
    if outline.stages_per_rank > 1:
        return list(_folded(problem, outline, grid))
    costed = list(_costed(problem, outline, grid))
    if any(overflows(*one) for one in costed):
        return []
    loads = _loads(problem, grid, costed)
    found = exact(loads)
    if not found.fits:
        return []
    partitions = [found]
    if schedule_named(outline.schedule).rule is Rule.SYNCHRONOUS and outline.num_stages > 1:
        most = _ENOUGH_ROUNDS * outline.num_ranks  # more of them move no cut, and take long to go through
        few = replace(loads.setting, num_microbatches=min(loads.setting.num_microbatches, most))
        better = autopipe(replace(loads, setting=few))
        if better is not None and better.partition.cuts != found.cuts:
            partitions.insert(0, better.partition)
    return [
        Draft(outline, grid, tuple(problem.bounds[cut] for cut in one.cuts), one.recompute)
        for one in partitions
    ]


@dataclass(frozen=True, slots=True)
class _Group:
    """Replicas that are alike: their micro-batch, and the device of each rank."""

    size: int
    seats: tuple[DeviceSlot, ...]


def loads_on(problem: PlanningProblem, outline: Outline, grid: Grid) -> Loads:
    """The loads of all stages on a mapping: of the slowest replica, and the bytes of the tightest."""
    return _loads(problem, grid, list(_costed(problem, outline, grid)))


def _loads(
    problem: PlanningProblem, grid: Grid, costed: Sequence[tuple[Chain, DeviceRow, StageSetting]]
) -> Loads:
    of_group = [loads_of(*one) for one in costed]
    slowest = of_group[0] if len(of_group) == 1 else _worst(of_group)
    named = tuple(
        replace(seat, name=problem.names[min(row, key=lambda device: problem.limits[device])])
        for seat, row in zip(slowest.line.seats, grid, strict=True)
    )
    slowest = replace(slowest, line=replace(slowest.line, seats=named))
    return _pinned(problem, slowest, grid) if problem.pins else slowest


def _costed(
    problem: PlanningProblem, outline: Outline, grid: Grid
) -> Iterator[tuple[Chain, DeviceRow, StageSetting]]:
    """What the loads of each group of replicas that are alike depend on."""
    links = tuple(links_between(problem, grid, range(outline.num_ranks), outline.schedule))
    schedule = _RECKONED_AS.get(outline.schedule, outline.schedule)
    num_microbatches = outline.num_microbatches
    if schedule == "zb-h1" and outline.num_ranks > DEEP:
        # None of its stages keeps more than that many micro-batches, so it takes no more than this.
        schedule, num_microbatches = "gpipe", min(outline.num_ranks, num_microbatches)
    request, rule = problem.request, schedule_named(outline.schedule).rule
    setting = StageSetting(
        schedule,
        num_microbatches,
        request.recompute,
        outline.updates_early,
        has_masters=request.has_masters or request.shares_newest(rule, outline.width),
    )
    for group in _groups(problem, outline, grid):
        chain = problem.merged(group.size, outline.width, rule)
        yield chain, DeviceRow(group.seats, links), setting


def _groups(problem: PlanningProblem, outline: Outline, grid: Grid) -> list[_Group]:
    """One for each size of micro-batch and kinds of devices, with the slowest and the tightest device of each
    rank.
    """
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for replica, size in enumerate(outline.sizes):
        kinds = tuple(problem.kinds[row[replica]] for row in grid) if len(problem.profiles) > 1 else ()
        alike.setdefault((size, kinds), []).append(replica)
    found = []
    for (size, kinds), replicas in alike.items():
        seats = []
        for rank, row in enumerate(grid):
            own = [row[replica] for replica in replicas]
            speed = min(problem.speeds[device] for device in own)
            gains = problem.gains(size, kinds[rank]) if kinds else ()
            seats.append(
                DeviceSlot(
                    f"rank {rank}",
                    min(problem.usual_speeds[device] for device in own),
                    min(problem.limits[device] for device in own),
                    min(problem.resource_speeds[device].memory for device in own),
                    tuple(speed * gain for gain in gains),
                )
            )
        found.append(_Group(size, tuple(seats)))
    return found


def _worst(of_group: list[Loads]) -> Loads:
    """What the slowest of several takes, and as much too much as the tightest; the first stands for all."""
    first = of_group[0]
    busy_s, recomputed, peak_bytes, link_s = [], [], [], []
    for stage, seat in enumerate(first.line.seats):
        busy_s.append(np.maximum.reduce([loads.busy_s[stage] for loads in of_group]))
        recomputed.append(np.logical_or.reduce([loads.recomputed[stage] for loads in of_group]))
        over = [loads.peak_bytes[stage] - loads.line.seats[stage].memory_bytes for loads in of_group]
        peak_bytes.append(np.maximum.reduce(over) + seat.memory_bytes)
    for link in range(len(first.link_s)):
        link_s.append(np.maximum.reduce([loads.link_s[link] for loads in of_group]))
    return replace(
        first,
        busy_s=tuple(busy_s),
        recomputed=tuple(recomputed),
        peak_bytes=tuple(peak_bytes),
        link_s=tuple(link_s),
    )


def _pinned(problem: PlanningProblem, loads: Loads, grid: Grid) -> Loads:
    """The loads in which no stage fits that has a unit which belongs to another's device."""
    peaks = []
    for stage, table in enumerate(loads.peak_bytes):
        blocked = np.zeros_like(table, np.bool_)
        places = np.arange(len(table))
        for unit, device in problem.pins.items():
            if device not in grid[stage]:
                blocked |= (places[:, None] + stage <= unit) & (unit <= places[None, :] + stage)
        peaks.append(np.where(blocked, np.inf, table))
    return replace(loads, peak_bytes=tuple(peaks))


def _folded(problem: PlanningProblem, outline: Outline, grid: Grid) -> Iterator[Draft]:
    """Stages of equal seconds: without a limit, within the memory, and running all again."""
    ranks = outline.rank_of_stage
    chain = problem.merged(max(outline.sizes), outline.width)
    width = chain.num_units - outline.num_stages + 1
    is_empty = np.tri(width, width, -1, np.bool_)
    allowed = problem.request.recompute
    ways = {
        Recompute.NEVER: [(False, False), (True, False)],
        Recompute.ALWAYS: [(False, True), (True, True)],
        Recompute.WHERE_NEEDED: [(False, False), (True, False), (True, True)],
    }[allowed]
    seen = set()
    for within, again in ways:
        backward_s = chain.recompute_backward_s if again else chain.backward_s
        through_s = np.concatenate(([0.0], np.cumsum(chain.forward_s + backward_s)))
        tables = chain.bytes
        state = tables.parameter + tables.gradient + tables.optimizer + tables.buffer
        costs = []
        for stage, rank in enumerate(ranks):
            here, there = slice(stage, stage + width), slice(stage + 1, stage + 1 + width)
            speed = min(problem.usual_speeds[device] for device in grid[rank])
            seconds = (through_s[there][None, :] - through_s[here][:, None]) / speed
            seconds[is_empty] = np.inf
            if within:
                num = _num_kept(outline, rank)
                held = state + tables.workspace + num * (tables.inputs if again else tables.kept)
                held = held + (tables.kept if again else 0)
                limit = min(problem.limits[device] for device in grid[rank]) / outline.stages_per_rank
                seconds[held[here, there] > limit] = np.inf
            for unit, device in problem.pins.items():
                if device not in grid[rank]:
                    place = np.arange(width) + stage
                    seconds[(place[:, None] <= unit) & (unit <= place[None, :])] = np.inf
            costs.append(seconds)
        least = least_max(costs)
        if least.value == np.inf:
            continue
        cuts = tuple(problem.bounds[cut] for cut in least.cuts())
        recompute = tuple(range(outline.num_stages)) if again else ()
        if (cuts, recompute) not in seen:
            seen.add((cuts, recompute))
            yield Draft(outline, grid, cuts, recompute)


def _num_kept(outline: Outline, rank: int) -> float:
    """How many micro-batches each stage of a rank keeps, of several stages about equally many."""
    p, parts, m = outline.num_ranks, outline.stages_per_rank, outline.num_microbatches
    ahead = 2 * p if outline.schedule == "zbv" else (parts - 1) * p + 2 * (p - 1 - rank) + 1
    return min(ahead / parts, m)
