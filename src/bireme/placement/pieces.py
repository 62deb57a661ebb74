"""A model as `PlacedPieces` that can be placed, units or operators, with the seconds and bytes of a profile.

What a piece takes on a device and what it tells others is here; how a workload says that is for
`from_model.py`. Nothing here knows devices, but for the figures of one that tell how the seconds of a unit
divide among its operators.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx

from bireme.cluster.device import Device
from bireme.grouping import grouped
from bireme.model.graph import Graph, Value, learned_values
from bireme.model.units import Unit, units_of
from bireme.profile.estimate import Seconds, estimate_unit
from bireme.profile.profile import Profile, UnitProfile

# Which operators of a graph are placed, who uses what they make, and which of them share a device.
#
# A value that depends on no parameter, such as a mask or a position table, is *free*: every unit makes it for
# itself (`model/units.py`), so it never crosses from one device to another and its operator is not placed.


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
        made = [(value, place) for place in unit_of for value in graph.operators[place].made]
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
        colours = self.colours(copy_tied=copy_tied)
        groups = grouped((colour, self.unit_of[place]) for place, colour in colours.items())
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
        made = {value.name for value in operator.made}
        is_fixed = operator.is_random or operator.is_of_chain or bool(operator.mutates or made & written)
        if is_fixed or not touched.isdisjoint(operator.reads()):
            touched |= made
        else:
            free.add(place)
    return free


def _helpers(graph: Graph, unit: Unit, own: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each operator of a unit the others there that go along with it, each with the first to need it."""
    others = sorted(set(unit.operators).difference(own))
    made_by = {value.name: place for place in others for value in graph.operators[place].made}
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
    graph: Graph, unit_of: Mapping[int, int], maker_of: Mapping[str, int], users: Mapping[str, Sequence[int]]
) -> Iterator[Sequence[int]]:
    """Operators that share memory which is written to, a number, or a parameter within a unit."""
    readers: dict[str, list[int]] = defaultdict(list)
    for place in unit_of:
        for name in (*graph.operators[place].reads(), *graph.operators[place].mutates):
            readers[name].append(place)
    for name in dict.fromkeys(name for operator in graph.operators for name in operator.mutates):
        yield [*([maker_of[name]] if name in maker_of else []), *readers[name]]
    for place in unit_of:
        for value in graph.operators[place].made:
            if value.dtype == "number":
                yield [place, *users.get(value.name, ())]
    for parameter in graph.parameters:
        yield from grouped((unit_of[place], place) for place in readers[parameter.name]).values()


def _alone(
    graph: Graph, unit_of: Mapping[int, int], users: Mapping[str, Sequence[int]]
) -> Iterator[Sequence[int]]:
    """Operators that share no value with another, such as a count of batches, each with a neighbor.

    They could be anywhere, but belong to what runs around them: the next of their unit, or else the last.
    """
    shared = {name for name, places in users.items() if places}
    joined = [
        place
        for place in unit_of
        if shared.intersection(graph.operators[place].reads())
        or any(value.name in shared for value in graph.operators[place].made)
    ]
    of_unit = grouped((unit_of[place], place) for place in joined)
    for place in unit_of.keys() - set(joined):
        near = of_unit.get(unit_of[place])
        if near:
            yield place, next((other for other in near if other > place), near[-1])


def _tied(graph: Graph, unit_of: Mapping[int, int]) -> Iterable[Sequence[int]]:
    """The users of each parameter."""
    parameters = {parameter.name for parameter in graph.parameters}
    read = {place: parameters.intersection(graph.operators[place].reads()) for place in unit_of}
    return grouped((name, place) for place, names in read.items() for name in names).values()


def _joined(places: Iterable[int], groups: Iterable[Sequence[int]]) -> dict[int, int]:
    """The first of the places that each is joined with, through any number of groups."""
    graph = networkx.Graph()
    graph.add_nodes_from(places)
    for group in groups:
        networkx.add_path(graph, group)
    first = {place: min(found) for found in networkx.connected_components(graph) for place in found}
    return {place: first[place] for place in graph}


# How what a unit takes divides among its operators: by what is estimated for each from flops and bytes.
#
# A profile knows units, as single operators are too short to measure. The estimate need not be right in
# seconds, only in proportion.


def _estimates_of(graph: Graph, learned: frozenset[str], micro_batch: int, device: Device) -> list[Seconds]:
    """An estimate for every operator of a graph; `learned` are the values that a gradient comes back to.

    Each is looked at as the one operator of a unit, with what it is given coming from outside.
    """
    states = {s.name: s for s in (*graph.parameters, *graph.buffers, *graph.constants)}
    values = graph.values
    alone = Unit(0, "", (0,), (), (), (), (), (), "")
    found = []
    for operator in graph.operators:
        read = dict.fromkeys(operator.reads())
        held = [states[name] for name in read if name in states]
        part = replace(
            graph,
            inputs=tuple(values[name] for name in read if name in values),
            parameters=tuple(state for state in held if state.is_parameter),
            buffers=tuple(state for state in held if not state.is_parameter),
            constants=(),
            operators=(operator,),
            outputs=(),
        )
        found.append(estimate_unit(part, alone, learned, micro_batch, device))
    return found


def divided(total: float, weights: Mapping[int, float]) -> dict[int, float]:
    """A total in proportion to weights; in equal parts if each weight is zero."""
    weight = sum(weights.values())
    if not weight:
        return {key: total / len(weights) for key in weights}
    return {key: total * own / weight for key, own in weights.items()}


# What the workload of a model is made from: its graph and units, and what they cost at one micro-batch size.
#
# Which of their parameters count where they are tied, and what training adds, is settled here.


@dataclass(frozen=True, slots=True)
class PiecesSource:
    """What pieces are made of: a graph with its units, and a profile of it at one size of micro-batch.

    With `training` there are backwards, gradients, the optimizer's state and what is kept for the backward.
    With `copy_tied` each unit holds a parameter that it shares with others by itself.
    """

    graph: Graph
    profile: Profile
    units: tuple[Unit, ...]
    learned: frozenset[str]
    micro_batch: int
    training: bool
    copy_tied: bool

    @staticmethod
    def of(
        graph: Graph, profile: Profile, *, micro_batch: int, training: bool, copy_tied: bool
    ) -> "PiecesSource":
        """The source of a graph that the profile is known to fit."""
        learned = learned_values(graph)
        return PiecesSource(graph, profile, units_of(graph), learned, micro_batch, training, copy_tied)

    def forward_s(self, unit: int) -> float:
        """The seconds of a unit's forward."""
        return self.profile.units[unit].at(self.micro_batch).forward_s

    def backward_s(self, unit: int) -> float:
        """The seconds of its backward, zero where there is no training."""
        return self.profile.units[unit].at(self.micro_batch).backward_s if self.training else 0.0

    def learns(self, place: int) -> bool:
        """Whether a gradient comes to an operator in training."""
        return self.training and any(v.name in self.learned for v in self.graph.operators[place].made)

    def state_bytes(self) -> "list[_StateBytes]":
        """What stays of each unit from one micro-batch to the next; what is placed together is there once."""
        counted: set[str] = set()
        found = []
        for unit, known in zip(self.units, self.profile.units, strict=True):
            together = () if self.copy_tied else unit.parameters
            found.append(_StateBytes.of(known, counted.intersection(together), training=self.training))
            counted.update(together)
        return found

    def saved_bytes(self, unit: int) -> int:
        """What a unit keeps of a micro-batch for its backward; its neighbors may keep some of it too."""
        return self.profile.units[unit].at(self.micro_batch).saved_bytes if self.training else 0


@dataclass(frozen=True, slots=True)
class _StateBytes:
    """Bytes of a unit: of all its parameters, of what training adds to those that learn, of its buffers."""

    parameter_bytes: int
    training_bytes: int
    buffer_bytes: int

    @staticmethod
    def of(unit: UnitProfile, counted: set[str], *, training: bool) -> "_StateBytes":
        """Of a unit, without the parameters that are counted elsewhere."""
        again = [held for held in unit.tied if held.name in counted]
        added = unit.gradient_bytes + unit.optimizer_bytes
        added -= sum(held.gradient_bytes + held.optimizer_bytes for held in again)
        return _StateBytes(
            unit.parameter_bytes - sum(held.parameter_bytes for held in again),
            added if training else 0,
            unit.buffer_bytes,
        )

    @property
    def num_bytes(self) -> int:
        """The bytes of all its states."""
        return self.parameter_bytes + self.training_bytes + self.buffer_bytes


@dataclass(frozen=True, slots=True)
class _PlacedPiece:
    """What is placed as a whole: operators of one unit, by their places in the graph.

    Pieces of one `colour` share a device. `backward_s` is None where no gradient comes to it.
    """

    name: str
    unit: int
    operators: tuple[int, ...]
    colour: int
    forward_s: float
    backward_s: float | None
    size_bytes: float


@dataclass(frozen=True, slots=True)
class PieceMessage:
    """A value from the piece that makes it to those that use it, in the order they run.

    `gradient_bytes` come back from each of them that has a backward; None where no gradient does.
    """

    maker: int
    users: tuple[int, ...]
    num_bytes: int
    gradient_bytes: int | None


@dataclass(frozen=True, slots=True)
class PlacedPieces:
    """Pieces in the order they run, and what passes between them."""

    pieces: tuple[_PlacedPiece, ...]
    messages: tuple[PieceMessage, ...]


def unit_pieces(source: PiecesSource) -> PlacedPieces:
    """The units as a chain: what one sends, values that only pass through included, goes to the next."""
    operators = Operators.of(source.graph, source.units)
    colours = operators.colours_of_units(copy_tied=source.copy_tied)
    pieces, messages = [], []
    for index, state in enumerate(source.state_bytes()):
        unit, backward_s = source.units[index], source.backward_s(index)
        has_backward = backward_s > 0 or any(source.learns(place) for place in unit.operators)
        pieces.append(
            _PlacedPiece(
                name=unit.name,
                unit=index,
                operators=unit.operators,
                colour=colours.get(index, index),
                forward_s=source.forward_s(index),
                backward_s=backward_s if has_backward else None,
                size_bytes=state.num_bytes + source.saved_bytes(index),
            )
        )
        if index + 1 < len(source.units):
            cost = source.profile.units[index].at(source.micro_batch)
            learned = [operators.values[name] for name in unit.sends if name in source.learned]
            gradient_bytes = sum(value.num_bytes(source.micro_batch) for value in learned)
            messages.append(
                PieceMessage(index, (index + 1,), cost.boundary_bytes, gradient_bytes if learned else None)
            )
    return PlacedPieces(tuple(pieces), tuple(messages))


def operator_pieces(source: PiecesSource, figures: Device) -> PlacedPieces:
    """The operators, each with its part of what its unit takes.

    Seconds divide as the estimates for a device of these `figures` do, parameters and what belongs to them
    by who uses them, and what is kept for the backward by the bytes that the operators make. An operator
    whose free value is made again wherever it is needed is no piece: it goes along with the first of its
    unit that needs it, so that its time counts once in each unit, as in the profile, and it sends nothing.
    """
    operators = Operators.of(source.graph, source.units)
    work = _Division(source, operators, figures)
    pieces: dict[int, _PlacedPiece] = {}
    for unit, state in enumerate(source.state_bytes()):
        pieces |= work.pieces_of(unit, state)
    colours = operators.colours(copy_tied=source.copy_tied, more=_looks(source, operators, pieces))
    number_of = {place: number for number, place in enumerate(operators.unit_of)}
    messages = []
    for name, users in operators.users.items():
        value = operators.values[name]
        if value.dtype == "number":
            continue  # who shares a number shares a device
        num_bytes = value.num_bytes(source.micro_batch)
        maker = number_of[operators.maker_of[name]]
        numbers = tuple(number_of[place] for place in users)
        messages.append(
            PieceMessage(maker, numbers, num_bytes, num_bytes if name in source.learned else None)
        )
    return PlacedPieces(
        tuple(replace(pieces[place], colour=number_of[colours[place]]) for place in number_of),
        tuple(messages),
    )


def _looks(
    source: PiecesSource, operators: Operators, pieces: Mapping[int, _PlacedPiece]
) -> Iterator[tuple[int, int]]:
    """Operators that look at a value in another way, such as a transpose, each with the maker of the value.

    One that takes no time and no room, is the only user of the one value it looks at, and gives one value of
    no more bytes, can as well be where that is made: what would have crossed before it crosses after it. At
    the boundary of two units that would keep a plan from cutting there, so there it is left alone.
    """
    for place, piece in pieces.items():
        read = [name for name in source.graph.operators[place].reads() if name in operators.maker_of]
        if piece.forward_s or piece.backward_s or piece.size_bytes or len(set(read)) != 1:
            continue
        maker = operators.maker_of[read[0]]
        if operators.unit_of[maker] != piece.unit:
            continue
        used = [one for one in source.graph.operators[place].made if one.name in operators.users]
        if operators.users.get(read[0]) == (place,) and len(used) <= 1:
            values = [operators.values[read[0]], *used]
            sizes = [v.num_bytes(source.micro_batch) if v.dtype != "number" else 0 for v in values]
            if sizes[0] == max(sizes):
                yield maker, place


class _Division:
    """What each unit takes, divided among its operators."""

    def __init__(self, source: PiecesSource, operators: Operators, figures: Device) -> None:
        self.source = source
        self.operators = operators
        self.estimates = _estimates_of(source.graph, source.learned, source.micro_batch, figures)
        self.states = {s.name: s for s in (*source.graph.parameters, *source.graph.buffers)}
        self.counted: set[str] = set()

    def pieces_of(self, unit: int, state: _StateBytes) -> dict[int, _PlacedPiece]:
        """The pieces of a unit by the places of their operators."""
        places = self.operators.own_of(unit)
        forward = {place: self._forward(place) for place in places}
        forward_s = divided(self.source.forward_s(unit), forward)
        learning = [place for place in places if self.source.learns(place)]
        total_s = self.source.backward_s(unit)
        if total_s and not learning:
            learning = list(places)  # what was measured has to be somewhere
        backward_s = divided(total_s, {place: self.estimates[place].backward_s for place in learning})
        size = self._sizes(unit, places, state, learning or list(places))
        return {
            place: _PlacedPiece(
                name=self.operators.name(place),
                unit=unit,
                operators=tuple(sorted((*self.operators.helpers[place], place))),
                colour=place,
                forward_s=forward_s[place],
                backward_s=backward_s.get(place),
                size_bytes=size[place],
            )
            for place in places
        }

    def _forward(self, place: int) -> float:
        return sum(self.estimates[one].forward_s for one in (*self.operators.helpers[place], place))

    def _sizes(
        self, unit: int, places: tuple[int, ...], state: _StateBytes, keeping: list[int]
    ) -> dict[int, float]:
        parameters, learned, buffers = (dict.fromkeys(places, 0.0) for _ in range(3))
        seen = set() if self.source.copy_tied else self.counted
        in_unit: set[str] = set()
        for place in places:
            for one in (*self.operators.helpers[place], place):
                for name in dict.fromkeys(self.source.graph.operators[one].reads()):
                    held = self.states.get(name)
                    if held is None or name in in_unit:
                        continue
                    in_unit.add(name)
                    if not held.is_parameter:
                        buffers[place] += held.num_bytes
                    elif name not in seen:
                        parameters[place] += held.num_bytes
                        learned[place] += held.num_bytes if held.trainable else 0
        self.counted |= in_unit
        made = {place: self._made_bytes(place) for place in keeping}
        parts = (
            divided(state.parameter_bytes, parameters),
            divided(state.training_bytes, learned),
            divided(state.buffer_bytes, buffers),
            divided(self.source.saved_bytes(unit), made),
        )
        return {place: sum(part.get(place, 0.0) for part in parts) for place in places}

    def _made_bytes(self, place: int) -> float:
        """What an operator makes; nothing if it only looks at what is there."""
        made = self.source.graph.operators[place].made if self.estimates[place].forward_s else ()
        return float(sum(v.num_bytes(self.source.micro_batch) for v in made if v.dtype != "number"))
