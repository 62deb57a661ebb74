"""AutoPipe's partitioner: start from the least pace, then move work away from the critical path.

A batch that drains takes more than its pace: in the best partition, loads are not equal but fall after the
master stage, so that the last micro-batch comes back without waiting. The search is that of the authors'
released planner. Ours are: any number of micro-batches, devices of unequal speed, memory limits and links
(through the tables it starts from), no stage is ever empty, and a last walk from neighbor to neighbor.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
import numpy.typing as npt

from bireme.plan.partition.chain import Chain, Seconds
from bireme.plan.partition.loads import Loads
from bireme.plan.partition.partition import LeastCuts, Partition, assess, least_max, least_sum
from bireme.simulate.costs import Costs

# AutoPipe's simulator: when a batch of 1F1B is through, and which stage sets its time.
#
# Stage s of p runs w = min(p − 1 − s, m) forwards ahead. Then step k pairs the forward of micro-batch k + w
# with the backward of micro-batch k:
#
#     forward begins   max( its input is there, backward k − 1 of this stage ends )
#     backward begins  max( its gradient is there, the forward of its step ends )
#
# An input is there C after the forward ends on stage s − 1, a gradient C after the backward ends on s + 1.
# In AutoPipe C comes on top of both, as where a stage waits while it receives; on a link that overlaps it
# only delays what is under way.
#
# The published planner fixes m at 2p and lets step 0 begin its backwards as soon as a gradient could be
# there, whatever the stage itself still has to run. Where a late stage is fast that is too early, and too
# short a batch; here a stage's own forwards hold its first backward up as they do in a run.

_SLACK = 1e-9
"""Relative to a batch: shorter than that nothing waits, it is rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class Iterations:
    """For each partition the seconds of a batch, and its master stage.

    The master is the last stage that never waits once it alternates: the critical path goes along it.
    """

    seconds: Seconds
    master: npt.NDArray[np.intp]


def iterate(
    forward_s: Seconds,
    backward_s: Seconds,
    num_microbatches: int,
    *,
    hop_s: Seconds | None = None,
    stops: Sequence[bool] | bool = True,
) -> Iterations:
    """Go through one batch of each partition, whose stages' seconds are the rows.

    `hop_s` are the seconds between each stage and the next. Without them the result is exact; so it is where
    stages wait while they receive, over links that `stops` names. The messages of other links do not wait
    for each other here.
    """
    forward_s, backward_s = np.atleast_2d(forward_s), np.atleast_2d(backward_s)
    num_stages = forward_s.shape[1]
    hop = np.zeros((1, num_stages - 1)) if hop_s is None else np.atleast_2d(hop_s)
    stopping = np.broadcast_to(np.asarray(stops, np.bool_), (num_stages - 1,))
    return _Run(forward_s, backward_s, hop, num_microbatches, stopping).result()


class _Run:
    """One batch on its way. `forward_end_s` and `backward_end_s` are those of each stage's latest.

    A chain of maxima along the stages, each with the stage's own seconds on top, becomes one running maximum
    of what is left when the seconds of the way are taken away first. Rows are the stages here, the last
    first, and columns the partitions.
    """

    def __init__(
        self,
        forward_s: Seconds,
        backward_s: Seconds,
        hop_s: Seconds,
        num_microbatches: int,
        stops: npt.NDArray[np.bool_],
    ) -> None:
        num_partitions, self._num_stages = forward_s.shape
        self._num_microbatches = num_microbatches
        self._forward_s = forward_s.T[::-1].copy()
        self._backward_s = backward_s.T[::-1].copy()
        nothing = np.zeros((1, num_partitions))
        self._hop_s = np.broadcast_to(hop_s, (num_partitions, self._num_stages - 1)).T[::-1].copy()
        from_before_s = np.vstack((self._hop_s, nothing))
        from_behind_s = np.vstack((nothing, self._hop_s))
        # A stage that waits while it receives does so even when it is late itself.
        stand_s = self._hop_s * stops[::-1, None]
        stand_before_s, stand_behind_s = np.vstack((stand_s, nothing)), np.vstack((nothing, stand_s))
        self._stand_before_s = stand_before_s if stand_s.any() else None
        way_s = np.vstack((self._forward_s[1:], nothing)) + from_before_s
        self._way_s = np.cumsum(way_s[::-1], axis=0)[::-1]
        way_back_s = np.cumsum(np.vstack((nothing, self._backward_s[:-1])) + from_behind_s, axis=0)
        self._way_back_s = way_back_s - stand_behind_s
        self._way_through_s = way_back_s + self._backward_s
        self._stand_s = stand_before_s + stand_behind_s
        self._forward_end_s, self._backward_end_s, self._first_s, self._last_s = np.zeros(
            (4, *self._forward_s.shape)
        )

    def result(self) -> Iterations:
        for microbatch in range(min(self._num_stages, self._num_microbatches)):
            self._forwards_ahead(microbatch)
        for k in range(self._num_microbatches):
            self._step(k)
        return Iterations(self._backward_end_s[-1].copy(), self._masters())

    def _forwards_ahead(self, microbatch: int) -> None:
        """A micro-batch's forwards on the stages where nothing but forwards comes before."""
        begin_s = self._forward_end_s[microbatch:] - self._way_s[microbatch:]
        if self._stand_before_s is not None:
            begin_s += self._stand_before_s[microbatch:]
        begin_s = np.maximum.accumulate(begin_s[::-1], axis=0)[::-1]
        begin_s += self._way_s[microbatch:]
        np.add(begin_s, self._forward_s[microbatch:], out=self._forward_end_s[microbatch:])

    def _step(self, k: int) -> None:
        # The first stages have no forward left at the end; with fewer micro-batches than stages never one.
        num = self._num_stages + min(0, self._num_microbatches - self._num_stages - k)
        if k:
            begin_s = self._backward_end_s[:num]
            if self._stand_before_s is not None:
                begin_s = begin_s + self._stand_before_s[:num]
            with_before = min(num, self._num_stages - 1)
            arrived_s = self._forward_end_s[1 : with_before + 1] + self._hop_s[:with_before]
            late_s = np.maximum(begin_s[:with_before], arrived_s)
            np.add(late_s, self._forward_s[:with_before], out=self._forward_end_s[:with_before])
            if with_before < num:
                np.add(begin_s[-1], self._forward_s[-1], out=self._forward_end_s[-1])
        ready_s = self._forward_end_s
        if k and num < self._num_stages:
            ready_s = np.concatenate((self._forward_end_s[:num], self._backward_end_s[num:]))
        chain_s = ready_s - self._way_back_s
        np.maximum.accumulate(chain_s, axis=0, out=chain_s)
        np.add(chain_s, self._way_through_s, out=self._backward_end_s)
        if k == 0:
            self._first_s[:] = self._last_s[:] = self._backward_end_s
        elif num:
            self._last_s[:num] = self._backward_end_s[:num]

    def _masters(self) -> npt.NDArray[np.intp]:
        busy_s = self._forward_s + self._backward_s
        steps = np.maximum(self._num_microbatches - 1 - np.arange(self._num_stages), 0)[:, None]
        waited_s = self._last_s - self._first_s - steps * (busy_s + self._stand_s)
        never_waits = waited_s <= _SLACK * self._backward_end_s[-1]
        # Where each stage waits at some time, the busiest comes nearest to it.
        busiest = busy_s >= busy_s.max(axis=0)
        candidates = np.where(never_waits.any(axis=0), never_waits, busiest)
        return np.asarray(self._num_stages - 1 - candidates.argmax(axis=0), np.intp)


# The stage times of many partitions at once, in the form that the recurrence wants.


@dataclass(frozen=True, slots=True, eq=False)
class _StageTimes:
    """A row per partition and a column per stage; `hop_s` has one column less, for the links between."""

    forward_s: Seconds
    backward_s: Seconds
    hop_s: Seconds

    def busy_s(self, stops: Sequence[bool]) -> Seconds:
        """How long a micro-batch keeps each stage busy, its waits for messages included."""
        busy_s, stand_s = self.forward_s + self.backward_s, self.hop_s * np.asarray(stops, np.bool_)
        busy_s[:, :-1] += stand_s
        busy_s[:, 1:] += stand_s
        return busy_s


class ChainTimes:
    """What is the same for all partitions of a chain on its devices, worked out once."""

    def __init__(self, loads: Loads) -> None:
        self._loads = loads
        chain, line = loads.chain, loads.line
        self._speeds = np.array([seat.speed for seat in line.seats])
        self._until_s = [
            np.concatenate(([0.0], np.cumsum(values)))
            for values in (chain.forward_s, chain.backward_s, chain.recompute_backward_s)
        ]
        self._again = np.stack(loads.recomputed) if any(t.any() for t in loads.recomputed) else None
        boundary = chain.boundary_bytes.astype(np.float64)
        self._hops_s = [link.seconds(boundary) + link.latency_s for link in line.links]

    def times(self, all_cuts: Sequence[Sequence[int]]) -> _StageTimes:
        """Those of the partitions with these cuts, which must leave no stage empty."""
        chain = self._loads.chain
        bounds = np.array([(0, *cuts, chain.num_units) for cuts in all_cuts], np.intp)
        begins, ends = bounds[:, :-1], bounds[:, 1:]
        forward_s, backward_s, again_s = self._until_s
        back_s = backward_s[ends] - backward_s[begins]
        if self._again is not None:
            stages = np.arange(begins.shape[1])
            again = self._again[stages, begins - stages, ends - 1 - stages]
            back_s = np.where(again, again_s[ends] - again_s[begins], back_s)
        return _StageTimes(
            forward_s=(forward_s[ends] - forward_s[begins]) / self._speeds,
            backward_s=back_s / self._speeds,
            hop_s=np.stack([hop_s[ends[:, link] - 1] for link, hop_s in enumerate(self._hops_s)], axis=1)
            if self._hops_s
            else np.zeros((len(bounds), 0)),
        )


Cuts = tuple[int, ...]

_MOST_WORK = 80_000
"""Stages times micro-batches times partitions that the search goes on from. With few it ends by itself."""

_SLOWER = (1.0, 1.2, 2.0)
"""How much slower a partition may be for the sake of a shorter way through."""

_MOST_STEPS = 8
"""Of the walk at the end."""

_MOST_NEIGHBORS = 64
"""About so many are gone through at each of them."""

_MOST_AT_ONCE = 2_000
"""So few partitions are all gone through, which takes a few milliseconds."""


@dataclass(frozen=True, slots=True)
class _FoundPartition:
    """The best partition found, and what its batch takes; that of the least pace takes `start_batch_s`."""

    partition: Partition
    batch_s: float
    start_batch_s: float


def autopipe(loads: Loads, *, most_at_once: int = _MOST_AT_ONCE) -> _FoundPartition | None:
    """Search from the partition with the least pace; None where no partition fits, and `exact` says why.

    The seconds are those of the recurrence, which is 1F1B's. If there are at most `most_at_once` partitions,
    it goes through them all.
    """
    costs = [loads.cost_s(stage) for stage in range(loads.num_stages)]
    table = least_max(costs, loads.link_s)
    if table.value == np.inf:
        return None
    search = _Search(loads, table)
    starts = [table.cuts()]
    if _has_short_ways(loads):
        starts += _short_ways(costs, loads.link_s, table.value)
    search.run(starts)
    num_units, num_cuts = loads.chain.num_units, loads.num_stages - 1
    if comb(num_units - 1, num_cuts) <= most_at_once:
        search.all_seconds(_fitting(loads, combinations(range(1, num_units), num_cuts)))
    fastest = min(search.tried.values(), key=lambda trial: trial.batch_s)
    best = _walk(fastest.cuts, search.all_seconds, loads)
    start_s, best_s = search.all_seconds([search.start.cuts, best])
    return _FoundPartition(assess(loads, best), best_s, start_s)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A partition that was gone through; `busy_s` is forward, backward and messages of each stage."""

    cuts: Cuts
    batch_s: float
    master: int
    busy_s: list[float]
    backward_s: list[float]


class _Search:
    """The published search: what was tried, and what is to be tried next."""

    def __init__(self, loads: Loads, table: LeastCuts) -> None:
        self._loads = loads
        self._table = table
        self._stopwatch = ChainTimes(loads)
        self._num_stages = loads.num_stages
        self.tried: dict[Cuts, _Trial] = {}
        self.start = self._try(table.cuts())

    def run(self, starts: Iterable[Cuts]) -> None:
        """Go on from some partitions and every one found until there is none left."""
        queue = deque(dict.fromkeys(starts))
        seen = set(queue)
        for _ in range(max(4, _MOST_WORK // (self._num_stages * self._loads.setting.num_microbatches))):
            if not queue:
                return
            trial = self._try(queue.popleft())
            self._lighten_the_tail(trial)
            for cuts in self._with_a_smaller_master(trial):
                if cuts not in seen:
                    seen.add(cuts)
                    queue.append(cuts)

    def all_seconds(self, all_cuts: Sequence[Cuts]) -> list[float]:
        """What batches take, those not tried yet in one go."""
        new = [cuts for cuts in dict.fromkeys(all_cuts) if cuts not in self.tried]
        if new:
            loads = self._loads
            times = self._stopwatch.times(new)
            stops = [link.stops for link in loads.line.links]
            gone = iterate(
                times.forward_s,
                times.backward_s,
                loads.setting.num_microbatches,
                hop_s=times.hop_s,
                stops=stops,
            )
            rows = zip(
                new,
                gone.seconds,
                gone.master,
                times.busy_s(stops),
                times.backward_s,
                strict=True,
            )
            for cuts, seconds, master, busy_s, backward_s in rows:
                trial = _Trial(cuts, float(seconds), int(master), busy_s.tolist(), backward_s.tolist())
                self.tried[cuts] = trial
        return [self.tried[cuts].batch_s for cuts in all_cuts]

    def _try(self, cuts: Cuts) -> _Trial:
        self.all_seconds([cuts])
        return self.tried[cuts]

    def _lighten_the_tail(self, trial: _Trial) -> None:
        """Move units to later stages after the master until the last micro-batch comes back without a bubble.

        The last micro-batch goes to stage `behind` and back while the master runs its last backwards;
        `gap_s` is what it may be late because of what was moved.
        """
        master, behind, gap_s = trial.master, trial.master + 1, 0.0
        while behind < self._num_stages:
            busy_s, backward_s = trial.busy_s, trial.backward_s
            if sum(busy_s[master + 1 : behind + 1]) <= (behind - master) * backward_s[master] + gap_s:
                behind += 1
                continue
            mover = self._first_that_can_take(trial, behind)
            if mover is None:
                return
            around_s = sum(busy_s[master + 1 : mover + 1])
            gap_s += max(0.0, around_s - ((mover - master) * backward_s[master] + gap_s))
            behind = mover + 1
            cuts = list(trial.cuts)
            cuts[mover] += 1
            trial = self._try(tuple(cuts))
            if trial.master != master:
                return

    def _first_that_can_take(self, trial: _Trial, behind: int) -> int | None:
        """The first stage after the master that stays below it with the next stage's first unit."""
        bounds = self._loads.chain.bounds(trial.cuts)
        master_s = self._loads.busy_of(trial.master, bounds[trial.master], bounds[trial.master + 1])
        for stage in range(trial.master + 1, min(behind, self._num_stages - 1)):
            begin, end, after = bounds[stage : stage + 3]
            if after - end < 2 or not self._loads.fits(stage, begin, end + 1):
                continue
            if not self._loads.fits(stage + 1, end + 1, after):
                continue
            if self._loads.busy_of(stage, begin, end + 1) < master_s:
                return stage
        return None

    def _with_a_smaller_master(self, trial: _Trial) -> Iterable[Cuts]:
        """Give the master's first unit to the stages before it, or its last to the next stage.

        The stages before are cut again as the table says. If the critical path would move later, nothing
        is won.
        """
        bounds, master = self._loads.chain.bounds(trial.cuts), trial.master
        if bounds[master + 1] - bounds[master] < 2 or master == 0:
            return
        begin, end = bounds[master] + 1, bounds[master + 1]
        if self._table.value_before(master, begin) < np.inf and self._loads.fits(master, begin, end):
            yield (*self._table.cuts_before(master, begin), begin, *bounds[master + 1 : -1])
        if master < self._num_stages - 1:
            after = bounds[master + 2]
            fits = self._loads.fits(master + 1, end - 1, after)
            if fits and self._table.value_before(master + 1, end - 1) < np.inf:
                before = self._table.cuts_before(master + 1, end - 1)
                cuts = (*before, end - 1, *bounds[master + 2 : -1])
                if self._try(cuts).master <= master:
                    yield cuts


def _has_short_ways(loads: Loads) -> bool:
    """Whether the time a micro-batch takes to go through depends on the cuts."""
    line = loads.line
    if len({seat.speed for seat in line.seats}) > 1 or any(again.any() for again in loads.recomputed):
        return True
    return any(link.stops and link.bytes_per_s < np.inf for link in line.links)


def _short_ways(costs: Sequence[Seconds], boundaries: Sequence[Seconds], pace_s: float) -> Iterable[Cuts]:
    """Of partitions that are a little slower than could be those that a micro-batch is soonest through."""
    for factor in _SLOWER:
        cuts = least_sum(costs, boundaries, factor * pace_s)
        if cuts is not None:
            yield cuts


def _walk(cuts: Cuts, all_seconds: Callable[[Sequence[Cuts]], list[float]], loads: Loads) -> Cuts:
    """From neighbor to neighbor as long as that is better."""
    best_s = all_seconds([cuts])[0]
    for _ in range(_MOST_STEPS):
        near = _fitting(loads, _neighbors(cuts))
        found = all_seconds(near)
        least_s = min(found, default=np.inf)
        if not least_s < best_s:
            break
        cuts, best_s = near[found.index(least_s)], least_s
    return cuts


def _neighbors(cuts: Cuts) -> Iterable[Cuts]:
    """A few cuts in a row moved by one: a unit goes from one stage to another, those between pass one on."""
    most = max(1, _MOST_NEIGHBORS // (2 * max(len(cuts), 1)))
    for first in range(len(cuts)):
        for end in range(first + 1, min(first + most, len(cuts)) + 1):
            for step in (-1, 1):
                yield (*cuts[:first], *(cut + step for cut in cuts[first:end]), *cuts[end:])


def _fitting(loads: Loads, all_cuts: Iterable[Cuts]) -> list[Cuts]:
    """Those that leave no stage empty and fit every device."""
    given = list(all_cuts)
    inner = np.array(given, np.intp).reshape(len(given), loads.num_stages - 1)
    ends = np.pad(inner, ((0, 0), (0, 1)), constant_values=loads.chain.num_units)
    begins = np.pad(inner, ((0, 0), (1, 0)))
    fine = np.asarray((begins < ends).all(axis=1), np.bool_)
    for stage, seat in enumerate(loads.line.seats):
        if seat.memory_bytes < np.inf:
            places = np.flatnonzero(fine)
            held = loads.peak_bytes[stage][begins[places, stage] - stage, ends[places, stage] - 1 - stage]
            fine[places] = held <= seat.memory_bytes
    return [cuts for cuts, is_fine in zip(given, fine.tolist(), strict=True) if is_fine]


# A partition's stages as costs for the simulator.


def costs_between(chain: Chain, cuts: Cuts, *, half_forward_s: Seconds | None = None) -> Costs:
    """The costs of the stages between some cuts for the simulator, on devices of speed 1.

    `half_forward_s` are the seconds of half a micro-batch in each unit, where they are known.
    """
    bounds = chain.bounds(cuts)
    begins, ends = list(bounds[:-1]), list(bounds[1:])
    tables = chain.bytes

    def sums(values: Seconds) -> list[float]:
        return [float(values[begin:end].sum()) for begin, end in zip(begins, ends, strict=True)]

    backward_s = sums(chain.backward_s)
    again_s = sums(chain.recompute_backward_s)
    input_s, weight_s = _halves_s(chain, begins, ends)
    return Costs.per_stage(
        len(begins),
        forward_s=sums(chain.forward_s),
        backward_s=backward_s,
        backward_input_s=input_s,
        backward_weight_s=weight_s,
        half_forward_s=None if half_forward_s is None else sums(half_forward_s),
        recompute_s=[max(again - once, 0.0) for again, once in zip(again_s, backward_s, strict=True)],
        update_s=sums(chain.update_s),
        trial_s=sums(chain.trial_s),
        reduce_busy_s=sums(chain.reduce_s),
        message_bytes=[*(float(chain.boundary_bytes[end - 1]) for end in ends[:-1]), 0.0],
        gradient_message_bytes=[*(float(chain.returned_bytes[end - 1]) for end in ends[:-1]), 0.0],
        weight_bytes=tables.parameter[begins, ends].tolist(),
        gradient_bytes=tables.gradient[begins, ends].tolist(),
        optimizer_bytes=tables.optimizer[begins, ends].tolist(),
        buffer_bytes=tables.buffer[begins, ends].tolist(),
        frozen_bytes=tables.frozen[begins, ends].tolist(),
        workspace_bytes=tables.workspace[begins, ends].tolist(),
        waiting_bytes=tables.waiting[begins, ends].tolist(),
        halves_bytes=tables.halves[begins, ends].tolist(),
        stash_bytes=tables.kept[begins, ends].tolist(),
        input_bytes=tables.inputs[begins, ends].tolist(),
    )


def _halves_s(
    chain: Chain, begins: list[int], ends: list[int]
) -> tuple[list[float] | None, list[float] | None]:
    """The seconds of the two halves of each stage's backward, where they are known.

    Together they take longer than a whole one. A stage that sends no gradient back has nothing to do in the
    first but to find that out, and does all of a whole one in the second.
    """
    inputs, weights = chain.backward_input_s, chain.backward_weight_s
    if inputs is None or weights is None:
        return None, None
    input_s, weight_s = list[float](), list[float]()
    for begin, end in zip(begins, ends, strict=True):
        goes_back = begin > 0 and chain.returned_bytes[begin - 1] > 0
        input_s.append(float(inputs[begin:end].sum() if goes_back else inputs[begin]))
        weight_s.append(float((weights if goes_back else chain.backward_s)[begin:end].sum()))
    return input_s, weight_s
