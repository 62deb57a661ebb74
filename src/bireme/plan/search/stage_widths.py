"""Widths of stages: PipeDream's dynamic program over units and devices, for devices that differ.

After Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section
3.1. Devices are put in an order. The last stage takes the first w of them, the stage before it the next, and
so on. With k devices from a stage on, of which its own w run a share of the m micro-batches each by their
speed v,

    cost of a stage = work · ( max share / v − 1 / fastest v )  +  update  +  gradient ring      1f1b, gpipe
                      max( work · max share / v  +  update,  gradient ring )                     2bw

and never less than its messages take. If a pipeline drains, the first micro-batch goes through all other
stages too; that is about the same for all cuts, so it is left out here and counted later. A stage keeps
⌈k / w⌉ micro-batches. The program finds the widths with the least greatest cost for every number of stages.
Then the chain is cut again for these widths.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bireme.errors import BiremeError
from bireme.plan.partition.chain import Chain, Seconds
from bireme.plan.partition.loads import Recompute
from bireme.plan.search.cutting import keeps_pins
from bireme.plan.search.draft import Draft, Grid, shares_by_speed
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.shapes import Outline
from bireme.schedule.catalogue import schedule_named
from bireme.schedule.generators.shape import Shape
from bireme.schedule.program import Rule, banks_needed

_MOST_PLACES, _MOST_UNITS = 16, 32
"""Places in the order of the devices at which a stage may begin, and units of the chain, to find widths."""


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A schedule, and how it cuts a batch: the same for all plans of a dynamic program."""

    schedule: str
    size: int
    num_microbatches: int

    @property
    def drains(self) -> bool:
        """Whether the pipeline drains between batches."""
        return schedule_named(self.schedule).rule is Rule.SYNCHRONOUS

    def outline(self, widths: Sequence[int]) -> Outline:
        """The shape of a plan of these widths."""
        return Outline(
            self.schedule, len(widths), 1, (self.size,), self.num_microbatches, stage_widths=tuple(widths)
        )


@dataclass(frozen=True, slots=True)
class _Replicas:
    """The devices of a stage: seconds for a batch of micro-batches of a second each, and other figures."""

    devices: tuple[int, ...]
    batch_s: float
    once_s: float
    """The seconds of that work for one micro-batch, on the fastest of them."""
    update_s: float
    limit: float
    ring_s: float
    """For each byte of gradients."""
    message_s: float
    """For each byte that a micro-batch sends to the next stage, over a batch."""


_Flags = npt.NDArray[np.bool_]


class StageCosts:
    """The cost of a stage, by its first unit and the unit after its last, for replicas on given devices."""

    def __init__(self, chain: Chain, rule: Rule, recompute: Recompute) -> None:
        self._chain = chain
        self._rule = rule
        self._recompute = recompute
        self._fits: dict[tuple[int, float], tuple[Seconds, _Flags, _Flags]] = {}

    @property
    def num_units(self) -> int:
        """How many units there are."""
        return self._chain.num_units

    @cached_property
    def work_s(self) -> tuple[Seconds, Seconds]:
        """Of every range of units, without and with a forward that runs again."""
        chain = self._chain
        return _of_ranges(chain.forward_s + chain.backward_s), _of_ranges(
            chain.forward_s + chain.recompute_backward_s
        )

    @cached_property
    def _updates_s(self) -> Seconds:
        return _of_ranges(self._chain.update_s)

    @cached_property
    def _message_bytes(self) -> Seconds:
        """The bytes that cross the cut before each unit, in the direction that has more."""
        chain = self._chain
        each = np.maximum(chain.boundary_bytes, chain.returned_bytes).astype(np.float64)
        each[-1] = 0.0
        return np.concatenate(([0.0], each))

    def _fitting(self, kept: int, limit: float) -> tuple[Seconds, _Flags, _Flags]:
        """The work of every range, whether it must run its forwards again to fit within a limit with `kept`
        micro-batches, and whether the range is empty or does not fit even so.
        """
        if (kept, limit) not in self._fits:
            tables = self._chain.bytes
            state = banks_needed(self._rule, 0, 1) * tables.parameter + tables.gradient + tables.optimizer
            state = state + tables.buffer + tables.workspace
            again = state + kept * tables.kept > limit
            if self._recompute is Recompute.ALWAYS:
                again = np.ones_like(again)
            is_over = again
            if self._recompute is not Recompute.NEVER:
                is_over = again & (state + tables.kept + kept * tables.inputs > limit)
            is_none = np.tri(self.num_units + 1, self.num_units + 1, 0, np.bool_)
            whole_s, again_s = self.work_s
            self._fits[kept, limit] = np.where(again, again_s, whole_s), again, is_over | is_none
        return self._fits[kept, limit]

    def of(self, replicas: _Replicas, kept: int) -> tuple[Seconds, _Flags]:
        """The cost of every range on these replicas, of which each keeps `kept` micro-batches, and whether
        it runs forwards again; the cost is infinite if the range does not fit.
        """
        work_s, again, is_over = self._fitting(kept, replicas.limit)
        ring_s = replicas.ring_s * self._chain.bytes.gradient
        updates_s = replicas.update_s * self._updates_s
        if self._rule is Rule.SYNCHRONOUS:
            cost_s = (replicas.batch_s - replicas.once_s) * work_s + updates_s + ring_s
        else:
            cost_s = np.maximum(replicas.batch_s * work_s + updates_s, ring_s)
        cost_s = np.maximum(cost_s, (replicas.message_s * self._message_bytes)[None, :])
        return np.where(is_over, np.inf, cost_s), again


def _of_ranges(values: Seconds) -> Seconds:
    sums = np.concatenate(([0.0], np.cumsum(values)))
    return np.asarray(sums[None, :] - sums[:, None])


class DeviceOrder:
    """Devices in an order, in which stages take them, the last stage first."""

    def __init__(self, problem: PlanningProblem, order: Sequence[int]) -> None:
        self.order = tuple(order)
        self._problem = problem
        self._hops = [self._bytes_per_s(*pair) for pair in pairwise(order)]
        self._replicas: dict[tuple[int, int, int], _Replicas] = {}

    def replicas(self, first: int, end: int, num_microbatches: int) -> _Replicas:
        """Those of a stage on the devices from a place up to another."""
        key = first, end, num_microbatches
        if key not in self._replicas:
            self._replicas[key] = self._made(*key)
        return self._replicas[key]

    def _made(self, first: int, end: int, num_microbatches: int) -> _Replicas:
        problem, devices = self._problem, self.order[first:end]
        speeds = [problem.usual_speeds[device] for device in devices]
        shares = shares_by_speed(speeds, num_microbatches)
        slowest = math.inf
        if len(devices) > 1:
            slowest = min(*self._hops[first : end - 1], self._bytes_per_s(devices[-1], devices[0]))
        return _Replicas(
            devices,
            max(share / speed for share, speed in zip(shares, speeds, strict=True)),
            1 / max(speeds),
            1 / min(problem.usual_resource_speeds[device].memory for device in devices),
            min(problem.limits[device] for device in devices),
            problem.request.sums_within.hop_share(len(devices)) / slowest,
            num_microbatches * self._message_s(devices, self.order[:first]) if first else 0.0,
        )

    def _message_s(self, devices: Sequence[int], behind: Sequence[int]) -> float:
        """The seconds of a byte for each micro-batch between a stage and those behind it. Messages within a
        server go beside those that cross the cards, of all servers at the end that has fewer.
        """
        ends = [Counter(self._problem.servers[one] for one in some) for some in (devices, behind)]
        near = sum(ends[0][server] * count for server, count in ends[1].items()) / len(devices) / len(behind)
        within = between = math.inf
        for one, other in (*((devices[0], one) for one in behind), *((behind[-1], one) for one in devices)):
            rate = self._bytes_per_s(one, other)
            if self._problem.servers[one] == self._problem.servers[other]:
                within = min(within, rate)
            else:
                between = min(between, rate)
        return max(near / within, (1 - near) / between) / min(map(len, ends))

    def _bytes_per_s(self, here: int, there: int) -> float:
        return min((lane.bytes_per_s for lane in self._problem.path(here, there)), default=math.inf)


def _num_kept(schedule: str, num_microbatches: int, width: int, num_from: int) -> int:
    """The micro-batches that a replica of a stage keeps, if the stages from it on have `num_from` devices."""
    share = -(-num_microbatches // width)
    return share if schedule == "gpipe" else min(-(-num_from // width), share)


@dataclass(frozen=True, slots=True)
class LikelyPlan:
    """A plan that was found without a simulation: the greatest cost of its stages, and the seconds in which
    one micro-batch goes through all of them, if the pipeline drains.
    """

    draft: Draft
    greatest_s: float
    fill_s: float

    @property
    def seconds(self) -> float:
        """About how long a batch takes."""
        return self.greatest_s + self.fill_s


_ANY, _UNEQUAL = range(2)


class Widths:
    """The dynamic program: the best widths of stages on devices in an order, for every number of stages."""

    def __init__(self, row: DeviceOrder, costs: StageCosts, shape: BatchShape, most_stages: int) -> None:
        m = shape.num_microbatches
        # Two versions need as many micro-batches as ranks, and each replica at least one.
        most = len(row.order) if shape.drains else min(len(row.order), m)
        self._places = sorted({*range(0, most, -(-most // _MOST_PLACES)), most})
        num_units = costs.num_units
        size = 2, len(self._places), most_stages + 1, num_units + 1
        self._least = np.full(size, np.inf)
        """Of any widths and of unequal widths, by how many devices the stages from a unit on have, their
        number, and that unit.
        """
        self._before = np.zeros(size, np.intp)
        self._ends = np.zeros(size, np.intp)
        self._least[_ANY, 0, 0, num_units] = 0.0
        for place, num_from in enumerate(self._places):
            for before, first in enumerate(self._places[:place]):
                width = num_from - first
                if width <= m:
                    kept = _num_kept("1f1b", m, width, num_from)
                    self._extend(place, before, costs.of(row.replicas(first, num_from, m), kept)[0])

    def _extend(self, place: int, before: int, cost_s: Seconds) -> None:
        """Let one more stage come before those that have the devices up to a place."""
        rest, width = self._least[:, before, :-1], self._places[place] - self._places[before]
        # All widths are unequal if the other stages cannot all have this one.
        may_be_equal = width * np.arange(rest.shape[1]) == self._places[before]
        behind = rest[[_ANY, _ANY]]
        behind[_UNEQUAL, may_be_equal] = rest[_UNEQUAL, may_be_equal]
        greatest = np.maximum(behind[:, :, None, :], cost_s)
        ends = greatest.argmin(axis=3)
        found = np.take_along_axis(greatest, ends[..., None], axis=3)[..., 0]
        is_less = found < self._least[:, place, 1:]
        self._least[:, place, 1:][is_less] = found[is_less]
        self._before[:, place, 1:][is_less] = before
        self._ends[:, place, 1:][is_less] = ends[is_less]

    def best(self, num_stages: int) -> tuple[int, ...] | None:
        """The unequal widths of `num_stages` stages whose greatest cost is least, from the first stage on."""
        least = self._least[_UNEQUAL, :, num_stages, 0]
        place, unit, which, found = int(least.argmin()), 0, _UNEQUAL, list[int]()
        if least[place] == np.inf:
            return None
        for left in range(num_stages, 0, -1):
            key = which, place, left, unit
            before, unit = int(self._before[key]), int(self._ends[key])
            width = self._places[place] - self._places[before]
            if width * (left - 1) != self._places[before]:
                which = _ANY
            found.append(width)
            place = before
        return tuple(found)


def coarse_chain(chain: Chain) -> Chain:
    """A chain of few units, of about equal work, in which widths are found."""
    if chain.num_units <= _MOST_UNITS:
        return chain
    work_s = np.concatenate(([0.0], np.cumsum(chain.forward_s + chain.backward_s)))
    bounds = np.searchsorted(work_s, np.linspace(0.0, work_s[-1], _MOST_UNITS + 1)[1:-1])
    inside = sorted({int(bound) for bound in bounds if 0 < bound < chain.num_units})
    return chain.merged((0, *inside, chain.num_units))


def placed_on(problem: PlanningProblem, draft: Draft, grid: Grid) -> Draft | None:
    """A draft on the devices of a grid, whose replicas share micro-batches by their speed; None if the
    schedule does not run so, or a pinned unit is elsewhere.
    """
    grid, m = tuple(tuple(sorted(row)) for row in grid), draft.outline.num_microbatches
    outline = replace(draft.outline, stage_widths=tuple(map(len, grid)))
    if max(outline.stage_widths) > m or not keeps_pins(problem, outline, grid, draft.cuts):
        return None
    shares = tuple(shares_by_speed([problem.usual_speeds[one] for one in row], m) for row in grid)
    try:
        schedule_named(outline.schedule).refuse(Shape(outline.num_stages, m, 1, shares=shares))
    except BiremeError:
        return None
    return replace(draft, outline=outline, grid=grid, shares=shares)


def most_lookahead(problem: PlanningProblem, draft: Draft) -> int:
    """How far stages may run ahead; 0 if the schedule or the request lets none run ahead."""
    schedule, outline = schedule_named(draft.outline.schedule), draft.outline
    if schedule.most_lookahead is None or not problem.request.lookahead:
        return 0
    return schedule.most_lookahead(
        Shape(outline.num_stages, outline.num_microbatches, 1, shares=draft.shares)
    )


def cut_for(
    problem: PlanningProblem, row: DeviceOrder, costs: StageCosts, shape: BatchShape, widths: Sequence[int]
) -> LikelyPlan | None:
    """The chain cut for stages of these widths on the devices of a row; None if they do not fit."""
    num_units, m = costs.num_units, shape.num_microbatches
    if len(widths) > num_units or sum(widths) > len(row.order) or max(widths) > m:
        return None
    least = np.full(num_units + 1, np.inf)
    least[num_units] = 0.0
    first, stages = 0, []
    for width in reversed(widths):
        replicas = row.replicas(first, first + width, m)
        cost_s, again = costs.of(replicas, _num_kept(shape.schedule, m, width, first + width))
        greatest = np.maximum(least[None, :], cost_s)
        stages.append((replicas, greatest.argmin(axis=1), again))
        least = greatest.min(axis=1)
        first += width
    if least[0] == np.inf:
        return None
    cuts, recompute, fill_s = [0], [], 0.0
    for stage, (replicas, ends, again) in enumerate(reversed(stages)):
        begin, end = cuts[-1], int(ends[cuts[-1]])
        cuts.append(end)
        fill_s += replicas.once_s * float(costs.work_s[0][begin, end])
        if again[begin, end]:
            recompute.append(stage)
    grid = tuple(replicas.devices for replicas, _, _ in reversed(stages))
    inside = tuple(problem.bounds[cut] for cut in cuts[1:-1])
    draft = placed_on(problem, Draft(shape.outline(widths), grid, inside, tuple(recompute)), grid)
    return None if draft is None else LikelyPlan(draft, float(least[0]), shape.drains * fill_s)
