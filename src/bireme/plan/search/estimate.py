"""What a shape would take, roughly: PipeDream-2BW's cost functions, to say what to look at first.

    pace  = max( work of a stage, messages over a link, gradient ring / m )    for schedules that do not drain
    batch = m · pace · (1 + bubble) + gradient ring                            for those that do

After the paper (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 4).
What we changed: times are of all w replicas, not of one; micro-batches are a whole number; replicas that fill
one server have its fast links; schedules that drain have their bubble; units are measured, so embedding and
head count; a device is as fast as it is; messages are under way while stages compute. Nothing is decided by
these numbers alone but the order.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bireme.plan.partition.loads import Recompute
from bireme.plan.search.draft import Draft
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.shapes import Outline, Outlines
from bireme.schedule.catalogue import schedule_named
from bireme.schedule.rule import Rule, banks_needed

__all__ = ["Estimator"]

OVER = 100.0
"""How much worse a shape looks that would not fit if its stages were equal; it may fit all the same."""

HALF_BUBBLE = 2 / 3
"""A sliced start-up is half a forward, of a third of the work."""


@dataclass(frozen=True, slots=True)
class _Totals:
    """Of the whole chain at a micro-batch size."""

    work_s: float
    again_s: float
    parameter_bytes: float
    gradient_bytes: float
    rest_bytes: float
    optimizer_bytes: float
    kept_bytes: float
    boundary_bytes: float
    returned_bytes: float
    workspace_bytes: float


class Estimator:
    """Orders shapes by what they would cost."""

    def __init__(self, problem: PlanningProblem, outlines: Outlines) -> None:
        self._problem = problem
        self._outlines = outlines
        self._totals: dict[int, _Totals] = {}
        self._limits = np.sort([problem.limits[device] for device in problem.devices])[::-1]

    def cost(self, outline: Outline) -> float:
        """Seconds of training per sample, or joules if energy is the goal."""
        rule = schedule_named(outline.schedule).rule
        m, p = outline.num_microbatches, outline.num_ranks
        totals = self._of(max(outline.sizes))
        again = self._runs_again(outline, rule, totals)
        num_units = self._problem.num_units
        # Units are not divided: of 10 on 4 ranks one has 3.
        pace_s = self._outlines.least_pace_s(outline) * (p * -(-num_units // p) / num_units)
        if again is None:
            pace_s *= OVER
        elif again:
            pace_s *= totals.again_s / totals.work_s if totals.work_s else 1.0
        message_s, ring_s = self._links_s(outline, totals)
        batch_s = max(m * max(pace_s, message_s if p > 1 else 0.0) * (1 + self._bubble(outline)), ring_s)
        if rule is Rule.SYNCHRONOUS:
            batch_s += ring_s
        penalty = self._problem.penalty(outline.schedule, outline.num_stages, m, outline.width)
        return penalty * batch_s / outline.batch_size * self._problem.least_power(outline.num_devices)

    def rough_cost(self, draft: Draft, floor_s: float) -> float:
        """The same for a plan whose busiest device or lane is known."""
        outline = draft.outline
        batch_s = floor_s * (1 + self._bubble(outline))
        if draft.rule is Rule.SYNCHRONOUS:
            batch_s += self._links_s(outline, self._of(max(outline.sizes)))[1]
        penalty = self._problem.penalty(
            outline.schedule,
            outline.num_stages,
            outline.num_microbatches,
            outline.width,
            lookahead=draft.lookahead,
        )
        power = self._problem.power(device for row in draft.grid for device in row)
        return penalty * batch_s / outline.batch_size * power

    def _bubble(self, outline: Outline) -> float:
        m, fill = outline.num_microbatches, outline.num_ranks - 1
        match outline.schedule:
            case "sequential":
                return float(fill)
            case "gpipe" | "1f1b":
                return fill / m
            case "1f1b-sliced":
                return fill / m * (1 - HALF_BUBBLE / 4)
            case "interleaved":
                return fill / m / outline.stages_per_rank
            case "zb-h1":
                return fill / m / 3
            case "zbv":
                return fill / m / 6
        return 0.0

    def _runs_again(self, outline: Outline, rule: Rule, totals: _Totals) -> bool | None:
        """Whether equal stages would have to run their forwards again to fit; None if they would not fit."""
        p, m = outline.num_ranks, outline.num_microbatches
        limit = float(self._limits[min(outline.num_devices, len(self._limits)) - 1])
        sharers = self._problem.request.num_sharers(outline.width)
        has_newest_apart = rule is Rule.FRESH and not self._problem.request.has_masters
        versions = banks_needed(rule, 0, p) + has_newest_apart / sharers
        under_way = {"gpipe": m, "sequential": 1}.get(outline.schedule, min(p, m))
        state = (versions * totals.parameter_bytes + totals.gradient_bytes + totals.rest_bytes) / p
        state += totals.workspace_bytes
        state -= (1 - 1 / sharers) * totals.optimizer_bytes / p
        if outline.width > 1:
            state += self._problem.request.sums.kept_share * totals.gradient_bytes / p
        allowed = self._problem.request.recompute
        if allowed is not Recompute.ALWAYS and state + under_way * totals.kept_bytes / p <= limit:
            return False
        least = state + totals.kept_bytes / p + under_way * totals.boundary_bytes
        return True if allowed is not Recompute.NEVER and least <= limit else None

    def _links_s(self, outline: Outline, totals: _Totals) -> tuple[float, float]:
        """A micro-batch's messages and a batch's gradient ring, in the better of two placements."""
        p, w = outline.num_ranks, outline.width
        fast, slow = self._rates
        per_server = self._per_server
        # A server's card carries all that its devices send at once.
        message = totals.boundary_bytes + totals.returned_bytes
        ring = self._problem.request.sums.hop_bytes(totals.gradient_bytes, slice(None), w) / p
        sharing = per_server if w > 1 else 1
        if p <= per_server:
            together = (
                message / fast,
                ring / fast if w * p <= per_server else ring * min(per_server, p) / slow,
            )
        else:
            together = message * max(1, per_server // p) / slow, ring * per_server / slow
        if w <= per_server:
            crosses = p * w > per_server
            apart = message * min(w, sharing) / slow if crosses else message / fast, ring / fast
        else:
            apart = together
        return min(together, apart, key=lambda pair: outline.num_microbatches * pair[0] + pair[1])

    @cached_property
    def _per_server(self) -> int:
        devices = self._problem.devices
        return max(1, len(devices) // len({self._problem.servers[device] for device in devices}))

    @cached_property
    def _rates(self) -> tuple[float, float]:
        """Bytes a second inside a server and between two, as two typical devices have them."""
        problem = self._problem
        first = problem.devices[0]
        inside = [d for d in problem.devices[1:] if problem.servers[d] == problem.servers[first]]
        outside = [d for d in problem.devices if problem.servers[d] != problem.servers[first]]
        fast = problem.cluster.bandwidth(first, inside[0]) if inside else float("inf")
        slow = min(
            (problem.cluster.bandwidth(first, d) for d in outside[:: max(1, len(outside) // 8)]),
            default=fast,
        )
        return (fast if inside else slow), slow

    def _of(self, size: int) -> _Totals:
        if size not in self._totals:
            chain = self._problem.merged(size)
            tables = chain.bytes
            self._totals[size] = _Totals(
                work_s=float((chain.forward_s + chain.backward_s).sum()),
                again_s=float((chain.forward_s + chain.recompute_backward_s).sum()),
                parameter_bytes=float(tables.parameter[0, -1]),
                gradient_bytes=float(tables.gradient[0, -1]),
                rest_bytes=float(tables.optimizer[0, -1] + tables.buffer[0, -1]),
                optimizer_bytes=float(tables.optimizer[0, -1]),
                kept_bytes=float(tables.kept[0, -1]),
                boundary_bytes=float(np.median(chain.boundary_bytes[:-1])) if chain.num_units > 1 else 0.0,
                returned_bytes=float(np.median(chain.returned_bytes[:-1])) if chain.num_units > 1 else 0.0,
                workspace_bytes=float(np.median(np.diag(tables.workspace, 1))),
            )
        return self._totals[size]
