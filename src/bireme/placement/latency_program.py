"""The integer program for the shortest latency: its columns and rows, and what a placement is in them.

The pieces of all accelerators are in one line, such that nothing in a piece needs a later one; there is
such a line as long as no pieces wait for each other in a circle, and in it no path leaves a piece and enters
it again. A step is in a piece or, on a CPU, somewhere between two:

    CPU | piece 0 | CPU | piece 1 | CPU | piece 2 | CPU      `opens[v, t]`: step v is before piece t
                                                             `closes[v, t]`: it is before piece t or in it

So it is in piece t where it `closes` but does not `opens` there. Both only rise with t, and no step is before
one that it needs: rows of two entries say all about the order. The line also takes away most of the symmetry
between equal accelerators. Times are relative to `unit`, sizes to the memory of an accelerator: both come to
numbers that the solver's tolerances are made for.
"""

import math
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np

from bireme.errors import BiremeError
from bireme.placement.check import check
from bireme.placement.contraction import Floats, Integers, essential_edges
from bireme.placement.latency import (
    LatencyFound,
    LatencySteps,
    latency_lower_bound,
    longest,
    steps_of,
)
from bireme.placement.program import IntegerProgram, SolverOutcome, beside
from bireme.placement.workload import Objective, Workload

_SCALE = 100.0
"""What the largest latency and the memory of an accelerator are in the program."""

_LEAST_GAIN = 1e-7
"""Relative: how much shorter than the latency that is known a placement must be to be in the program."""


class _LatencyProgram:
    """The program for some steps, accelerators of `num_pieces` pieces, and the latencies that are of
    interest: none is below `least`, and none above `most` is wanted.
    """

    def __init__(self, steps: LatencySteps, num_pieces: int, least: float, most: float) -> None:
        self.steps = steps
        self.num_pieces = num_pieces
        self.num_places = steps.num_accelerators * num_pieces
        self.unit = _SCALE / most if most > 0 else 1.0
        self.most = most * self.unit
        self.accelerator_time = steps.accelerator_time * self.unit
        self.cpu_time = steps.cpu_time * self.unit
        self.edges = essential_edges(steps.after)
        self.nets = _nets_of(steps, self.edges, self.unit)
        self.is_barred = ~steps.can_accelerate[steps.family]
        self.least = np.minimum(
            np.where(self.is_barred, np.inf, self.accelerator_time),
            self.cpu_time if steps.num_cpus else np.inf,
        )
        numbers, times = range(len(steps)), self.least.tolist()
        self.heads = np.array(longest(numbers, [steps.before.row(step) for step in numbers], times))
        self.tails = np.array(longest(numbers[::-1], [steps.after.row(step) for step in numbers], times))
        by_cpu = self.heads + self.cpu_time + self.tails
        self.is_forced = by_cpu > self.most if steps.num_cpus else np.ones(len(steps), np.bool_)
        self.program = IntegerProgram()
        self._add_columns(least * self.unit)
        self._add_order()
        self._add_moves()
        self._add_times()
        self._add_paths()
        self._add_families()

    def _add_columns(self, least: float) -> None:
        program, num_steps, num_places = self.program, len(self.steps), self.num_places
        num_nets = len(self.nets.cost)
        shape = (num_steps, num_places)
        self.opens = program.add_columns(shape, upper=1.0, is_integer=True)
        self.closes = program.add_columns(shape, upper=1.0, is_integer=True)
        self.accelerates = program.add_columns(
            num_steps, lower=np.where(self.is_forced, 1.0, 0.0), upper=np.where(self.is_barred, 0.0, 1.0)
        )
        self.moves_in = program.add_columns((num_nets, num_places), upper=1.0)
        self.moves_out = program.add_columns((num_nets, num_places), upper=1.0)
        self.starts = program.add_columns(num_places, upper=self.most)
        self.durations = program.add_columns(num_places, upper=self.most)
        self.done = program.add_columns(num_steps, upper=self.most)
        self.path = program.add_columns(num_steps, upper=self.most)
        self.latency = program.add_columns(1, lower=min(least, self.most), upper=self.most, cost=1.0)
        homes = (self.num_places, self.steps.num_accelerators if self.num_pieces > 1 else 0)
        self.homes = program.add_columns(homes, upper=1.0, is_integer=True)
        families = (len(self.steps.families), homes[1])
        self.family_homes = program.add_columns(families, upper=1.0)

    def _add_order(self) -> None:
        """Where a step can be, and that it is not before what it needs."""
        add, opens, closes = self.program.add_rows, self.opens, self.closes
        self.program.less(opens, closes)
        forced = self.is_forced
        self.program.less(closes[~forced, :-1], opens[~forced, 1:])
        # What must be in a piece opens where the one before it closes.
        add(beside(closes[forced, :-1], opens[forced, 1:]), [-1, 1], lower=0.0, upper=0.0)
        held = np.concatenate([closes, opens, self.accelerates[:, np.newaxis]], axis=1)
        add(held, np.repeat([1.0, -1.0], [self.num_places, self.num_places + 1]), lower=0.0, upper=0.0)
        sources, users = self.edges.T
        self.program.less(opens[users], opens[sources])
        self.program.less(closes[users], closes[sources])

    def _add_moves(self) -> None:
        """An output moves into a piece that uses it and has not made it, and out of the other way round."""
        nets, users = self.nets.pair_net, self.nets.pair_user
        sources = self.nets.source[nets]
        ends = [self.closes[users], self.opens[users], self.closes[sources], self.opens[sources]]
        self.program.add_rows(beside(self.moves_in[nets], *ends), [1, -1, 1, 1, -1], lower=0.0)
        self.program.add_rows(beside(self.moves_out[nets], *ends), [1, 1, -1, -1, 1], lower=0.0)
        time, cost = self.accelerator_time, self.nets.cost
        columns = [self.durations[np.newaxis], self.closes, self.opens, self.moves_in, self.moves_out]
        coefficients = np.concatenate([[1.0], -time, time, -cost, -cost])
        self.program.add_rows(np.concatenate(columns).T, coefficients, lower=0.0, upper=0.0)

    def _add_times(self) -> None:
        """When pieces start and steps are done."""
        add, done, most = self.program.add_rows, self.done, self.most
        sources, users = self.edges.T
        if len(self.edges):
            times = self.cpu_time[users]
            columns = beside(done[users], done[sources], self.accelerates[users])
            add(columns, beside(1.0, -1.0, times), lower=times)
        add(beside(done, self.accelerates), beside(1.0, self.cpu_time), lower=self.cpu_time)
        # A piece's end counts for the steps in it; elsewhere the row holds by their earliest end.
        spares = np.repeat((most - self.heads - self.least).clip(min=0.0), self.num_places)
        columns = beside(done[:, np.newaxis], self.starts, self.durations, self.closes, self.opens)
        add(columns, beside(1.0, -1.0, -1.0, -spares, spares), lower=-spares)
        columns = beside(self.starts, done[self.nets.source][:, np.newaxis], self.moves_in)
        add(columns, [1.0, -1.0, -most], lower=-most)
        self.program.less(done, self.latency)
        add(beside(self.latency, self.starts, self.durations), [1, -1, -1], lower=0.0)

    def _add_paths(self) -> None:
        """`path`: the longest way to a step's end that counts of each piece only what lies on it.

        It is never after `done`, and needs no row that a big number switches off: what a step takes and the
        moves of an output that it alone uses add up along each edge. A path enters and leaves a piece once.
        """
        shorter = self.accelerator_time - self.cpu_time
        add = self.program.add_rows
        add(beside(self.path, self.accelerates), beside(1.0, -shorter), lower=self.cpu_time)
        self.program.less(self.path, self.done)
        add(beside(self.latency, self.path), [1.0, -1.0], lower=self.tails)
        of_users = {(int(self.nets.source[net]), user): net for net, user in self.nets.alone()}
        for source, user in self.edges.tolist():
            columns = [self.path[user], self.path[source], self.accelerates[user]]
            coefficients = [1.0, -1.0, -shorter[user]]
            net = of_users.get((source, user))
            if net is not None:
                columns += [*self.moves_in[net], *self.moves_out[net]]
                coefficients += [-self.nets.cost[net]] * (2 * self.num_places)
            add([columns], [coefficients], lower=self.cpu_time[user])

    def _add_families(self) -> None:
        """Families share an accelerator, and accelerators hold what they are given."""
        steps = self.steps
        rows = map(steps.families.row, range(len(steps.families)))
        pairs = [pair for row in rows for pair in pairwise(row)]
        limited = steps.room < float(steps.size.sum())
        sizes = steps.size * (_SCALE / steps.room if steps.room > 0 else 1.0)
        most = _SCALE if steps.room > 0 else 0.0
        if pairs and self.num_pieces == 1:
            one, other = np.array(pairs).T
            ends = (self.closes[one], self.opens[one], self.closes[other], self.opens[other])
            self.program.add_rows(beside(*ends), [1, -1, -1, 1], lower=0.0, upper=0.0)
        if limited:
            held = np.concatenate([self.closes, self.opens]).T
            self.program.add_rows(held, np.concatenate([sizes, -sizes]), upper=most)
        if self.num_pieces > 1:
            self._add_homes()
            if limited:
                of_families = np.bincount(steps.family, weights=sizes, minlength=len(steps.families))
                self.program.add_rows(self.family_homes.T, of_families, upper=most)

    def _add_homes(self) -> None:
        """Each place in the line is one of its accelerator's pieces, which run one after the other."""
        homes, add = self.homes, self.program.add_rows
        num_places, num_accelerators = homes.shape
        add(homes, 1.0, lower=1.0, upper=1.0)
        add(homes.T, 1.0, lower=self.num_pieces, upper=self.num_pieces)
        # Equal accelerators come in the order of their first pieces.
        for place in range(num_places):
            for accelerator in range(1, num_accelerators):
                earlier = homes[:place, accelerator - 1].tolist()
                add([[homes[place, accelerator], *earlier]], [[1.0] + [-1.0] * len(earlier)], upper=0.0)
        for earlier_place, later in combinations(range(num_places), 2):
            starts = self.starts[later], self.starts[earlier_place], self.durations[earlier_place]
            columns = beside(*starts, homes[later], homes[earlier_place])
            add(columns, [1.0, -1.0, -1.0, -self.most, -self.most], lower=-2 * self.most)
        of_steps = self.family_homes[self.steps.family]
        total = np.concatenate([of_steps, self.accelerates[:, np.newaxis]], axis=1)
        add(total, np.append(np.ones(num_accelerators), -1.0), lower=0.0, upper=0.0)
        ends = (self.closes[:, :, np.newaxis], self.opens[:, :, np.newaxis])
        columns = beside(of_steps[:, np.newaxis], *ends, homes[np.newaxis])
        add(columns, [1.0, -1.0, 1.0, -1.0], lower=-1.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Nets:
    """Outputs, what moving them costs, and their users in pairs; every essential edge is in one of them."""

    source: Integers
    cost: Floats
    pair_net: Integers
    pair_user: Integers

    def alone(self) -> list[tuple[int, int]]:
        """Nets with one user, and that user."""
        num_users = np.bincount(self.pair_net, minlength=len(self.cost))
        pairs = zip(self.pair_net.tolist(), self.pair_user.tolist(), strict=True)
        return [(net, user) for net, user in pairs if num_users[net] == 1]


def _nets_of(steps: LatencySteps, edges: Integers, unit: float) -> _Nets:
    """The nets of the steps, and free ones for edges along which nothing is paid."""
    sources, costs = steps.net_source.tolist(), (steps.net_cost * unit).tolist()
    rows = [steps.net_users.row(net) for net in range(len(sources))]
    paid = {(source, user) for source, row in zip(sources, rows, strict=True) for user in row}
    for source, user in edges.tolist():
        if (source, user) not in paid:
            sources.append(source)
            costs.append(0.0)
            rows.append([user])
    pairs = [(net, user) for net, row in enumerate(rows) for user in row]
    in_pairs = np.array(pairs, np.int64).reshape(-1, 2)
    return _Nets(np.array(sources, np.int64), np.array(costs, np.float64), in_pairs[:, 0], in_pairs[:, 1])


# The shortest latency, by an integer program: proven where time allows, with a bound where it does not.
#
# It gives its answer back for nodes, with a value that was evaluated again. The program itself is in
# `latency_program.py`.

_TOLERANCE = 1e-6
"""Relative: what the solver's numbers may be off by."""


def solve_latency(
    workload: Workload, *, num_pieces: int = 1, time_limit_s: float, start: LatencyFound | None = None
) -> LatencyFound:
    """The placement with the shortest latency, up to `num_pieces` pieces on each accelerator.

    It is never worse than `start`, a placement that runs and fits. The search ends when value and bound meet,
    or when time is over.
    """
    steps = steps_of(workload)
    known = None if start is None else _checked(workload, num_pieces, start)
    least = latency_lower_bound(workload)
    if least == math.inf:
        raise _nothing_fits(workload, num_pieces)
    if known is not None and known.value <= least:
        return replace(known, lower_bound=known.value)
    most = _longest(steps) * (1 + _LEAST_GAIN) if known is None else known.value * (1 - _LEAST_GAIN)
    program = _LatencyProgram(steps, num_pieces, least, most)
    solved = program.program.solve(time_limit_s=time_limit_s)
    found = [] if known is None else [known]
    if solved.values is not None:
        better = _found(workload, program, solved.values)
        found += [] if better is None else [better]
    if not found:
        if solved.outcome is SolverOutcome.INFEASIBLE:
            raise _nothing_fits(workload, num_pieces)
        raise BiremeError(
            f"No placement was found within {time_limit_s:g} s. Raise the time limit, or begin with what a "
            "search has found."
        )
    best = min(found, key=lambda one: one.value)
    is_best = solved.outcome is SolverOutcome.INFEASIBLE
    bound = max(least, most if is_best else solved.bound / program.unit * (1 - _TOLERANCE))
    return replace(best, lower_bound=min(bound, best.value))


def _checked(workload: Workload, num_pieces: int, start: LatencyFound) -> LatencyFound:
    """The start, with the value that it really has."""
    verdict = check(workload, start.devices, Objective.LATENCY, num_pieces=num_pieces, pieces=start.pieces)
    if not verdict.valid:
        raise BiremeError(f"The placement to begin with cannot run. {verdict.problems[0]}")
    return replace(start, value=verdict.value)


def _nothing_fits(workload: Workload, num_pieces: int) -> BiremeError:
    return BiremeError(
        f"No placement fits: {workload.num_accelerators} accelerators of {workload.accelerator_bytes:g} "
        f"bytes with {num_pieces} pieces each cannot run all nodes, and there is no CPU. Allow more "
        "accelerators, more memory, or more pieces."
    )


def _longest(steps: LatencySteps) -> float:
    """What no placement takes longer than: one thing after the other, each output moved for each user."""
    times = steps.cpu_time.clip(min=steps.accelerator_time).sum()
    num_moves = steps.net_users.starts[1:] - steps.net_users.starts[:-1] + 1
    return float(times + (steps.net_cost * num_moves).sum())


def _found(workload: Workload, program: _LatencyProgram, values: Floats) -> LatencyFound | None:
    """The placement that a solution stands for; none if it cannot run, for the solver rounds."""
    steps, num_pieces = program.steps, program.num_pieces
    places = np.zeros(len(steps), np.int64)
    homes = np.arange(program.num_places)
    if program.num_places:
        places = np.argmax(values[program.closes] - values[program.opens], axis=1)
        homes = np.argmax(values[program.homes], axis=1) if num_pieces > 1 else homes
    # The piece of a place is how many places in the line its accelerator has before.
    runs = [(home, homes[:place].tolist().count(home)) for place, home in enumerate(homes.tolist())]
    on_accelerator = values[program.accelerates] > 0.5
    of_steps = [
        runs[place] if is_there else (steps.num_accelerators, 0)
        for place, is_there in zip(places.tolist(), on_accelerator.tolist(), strict=True)
    ]
    devices, pieces = (steps.spread(of) for of in zip(*of_steps, strict=True))
    verdict = check(workload, devices, Objective.LATENCY, num_pieces=num_pieces, pieces=pieces)
    return LatencyFound(devices, pieces, verdict.value, 0.0) if verdict.valid else None
