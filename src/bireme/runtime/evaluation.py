"""Evaluation: batches through the pipeline forward, on the newest weights, in the model's evaluation mode."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from bireme.bounds import bytes_text
from bireme.codec.description import NO_CODECS, LinkCodecs
from bireme.devices import check_supported, is_accelerator
from bireme.errors import BiremeError
from bireme.model.counting import count_of
from bireme.model.graph import Graph, ModelState
from bireme.model.halves import GradientHook, feeding
from bireme.model.stage import SegmentedFunction, StageFunction, torch_operator
from bireme.model.units import LinearMap, Unit, chosen_maps, units_of
from bireme.model.weights import Weights
from bireme.plan.plan import Plan
from bireme.plan.program_plan import ProgramPlan, even_cuts
from bireme.runtime.banks import WeightBanks
from bireme.runtime.fabric import Fabric, PipelineFabric, fabric_of, teller
from bireme.runtime.gradients import principal_of
from bireme.runtime.interpreter import Interpreter
from bireme.runtime.layout import Layout, layout_of, work_of
from bireme.runtime.message_format import Boundaries
from bireme.runtime.microbatches import Batch, Cutter, Feed, MicroBatch, Portion
from bireme.runtime.paging.rank_paging import RankPaging
from bireme.runtime.parameter_groups import bank_dtype_of, step_dtype_of
from bireme.runtime.settings import PipelineSettings
from bireme.runtime.shared_weights import Sharers
from bireme.runtime.stage import LOSS, AnyStageFunction, Batches, Place, Stage
from bireme.runtime.stage_messages import StageMessages
from bireme.runtime.stepper import OptimizerFactory
from bireme.runtime.updates import Updates, UpdateSettings
from bireme.runtime.world import World
from bireme.schedule.chunk_account import Holding
from bireme.schedule.generators.shape import forward_only
from bireme.schedule.instruction import Item, Kind
from bireme.schedule.program import Program
from bireme.schedule.source import ProgramSource
from bireme.schedule.tiers import Chunk, RankTiers
from bireme.sync.group import Group, SingleRankGroup
from bireme.sync.reducer import GroupReducer


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean loss over everything that counts in some batches, and how much that is.

    It is NaN where nothing counts.
    """

    loss: float
    weight: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Runs batches through the stages of one rank. `group` has all ranks of all replicas. Where replicas
    share weights, this one `gathers` them with the others, whether it has samples of a batch or not.
    """

    stages: "Mapping[int, _EvaluationStage]"
    layout: Layout
    interpreter: Interpreter
    group: Group
    cutter: Cutter
    gathers: bool = False

    def evaluate(self, batches: Iterable[Batch], codecs: LinkCodecs = NO_CODECS) -> Evaluation:
        """The loss over some batches, each of any size down to one sample; what crosses boundaries goes
        through `codecs`.
        """
        lending = _Lending()
        for stage in self.stages.values():
            stage.begin(lending)
        try:
            loss, weight, num_samples = self._sums(batches, codecs)
        finally:
            lending.close()
        total = torch.tensor([loss], dtype=torch.float64)
        self.group.all_reduce(total).wait()
        return Evaluation(float(total) / weight if weight else math.nan, weight, num_samples)

    def _sums(self, batches: Iterable[Batch], codecs: LinkCodecs) -> tuple[float, float, int]:
        """This rank's part of the weighted loss, the weight of all batches, and their samples."""
        loss = weight = 0.0
        num_samples = 0
        for number, given in enumerate(batches):
            portion = self.cutter.cut_to_evaluate(given, number)
            weight += portion.weight
            num_samples += portion.num_samples
            if portion.num_microbatches:
                self._run(portion, codecs)
                loss += portion.weight * sum(stage.take_loss() for stage in self.stages.values())
            elif self.gathers:
                for _, stage in sorted(self.stages.items()):
                    stage.take_part()
        return loss, weight, num_samples

    def _run(self, portion: Portion, codecs: LinkCodecs) -> None:
        feed = Feed((), self.cutter, 0)
        feed.hold(0, portion)
        program = forward_only(self.layout.routes, portion.num_microbatches)
        blocks = program.tracks[self.layout.pipeline_rank].blocks()
        for _ in self.interpreter.run(blocks, feed, forwards=self.stages, codecs=codecs):
            raise AssertionError("an evaluation finishes no batch of training")


class _HoldsWeights(Protocol):
    """Where an evaluation takes a stage's weights from."""

    def lent(self) -> AbstractContextManager[Mapping[str, Tensor] | None]:
        """The newest weights by name, in the type that the stage computes with, to be read within this
        context; None if they are paged and the device has no room for them.
        """

    def newest_to_compute_with(self) -> Mapping[str, Tensor]:
        """The same, as copies where they are paged."""


class _Lending:
    """The weights that an evaluation reads: of all stages where the device has room for them, else of some.

    A rank takes all micro-batches of a batch through a stage before the next, so weights are read once for
    each batch. Those that came last go first: the first of the next batch are there then.
    """

    def __init__(self) -> None:
        self._lent: list[tuple[_HoldsWeights, ExitStack, Mapping[str, Tensor]]] = []

    def of(self, banks: _HoldsWeights) -> Mapping[str, Tensor]:
        for owner, _, weights in self._lent:
            if owner is banks:
                return weights
        while True:
            stack = ExitStack()
            found = stack.enter_context(banks.lent())
            if found is None and self._lent:
                stack.close()
                self._lent.pop()[1].close()
                continue
            weights = banks.newest_to_compute_with() if found is None else found
            self._lent.append((banks, stack, weights))
            return weights

    def close(self) -> None:
        while self._lent:
            self._lent.pop()[1].close()


@dataclass(slots=True, eq=False)
class _EvaluationStage:
    """A stage that only runs forward, and keeps nothing but the loss."""

    function: StageFunction
    banks: _HoldsWeights
    buffers: Mapping[str, Tensor]
    device: torch.device
    loss: float = 0.0
    lending: _Lending = field(default_factory=_Lending)

    def begin(self, lending: _Lending) -> None:
        """An evaluation begins, which lends the newest weights."""
        self.loss, self.lending = 0.0, lending

    def forward(
        self, _place: Place, _version: int, micro_batch: MicroBatch, received: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run a micro-batch on the newest weights; gives what goes to the next stage."""
        given = {**micro_batch.inputs, **received}
        weights = self.lending.of(self.banks)
        with torch.no_grad():
            results = self.function(weights, self.buffers, given, device=self.device)
        if LOSS in results and micro_batch.share:
            self.loss += float(results[LOSS]) * micro_batch.share
        return {name: results[name] for name in self.function.sends}

    def take_part(self) -> None:
        """Have the weights that the others run a batch on."""
        self.lending.of(self.banks)

    def take_loss(self) -> float:
        """The sum of the losses since it was last asked, each by its share."""
        loss, self.loss = self.loss, 0.0
        return loss


# A `ForwardPipeline` evaluates a model over one or several ranks: their weights, and nothing of training.
#
# It runs the program of forwards that evaluations within a training run. So a model that trains over a
# pipeline is evaluated over one too, in the memory of its weights, and with the same numbers.


class ForwardPipeline:
    """One rank's part of it. `graph` is that of the model in evaluation mode.

    Its units are cut into as many stages as there are ranks, at `cuts` if they are given. A batch goes
    through in `num_microbatches` parts. `weights` gives the parameters and buffers of this rank's stage; they
    are converted to the types of the graph.
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
        cuts: tuple[int, ...] | None = None,
    ) -> None:
        device = torch.device(device)
        check_supported(device)
        units = units_of(graph)
        cuts = equal_cuts(graph, num_stages) if cuts is None else cuts
        plan = Plan(cuts, num_microbatches, "gpipe").by_program
        self._fabric = PipelineFabric(fabric_of(world, num_stages, device))
        layout = layout_of(graph, units, plan, self._fabric.rank, self._fabric.size)
        receives = tuple(units[begin].receives for begin in (0, *cuts))
        boundaries = Boundaries(graph, receives)
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
        transport = self._fabric.transport(layout.pipeline, layout.routes)
        stage_messages = StageMessages(layout.routes, boundaries, transport, device)
        alone = GroupReducer(SingleRankGroup(), in_background=False)
        updates = Updates({}, Batches(), alone, UpdateSettings())  # a program of forwards has none
        interpreter = Interpreter({}, stage_messages, updates, teller(world))
        self._evaluator = Evaluator(stages, layout, interpreter, self._fabric.everyone(), self.cutter)

    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        """The loss over some batches, each of any size down to one sample; the same on every rank."""
        return self._evaluator.evaluate(batches)

    def close(self) -> None:
        """Give back sockets and groups."""
        self._fabric.close()


def equal_cuts(graph: Graph, num_stages: int) -> tuple[int, ...]:
    """The cuts into stages with shares of the model's work and of its weights that are as equal as can be."""
    units = units_of(graph)
    states = {state.name: state.num_bytes for state in graph.parameters}
    work = [work_of(graph, unit) for unit in units]
    held = [float(sum(states[name] for name in unit.parameters)) for unit in units]
    shares = [
        one / (sum(work) or 1.0) + other / (sum(held) or 1.0) for one, other in zip(work, held, strict=True)
    ]
    return even_cuts(shares, num_stages)


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
) -> dict[int, _EvaluationStage]:
    """The stages of this rank, with their weights on the device."""
    dtypes = {state.name: getattr(torch, state.dtype) for state in (*graph.parameters, *graph.buffers)}
    found = {}
    for stage, own in layout.units.items():
        function = StageFunction(graph, own, resolve=torch_operator, outputs=(LOSS,))
        given = weights((*function.parameters, *function.buffers))
        held = {name: tensor.to(device, dtypes[name]) for name, tensor in given.items()}
        fixed = _Fixed({name: held[name] for name in function.parameters})
        buffers = {name: held[name] for name in function.buffers}
        found[stage] = _EvaluationStage(function, fixed, buffers, device)
    return found


# The stages of one rank, put together: the function of each, its weights, its part of the evaluation.


@dataclass(frozen=True, slots=True)
class Assembly:
    """What stages are made of, and how they run."""

    graph: Graph
    plan: ProgramPlan
    layout: Layout
    boundaries: Boundaries
    settings: PipelineSettings
    batches: Batches
    paging: RankPaging | None = None
    sharers: Sharers | None = None
    averagers: Sharers | None = None

    def stages(self, weights: Weights, factory: OptimizerFactory) -> dict[int, Stage]:
        """The rank's stages, each with its weights."""
        form = self.settings.form
        maps = {} if form is None else chosen_maps(self.graph, form)
        found = {}
        for stage, own in self.layout.units.items():
            gradient_hook = GradientHook() if maps else None
            function = self._function(own, maps, gradient_hook)
            found[stage] = self._stage(stage, function, weights, factory, maps, gradient_hook)
        return found

    def evaluation_stages(self, evaluation: Graph, stages: dict[int, Stage]) -> dict[int, _EvaluationStage]:
        """The same in evaluation mode, on the same weights. They must be cut where those in training are."""
        units = units_of(evaluation)
        in_training = units_of(self.graph)
        if [unit.parameters for unit in units] != [unit.parameters for unit in in_training]:
            raise BiremeError(
                f"In evaluation mode {evaluation.name} is cut into other units ({len(units)}) than in "
                "training "
                f"({len(in_training)}), so its stages hold other parameters. Leave evaluation out."
            )
        found = {}
        for stage, training in stages.items():
            own = [units[unit.index] for unit in self.layout.units[stage]]
            function = StageFunction(evaluation, own, resolve=self.settings.resolve, outputs=(LOSS,))
            device = torch.device(self.settings.device)
            found[stage] = _EvaluationStage(function, training.banks, training.buffers, device)
        return found

    def _function(
        self, units: tuple[Unit, ...], maps: Mapping[str, LinearMap], gradient_hook: GradientHook | None
    ) -> AnyStageFunction:
        """What runs some units in training."""
        resolve, compiles = self.settings.resolve, self.settings.compile
        if gradient_hook is not None:
            resolve = feeding(resolve, maps, gradient_hook)
        again = set(self.plan.recompute_units) & {unit.index for unit in units}
        if not again:
            return StageFunction(self.graph, units, resolve=resolve, compile=compiles, outputs=(LOSS,))
        if self.plan.source.splits_backward:
            raise BiremeError(
                f"{self.plan.source.name} runs backwards in two halves, and units that recompute would do so "
                "in each. Recompute whole stages, or use a schedule whose backwards are whole."
            )
        return SegmentedFunction(self.graph, units, again, resolve=resolve, compile=compiles, outputs=(LOSS,))

    def _stage(
        self,
        stage: int,
        function: AnyStageFunction,
        weights: Weights,
        factory: OptimizerFactory,
        maps: Mapping[str, LinearMap],
        gradient_hook: GradientHook | None,
    ) -> Stage:
        device, bank_dtype = torch.device(self.settings.device), self.settings.bank_dtype
        states = {state.name: state for state in (*self.graph.parameters, *self.graph.buffers)}
        names = (*function.parameters, *function.buffers)
        given = {name: tensor.to(device) for name, tensor in weights(names).items()}
        for name in names:
            found = tuple(given[name].shape) if name in given else None
            if found != states[name].shape:
                what = "are not there" if found is None else f"have the shape {found}"
                raise BiremeError(
                    f"The weights given for {name} {what}, but the model has {states[name].shape}."
                )
        for name in function.parameters:
            _check_dtype(states[name], given[name].dtype, bank_dtype)
        trainable = tuple(name for name in function.parameters if states[name].trainable)
        for name in trainable:
            if given[name].is_complex() and (len(self.layout.peers) > 1 or name in self.layout.tied):
                raise BiremeError(
                    f"The gradient of {name} is of {given[name].dtype}. Several ranks can sum gradients "
                    "of real numbers only. Split the parameter into real ones, or train with one replica."
                )
        source = self.plan.source
        dtypes = {name: step_dtype_of(bank_dtype_of(given[name], bank_dtype)) for name in trainable}
        memory = None if self.paging is None else self.paging.stage(stage)
        banks = WeightBanks(
            {name: given[name] for name in function.parameters},
            trainable,
            rule=source.rule,
            num_banks=source.banks[stage],
            factory=factory,
            bank_dtype=bank_dtype,
            summed_apart=self.layout.tied.keys() | (self.layout.repeated if self.sharers else ()),
            stage=stage,
            principal=principal_of(maps, self.settings.form, dtypes, source.rule, device),
            memory=memory,
            sharers=self.sharers,
            averagers=self.averagers,
        )
        return Stage(
            stage,
            function,
            banks,
            {name: given[name].clone() for name in function.buffers},
            self.boundaries,
            self.batches,
            device=device,
            recomputes=stage in source.recomputed,
            gradient_hook=gradient_hook,
            memory=memory,
        )


def _check_dtype(state: ModelState, given: torch.dtype, bank_dtype: torch.dtype | None) -> None:
    """A stage computes with banks of the dtype that it was captured in."""
    computes_with = bank_dtype if bank_dtype is not None and given.is_floating_point else given
    found = str(computes_with).removeprefix("torch.")
    if found == state.dtype:
        return
    if computes_with is given:
        remedy = f"Give them in {state.dtype}, or capture the model in {found}."
    else:
        remedy = f"With bank_dtype = {found}, capture the model in {found}."
    raise BiremeError(
        f"The weights given for {state.name} would be used in {found}, but the model was captured "
        f"with {state.dtype}. {remedy}"
    )


# Whether a rank pages, and whether it can what its program asks for.


def paging_of(
    graph: Graph,
    source: ProgramSource,
    layout: Layout,
    settings: PipelineSettings,
) -> RankPaging | None:
    """The paging of this rank; None if its memory is not cut."""
    rank, program, device = layout.pipeline_rank, source.settled(), torch.device(settings.device)
    tiers = program.tiers_of(rank)
    if tiers is None:
        return None
    if tiers.host_updates and is_accelerator(device):
        raise BiremeError(
            f"The plan has the optimizer step on the host, which Bireme's engine does only where the device "
            f'is a processor, and rank {layout.rank} has {device}. Plan with memory.optimizer = "device".'
        )
    if settings.compile and any(item is Item.STASH for item, _ in tiers.chunks):
        raise BiremeError(
            "A stage that torch compiles keeps its activations itself, and the plan offloads them. Leave "
            "compile out, or plan with memory.stashes = false."
        )
    frozen_bytes = _frozen_bytes(graph, layout, tiers) // program.num_sharers
    if frozen_bytes > tiers.unpaged_bytes:
        raise BiremeError(
            f"Rank {layout.rank} has {bytes_text(frozen_bytes)} of frozen weights that the plan leaves on "
            f"the device, where it counts on {bytes_text(tiers.unpaged_bytes)} besides its chunks. Make a "
            "new plan for the part of the model that learns."
        )
    is_apart = program.updates_apart
    keeps = not is_apart and _keeps_gradients(program, rank)
    is_tied = layout.tied or layout.repeated
    # Replicas that share weights sum their parts before a batch ends.
    is_summed = is_tied or settings.agreement is not None or (layout.is_summed and program.num_sharers == 1)
    if is_apart and (is_tied or settings.form is not None or layout.is_summed):
        raise BiremeError(
            "The plan updates stages before the others have their gradients, so gradients cannot be summed "
            "over replicas or stages, and principal components cannot be found. Plan with memory.updates = "
            '"agreed".'
        )
    if is_summed and not keeps:
        raise BiremeError(
            f"Gradients of rank {layout.rank} are summed up with others, and {source.name} takes them off "
            "the device before. Page the program with is_summed = True, so that they stay until the UPDATE."
        )
    return RankPaging(program, rank, device, settings.paging, keeps_gradients=keeps)


def _frozen_bytes(graph: Graph, layout: Layout, tiers: RankTiers) -> int:
    """The bytes of weights that do not learn and stay on the device."""
    frozen = {state.name: state.num_bytes for state in graph.parameters if not state.trainable}
    names = {
        name
        for stage, units in layout.units.items()
        if (Item.FROZEN, stage) not in tiers.chunks
        for unit in units
        for name in unit.parameters
    }
    return sum(frozen.get(name, 0) for name in names)


def _keeps_gradients(program: Program, rank: int) -> bool:
    """Whether every batch's gradients of all stages are on the device from the rank's last REDUCE of it to
    the UPDATE of each.
    """
    holding = Holding(program, rank)
    num_stages, reduced = len(program.stages_of(rank)), Counter[int]()
    waiting: set[Chunk] = set()
    for step in program.tracks[rank]:
        holding.start(step)
        own = {
            chunk for use, chunks in holding.uses.of(step) if use.item is Item.GRADIENT for chunk in chunks
        }
        if step.kind is Kind.REDUCE:
            reduced[step.batch] += 1
            waiting |= own
        elif step.kind is Kind.UPDATE:
            waiting -= own
        ended = {chunk for chunk in waiting if reduced[chunk.number] == num_stages}
        # A chunk that was fetched may still be on its way.
        if ended & holding.arriving.keys() or any(0 not in holding.where.get(chunk, ()) for chunk in ended):
            return False
        holding.end(step)
    return True
