"""What gradients take that are kept as principal components: in a profile, in sums, in a document."""

from dataclasses import dataclass, replace

from bireme.codec.gradient_words import GradientForm
from bireme.codec.sum_words import Gathered, SumCodec, SumCost, sum_cost
from bireme.model.graph import Graph
from bireme.model.linear_maps import LinearMap, chosen_maps
from bireme.model.units import units_of
from bireme.profile.optimizers import gradient_bytes
from bireme.profile.profile import Profile

__all__ = ["KeptGradients", "kept_gradients", "sum_cost_of"]


@dataclass(frozen=True, slots=True)
class _OfUnit:
    """Gradients of a unit that are kept as components: bytes of whole ones, of components, of a message."""

    whole_bytes: int
    kept_bytes: int
    message_bytes: int


@dataclass(frozen=True, slots=True)
class KeptGradients:
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
        optimiser's state; of two batches where updates may be delayed.
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


def kept_gradients(graph: Graph, form: GradientForm) -> KeptGradients:
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
    return KeptGradients(form, len(maps), tuple(units))


def sum_cost_of(graph: Graph, codec: SumCodec, form: GradientForm) -> SumCost:
    """What sums over replicas cost: components are gathered, all other gradients go through the codec."""
    apart = chosen_maps(graph, form)
    shapes = [state.shape for state in graph.parameters if state.trainable and state.name not in apart]
    return replace(sum_cost(codec, shapes), gathered=kept_gradients(graph, form).gathered)
