"""What training keeps for a parameter in addition to it, in bytes, and which parameters muon takes.

Weights of sixteen bits get float32 sums of gradients, float32 state, and a float32 copy that is stepped.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bireme.codec.sum_description import Gathered, GradientForm, SumCodec, SumCost, sum_cost
from bireme.errors import BiremeError, closest
from bireme.model.graph import Graph, ModelState
from bireme.model.units import LinearMap, chosen_maps, units_of
from bireme.profile.profile import Profile

OPTIMIZERS = ("adam", "adamw", "muon", "sgd")
"""The optimizers known by name; sgd is meant with momentum, muon leaves to adamw what is no hidden matrix."""

SHORT = ("bfloat16", "float16")

_STEP_BYTES = 4
"""Adam counts its steps for each parameter apart, in a float32."""

_MUON_ROUNDS = 5
"""Of Newton and Schulz, by which muon makes a matrix orthogonal."""


def check_optimizer(name: str) -> None:
    """Refuse a name that is none."""
    if name not in OPTIMIZERS:
        raise BiremeError(f"There is no optimizer {name!r}. {closest(name, OPTIMIZERS)}")


def is_hidden_matrix(name: str, num_axes: int) -> bool:
    """Whether a parameter is a matrix inside one of the model's numbered layers, judging by its name.

    `layers.3.attention.query.weight` is; what is looked up and the last matrix lie outside the layers, and so
    does `2.weight`, a module on its own in a sequence.
    """
    return num_axes == 2 and any(part.isdecimal() for part in name.split(".")[:-2])


def frozen_bytes(state: ModelState) -> int:
    """The bytes of a parameter that does not learn; none of what learns, and none of a buffer."""
    return state.num_bytes if state.is_parameter and not state.trainable else 0


def gradient_bytes(state: ModelState) -> int:
    """The bytes of the sum of one parameter's gradients, which has at least 32 bits an element."""
    if not state.trainable:
        return 0
    return 4 * state.num_elements if state.dtype in SHORT else state.num_bytes


def optimizer_bytes(state: ModelState, optimizer: str) -> int:
    """The bytes an optimizer keeps of one parameter; nothing of one that is frozen."""
    if not state.trainable:
        return 0
    is_short = state.dtype in SHORT
    num_moments = _num_moments(state, optimizer)
    return (num_moments + is_short) * gradient_bytes(state) + (0 if num_moments == 1 else _STEP_BYTES)


def has_masters(states: Iterable[ModelState]) -> bool:
    """Whether an optimizer steps float32 copies of a model's weights, because these are too short."""
    return any(state.trainable and state.dtype in SHORT for state in states)


def moments_share(states: Iterable[ModelState], optimizer: str) -> float:
    """The bytes of what an optimizer remembers of each weight, for each byte of all gradients."""
    found = [(gradient_bytes(state), _num_moments(state, optimizer)) for state in states]
    return sum(own * num for own, num in found) / max(sum(own for own, _ in found), 1)


def whole_bytes(states: Iterable[ModelState], optimizer: str) -> int:
    """The most bytes that an optimizer keeps of one parameter that it steps whole; 0 if there is none."""
    return max((optimizer_bytes(one, optimizer) for one in states if _is_muons(one, optimizer)), default=0)


def optimizer_flops(state: ModelState, optimizer: str) -> int:
    """The floating-point operations of the products in a step; other arithmetic counts as none."""
    if not state.trainable or not _is_muons(state, optimizer):
        return 0
    m, n = sorted(state.shape)
    # A round multiplies an m × n matrix by its transpose, the product by itself, and that by the matrix.
    return _MUON_ROUNDS * (4 * m * m * n + 2 * m * m * m)


def _num_moments(state: ModelState, optimizer: str) -> int:
    """How many numbers an optimizer remembers of each weight of a parameter."""
    return 1 if optimizer == "sgd" or _is_muons(state, optimizer) else 2


def _is_muons(state: ModelState, optimizer: str) -> bool:
    return optimizer == "muon" and is_hidden_matrix(state.name, len(state.shape))


# What gradients take that are kept as principal components: in a profile, in sums, in a document.


@dataclass(frozen=True, slots=True)
class _OfUnit:
    """Gradients of a unit that are kept as components: bytes of whole ones, of components, of a message."""

    whole_bytes: int
    kept_bytes: int
    message_bytes: int


@dataclass(frozen=True, slots=True)
class _KeptGradients:
    """The gradients of a model in a form, unit by unit."""

    form: GradientForm
    num_weights: int
    units: tuple[_OfUnit, ...]

    @property
    def gathered(self) -> tuple[Gathered, ...]:
        """What replicas send of them."""
        return tuple(Gathered(one.message_bytes, one.kept_bytes) for one in self.units)

    def counted_in(self, profile: Profile, *, may_delay: bool) -> Profile:
        """The profile with gradients that take what is kept of them. What a batch goes on from is with the
        optimizer's state; of two batches where updates may be delayed.
        """
        num_settled = 2 if may_delay else 1
        units = (
            replace(
                cost,
                gradient_bytes=cost.gradient_bytes - own.whole_bytes + own.kept_bytes,
                optimizer_bytes=cost.optimizer_bytes + num_settled * own.kept_bytes,
            )
            for cost, own in zip(profile.units, self.units, strict=True)
        )
        return replace(profile, units=tuple(units))

    def document(self, graph: Graph) -> dict[str, object]:
        """For a document: what the gradients of one batch take, over all stages, and would if they were
        whole.
        """
        whole = sum(gradient_bytes(state) for state in graph.parameters)
        saved = sum(one.whole_bytes - one.kept_bytes for one in self.units)
        return {
            "form": str(self.form),
            "num_weights": self.num_weights,
            "whole_bytes": whole,
            "kept_bytes": whole - saved,
        }


def kept_gradients(graph: Graph, form: GradientForm) -> _KeptGradients:
    """The gradients of a graph in a form; a `BiremeError` where the model does not go with it."""
    maps = chosen_maps(graph, form)
    value_bytes = {
        state.name: gradient_bytes(state) // state.num_elements
        for state in graph.parameters
        if state.name in maps
    }

    def of(own: list[LinearMap]) -> _OfUnit:
        return _OfUnit(
            sum(value_bytes[one.name] * one.rows * one.columns for one in own),
            sum(value_bytes[one.name] * form.num_elements(one.rows, one.columns) for one in own),
            # Both factors, and a number that says whether the replica has any.
            sum(value_bytes[one.name] * (form.rank * (one.rows + one.columns) + 1) for one in own),
        )

    units = (of([maps[name] for name in unit.parameters if name in maps]) for unit in units_of(graph))
    return _KeptGradients(form, len(maps), tuple(units))


def sum_cost_of(graph: Graph, codec: SumCodec, form: GradientForm) -> SumCost:
    """What sums over replicas cost: components are gathered, all other gradients go through the codec."""
    apart = chosen_maps(graph, form)
    shapes = [state.shape for state in graph.parameters if state.trainable and state.name not in apart]
    return replace(sum_cost(codec, shapes), gathered=kept_gradients(graph, form).gathered)
