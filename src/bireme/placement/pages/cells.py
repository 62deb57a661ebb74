"""A placed graph as the cells of a picture: a forward node and, in the same cell, its backward nodes.

A graph of more cells than anyone could read is drawn coarser: what a device runs in a row or side by side
becomes one cell.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bireme.placement.workload import Workload

__all__ = ["CellPart", "Cells", "PictureCell", "cells_of"]

MOST_CELLS = 400
MOST_IN_A_ROW = 48
"""Cells side by side; a picture with more is too wide to read."""

NO_TIME = 1e-6
"""Below this a node takes none."""


@dataclass(frozen=True, slots=True)
class CellPart:
    """Nodes of a cell, by their places in the workload, that run on one device in one pass."""

    device: int
    is_backward: bool
    time: float
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PictureCell:
    """What is drawn as one: forward parts, then backward parts."""

    parts: tuple[CellPart, ...]


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells, and whom each sends something to; backward edges count only for lone backward nodes."""

    cells: tuple[PictureCell, ...]
    followers: tuple[tuple[int, ...], ...]
    is_coarser: bool


def cells_of(workload: Workload, devices: Sequence[int]) -> Cells:
    """The cells of a placed graph, few enough to be drawn."""
    graph = _Graph(workload, devices)
    is_coarser = not graph.is_legible()
    if is_coarser:
        graph.merge_weights()
    rows = 1
    while not graph.is_legible():
        graph.merge_runs()
        if not graph.is_legible():
            graph.merge_rows(rows)
            rows *= 2
    return graph.cells(is_coarser=is_coarser)


class _Graph:
    """The cells while they are merged: `cell_of` has the cell of each node, by its place."""

    def __init__(self, workload: Workload, devices: Sequence[int]) -> None:
        self.workload = workload
        self.devices = devices
        place_of = {node.id: place for place, node in enumerate(workload.nodes)}
        self.cell_of = _with_forward(workload, place_of)
        has_forward = {
            self.cell_of[place] for place, node in enumerate(workload.nodes) if not node.is_backward
        }
        self.pairs: list[tuple[int, int]] = []
        for edge in workload.edges:
            source, target = place_of[edge.source], place_of[edge.target]
            if not workload.nodes[target].is_backward:
                self.pairs.append((source, target))
            elif self.cell_of[source] not in has_forward or self.cell_of[target] not in has_forward:
                # A backward edge runs against the picture's order.
                backward = workload.nodes[source].is_backward
                self.pairs.append((target, source) if backward else (source, target))
        self._number()

    def _number(self) -> None:
        """Number the cells from 0 on, and find their followers."""
        numbers: dict[int, int] = {}
        self.cell_of = [numbers.setdefault(cell, len(numbers)) for cell in self.cell_of]
        self.followers: list[dict[int, None]] = [{} for _ in numbers]
        self.num_before = [0] * len(numbers)
        for source, target in self.pairs:
            one, other = self.cell_of[source], self.cell_of[target]
            if one != other and other not in self.followers[one]:
                self.followers[one][other] = None
                self.num_before[other] += 1
        self.device_of: list[int] = [0] * len(numbers)
        self.time_of = [0.0] * len(numbers)
        for place, cell in enumerate(self.cell_of):
            self.device_of[cell] = self.devices[place]
            self.time_of[cell] += self.time(place)

    def time(self, place: int) -> float:
        node = self.workload.nodes[place]
        on_accelerator = self.devices[place] < self.workload.num_accelerators
        return node.accelerator_time if on_accelerator else node.cpu_time

    def is_legible(self) -> bool:
        """Whether there are few enough cells, in all and side by side."""
        if len(self.followers) == len(set(self.device_of)):
            return True
        in_row = Counter(self._rows())
        return len(self.followers) <= MOST_CELLS and max(in_row.values()) <= MOST_IN_A_ROW

    def merge_weights(self) -> None:
        """Cells that take no time and only feed one other on their device go into that."""
        into = list(range(len(self.followers)))
        for cell, targets in enumerate(self.followers):
            if len(targets) == 1 and not self.num_before[cell] and self.time_of[cell] < NO_TIME:
                (target,) = targets
                if self.device_of[target] == self.device_of[cell]:
                    into[cell] = target
        self._merge([into[cell] for cell in self.cell_of])

    def merge_runs(self) -> None:
        """Cells on one device that follow each other, with nothing in parallel, become one."""
        into = list(range(len(self.followers)))
        for cell, targets in enumerate(self.followers):
            for target in targets if len(targets) == 1 else ():
                if self.num_before[target] == 1 and self.device_of[target] == self.device_of[cell]:
                    into[target] = cell
        for cell in range(len(into)):
            way = [cell]
            while into[way[-1]] != way[-1]:
                way.append(into[way[-1]])
            for one in way:
                into[one] = way[-1]
        self._merge([into[cell] for cell in self.cell_of])

    def merge_rows(self, num_rows: int) -> None:
        """Cells of one device in so many neighbouring rows of the picture become one."""
        rows = self._rows()
        keys = [(rows[cell] // num_rows, self.device_of[cell]) for cell in range(len(rows))]
        first: dict[tuple[int, int], int] = {}
        into = [first.setdefault(key, cell) for cell, key in enumerate(keys)]
        self._merge([into[cell] for cell in self.cell_of])

    def _rows(self) -> list[int]:
        """The row of each cell: below all before it, except where a circle makes that impossible."""
        rows = [0] * len(self.followers)
        waiting = list(self.num_before)
        left = dict.fromkeys(range(len(rows)))
        ready = [cell for cell in left if not waiting[cell]]
        while left:
            cell = ready.pop() if ready else next(iter(left))
            if cell not in left:
                continue
            del left[cell]
            for target in self.followers[cell]:
                waiting[target] -= 1
                if target in left:
                    rows[target] = max(rows[target], rows[cell] + 1)
                    if not waiting[target]:
                        ready.append(target)
        return rows

    def _merge(self, cell_of: list[int]) -> None:
        self.cell_of = cell_of
        self._number()

    def cells(self, *, is_coarser: bool) -> Cells:
        places: list[list[int]] = [[] for _ in self.followers]
        for place, cell in enumerate(self.cell_of):
            places[cell].append(place)
        return Cells(
            tuple(PictureCell(tuple(self._parts(row))) for row in places),
            tuple(tuple(targets) for targets in self.followers),
            is_coarser,
        )

    def _parts(self, places: Iterable[int]) -> list[CellPart]:
        groups: dict[tuple[bool, int], list[int]] = defaultdict(list)
        for place in places:
            groups[self.workload.nodes[place].is_backward, self.devices[place]].append(place)
        return [
            CellPart(device, is_backward, sum(map(self.time, group)), tuple(group))
            for (is_backward, device), group in sorted(groups.items())
        ]


def _with_forward(workload: Workload, place_of: dict[int, int]) -> list[int]:
    """For each node the place of the forward node it is drawn with; one without is drawn alone."""
    cell_of = list(range(len(workload.nodes)))
    forward: dict[int, list[int]] = defaultdict(list)
    for place, node in enumerate(workload.nodes):
        if node.colour is not None and not node.is_backward:
            forward[node.colour].append(place)
    sources: dict[int, set[int]] = defaultdict(set)
    for edge in workload.edges:
        sources[edge.target].add(place_of[edge.source])
    for place, node in enumerate(workload.nodes):
        if node.is_backward and node.colour is not None and forward[node.colour]:
            mates = forward[node.colour]
            # Of several forward nodes of its colour, the one whose output it reads is its own.
            own = (mate for mate in mates if mate in sources[node.id])
            cell_of[place] = next(own, mates[0])
    return cell_of
