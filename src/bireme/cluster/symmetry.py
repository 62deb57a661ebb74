"""Devices that can stand for each other, so that nobody tries equal ways to use a cluster twice.

A cluster is a tree: servers, in them the groups that share links, in these devices. Subtrees of the same
shape can change places, and nothing else changes. Where groups of a server overlap without one holding the
other it is no tree; there only devices that are in the same groups are found to be equal.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from bireme.cluster.cluster import Cluster, Mesh, Server
from bireme.grouping import grouped


@dataclass(slots=True, eq=False)
class _Node:
    shape: int
    children: list["_Node"]
    first: int
    """The lowest number of its devices; a leaf's own."""
    parent: "_Node | None" = None

    def __post_init__(self) -> None:
        for child in self.children:
            child.parent = self


@dataclass(slots=True)
class Symmetry:
    """The ways in which a cluster's devices can change places."""

    cluster: Cluster
    _shapes: dict[Hashable, int] = field(init=False, default_factory=dict, repr=False)
    _leaves: list[_Node] = field(init=False, default_factory=list, repr=False)
    _root: _Node = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._root = self._node((), [self._server(server) for server in self.cluster.servers])

    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Devices that can stand for each other as long as none is in use."""
        shapes = (tuple(node.shape for node in _way_down(leaf)) for leaf in self._leaves)
        return tuple(map(tuple, grouped((shape, number) for number, shape in enumerate(shapes)).values()))

    def choices(self, used: Sequence[int]) -> tuple[int, ...]:
        """One device of each kind that can come next where these are in use already.

        All ways to go on with another device are one of these with equal devices exchanged. Who extends an
        empty list with every choice, and so on, meets each order of devices once, as `canonical` writes it.
        """
        touched = {node for number in used for node in _way_down(self._leaves[number])}
        return tuple(sorted(_unlike_leaves(self._root, touched)))

    def canonical(self, order: Sequence[int]) -> tuple[int, ...]:
        """The one order of devices that stands for all that come out of this one by exchanging equal ones."""
        image: dict[_Node, _Node] = {self._root: self._root}
        taken: set[_Node] = {self._root}
        for number in order:
            for node in _way_down(self._leaves[number]):
                if node in image:
                    continue
                assert node.parent is not None
                image[node] = next(
                    twin
                    for twin in image[node.parent].children
                    if twin.shape == node.shape and twin not in taken
                )
                taken.add(image[node])
        return tuple(image[self._leaves[number]].first for number in order)

    def _shape(self, what: Hashable) -> int:
        return self._shapes.setdefault(what, len(self._shapes))

    def _node(self, links: tuple[Hashable, ...], children: list[_Node]) -> _Node:
        children = sorted(children, key=lambda child: child.first)
        inner = tuple(sorted(child.shape for child in children))
        return _Node(self._shape((links, inner)), children, children[0].first)

    def _leaf(self, what: Hashable) -> _Node:
        leaf = _Node(self._shape(what), [], len(self._leaves))
        self._leaves.append(leaf)
        return leaf

    def _server(self, server: Server) -> _Node:
        groups = _groups(server)
        # A server with routes of its own is like no other.
        on_routes = {name for route in self.cluster.routes for name in route.servers}
        named_here = server.name if server.name in on_routes else ""
        begin = len(self._leaves)
        if not _is_tree(groups):
            kinds = [
                tuple(index for index, group in enumerate(groups) if place in group)
                for place in range(len(server.devices))
            ]
            named = (named_here, tuple(groups.values()), *map(tuple, map(sorted, groups)))
            return self._node(
                named,
                [self._leaf((device, kind)) for device, kind in zip(server.devices, kinds, strict=True)],
            )
        outermost = {place: self._leaf(device) for place, device in enumerate(server.devices)}
        for group in sorted(groups, key=len):
            inside = list(dict.fromkeys(outermost[place] for place in group))
            node = self._node(groups[group], inside)
            outermost |= dict.fromkeys(group, node)
        assert len(self._leaves) - begin == len(server.devices)
        return self._node(("server", named_here), list(dict.fromkeys(outermost.values())))


def _groups(server: Server) -> dict[frozenset[int], tuple[Hashable, ...]]:
    """The sets of devices that share links, and which links they share."""
    found = grouped(
        (frozenset(one.devices), (type(one).__name__, one.link, isinstance(one, Mesh) and one.switched))
        for one in server.groups
    )
    return {group: tuple(sorted(links, key=repr)) for group, links in found.items()}


def _is_tree(groups: dict[frozenset[int], tuple[Hashable, ...]]) -> bool:
    """Whether of any two groups one holds the other, or they have no device in common."""
    outermost: dict[int, frozenset[int]] = {}
    for group in sorted(groups, key=len):
        if any(not outermost.get(place, group) <= group for place in group):
            return False
        outermost |= dict.fromkeys(group, group)
    return True


def _way_down(leaf: _Node) -> list[_Node]:
    """The nodes from the root to a leaf."""
    way = [leaf]
    while (parent := way[-1].parent) is not None:
        way.append(parent)
    return way[::-1]


def _unlike_leaves(node: _Node, touched: set[_Node]) -> Iterator[int]:
    if not node.children:
        if node not in touched:
            yield node.first
        return
    seen: set[int] = set()
    for child in node.children:
        if child in touched:
            yield from _unlike_leaves(child, touched)
        elif child.shape not in seen:
            seen.add(child.shape)
            yield from _unlike_leaves(child, touched)
