"""A `ForwardPipeline` evaluates a model over one or several ranks: their weights, and nothing of training.

It runs the program of forwards that evaluations within a training run. So a model that trains over a pipeline
is evaluated over one too, in the memory of its weights, and with the same numbers.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.devices import check_supported
from bireme.model.counting import count_of
from bireme.model.graph import Graph
from bireme.model.stage import stage_function, torch_operator
from bireme.model.units import units_of
from bireme.plan.plan import Plan
from bireme.plan.program_plan import even_cuts
from bireme.runtime.batch_end import Batches
from bireme.runtime.batches import Batch
from bireme.runtime.borders import Borders
from bireme.runtime.courier import StageMessages
from bireme.runtime.evaluation import Evaluation, EvaluationStage, Evaluator
from bireme.runtime.fabric import Fabric, PipelineFabric, fabric_of, teller
from bireme.runtime.interpreter import Interpreter
from bireme.runtime.layout import Layout, layout_of
from bireme.runtime.microbatches import Cutter
from bireme.runtime.prepared import Weights
from bireme.runtime.runnable import work_of
from bireme.runtime.stage import LOSS
from bireme.runtime.updates import Updates, UpdateSettings
from bireme.runtime.world import World
from bireme.sync.group import SingleRankGroup
from bireme.sync.reducer import Reducer

__all__ = ["ForwardPipeline"]


class ForwardPipeline:
    """One rank's part of it. `graph` is that of the model in evaluation mode.

    Its units are cut into as many stages as there are ranks, with shares of work and of weights that are as
    equal as can be. A batch goes through in `num_microbatches` parts. `weights` gives the parameters and
    buffers of this rank's stage; they are converted to the types of the graph.
    """

    def __init__(
        self,
        graph: Graph,
        world: World | Fabric | None = None,
        *,
        num_stages: int = 1,
        num_microbatches: int = 1,
        weights: Weights,
        device: torch.device | str = "cpu",
    ) -> None:
        device = torch.device(device)
        check_supported(device)
        units = units_of(graph)
        cuts = even_cuts(_shares(graph), num_stages)
        plan = Plan(cuts, num_microbatches, "gpipe").by_program
        self._fabric = PipelineFabric(fabric_of(world, num_stages, device))
        layout = layout_of(graph, units, plan, self._fabric.rank, self._fabric.size)
        receives = tuple(units[begin].receives for begin in (0, *cuts))
        borders = Borders(graph, receives)
        stages = _stages(graph, layout, weights, device)
        self.cutter = Cutter(
            width=1,
            replica=0,
            num_microbatches=num_microbatches,
            num_sliced=0,
            count=count_of(graph),
            required=graph.inputs,
            needed=tuple(dict.fromkeys(name for one in stages.values() for name in one.function.inputs)),
            device=device,
            seed=0,
        )
        """What this rank takes of each batch."""
        transport = self._fabric.transport(layout.pipeline, layout.rank_of_stage)
        courier = StageMessages(layout.rank_of_stage, borders, transport, device)
        alone = Reducer(SingleRankGroup(), in_background=False)
        updates = Updates({}, Batches(), alone, UpdateSettings())  # a program of forwards has none
        interpreter = Interpreter({}, courier, updates, teller(world))
        self._evaluator = Evaluator(stages, layout, interpreter, self._fabric.everyone(), self.cutter)

    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        """The loss over some batches, each of any size down to one sample; the same on every rank."""
        return self._evaluator.evaluate(batches)

    def close(self) -> None:
        """Give back sockets and groups."""
        self._fabric.close()


def _shares(graph: Graph) -> list[float]:
    """What each unit has of the model's work and of its weights, together."""
    units = units_of(graph)
    states = {state.name: state.num_bytes for state in graph.parameters}
    work = [work_of(graph, unit) for unit in units]
    held = [float(sum(states[name] for name in unit.parameters)) for unit in units]
    return [
        one / (sum(work) or 1.0) + other / (sum(held) or 1.0) for one, other in zip(work, held, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Weights that stay as they are."""

    weights: Mapping[str, Tensor]

    def lent(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        return nullcontext(self.weights)

    def newest_to_compute_with(self) -> Mapping[str, Tensor]:
        return self.weights


def _stages(
    graph: Graph, layout: Layout, weights: Weights, device: torch.device
) -> dict[int, EvaluationStage]:
    """The stages of this rank, with their weights on the device."""
    dtypes = {state.name: getattr(torch, state.dtype) for state in (*graph.parameters, *graph.buffers)}
    found = {}
    for stage, own in layout.units.items():
        function = stage_function(graph, own, resolve=torch_operator, outputs=(LOSS,))
        given = weights((*function.parameters, *function.buffers))
        held = {name: tensor.to(device, dtypes[name]) for name, tensor in given.items()}
        fixed = _Fixed({name: held[name] for name in function.parameters})
        buffers = {name: held[name] for name in function.buffers}
        found[stage] = EvaluationStage(function, fixed, buffers, device)
    return found
