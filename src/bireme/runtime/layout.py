"""Who does what: from a plan and a number of ranks to each rank's stages, replica and groups.

Ranks are assigned replica by replica: the first pipeline is ranks 0, 1, 2, …, the second follows. Within a
pipeline a stage may be on several ranks, which share its micro-batches.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from bireme.errors import BiremeError
from bireme.memory.system_memory import page_bytes
from bireme.model.capture import Inputs, Loss, capture
from bireme.model.graph import Graph, references
from bireme.model.stage import torch_operator
from bireme.model.torch_private import schema_of
from bireme.model.units import Unit
from bireme.model.weights import Weights, materialize
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan
from bireme.plan.program_plan import ProgramPlan
from bireme.schedule.catalogue import SCHEDULES
from bireme.schedule.instruction import Kind
from bireme.schedule.program import Program, Rule
from bireme.schedule.routes import Routes
from bireme.schedule.source import ProgramSource, source_of

# What a pipeline is made from: a graph and its weights, from a model or from what was captured before.


@dataclass(frozen=True, slots=True)
class _PreparedModel:
    """A model in training mode, maybe one in evaluation mode, and its weights."""

    graph: Graph
    evaluation: Graph | None
    weights: Weights
    """The engine takes over what they give, and writes to it."""


def prepared(
    model: Graph | nn.Module,
    *,
    evaluation: Graph | None,
    weights: Weights | None,
    example_inputs: Inputs | None,
    loss: Loss | None,
    seed: int,
) -> _PreparedModel:
    """A graph as it is given; a module captured in both modes, with copies of its own weights.

    A module on the meta device gets weights from the seed.
    """
    if isinstance(model, Graph):
        _refuse_sparse_gradients(model)
        if weights is None:
            raise BiremeError(
                "A graph holds no weights. Give a function as weights= that has them by name, such as one "
                "that calls materialize(model, names, seed=0)."
            )
        return _PreparedModel(model, evaluation, weights)
    if example_inputs is None:
        raise BiremeError(
            f"To capture {type(model).__name__}, the pipeline needs example_inputs=: a dict of tensors that "
            "the model can be called with."
        )
    graph = capture(model, example_inputs, loss=loss)
    _refuse_sparse_gradients(graph)
    if evaluation is None:
        evaluation = capture(model, example_inputs, loss=loss, training=False)
    return _PreparedModel(graph, evaluation, weights or _own_weights(model, seed))


def _refuse_sparse_gradients(graph: Graph) -> None:
    """Gradients are summed in flat memory, which a sparse one has no place in."""
    for operator in graph.operators:
        schema = None if operator.is_of_chain else schema_of(torch_operator(operator))
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        given = dict(zip(names, operator.arguments, strict=False)) | dict(operator.keywords)
        if given.get("sparse") is True:
            table = next(references(operator.arguments), "a table")
            raise BiremeError(
                f"{table} is an embedding with sparse=True, and the engine sums dense gradients only. Make "
                "it with sparse=False; its gradient then takes as much memory as the table."
            )


def _own_weights(model: nn.Module, seed: int) -> Weights:
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if any(tensor.is_meta for tensor in own.values()):
        return lambda names: materialize(model, names, seed=seed)
    return lambda names: {name: own[name].detach().clone() for name in names}


# What a pipeline is asked to run, by name or as a program, in the one form that the engine knows.

AnyPlan = Plan | SavedPlan | ProgramPlan | Program


def named_plan(plan: AnyPlan) -> Plan | None:
    """The plan that names a schedule; None of a program."""
    named = plan.plan if isinstance(plan, SavedPlan) else plan
    return named if isinstance(named, Plan) else None


def on_pages(plan: AnyPlan, device: torch.device) -> AnyPlan:
    """The plan with chunks that can be mapped on the device that it runs on."""
    named = named_plan(plan)
    if named is None or named.paging is None:
        return plan
    fitting = named.on_pages(page_bytes(device))
    return replace(plan, plan=fitting) if isinstance(plan, SavedPlan) else fitting


def runnable(plan: AnyPlan) -> ProgramPlan:
    """What a plan asks for. Refuses a program that is wrong, or right and yet nothing for the engine."""
    if (named := named_plan(plan)) is not None:
        asked = named.by_program
    else:
        assert not isinstance(plan, Plan | SavedPlan), "these name a schedule"
        asked = ProgramPlan(source_of(plan)) if isinstance(plan, Program) else plan
    if asked.source.rule is Rule.STASHED:
        raise BiremeError(
            f"The engine does not run {asked.source.name}, whose stages step after every micro-batch and so "
            "never agree on a batch. 2bw also trains without a bubble, on two weight versions. `bireme "
            "simulate` shows both."
        )
    _check_updates(asked.source)
    return asked


def _check_updates(source: ProgramSource) -> None:
    """A batch ends on a rank for all its stages at once: its norm and its verdict are of all of them."""
    program = source.settled()
    for rank, track in enumerate(program.tracks):
        newest = dict.fromkeys(source.stages_of(rank), program.first_batch - 1)
        for step in track:
            if step.kind is not Kind.UPDATE:
                continue
            newest[step.stage] = step.batch
            last = min(newest, key=newest.__getitem__)
            if step.batch > newest[last] + 1:
                raise BiremeError(
                    f"{source.name} updates stage {step.stage} from batch {step.batch} before stage {last}, "
                    f"which is on the same rank, is updated from batch {newest[last] + 1}. The engine ends a "
                    "batch on all stages of a rank before it ends the next one on any. Change the order of "
                    "these updates."
                )


_WHOLE_WEIGHTS = 2
"""Whole weights of a plan that gives no number: those of the running pass, and those of the next pass."""


def for_replicas(
    plan: AnyPlan,
    by_program: ProgramPlan,
    shard: str,
    programs: Callable[[AnyPlan], ProgramPlan],
    *,
    is_tied: bool,
) -> ProgramPlan:
    """The plan for what its ranks share. Refuses a plan whose replicas are to share weights if they do not.

    With tied parameters, updates are early only if the plan asks for it: tied gradients take long to sum. If
    replicas share an optimizer, updates leave time for the weights to travel; if they share weights, these
    are gathered before use. `programs` gives the programs of a plan.
    """
    named = named_plan(plan)
    if named is not None and named.whole_weights and shard != "weights":
        raise BiremeError(
            f"In the plan replicas share weights (whole_weights = {named.whole_weights}), but shard is "
            f'"{shard}". Set shard = "weights", or make a new plan.'
        )
    shared = shard if by_program.width > 1 else "none"
    if named is None:
        if shared == "weights":
            raise BiremeError(
                "Replicas share the weights, which are gathered where a schedule uses them, but "
                f"{by_program.source.name} "
                'is a program and not a plan with a schedule. Name a schedule, or use shard = "optimizer".'
            )
        return by_program
    asked = named
    if is_tied and asked.updates_early is None:
        asked = replace(asked, updates_early=False)
    if shared == "optimizer":
        asked = replace(asked, updates_halfway=True)
    if shared == "weights" and not asked.whole_weights:
        asked = replace(asked, whole_weights=_WHOLE_WEIGHTS)
    if asked != named:
        by_program = programs(asked)
    if shared == "weights":
        by_program.source.settled()  # refuses schedules that need gradients whole
    return by_program


def work_of(graph: Graph, unit: Unit) -> float:
    """The multiplications of a unit, and a little for each operator, so that none counts for nothing."""
    return sum(1.0 + graph.operators[place].flops for place in unit.operators)


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's place. `tied` are the parameters that stages of other ranks hold too, with all their
    ranks.
    """

    rank: int
    replica: int
    pipeline_rank: int
    routes: Routes
    width: int
    units: Mapping[int, tuple[Unit, ...]]
    """The units of each of this rank's stages."""
    tied: Mapping[str, tuple[int, ...]]
    counted: frozenset[str]
    """The parameters whose norm this rank adds to the whole."""
    owners: Mapping[str, int]
    """The first rank that holds each parameter and buffer."""
    repeated: frozenset[str]
    """The parameters with gradients that several of this rank's own stages hold."""

    @property
    def num_pipeline_ranks(self) -> int:
        """How many ranks one replica has."""
        return self.routes.num_ranks

    @property
    def pipeline(self) -> tuple[int, ...]:
        """The ranks of this replica, in the order of the program's."""
        first = self.replica * self.num_pipeline_ranks
        return tuple(range(first, first + self.num_pipeline_ranks))

    @property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """All ranks, each beside those with the same stages, in all replicas."""
        return self.routes.alike(self.width)

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks with the same stages as this one, itself among them: they sum their gradients."""
        return next(ranks for ranks in self.alike if self.rank in ranks)

    @property
    def first_rank(self) -> int:
        """The first pipeline rank with this one's stages."""
        return self.routes.rank_of_stage[next(iter(self.units))]

    @property
    def member(self) -> int:
        """The place of this rank among its peers."""
        return self.peers.index(self.rank)

    @property
    def is_summed(self) -> bool:
        """Whether the gradients of any rank are summed with those of peers."""
        return self.width > 1 or bool(self.routes.shares)


def layout_of(graph: Graph, units: Sequence[Unit], plan: ProgramPlan, rank: int, num_ranks: int) -> Layout:
    """The place of a rank among so many."""
    routes = plan.source.routes
    per_replica = routes.num_ranks
    if num_ranks != per_replica * plan.width:
        raise BiremeError(
            f"The plan is for {per_replica * plan.width} processes ({plan.width} replicas of "
            f"{per_replica}), and there are {num_ranks}. Start as many, or plan for {num_ranks}."
        )
    holders: dict[str, set[int]] = {}
    for stage, owner in enumerate(routes.rank_of_stage):
        for index in plan.units_of(stage, len(units)):
            for name in (*units[index].parameters, *units[index].buffers):
                holders.setdefault(name, set()).add(owner)
    replica, pipeline_rank = divmod(rank, per_replica)
    own = {
        stage: tuple(units[index] for index in plan.units_of(stage, len(units)))
        for stage in routes.stages_of(pipeline_rank)
    }
    trainable = {state.name for state in graph.parameters if state.trainable}
    alike = routes.alike(plan.width)
    return Layout(
        rank=rank,
        replica=replica,
        pipeline_rank=pipeline_rank,
        routes=routes,
        width=plan.width,
        units=own,
        tied={
            name: tuple(sorted(rank for ranks in alike if ranks[0] in places for rank in ranks))
            for name, places in sorted(holders.items())
            if len(places) > 1 and name in trainable
        },
        counted=frozenset(
            name
            for name, places in holders.items()
            if replica == 0 and min(places) == pipeline_rank and name in trainable
        ),
        owners={name: min(places) for name, places in holders.items()},
        repeated=frozenset(name for name, count in _uses(own).items() if count > 1 and name in trainable),
    )


def _uses(stages: Mapping[int, Sequence[Unit]]) -> Counter[str]:
    """How many of some stages hold each parameter."""
    return Counter(
        name for units in stages.values() for name in {name for unit in units for name in unit.parameters}
    )


def used_by_plan(source: ProgramSource, layout: Layout, *, offloads: bool) -> dict[str, str]:
    """The capabilities that a plan uses for a model, each with words that name it.

    A program that is in no catalogue counts as the schedule whose passes and updates are like its own.
    """
    alike = {
        source.name: source.name in SCHEDULES and source.rule is not Rule.STASHED,
        "interleaved": source.num_stages > source.num_ranks,
        "zb-h1": source.splits_backward,
        "2bw-fresh": source.rule is Rule.FRESH,
    }
    found = {name: f'the schedule is "{source.name}"' for name, is_so in alike.items() if is_so}
    if offloads:
        found["offloading"] = "the plan offloads"
    if layout.tied:
        found["tied"] = f"{next(iter(layout.tied))} is shared by stages on several ranks"
    return found


_OF_WHOLE_PIPELINES = (
    "shard-optimizer",
    "shard-weights",
    "quorum",
    "groups",
    "diloco",
)
"""Capabilities that replicas of whole pipelines have, and the ranks of a stage have not."""


def refuse_with_widths(routes: Routes, used: Mapping[str, str]) -> None:
    """Refuse capabilities of replicas if stages are of unequal width; `used` has words for each."""
    words = [used[name] for name in _OF_WHOLE_PIPELINES if name in used]
    if routes.shares and words:
        widths = ", ".join(str(len(share)) for share in routes.shares)
        raise BiremeError(
            f"{words[0]}, which is for replicas of whole pipelines, and the plan has stages of unequal width "
            f"({widths} ranks). Leave one of them out: plan with plan.width instead of stage_widths, or sum "
            "all gradients in every batch."
        )
