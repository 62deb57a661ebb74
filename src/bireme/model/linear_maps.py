"""The weights of a graph that are linear maps: what their gradients are made of is pairs of rows.

A weight counts if one operator alone uses it, within a single unit, and that operator multiplies rows by it:
a linear layer, a product of matrices, or a convolution of one group, whose rows are its patches.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from bireme.codec.gradient_words import GradientForm
from bireme.errors import BiremeError
from bireme.model.argument import Argument, Reference
from bireme.model.graph import Graph, ModelState, Operator

__all__ = ["LinearMap", "MapKind", "chosen_maps", "linear_maps"]


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


def _kind(operator: Operator, state: ModelState) -> MapKind | None:
    """How an operator uses a weight, None if not as a linear map."""
    space, _, rest = operator.target.partition(".")
    name = rest.rpartition(".")[0]
    given = operator.arguments
    if space != "aten" or operator.no_grad or operator.keywords or state.dtype.startswith("complex"):
        return None
    if name == "linear" and _is(given, 1, state) and len(state.shape) == 2:
        return MapKind.LINEAR
    if name in ("mm", "matmul") and _is(given, 1, state) and len(state.shape) == 2:
        return MapKind.PRODUCT
    if name == "addmm" and _is(given, 2, state) and len(state.shape) == 2:
        return MapKind.PRODUCT
    if name in ("conv1d", "conv2d") and _is(given, 1, state):
        has_one_group = len(given) < 7 or given[6] == 1
        padding = given[4] if len(given) > 4 else 0
        return MapKind.CONVOLUTION if has_one_group and not isinstance(padding, str) else None
    return None


def _is(given: tuple[Argument, ...], place: int, state: ModelState) -> bool:
    return len(given) > place and given[place] == Reference(state.name)
