"""Where nothing fits: the plan that comes nearest, and the least change that would make one fit.

Whether anything fits is asked of the exact partition, which knows the bytes of every stage of every cut.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from bireme.errors import BiremeError
from bireme.plan.forecast import NothingFits, StageForecast
from bireme.plan.partition.device_row import DeviceRow, DeviceSlot, Link
from bireme.plan.partition.exact import exact
from bireme.plan.partition.loads import Recompute, Setting, loads_of
from bireme.plan.partition.partition import Misfit, Partition
from bireme.plan.search.cutting import loads_on
from bireme.plan.search.draft import Grid
from bireme.plan.search.evaluated import EvaluatedDraft
from bireme.plan.search.mapping import promising_grids
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.shapes import Outline, Outlines
from bireme.schedule.catalogue import schedule_named

__all__ = ["nearest_misfit"]

MOST_ASKED = 40
"""Pairs of a shape and a mapping that are asked whether they fit."""

MOST_NAMED = 3
"""Devices in a sentence."""

MOST_MORE = 64
"""Devices more to think of."""


@dataclass(frozen=True, slots=True)
class _Near:
    """A plan that does not fit."""

    outline: Outline
    grid: Grid
    stages: tuple[StageForecast, ...]

    @property
    def missing(self) -> list[float]:
        """What each stage takes more than its device has."""
        return [max(stage.peak_bytes - stage.limit_bytes, 0.0) for stage in self.stages]

    @property
    def most_missing(self) -> float:
        """What the worst one misses."""
        return max(self.missing)


def nearest_misfit(
    problem: PlanningProblem, shapes: Sequence[Outline], evaluated: Sequence[EvaluatedDraft]
) -> NothingFits:
    """Of all plans the one whose worst device misses least, and what would help.

    `evaluated` are plans that were looked at and do not fit: all there is of schedules with several stages on
    a rank, of which the partition knows no bytes.
    """
    asked = [found for found in _asked(problem, shapes) if isinstance(found, _Near)]
    looked_at = [_Near(one.draft.outline, one.draft.grid, one.forecast.stages) for one in evaluated]
    near = min(
        asked or looked_at,
        key=lambda one: (one.most_missing, one.outline.num_devices),
        default=None,
    )
    if near is None and problem.owners and not problem.pins:
        raise BiremeError(
            "No plan keeps private samples at home: the model reads inputs in its units "
            f"{', '.join(map(str, problem.readers))}, whose stages must all be on the owner's devices. Put a "
            "whole replica there (depth 1)."
        )
    if near is None:
        freed = list(_given_up(problem))
        instead = f", or plan with {' or '.join(freed)}" if freed else ""
        raise BiremeError(f"No plan keeps all pinned units on their devices. Pin fewer of them{instead}.")
    stage = near.missing.index(near.most_missing)
    return NothingFits(
        schedule=near.outline.schedule,
        depth=near.outline.num_ranks,
        width=near.outline.width,
        micro_batch=max(near.outline.sizes),
        stages=near.stages,
        stage=stage,
        device=_tightest(problem, near, stage),
        missing_bytes=near.most_missing,
        remedies=tuple(_remedies(problem, near)),
    )


def _near_of(problem: PlanningProblem, outline: Outline, grid: Grid, misfit: Misfit) -> _Near:
    return _Near(
        outline,
        grid,
        tuple(
            StageForecast(
                begin=problem.bounds[stage.begin],
                end=problem.bounds[stage.end],
                devices=tuple(problem.names[device] for device in row),
                recompute=stage.recompute,
                busy_s=outline.num_microbatches * stage.busy_s,
                peak_bytes=stage.peak_bytes + problem.process_bytes[row[0]],
                limit_bytes=stage.limit_bytes + problem.process_bytes[row[0]],
            )
            for stage, row in zip(misfit.nearest.stages, grid, strict=True)
        ),
    )


def _tightest(problem: PlanningProblem, near: _Near, stage: int) -> str:
    """The device of a stage that has least memory."""
    row = near.grid[near.outline.rank_of_stage[stage]]
    return problem.names[min(row, key=lambda device: problem.limits[device])]


def _asked(problem: PlanningProblem, shapes: Sequence[Outline]) -> Iterator[_Near | Partition]:
    """The shapes that take the fewest bytes, on likely mappings."""
    seen: set[tuple[str, int, int, int]] = set()
    num_asked = 0
    for outline in sorted(shapes, key=lambda one: (max(one.sizes), -one.num_ranks, one.width)):
        key = outline.schedule, outline.num_ranks, outline.width, max(outline.sizes)
        if outline.stages_per_rank > 1 or key in seen:
            continue
        seen.add(key)
        for grid in islice(promising_grids(problem, outline), 3):
            num_asked += 1
            found = exact(loads_on(problem, outline, grid))
            yield _near_of(problem, outline, grid, found) if isinstance(found, Misfit) else found
        if num_asked >= MOST_ASKED:
            return


def _remedies(problem: PlanningProblem, near: _Near) -> Iterator[str]:
    """The changes that would do, each alone."""
    request = problem.request
    missing = near.most_missing
    if missing == math.inf:
        return
    if request.recompute is Recompute.NEVER and _would_fit(problem, recompute=Recompute.WHERE_NEEDED):
        yield "recomputation (recompute)"
    smaller = [size for size in problem.profile.micro_batches if size < min(problem.sizes)]
    if smaller:
        fits = [size for size in smaller if _would_fit(problem, micro_batch=size)]
        if fits:
            yield f"micro-batches of {max(fits)} samples"
    if request.memory_fraction < 1 and _would_fit(problem, memory_fraction=1.0):
        yield "all of the devices' memory (memory_fraction 1)"
    yield from _given_up(problem)
    short = dict.fromkeys(_tightest(problem, near, stage) for stage, over in enumerate(near.missing) if over)
    where = f"{'each of ' if len(short) > 1 else ''}{', '.join(short)}"
    if len(short) > MOST_NAMED:
        where = f"each of {len(short)} devices"
    yield f"{missing / request.memory_fraction:,.0f} bytes more on {where}"
    more = _devices_more(problem, near)
    if more is not None and request.depth is None:
        like = _tightest(problem, near, near.missing.index(missing))
        yield f"{more} device{'s' if more > 1 else ''} more like {like}"


def _given_up(problem: PlanningProblem) -> Iterator[str]:
    """The parts of the request about a plan's shape without any one of which something would fit."""
    request = problem.request
    if request.schedule != "auto" and _would_fit(problem, schedule="auto"):
        yield "another schedule (auto)"
    for name in ("depth", "width"):
        value = getattr(request, name)
        if value is not None and _would_fit(problem, **{name: None}):
            yield f"another {name} than {value}"


def _would_fit(problem: PlanningProblem, **changes: object) -> bool:
    """Whether anything would fit with other request."""
    request = replace(problem.request, **changes)  # type: ignore[arg-type]  # the names and types are given above
    other = PlanningProblem(problem.profile, problem.cluster, request)
    return any(isinstance(found, Partition) for found in _asked(other, list(Outlines(other))))


def _devices_more(problem: PlanningProblem, near: _Near) -> int | None:
    """How many devices like the one that misses most would make a pipeline deep enough, if so many do."""
    outline = near.outline
    row = near.grid[outline.rank_of_stage[near.missing.index(near.most_missing)]]
    device = min(row, key=lambda one: problem.limits[one])
    seats = [
        DeviceSlot(problem.names[own], problem.speeds[own], problem.limits[own])
        for own in (min(one, key=lambda d: problem.limits[d]) for one in near.grid)
    ]
    request = problem.request
    name = outline.schedule if schedule_named(outline.schedule).stages_per_rank == 1 else "1f1b"
    rule = schedule_named(name).rule
    has_masters = request.has_masters or request.shares_newest(rule, outline.width)
    chain = problem.merged(max(outline.sizes), outline.width, rule)
    for more in range(1, MOST_MORE + 1):
        depth = outline.num_ranks + more
        if depth > chain.num_units:
            return None
        m = max(outline.num_microbatches, depth)
        line = DeviceRow(
            (*seats, *[DeviceSlot("more", problem.speeds[device], problem.limits[device])] * more),
            (Link(),) * (depth - 1),  # bytes do not depend on the links
        )
        setting = Setting(name, m, request.recompute, has_masters=has_masters)
        found = exact(loads_of(chain, line, setting))
        if isinstance(found, Partition):
            return more
    return None
