"""The chain of units: a graph cut wherever it is narrow.

A value is *free* when it depends on inputs but on no parameter, such as a mask or a position table: it is
made again where it is needed and never sent. What is left live between two operators must cross if the
graph is cut there. A cut is narrow where that is one tensor. Between two operators that multiply by weights
one narrow cut is enough: the one with the fewest bytes, of these one between two layers, and else the first.

Some values are live for most of a model, such as an encoder's output for all of the decoder, and would leave
no narrow cut there. A value that whole layers pass by is taken out of the count; it crosses every cut on its
way beside the one tensor.

A chain of modules is cut ahead of every module with parameters, whatever crosses there. Nothing in it is
free, as nobody knows what a module does.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import pairwise

from bireme.codec.sum_description import GradientForm
from bireme.errors import BiremeError
from bireme.model.graph import (
    Argument,
    Graph,
    ModelState,
    Operator,
    Reference,
    Token,
    once_for_each_graph,
    references,
)

# The weights of a graph that are linear maps: what their gradients are made of is pairs of rows.
#
# A weight counts if one operator alone uses it, within a single unit, and that operator multiplies rows by
# it: a linear layer, a product of matrices, or a convolution of one group, whose rows are its patches.


class MapKind(StrEnum):
    """How an operator uses its weight."""

    LINEAR = "linear"
    """y = x WT."""
    PRODUCT = "product"
    """y = x W."""
    CONVOLUTION = "convolution"


@dataclass(frozen=True, slots=True)
class LinearMap:
    """A weight as a matrix: its first axis, and all others together. `operator` is the place of its use."""

    name: str
    shape: tuple[int, ...]
    kind: MapKind
    operator: int

    @property
    def rows(self) -> int:
        """The length of the first axis."""
        return self.shape[0]

    @property
    def columns(self) -> int:
        """That of all others together."""
        return math.prod(self.shape[1:])


def linear_maps(graph: Graph) -> dict[str, LinearMap]:
    """All weights that learn and are linear maps, by name."""
    uses: dict[str, list[int]] = {state.name: [] for state in graph.parameters if state.trainable}
    for place, operator in enumerate(graph.operators):
        for name in operator.reads():
            if name in uses:
                uses[name].append(place)
    given = {output.value.name for output in graph.outputs if isinstance(output.value, Reference)}
    found = {}
    for state in graph.parameters:
        places = uses.get(state.name, ())
        if len(places) == 1 and state.name not in given:
            kind = _kind(graph.operators[places[0]], state)
            if kind is not None:
                found[state.name] = LinearMap(state.name, state.shape, kind, places[0])
    return found


def chosen_maps(graph: Graph, form: GradientForm) -> dict[str, LinearMap]:
    """The weights whose gradients take a form; a `BiremeError` where that cannot be."""
    maps = linear_maps(graph)
    if any(operator.is_of_chain for operator in graph.operators):
        raise BiremeError(
            f"Gradients are to be kept as {form}, but the model is a chain, whose modules hide their linear "
            "maps. Capture it as one module."
        )
    if not maps:
        raise BiremeError(
            f"Gradients are to be kept as {form}, but {graph.name} has no linear map that learns."
        )
    if form.patterns is None:
        return _all_smaller(maps, form)
    found: dict[str, LinearMap] = {}
    for pattern in form.patterns:
        own = [state for state in graph.parameters if _fits(state, pattern)]
        here = [maps[state.name] for state in own if state.name in maps]
        if not here:
            raise BiremeError(f"training.gradient_of names {pattern}, {_why_not(graph, own, maps)}")
        found |= {one.name: one for one in here}
    for one in found.values():
        if form.rank > min(one.rows, one.columns):
            raise BiremeError(
                f"Gradients are to be kept as {form}, but {one.name} is a matrix of {one.rows} × "
                f"{one.columns}: its gradient has rank {min(one.rows, one.columns)} at most. Lower the rank, "
                "or leave it out of training.gradient_of."
            )
    return found


def _all_smaller(maps: Mapping[str, LinearMap], form: GradientForm) -> dict[str, LinearMap]:
    found = {
        name: one
        for name, one in maps.items()
        if form.rank <= min(one.rows, one.columns) and form.is_smaller(one.rows, one.columns)
    }
    if not found:
        largest = max(maps.values(), key=lambda one: min(one.rows, one.columns))
        raise BiremeError(
            f"Gradients are to be kept as {form}, but no gradient of a linear map gets smaller by it: the "
            f"best is {largest.name}, a matrix of {largest.rows} × {largest.columns}. Lower the rank."
        )
    return found


def _fits(state: ModelState, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in (state.name, *state.aliases))


def _why_not(graph: Graph, own: list[ModelState], maps: Mapping[str, LinearMap]) -> str:
    if not own:
        some = ", ".join(list(maps)[:3])
        return f"which matches no parameter. The linear maps have names such as {some}."
    one = own[0]
    if not one.trainable:
        return f"but {one.name} is frozen, so it has no gradient. Leave it out."
    num_uses = sum(name == one.name for operator in graph.operators for name in operator.reads())
    if num_uses > 1:
        return (
            f"but {one.name} is used in {num_uses} places (tied weights), and the components are of a weight "
            "with one. Leave it out."
        )
    return f"but {one.name}, of shape {list(one.shape)}, is not the weight of a linear map. Leave it out."


_KINDS = {
    "linear": (1, MapKind.LINEAR),
    "mm": (1, MapKind.PRODUCT),
    "matmul": (1, MapKind.PRODUCT),
    "addmm": (2, MapKind.PRODUCT),
    "conv1d": (1, MapKind.CONVOLUTION),
    "conv2d": (1, MapKind.CONVOLUTION),
}
"""For each operator the place of its weight, and how it uses it."""


def _kind(operator: Operator, state: ModelState) -> MapKind | None:
    """How an operator uses a weight, None if not as a linear map."""
    space, _, rest = operator.target.partition(".")
    name = rest.rpartition(".")[0]
    given = operator.arguments
    if space != "aten" or operator.no_grad or operator.keywords or state.dtype.startswith("complex"):
        return None
    place, kind = _KINDS.get(name, (0, None))
    if kind is None or len(given) <= place or given[place] != Reference(state.name):
        return None
    if kind is not MapKind.CONVOLUTION:
        return kind if len(state.shape) == 2 else None
    has_one_group = len(given) < 7 or given[6] == 1
    padding = given[4] if len(given) > 4 else 0
    return kind if has_one_group and not isinstance(padding, str) else None


@dataclass(frozen=True, slots=True)
class Unit:
    """The smallest piece the planner may move.

    `operators` are the places in the graph of what it runs, those included whose free values it makes for
    itself. `receives` and `sends` are the names of the tensors that cross its two boundaries, those that only
    pass through included. Units of the same `structure` do the same work on other weights.
    """

    index: int
    name: str
    operators: tuple[int, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    structure: str


@once_for_each_graph
def units_of(graph: Graph) -> tuple[Unit, ...]:
    """The units of a graph, in order; at least one."""
    flow = _Flow(graph)
    bounds = [0, *flow.cuts(), len(graph.operators)]
    return tuple(flow.unit(index, begin, end) for index, (begin, end) in enumerate(pairwise(bounds)))


class _Flow:
    """What depends on what, and what is live where."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.states = {s.name: s for s in (*graph.parameters, *graph.buffers, *graph.constants)}
        self.parameters = {parameter.name for parameter in graph.parameters}
        self.made_by = graph.made_by
        self.values = graph.values
        self.is_free = self._free()
        self.last_use = self._last_uses()
        self.layer = [_layer(operator.module) for operator in graph.operators]
        self.heavy = self._multiplying()

    def _free(self) -> list[bool]:
        """For each operator whether it is made again where it is needed."""
        free: list[bool] = []
        touched: set[str] = {name for operator in self.graph.operators for name in operator.mutates}
        for operator in self.graph.operators:
            depends = any(
                name in self.parameters
                or name in touched
                or (name in self.made_by and not free[self.made_by[name]])
                for name in operator.reads()
            )
            made = {value.name for value in operator.made}
            is_written = bool(operator.mutates or made & touched)
            can_repeat = not operator.is_random and not is_written and not operator.is_of_chain
            free.append(not depends and can_repeat)
        return free

    def _last_uses(self) -> dict[str, int]:
        return {
            name: place
            for place, operator in enumerate(self.graph.operators)
            for name in operator.reads()
            if name in self.made_by
        }

    def cuts(self) -> list[int]:
        """Where to cut: places in the list of operators, right before the one there."""
        operators = self.graph.operators
        heavy = self.heavy
        best: dict[int, tuple[int, bool, int]] = {}
        group = 0
        live: dict[str, None] = {}
        pass_by = self._passing_by()
        is_chain = any(operator.is_of_chain for operator in operators)
        for place in range(1, len(operators)):
            group += place - 1 in heavy
            self._advance(live, place)
            counted = [name for name in live if name not in pass_by]
            is_narrow = place in heavy if is_chain else len(counted) == 1
            if is_narrow and 0 < group < len(heavy) and self._can_cross(live, place):
                num_bytes = sum(self.values[name].num_bytes(self.graph.batch) for name in live)
                candidate = num_bytes, self.layer[place - 1] == self.layer[place], place
                best[group] = min(best.get(group, candidate), candidate)
        return sorted(place for _, _, place in best.values())

    def _advance(self, live: dict[str, None], place: int) -> None:
        """From what is live before the operator ahead of `place` to what is live after it."""
        operator = self.graph.operators[place - 1]
        for name in operator.reads():
            if self.last_use.get(name) == place - 1:
                live.pop(name, None)
        if not self.is_free[place - 1]:
            live.update((value.name, None) for value in operator.made if value.name in self.last_use)

    def _multiplying(self) -> set[int]:
        """The operators that work with a matrix of weights; of look-ups in a row only the last.

        In a chain those with any parameters: it has no others to cut between.
        """
        heavy = [
            place
            for place, operator in enumerate(self.graph.operators)
            if not operator.is_pointwise
            and any(
                operator.is_of_chain or self._is_matrix(n) for n in operator.reads() if n in self.parameters
            )
        ]
        looks_up = [self.graph.operators[place].target.startswith("aten.embedding.") for place in heavy]
        following = [*looks_up, False][1:]
        return {
            p for p, one, next_one in zip(heavy, looks_up, following, strict=True) if not (one and next_one)
        }

    def _is_matrix(self, name: str) -> bool:
        return sum(length > 1 for length in self.states[name].unpacked.shape) > 1

    def _passing_by(self) -> set[str]:
        """The values that several layers use, or that a whole layer lies between."""
        spans: dict[str, list[int]] = {}
        for place, layer in enumerate(self.layer):
            if layer:
                spans.setdefault(layer, [place, place])[1] = place
        used_in: dict[str, set[str]] = {}
        for place, operator in enumerate(self.graph.operators):
            for name in operator.reads():
                if name in self.made_by and self.layer[place]:
                    used_in.setdefault(name, set()).add(self.layer[place])
        found = set()
        for name, last in self.last_use.items():
            made = self.made_by[name]
            if self.is_free[made]:
                continue
            inside = any(made < begin and end < last for begin, end in spans.values())
            if inside or len(used_in.get(name, ())) > 1:
                found.add(name)
        return found

    def _can_cross(self, live: Iterable[str], place: int) -> bool:
        """Only tensors cross, and none that is written to later: its maker would not see that."""
        operators = self.graph.operators
        return all(
            self.values[name].dtype != "number"
            and not any(name in operator.mutates for operator in operators[place : self.last_use[name] + 1])
            for name in live
        )

    def live_at(self, place: int) -> tuple[str, ...]:
        """What crosses a cut right before the operator at `place`, in the order it is made."""
        return tuple(
            name
            for name, made in self.made_by.items()
            if not self.is_free[made] and made < place <= self.last_use.get(name, -1)
        )

    def unit(self, index: int, begin: int, end: int) -> Unit:
        """The unit between two cuts."""
        own = [place for place in range(begin, end) if not self.is_free[place]]
        read_by_own = (name for place in own for name in self.graph.operators[place].reads())
        is_last = end == len(self.graph.operators)
        results = (name for out in self.graph.outputs if is_last for name in references(out.value))
        free = self._free_for((*read_by_own, *results))
        places = tuple(sorted((*free, *own)))
        read = {name: None for place in places for name in self.graph.operators[place].reads()}
        outside = {value.name for value in self.graph.inputs}
        buffers = {buffer.name for buffer in self.graph.buffers}
        return Unit(
            index=index,
            name=self._name(own),
            operators=places,
            receives=self.live_at(begin),
            sends=self.live_at(end),
            parameters=tuple(name for name in read if name in self.parameters),
            buffers=tuple(name for name in read if name in buffers),
            inputs=tuple(name for name in read if name in outside),
            structure=self._structure(places, self.live_at(begin), self.live_at(end)),
        )

    def _free_for(self, names: Iterable[str]) -> tuple[int, ...]:
        """The free operators that make these values, directly or through others, in order."""
        needed: set[int] = set()
        todo = list(names)
        while todo:
            made = self.made_by.get(todo.pop())
            if made is not None and self.is_free[made] and made not in needed:
                needed.add(made)
                todo.extend(self.graph.operators[made].reads())
        return tuple(sorted(needed))

    def _name(self, own: list[int]) -> str:
        """The innermost module that all multiplying operators of the unit belong to."""
        modules = [self.graph.operators[p].module.split(".") for p in own if p in self.heavy]
        if not modules:
            modules = [self.graph.operators[p].module.split(".") for p in own] or [[]]
        common = []
        for parts in zip(*modules, strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        return ".".join(common) or self.graph.name

    def _structure(self, places: tuple[int, ...], receives: tuple[str, ...], sends: tuple[str, ...]) -> str:
        """A hash that is the same for units that differ in names only."""
        number: dict[str, str] = {name: f"r{i}" for i, name in enumerate(receives)}
        lines = [f"{self.graph.training} {self.graph.batch if not self.graph.any_batch else 'b'}"]
        lines += [f"{number[name]} {self._shape(name)}" for name in receives]
        for place in places:
            operator = self.graph.operators[place]
            for name in operator.reads():
                if name not in number:
                    number[name] = f"s{len(number)} {self._shape(name)}"
            given = (operator.arguments, tuple(value for _, value in operator.keywords))
            keys = [key for key, _ in operator.keywords]
            lines.append(f"{operator.target} {_canonical(given, number)} {keys} {operator.no_grad}")
            for value in operator.made:
                number[value.name] = f"v{len(number)}"
                lines.append(f"{number[value.name]} {value.shape} {value.dtype}")
        lines.append(" ".join(number.get(name, "passes") for name in sends))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def _shape(self, name: str) -> str:
        state = self.states.get(name)
        if state is not None:
            return f"{state.shape} {state.dtype} {state.is_parameter} {state.trainable} {state.data!r}"
        value = self.values.get(name)
        return f"{value.shape} {value.dtype}" if value is not None else "outside"


def _canonical(argument: Argument, number: dict[str, str]) -> str:
    match argument:
        case Reference(name):
            return number[name]
        case Token(kind, name):
            return f"<{kind} {name}>"
        case tuple():
            return f"({', '.join(_canonical(part, number) for part in argument)})"
    return repr(argument)


def _layer(module: str) -> str:
    """The outermost numbered module on the way, such as `model.layers.3`; empty where there is none."""
    found = re.match(r"(.*?\.)??\d+(?=\.|$)", module)
    return found.group(0) if found else ""
