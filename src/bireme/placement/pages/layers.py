"""A layered drawing of a graph: each cell in a row below all that comes before it.

What leaves a cell for rows further down goes through them as one line, its *trunk*, from which each follower
branches off in the row above its own. The order within rows comes from barycentres, the places from least
squares. It knows nothing of what is drawn.
"""

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Layout", "laid_out_in_layers", "layers_of"]

ORDER_SWEEPS = 8
PLACE_SWEEPS = 24
"""Down and up again through all rows, for the order and for the places."""

STRAIGHT = 12.0
"""How much more it counts that a trunk stands straight than that a cell is near its neighbours."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The row of each cell and where its middle is; `trunks[i]` are the places of its trunk, row by row.

    The first place of a trunk is in the row below the cell. Places begin at 0, the leftmost edge.
    """

    layers: tuple[int, ...]
    x: tuple[float, ...]
    trunks: tuple[tuple[float, ...], ...]
    width: float


def laid_out_in_layers(
    followers: Sequence[Iterable[int]], *, cell_width: float, trunk_width: float, gap: float
) -> Layout:
    """A drawing of a graph of equally wide cells, each with its followers."""
    layers = layers_of(followers)
    graph = _Rows(followers, layers)
    graph.sort()
    widths = [cell_width if vertex < len(layers) else trunk_width for vertex in range(len(graph.row_of))]
    x = graph.places(widths, gap)
    left = min((x[v] - widths[v] / 2 for v in range(len(x))), default=0.0)
    right = max((x[v] + widths[v] / 2 for v in range(len(x))), default=0.0)
    return Layout(
        tuple(layers),
        tuple(place - left for place in x[: len(layers)]),
        tuple(tuple(x[vertex] - left for vertex in trunk) for trunk in graph.trunks),
        right - left,
    )


def layers_of(followers: Sequence[Iterable[int]]) -> list[int]:
    """The row of each cell, from 0 on, as near to its followers as that makes lines shorter.

    A cell is above its followers, except where a circle makes that impossible.
    """
    rows = [list(targets) for targets in followers]
    order = _in_order(rows)
    rank = {cell: place for place, cell in enumerate(order)}
    after = [[target for target in rows[cell] if rank[target] > rank[cell]] for cell in range(len(rows))]
    num_before = [0] * len(rows)
    layers = [0] * len(rows)
    # Whether nothing but a chain from a source hangs above a cell, as above a weight that is transposed.
    hangs_free = [True] * len(rows)
    for cell in order:
        for target in after[cell]:
            num_before[target] += 1
            layers[target] = max(layers[target], layers[cell] + 1)
            hangs_free[target] &= hangs_free[cell] and len(after[cell]) == 1
    for cell in reversed(order):
        gain = len(after[cell]) - num_before[cell]
        if after[cell] and (gain > 0 or hangs_free[cell]):
            layers[cell] = min(layers[target] for target in after[cell]) - 1
    row_of = {layer: row for row, layer in enumerate(sorted(set(layers)))}
    return [row_of[layer] for layer in layers]


def _in_order(followers: Sequence[Sequence[int]]) -> list[int]:
    """A walk in depth that takes a cell once all before it are taken; circles are cut where it is stuck."""
    waiting = [0] * len(followers)
    for targets in followers:
        for target in targets:
            waiting[target] += 1
    ready = [cell for cell, count in enumerate(waiting) if not count][::-1]
    order: list[int] = []
    taken = [False] * len(followers)
    next_stuck = 0
    while len(order) < len(followers):
        while not ready:
            if not taken[next_stuck]:
                ready.append(next_stuck)
            next_stuck += 1
        cell = ready.pop()
        if taken[cell]:
            continue
        taken[cell] = True
        order.append(cell)
        for target in reversed(followers[cell]):
            waiting[target] -= 1
            if not waiting[target] and not taken[target]:
                ready.append(target)
    return order


class _Rows:
    """Cells and the points of trunks, as vertices in rows, with lines between neighbouring rows only."""

    def __init__(self, followers: Sequence[Iterable[int]], layers: Sequence[int]) -> None:
        self.row_of = list(layers)
        self.trunks: list[list[int]] = []
        self.above: list[list[int]] = [[] for _ in layers]
        self.below: list[list[int]] = [[] for _ in layers]
        self.num_cells = len(layers)
        for cell, targets in enumerate(followers):
            lower = [target for target in targets if layers[target] > layers[cell]]
            trunk = [cell]
            for row in range(layers[cell] + 1, max((layers[target] for target in lower), default=0)):
                trunk.append(self._point(row))
                self._join(trunk[-2], trunk[-1])
            for target in lower:
                self._join(trunk[layers[target] - 1 - layers[cell]], target)
            self.trunks.append(trunk[1:])
        self.rows: list[list[int]] = [[] for _ in range(max(self.row_of, default=-1) + 1)]
        for cell in _in_order([list(targets) for targets in followers]):
            for vertex in (cell, *self.trunks[cell]):
                self.rows[self.row_of[vertex]].append(vertex)

    def _point(self, row: int) -> int:
        self.row_of.append(row)
        self.above.append([])
        self.below.append([])
        return len(self.row_of) - 1

    def _join(self, upper: int, lower: int) -> None:
        self.below[upper].append(lower)
        self.above[lower].append(upper)

    def sort(self) -> None:
        """Put the vertices of each row in an order with few crossings."""
        best = [list(row) for row in self.rows]
        fewest = self._crossings()
        for _ in range(ORDER_SWEEPS):
            for rows, neighbours in ((self.rows, self.above), (self.rows[::-1], self.below)):
                for before, row in pairwise(rows):
                    self._sort_by(row, before, neighbours)
            crossings = self._crossings()
            if crossings < fewest:
                best, fewest = [list(row) for row in self.rows], crossings
        self.rows = best

    def _sort_by(self, row: list[int], before: list[int], neighbours: list[list[int]]) -> None:
        place = {vertex: number / len(before) for number, vertex in enumerate(before)}
        own = {vertex: number / len(row) for number, vertex in enumerate(row)}
        key = {
            vertex: sum(place[other] for other in neighbours[vertex]) / len(neighbours[vertex])
            if neighbours[vertex]
            else own[vertex]
            for vertex in row
        }
        row.sort(key=key.__getitem__)

    def _crossings(self) -> int:
        count = 0
        for upper, lower in pairwise(self.rows):
            place = {vertex: number for number, vertex in enumerate(lower)}
            seen: list[int] = []
            for vertex in upper:
                ends = sorted(place[other] for other in self.below[vertex])
                count += sum(len(seen) - bisect_right(seen, end) for end in ends)
                for end in ends:
                    insort(seen, end)
        return count

    def places(self, widths: Sequence[float], gap: float) -> list[float]:
        """Where the middle of each vertex is, so that lines are short and trunks straight."""
        x = [0.0] * len(self.row_of)
        for row in self.rows:
            right = 0.0
            for vertex in row:
                x[vertex] = right + widths[vertex] / 2
                right += widths[vertex] + gap
            for vertex in row:
                x[vertex] -= (right - gap) / 2
        both = [above + below for above, below in zip(self.above, self.below, strict=True)]
        for sweep in range(PLACE_SWEEPS):
            is_last = sweep >= PLACE_SWEEPS / 2
            self._spread(self.rows, both if is_last else self.above, x, widths, gap)
            self._spread(self.rows[::-1], both if is_last else self.below, x, widths, gap)
        for trunk in filter(None, self.trunks):
            self._straighten(trunk, x, widths, gap)
        return x

    def _straighten(self, trunk: Sequence[int], x: list[float], widths: Sequence[float], gap: float) -> None:
        """Give the points of a trunk one place for as many rows as their neighbours leave free."""
        run: list[int] = []
        low, high = -math.inf, math.inf
        for point in (*trunk, None):
            free = (math.inf, -math.inf) if point is None else self._room(point, x, widths, gap)
            if max(low, free[0]) > min(high, free[1]):
                mean = sum(x[one] for one in run) / len(run)
                for one in run:
                    x[one] = min(max(low, mean), high)
                run, (low, high) = [], free
            low, high = max(low, free[0]), min(high, free[1])
            if point is not None:
                run.append(point)

    def _room(
        self, vertex: int, x: Sequence[float], widths: Sequence[float], gap: float
    ) -> tuple[float, float]:
        """How far a vertex can go to the left and to the right in its row."""
        row = self.rows[self.row_of[vertex]]
        place = row.index(vertex)
        low, high = -math.inf, math.inf
        if place:
            other = row[place - 1]
            low = x[other] + (widths[other] + widths[vertex]) / 2 + gap
        if place + 1 < len(row):
            other = row[place + 1]
            high = x[other] - (widths[other] + widths[vertex]) / 2 - gap
        # Sums round, and a vertex may always stay where it is.
        return min(low, x[vertex]), max(high, x[vertex])

    def _spread(
        self,
        rows: Sequence[Sequence[int]],
        neighbours: Sequence[Sequence[int]],
        x: list[float],
        widths: Sequence[float],
        gap: float,
    ) -> None:
        for row in rows:
            wished, weights, offsets = [], [], []
            offset = 0.0
            for number, vertex in enumerate(row):
                if number:
                    offset += (widths[row[number - 1]] + widths[vertex]) / 2 + gap
                place, weight = self._wish(vertex, neighbours[vertex], x)
                wished.append(place - offset)
                weights.append(weight)
                offsets.append(offset)
            for vertex, place, offset in zip(row, _rising(wished, weights), offsets, strict=True):
                x[vertex] = place + offset

    def _wish(self, vertex: int, neighbours: Sequence[int], x: Sequence[float]) -> tuple[float, float]:
        """Where a vertex would be best for its neighbours, and how much that counts."""
        total = weight = 0.0
        for other in neighbours:
            is_trunk = vertex >= self.num_cells and other >= self.num_cells
            share = STRAIGHT if is_trunk else 1.0
            total += share * x[other]
            weight += share
        return (total / weight, weight) if weight else (x[vertex], 0.1)


def _rising(wished: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The numbers nearest to those wished for that do not fall, by pooling neighbours that would."""
    pools: list[tuple[float, float, int]] = []
    for wish, weight in zip(wished, weights, strict=True):
        value, total, count = wish, weight, 1
        while pools and pools[-1][0] > value:
            other, other_weight, other_count = pools.pop()
            value = (value * total + other * other_weight) / (total + other_weight)
            total += other_weight
            count += other_count
        pools.append((value, total, count))
    return [value for value, _, count in pools for _ in range(count)]
