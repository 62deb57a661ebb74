"""The pieces of a graph to profile: its units, which of them do the same work, and what they share.

Two units of the same structure cost the same unless a gradient goes back from one and not from the other.
"""

from collections import Counter
from dataclasses import dataclass, replace

from bireme.model.graph import Graph
from bireme.model.learned import learned_values
from bireme.model.units import Unit, units_of
from bireme.profile.optimizers import frozen_bytes, gradient_bytes
from bireme.profile.profile import KeptMemory, SharedState

__all__ = ["ProfiledUnits", "pieces_of"]


@dataclass(frozen=True, slots=True)
class ProfiledUnits:
    """A graph's units. `firsts[i]` is the first unit of the same work as unit i, often i itself.

    `learned` are the values that a gradient comes back to, `common` those that several units make for
    themselves.
    """

    graph: Graph
    units: tuple[Unit, ...]
    firsts: tuple[int, ...]
    learned: frozenset[str]
    common: frozenset[str]

    @property
    def distinct(self) -> tuple[int, ...]:
        """The units that stand for all others."""
        return tuple(dict.fromkeys(self.firsts))

    def common_of(self, unit: Unit) -> tuple[str, ...]:
        """What a unit makes for itself that others make too."""
        return tuple(name for name in _made(self.graph, unit) if name in self.common)

    def translated(self, kept: tuple[KeptMemory, ...], index: int) -> tuple[KeptMemory, ...]:
        """What the first unit of the same work shares, in the names that it has at this one."""
        there, here = self.units[self.firsts[index]], self.units[index]
        pairs = zip(_outside(self.graph, there), _outside(self.graph, here), strict=True)
        name_here = dict(pairs)
        return tuple(replace(one, names=tuple(name_here[name] for name in one.names)) for one in kept)

    def returned_bytes(self, index: int, size: int) -> int | None:
        """The bytes of the gradients that come back to a unit; None if all that it sends has one."""
        sent = set(self.units[index].sends)
        if sent <= self.learned:
            return None
        made = (value for operator in self.graph.operators for value in operator.outputs if value is not None)
        return sum(value.num_bytes(size) for value in made if value.name in sent & self.learned)

    def tied(self, unit: Unit, optimizer_bytes: dict[str, int]) -> tuple[SharedState, ...]:
        """The parameters and buffers of a unit that others use too."""
        uses = Counter(name for other in self.units for name in (*other.parameters, *other.buffers))
        states = {state.name: state for state in (*self.graph.parameters, *self.graph.buffers)}
        return tuple(
            SharedState(
                name=name,
                parameter_bytes=states[name].num_bytes if states[name].trainable else 0,
                gradient_bytes=gradient_bytes(states[name]),
                optimizer_bytes=optimizer_bytes.get(name, 0),
                buffer_bytes=0 if states[name].trainable else states[name].num_bytes,
                frozen_bytes=frozen_bytes(states[name]),
            )
            for name in (*unit.parameters, *unit.buffers)
            if uses[name] > 1
        )


def pieces_of(graph: Graph) -> ProfiledUnits:
    """The pieces of a graph."""
    units = units_of(graph)
    learned = learned_values(graph)
    times_made = Counter(name for unit in units for name in _made(graph, unit))
    first: dict[tuple[str, tuple[bool, ...]], int] = {}
    keys = [(unit.structure, tuple(name in learned for name in unit.receives)) for unit in units]
    return ProfiledUnits(
        graph=graph,
        units=units,
        firsts=tuple(first.setdefault(key, index) for index, key in enumerate(keys)),
        learned=learned,
        common=frozenset(name for name, times in times_made.items() if times > 1),
    )


def _made(graph: Graph, unit: Unit) -> list[str]:
    return [v.name for place in unit.operators for v in graph.operators[place].outputs if v is not None]


def _outside(graph: Graph, unit: Unit) -> list[str]:
    """All names that a unit and another one may both know, in an order that equal units agree on."""
    return [*unit.receives, *unit.sends, *unit.inputs, *_made(graph, unit)]
