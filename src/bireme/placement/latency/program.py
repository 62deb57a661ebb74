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

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bireme.placement.integer.program import Columns, IntegerProgram
from bireme.placement.items import Floats, Integers, Ragged
from bireme.placement.latency.steps import LatencySteps

__all__ = ["LatencyProgram", "LatencyWindow"]

SCALE = 100.0
"""What the largest latency and the memory of an accelerator are in the program."""

SLACK_IN_PROGRAM = 1e-6
"""Relative: how far over the largest latency the program goes, so that a placement of just that is in it."""


@dataclass(frozen=True, slots=True)
class LatencyWindow:
    """The latencies that are of interest: none is below `least`, and none above `most` is wanted."""

    least: float
    most: float


class LatencyProgram:
    """The program for some steps, accelerators of `num_pieces` pieces, and latencies in a window."""

    def __init__(self, steps: LatencySteps, num_pieces: int, window: LatencyWindow) -> None:
        self.steps = steps
        self.num_pieces = num_pieces
        self.num_places = steps.num_accelerators * num_pieces
        self.unit = SCALE / window.most if window.most > 0 else 1.0
        self.most = window.most * self.unit * (1 + SLACK_IN_PROGRAM)
        self.accelerator_time = steps.accelerator_time * self.unit
        self.cpu_time = steps.cpu_time * self.unit
        self.edges = essential_edges(steps)
        self.nets = _nets_of(steps, self.edges, self.unit)
        self.is_barred = ~steps.can_accelerate[steps.family]
        self.least = np.minimum(
            np.where(self.is_barred, np.inf, self.accelerator_time),
            self.cpu_time if steps.num_cpus else np.inf,
        )
        self.heads = self._longest_to(range(len(steps)), steps.before)
        self.tails = self._longest_to(range(len(steps) - 1, -1, -1), steps.after)
        by_cpu = self.heads + self.cpu_time + self.tails
        self.is_forced = by_cpu > self.most if steps.num_cpus else np.ones(len(steps), np.bool_)
        self.program = IntegerProgram()
        self._add_columns(window.least * self.unit)
        self._add_order()
        self._add_moves()
        self._add_times()
        self._add_paths()
        self._add_families()

    def paths(self, values: Floats) -> Floats:
        """What the columns `path` come to, at least, with these values of the others."""
        times = np.where(values[self.accelerates] > 0.5, self.accelerator_time, self.cpu_time)
        moved = (values[self.moves_in] + values[self.moves_out]).sum(axis=1) * self.nets.cost
        moves = {(int(self.nets.source[net]), user): float(moved[net]) for net, user in self.nets.alone()}
        paths = np.array(times)
        for source, user in self.edges.tolist():
            paths[user] = max(paths[user], paths[source] + moves.get((source, user), 0.0) + times[user])
        return paths

    def _longest_to(self, order: Iterable[int], earlier: Ragged) -> Floats:
        """The longest path that ends right before each step, at its fastest."""
        ends = np.zeros(len(self.steps))
        for step in order:
            ends[step] = max((ends[other] + self.least[other] for other in earlier.row(step)), default=0.0)
        return ends

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
        num_places = self.num_places
        _add_ordered(self.program, opens, closes)
        forced = self.is_forced
        _add_ordered(self.program, closes[~forced, :-1], opens[~forced, 1:])
        # What must be in a piece opens where the one before it closes.
        between = np.stack([closes[forced, :-1], opens[forced, 1:]], axis=-1).reshape(-1, 2)
        add(between, [-1, 1], lower=0.0, upper=0.0)
        held = np.concatenate([closes, opens, self.accelerates[:, np.newaxis]], axis=1)
        add(held, [1.0] * num_places + [-1.0] * num_places + [-1.0], lower=0.0, upper=0.0)
        sources, users = self.edges.T
        _add_ordered(self.program, opens[users], opens[sources])
        _add_ordered(self.program, closes[users], closes[sources])

    def _add_moves(self) -> None:
        """An output moves into a piece that uses it and has not made it, and out of the other way round."""
        nets, users = self.nets.pair_net, self.nets.pair_user
        sources = self.nets.source[nets]
        ends = [self.closes[users], self.opens[users], self.closes[sources], self.opens[sources]]
        inward = np.stack([self.moves_in[nets], *ends], axis=-1).reshape(-1, 5)
        self.program.add_rows(inward, [1, -1, 1, 1, -1], lower=0.0)
        outward = np.stack([self.moves_out[nets], *ends], axis=-1).reshape(-1, 5)
        self.program.add_rows(outward, [1, 1, -1, -1, 1], lower=0.0)
        for place in range(self.num_places):
            columns = [
                self.durations[[place]],
                self.closes[:, place],
                self.opens[:, place],
                self.moves_in[:, place],
                self.moves_out[:, place],
            ]
            time, cost = self.accelerator_time, self.nets.cost
            coefficients = np.concatenate([[1.0], -time, time, -cost, -cost])
            self.program.add_rows(
                np.concatenate(columns)[np.newaxis], coefficients[np.newaxis], lower=0.0, upper=0.0
            )

    def _add_times(self) -> None:
        """When pieces start and steps are done."""
        add, done, most = self.program.add_rows, self.done, self.most
        shape = (len(self.steps), self.num_places)
        sources, users = self.edges.T
        if len(self.edges):
            columns = np.stack([done[users], done[sources], self.accelerates[users]], axis=-1)
            times = self.cpu_time[users]
            add(columns, _beside([1.0, -1.0], times), lower=times)
        add(np.stack([done, self.accelerates], axis=-1), _beside([1.0], self.cpu_time), lower=self.cpu_time)
        # A piece's end counts for the steps in it; elsewhere the row holds by their earliest end.
        spare = (most - self.heads - self.least).clip(min=0.0)
        starts = np.broadcast_to(self.starts, shape)
        durations = np.broadcast_to(self.durations, shape)
        dones = np.broadcast_to(done[:, np.newaxis], shape)
        columns = np.stack([dones, starts, durations, self.closes, self.opens], axis=-1).reshape(-1, 5)
        spares = np.repeat(spare, self.num_places)
        add(columns, np.stack([*_ones(spares, 1, -1, -1), -spares, spares], axis=-1), lower=-spares)
        dones = np.broadcast_to(done[self.nets.source][:, np.newaxis], self.moves_in.shape)
        starts = np.broadcast_to(self.starts, self.moves_in.shape)
        columns = np.stack([starts, dones, self.moves_in], axis=-1).reshape(-1, 3)
        add(columns, [1.0, -1.0, -most], lower=-most)
        ends = np.stack([np.broadcast_to(self.latency, done.shape), done], axis=-1)
        add(ends, [1.0, -1.0], lower=0.0)
        latencies = np.broadcast_to(self.latency, self.starts.shape)
        add(np.stack([latencies, self.starts, self.durations], axis=-1), [1, -1, -1], lower=0.0)

    def _add_paths(self) -> None:
        """`path`: the longest way to a step's end that counts of each piece only what lies on it.

        It is never after `done`, and needs no row that a big number switches off: what a step takes and the
        moves of an output that it alone uses add up along each edge. A path enters and leaves a piece once.
        """
        shorter = self.accelerator_time - self.cpu_time
        add = self.program.add_rows
        add(np.stack([self.path, self.accelerates], axis=-1), _beside([1.0], -shorter), lower=self.cpu_time)
        add(np.stack([self.done, self.path], axis=-1), [1.0, -1.0], lower=0.0)
        of_users = {(int(self.nets.source[net]), user): net for net, user in self.nets.alone()}
        latency, tails = self.latency[0], self.tails
        for step in range(len(self.steps)):
            add([[latency, self.path[step]]], [[1.0, -1.0]], lower=tails[step])
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
        steps, num_places = self.steps, self.num_places
        pairs = [
            pair for number in range(len(steps.families)) for pair in pairwise(steps.families.row(number))
        ]
        limited = steps.room < float(steps.size.sum())
        sizes = steps.size * (SCALE / steps.room if steps.room > 0 else 1.0)
        most = SCALE if steps.room > 0 else 0.0
        if pairs and self.num_pieces == 1:
            one, other = np.array(pairs).T
            ends = [self.closes[one], self.opens[one], self.closes[other], self.opens[other]]
            together = np.stack(ends, axis=-1).reshape(-1, 4)
            self.program.add_rows(together, [1, -1, -1, 1], lower=0.0, upper=0.0)
        if limited:
            for place in range(num_places):
                columns = np.concatenate([self.closes[:, place], self.opens[:, place]])
                self.program.add_rows([columns], [np.concatenate([sizes, -sizes])], upper=most)
        if self.num_pieces > 1:
            self._add_homes()
            for accelerator in range(steps.num_accelerators if limited else 0):
                of_families = np.bincount(steps.family, weights=sizes, minlength=len(steps.families))
                self.program.add_rows([self.family_homes[:, accelerator]], [of_families], upper=most)

    def _add_homes(self) -> None:
        """Each place in the line is one of its accelerator's pieces, which run one after the other."""
        steps, homes, add = self.steps, self.homes, self.program.add_rows
        num_places, num_accelerators = homes.shape
        add(homes, 1.0, lower=1.0, upper=1.0)
        add(homes.T, 1.0, lower=self.num_pieces, upper=self.num_pieces)
        # Equal accelerators come in the order of their first pieces.
        for place in range(num_places):
            for accelerator in range(1, num_accelerators):
                earlier = homes[:place, accelerator - 1].tolist()
                add([[homes[place, accelerator], *earlier]], [[1.0] + [-1.0] * len(earlier)], upper=0.0)
        for later in range(num_places):
            for earlier_place in range(later):
                columns = np.array(
                    [
                        [
                            self.starts[later],
                            self.starts[earlier_place],
                            self.durations[earlier_place],
                            homes[later, accelerator],
                            homes[earlier_place, accelerator],
                        ]
                        for accelerator in range(num_accelerators)
                    ]
                )
                add(columns, [1.0, -1.0, -1.0, -self.most, -self.most], lower=-2 * self.most)
        for step, family in enumerate(steps.family.tolist()):
            total = np.concatenate([self.family_homes[family], self.accelerates[[step]]])
            add([total], [[1.0] * num_accelerators + [-1.0]], lower=0.0, upper=0.0)
            for place in range(num_places):
                at = [self.closes[step, place], self.opens[step, place]]
                columns = np.array(
                    [
                        [self.family_homes[family, accelerator], *at, homes[place, accelerator]]
                        for accelerator in range(num_accelerators)
                    ]
                )
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


def essential_edges(steps: LatencySteps) -> Integers:
    """The edges, in rows of two, that no longer path stands for; order and times need no others."""
    reach = [0] * len(steps)
    edges = []
    for step in range(len(steps) - 1, -1, -1):
        farther = 0
        users = steps.after.row(step)
        for user in users:
            farther |= reach[user]
        edges += [(step, user) for user in users if not farther >> user & 1]
        reach[step] = farther | sum(1 << user for user in users)
    return np.array(edges[::-1], np.int64).reshape(-1, 2)


def _add_ordered(program: IntegerProgram, small: Columns, large: Columns) -> None:
    """No entry of the first is above its counterpart in the second."""
    program.add_rows(np.stack([large, small], axis=-1).reshape(-1, 2), [1.0, -1.0], lower=0.0)


def _ones(like: Floats, *signs: float) -> list[Floats]:
    return [np.full(len(like), sign) for sign in signs]


def _beside(constants: list[float], numbers: Floats) -> Floats:
    """Rows of the same constants, each with one of the numbers at its end."""
    return np.stack([*_ones(numbers, *constants), numbers], axis=-1)
