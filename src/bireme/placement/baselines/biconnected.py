"""The biconnected components of a graph: what hangs together even where any one vertex is taken away.

Directions of edges do not matter here. Each edge is in one component; an edge that alone joins two parts is a
component of its own.
"""

from bireme.placement.items import Ragged

__all__ = ["Arrow", "biconnected_components"]

Arrow = tuple[int, int]
"""An edge: its tail, then its head."""


def biconnected_components(after: Ragged) -> list[list[Arrow]]:
    """The edges of each component of the graph in which vertex `v` has the edges to `after.row(v)`.

    There must be no two edges between the same two vertices.
    """
    neighbours: list[list[Arrow]] = [[] for _ in range(len(after))]
    for tail in range(len(after)):
        for head in after.row(tail):
            neighbours[tail].append((tail, head))
            neighbours[head].append((tail, head))
    walk = _Walk(neighbours)
    for root in range(len(after)):
        if root not in walk.entered:
            walk.from_root(root)
    return walk.components


class _Walk:
    """The walk in depth of Hopcroft and Tarjan, without recursion.

    `lowest[v]` is the earliest vertex, by its number in `entered`, that an edge reaches from `v` or from what
    was entered after it and is not yet left.
    """

    def __init__(self, neighbours: list[list[Arrow]]) -> None:
        self.neighbours = neighbours
        self.entered: dict[int, int] = {}
        self.lowest: dict[int, int] = {}
        self.open: list[Arrow] = []
        self.components: list[list[Arrow]] = []

    def from_root(self, root: int) -> None:
        """Close the components of all that hangs together with a vertex not entered so far."""
        self._enter(root)
        way = [(root, (-1, -1), iter(self.neighbours[root]))]
        while way:
            vertex, came_by, left = way[-1]
            edge = next(left, None)
            if edge is None:
                way.pop()
                if way:
                    self._leave(vertex, way[-1][0], came_by)
                continue
            other = edge[0] + edge[1] - vertex
            if edge == came_by:
                continue
            if other not in self.entered:
                self.open.append(edge)
                self._enter(other)
                way.append((other, edge, iter(self.neighbours[other])))
            elif self.entered[other] < self.entered[vertex]:
                self.open.append(edge)
                self.lowest[vertex] = min(self.lowest[vertex], self.entered[other])

    def _enter(self, vertex: int) -> None:
        self.entered[vertex] = self.lowest[vertex] = len(self.entered)

    def _leave(self, vertex: int, parent: int, came_by: Arrow) -> None:
        self.lowest[parent] = min(self.lowest[parent], self.lowest[vertex])
        if self.lowest[vertex] < self.entered[parent]:
            return
        start = len(self.open) - 1
        while self.open[start] != came_by:
            start -= 1
        self.components.append(self.open[start:])
        del self.open[start:]
