"""Whether the last linear layer of a run's model and its loss are one operator, and why not."""

from bireme.errors import BiremeError
from bireme.model.fused_loss import Fusion, fused
from bireme.model.graph import Graph
from bireme.model.units import chosen_maps
from bireme.train.run_file import RunFile


def with_fused_loss(run: RunFile, graph: Graph) -> Graph:
    """The graph of a run's model as the run trains it. Refuses a fused loss that cannot be."""
    fusion = _fusion(run, graph)
    if run.model.fused_loss and fusion.reason is not None:
        raise BiremeError(
            f"model.fused_loss is true, but {fusion.reason}. Leave model.fused_loss out; the layer and its "
            "loss then run one after the other."
        )
    return fusion.graph


def fused_loss_note(run: RunFile, graph: Graph | None) -> list[str]:
    """A sentence if all logits of a micro-batch are in memory, though they are many."""
    reason = None if graph is None else _fusion(run, graph).reason
    if reason is None or run.model.fused_loss:
        return []
    return [f"All logits of a micro-batch are in memory at once, because {reason} (model.fused_loss)."]


def _fusion(run: RunFile, graph: Graph) -> Fusion:
    form = run.training.gradient_form
    kept = {} if form is None or run.model.fused_loss is False else chosen_maps(graph, form)
    why = "training.gradient keeps the gradient of its last linear layer as components"
    return fused(graph, asked=run.model.fused_loss, but=dict.fromkeys(kept, why))
