"""A model as `PlacedPieces` that can be placed, units or operators, with the seconds and bytes of a profile.

What a piece takes on a device and what it tells others is here; how a workload says that is for
`from_model.py`. Nothing here knows devices, but for the figures of one that tell how the seconds of a unit
divide among its operators.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from bireme.cluster.device import Device
from bireme.placement.of_model.operators import Operators
from bireme.placement.of_model.shares import divided, estimates_of
from bireme.placement.of_model.source import PiecesSource, StateBytes

__all__ = ["PieceMessage", "PlacedPiece", "PlacedPieces", "operator_pieces", "unit_pieces"]


@dataclass(frozen=True, slots=True)
class PlacedPiece:
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

    pieces: tuple[PlacedPiece, ...]
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
            PlacedPiece(
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
    pieces: dict[int, PlacedPiece] = {}
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
    source: PiecesSource, operators: Operators, pieces: Mapping[int, PlacedPiece]
) -> Iterator[tuple[int, int]]:
    """Operators that look at a value in another way, such as a transpose, each with the maker of the value.

    One that takes no time and no room, is the only user of the one value it looks at, and gives one value of
    no more bytes, can as well be where that is made: what would have crossed before it crosses after it. At
    the border of two units that would keep a plan from cutting there, so there it is left alone.
    """
    for place, piece in pieces.items():
        read = [name for name in source.graph.operators[place].reads() if name in operators.maker_of]
        if piece.forward_s or piece.backward_s or piece.size_bytes or len(set(read)) != 1:
            continue
        maker = operators.maker_of[read[0]]
        if operators.unit_of[maker] != piece.unit:
            continue
        outputs = [value for value in source.graph.operators[place].outputs if value is not None]
        used = [value for value in outputs if value.name in operators.users]
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
        self.estimates = estimates_of(source.graph, source.learned, source.micro_batch, figures)
        self.states = {s.name: s for s in (*source.graph.parameters, *source.graph.buffers)}
        self.counted: set[str] = set()

    def pieces_of(self, unit: int, state: StateBytes) -> dict[int, PlacedPiece]:
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
            place: PlacedPiece(
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
        self, unit: int, places: tuple[int, ...], state: StateBytes, keeping: list[int]
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
        outputs = self.source.graph.operators[place].outputs if self.estimates[place].forward_s else ()
        made = [v for v in outputs if v is not None and v.dtype != "number"]
        return float(sum(v.num_bytes(self.source.micro_batch) for v in made))
