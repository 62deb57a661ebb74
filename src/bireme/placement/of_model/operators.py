"""Which operators of a graph are placed, who uses what they make, and which of them share a device.

A value that depends on no parameter, such as a mask or a position table, is *free*: every unit makes it for
itself (`model/units.py`), so it never crosses from one device to another and its operator is not placed.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx

from bireme.model.graph import Graph, Value
from bireme.model.units import Unit

__all__ = ["Operators"]


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators that are placed, by their places in the graph and in the order they run.

    `unit_of` is the unit of each, `helpers` are the operators of free values that go along with it. `values`
    are all that placed operators make, `maker_of` and `users` who makes and who uses each; a maker is not
    among its users. `together` are groups that must share a device, `tied` those that use one parameter.
    """

    graph: Graph
    unit_of: Mapping[int, int]
    helpers: Mapping[int, tuple[int, ...]]
    values: Mapping[str, Value]
    maker_of: Mapping[str, int]
    users: Mapping[str, tuple[int, ...]]
    together: tuple[tuple[int, ...], ...]
    tied: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(graph: Graph, units: Sequence[Unit]) -> "Operators":
        """The operators of a graph with these units."""
        free = _free(graph)
        unit_of: dict[int, int] = {}
        helpers: dict[int, tuple[int, ...]] = {}
        for unit in units:
            # Where nothing depends on a parameter, there is nothing else to place.
            own = [place for place in unit.operators if place not in free] or list(unit.operators)
            unit_of |= dict.fromkeys(own, unit.index)
            helpers |= _helpers(graph, unit, own)
        unit_of = dict(sorted(unit_of.items()))
        made = [(v, p) for p in unit_of for v in graph.operators[p].outputs if v is not None]
        maker_of = {value.name: place for value, place in made}
        users: dict[str, list[int]] = defaultdict(list)
        for place in unit_of:
            for name in dict.fromkeys(graph.operators[place].reads()):
                if name in maker_of and maker_of[name] != place:
                    users[name].append(place)
        return Operators(
            graph=graph,
            unit_of=unit_of,
            helpers=helpers,
            values={value.name: value for value, _ in made},
            maker_of=maker_of,
            users={name: tuple(places) for name, places in users.items()},
            together=tuple(
                map(tuple, (*_inseparable(graph, unit_of, maker_of, users), *_alone(graph, unit_of, users)))
            ),
            tied=tuple(map(tuple, _tied(graph, unit_of))),
        )

    def own_of(self, unit: int) -> tuple[int, ...]:
        """The placed operators of a unit."""
        return tuple(place for place, own in self.unit_of.items() if own == unit)

    def colours(self, *, copy_tied: bool, more: Iterable[Sequence[int]] = ()) -> dict[int, int]:
        """For each operator the first of those that share its device; `more` are groups that do so too."""
        return _joined(self.unit_of, (*self.together, *(() if copy_tied else self.tied), *more))

    def colours_of_units(self, *, copy_tied: bool) -> dict[int, int]:
        """For each unit the first of those that share its device, as operators of theirs do."""
        groups: dict[int, list[int]] = defaultdict(list)
        for place, colour in self.colours(copy_tied=copy_tied).items():
            groups[colour].append(self.unit_of[place])
        return _joined(dict.fromkeys(self.unit_of.values()), groups.values())

    def name(self, place: int) -> str:
        """What to call an operator: its module, and what it does there."""
        operator = self.graph.operators[place]
        does = operator.target.removeprefix("aten.").partition(".")[0]
        return f"{operator.module} {does}" if operator.module else does


def _free(graph: Graph) -> set[int]:
    """The operators of free values: nothing that a parameter, a draw or a write has touched."""
    written = {name for operator in graph.operators for name in operator.mutates}
    touched = {parameter.name for parameter in graph.parameters} | written
    free: set[int] = set()
    for place, operator in enumerate(graph.operators):
        made = {value.name for value in operator.outputs if value is not None}
        is_fixed = operator.is_random or operator.is_of_chain or bool(operator.mutates or made & written)
        if is_fixed or not touched.isdisjoint(operator.reads()):
            touched |= made
        else:
            free.add(place)
    return free


def _helpers(graph: Graph, unit: Unit, own: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each operator of a unit the others there that go along with it, each with the first to need it."""
    others = sorted(set(unit.operators).difference(own))
    made_by = {v.name: place for place in others for v in graph.operators[place].outputs if v is not None}
    found: dict[int, list[int]] = {place: [] for place in own}
    taken: set[int] = set()
    for place in own:
        todo = [place]
        while todo:
            for name in graph.operators[todo.pop()].reads():
                helper = made_by.get(name)
                if helper is not None and helper not in taken:
                    taken.add(helper)
                    found[place].append(helper)
                    todo.append(helper)
    if own:
        # What only the model's results need goes along with the last.
        found[own[-1]] += [place for place in others if place not in taken]
    return {place: tuple(places) for place, places in found.items()}


def _inseparable(
    graph: Graph,
    unit_of: Mapping[int, int],
    maker_of: Mapping[str, int],
    users: Mapping[str, Sequence[int]],
) -> Iterator[Sequence[int]]:
    """Operators that share memory which is written to, a number, or a parameter within a unit."""
    readers: dict[str, list[int]] = defaultdict(list)
    for place in unit_of:
        for name in (*graph.operators[place].reads(), *graph.operators[place].mutates):
            readers[name].append(place)
    for name in dict.fromkeys(name for operator in graph.operators for name in operator.mutates):
        yield [*([maker_of[name]] if name in maker_of else []), *readers[name]]
    for place in unit_of:
        for value in graph.operators[place].outputs:
            if value is not None and value.dtype == "number":
                yield [place, *users.get(value.name, ())]
    for parameter in graph.parameters:
        of_unit: dict[int, list[int]] = defaultdict(list)
        for place in readers[parameter.name]:
            of_unit[unit_of[place]].append(place)
        yield from of_unit.values()


def _alone(
    graph: Graph, unit_of: Mapping[int, int], users: Mapping[str, Sequence[int]]
) -> Iterator[Sequence[int]]:
    """Operators that share no value with another, such as a count of batches, each with a neighbour.

    They could be anywhere, but belong to what runs around them: the next of their unit, or else the last.
    """
    shared = {name for name, places in users.items() if places}
    joined = [
        place
        for place in unit_of
        if shared.intersection(graph.operators[place].reads())
        or any(value is not None and value.name in shared for value in graph.operators[place].outputs)
    ]
    of_unit: dict[int, list[int]] = defaultdict(list)
    for place in joined:
        of_unit[unit_of[place]].append(place)
    for place in unit_of.keys() - set(joined):
        near = of_unit[unit_of[place]]
        if near:
            yield place, next((other for other in near if other > place), near[-1])


def _tied(graph: Graph, unit_of: Mapping[int, int]) -> Iterable[Sequence[int]]:
    """The users of each parameter."""
    parameters = {parameter.name for parameter in graph.parameters}
    found: dict[str, list[int]] = defaultdict(list)
    for place in unit_of:
        for name in parameters.intersection(graph.operators[place].reads()):
            found[name].append(place)
    return found.values()


def _joined(places: Iterable[int], groups: Iterable[Sequence[int]]) -> dict[int, int]:
    """The first of the places that each is joined with, through any number of groups."""
    graph = networkx.Graph()
    graph.add_nodes_from(places)
    for group in groups:
        networkx.add_path(graph, group)
    first = {place: min(found) for found in networkx.connected_components(graph) for place in found}
    return {place: first[place] for place in graph}
