"""The engine's face: a `Pipeline` trains a model over the ranks of a run, batch after batch.

Every rank makes one, with the same arguments, and gives it the same batches. What it gives back, a loss for
each batch, is the same on every rank.
"""

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor, nn

from bireme.balance import Shares
from bireme.capabilities import refuse_excluded
from bireme.codec.description import NO_CODECS
from bireme.devices import check_supported
from bireme.errors import BiremeError
from bireme.model.capture import Inputs, Loss
from bireme.model.counting import count_of
from bireme.model.graph import Graph
from bireme.model.units import units_of
from bireme.model.weights import Weights
from bireme.plan.plan_file import SavedPlan, check_plan_fits
from bireme.plan.program_plan import ProgramPlan
from bireme.runtime.balancer import Balancer, Stopwatch
from bireme.runtime.evaluation import Assembly, Evaluation, Evaluator, paging_of
from bireme.runtime.exchange.averages import Averages, Met
from bireme.runtime.exchange.joining import Donations, join
from bireme.runtime.exchange.round_reducer import RoundReducer
from bireme.runtime.fabric import Fabric, PipelineFabric, fabric_of, teller
from bireme.runtime.gathering import (
    Recorder,
    Recording,
    gather_rows,
    gather_tensors,
    gather_times,
    timeline_of,
)
from bireme.runtime.interpreter import Interpreter
from bireme.runtime.layout import (
    AnyPlan,
    Layout,
    for_replicas,
    layout_of,
    named_plan,
    on_pages,
    prepared,
    refuse_with_widths,
    runnable,
    used_by_plan,
    work_of,
)
from bireme.runtime.message_format import Boundaries, checked, received_by
from bireme.runtime.microbatches import Batch, Cutter, Feed
from bireme.runtime.paging.rank_paging import TierMoves
from bireme.runtime.reducers import reducer_of, replicas_of
from bireme.runtime.settings import PipelineSettings, named_optimizer
from bireme.runtime.shared_weights import sharers_of
from bireme.runtime.snapshot import (
    Snapshot,
    feedback_sections,
    load_feedback,
    load_stage,
    load_thresholds,
    own_sections,
    threshold_sections,
)
from bireme.runtime.stage import Batches, Stage
from bireme.runtime.stage_messages import BoundaryTraffic, StageMessages
from bireme.runtime.stepper import OptimizerFactory
from bireme.runtime.updates import BatchResult, Updates, UpdateSettings, own_limits, result_of
from bireme.runtime.world import World
from bireme.schedule.program import Rule
from bireme.sync.coordinator.messages import Window
from bireme.sync.exchange import SentBytes
from bireme.sync.reducer import GroupReducer
from bireme.timeline.timeline import Timeline

# What a rank takes of each batch: its cutter, from the graph, the plan and the rank's place in it.


def _cutter_of(
    graph: Graph,
    plan: ProgramPlan,
    layout: Layout,
    stages: Mapping[int, Stage],
    settings: PipelineSettings,
    balancer: Balancer | None,
) -> Cutter:
    """The cutter of a rank. With an agreement its batches are parts of whole ones."""
    num_microbatches, agreement = plan.source.num_microbatches, settings.agreement
    return Cutter(
        width=plan.width,
        replica=layout.replica,
        num_microbatches=num_microbatches,
        num_sliced=plan.source.num_sliced,
        count=count_of(graph),
        required=graph.inputs,
        needed=tuple(dict.fromkeys(name for stage in stages.values() for name in stage.function.inputs)),
        device=torch.device(settings.device),
        seed=settings.seed,
        sizes=plan.micro_batch_sizes,
        shares=None if balancer is None else balancer.shares,
        num_samples=0 if agreement is None else agreement.num_samples,
        own=plan.source.routes.microbatches_of(layout.pipeline_rank, num_microbatches),
        first_piece=0 if agreement is None else agreement.agent.own.replica * plan.width * num_microbatches,
    )


class Pipeline:
    """One rank's part of a pipeline, joined with the others through `world`.

    `plan` is one made by hand, or what `load_plan` gives, which must have been made for this model; or a
    program, alone or in a `ProgramPlan` that says how the model is cut for it.
    `model` is a module, captured with `example_inputs` and `loss`, or a graph captured before. `weights`
    gives the parameters and buffers of this rank's stages; a module's own are the default. `optimizer` is a
    name, which takes its own learning rate, or makes optimizers from named parameters.
    """

    def __init__(
        self,
        model: Graph | nn.Module,
        plan: AnyPlan,
        world: World | Fabric | None = None,
        *,
        example_inputs: Inputs | None = None,
        loss: Loss | None = None,
        weights: Weights | None = None,
        optimizer: OptimizerFactory | str = "adamw",
        settings: PipelineSettings | None = None,
    ) -> None:
        self.num_trained = 0
        self._is_running = False
        self._failure: Exception | None = None
        settings = settings or PipelineSettings()
        agreement, averaging, sharing = settings.agreement, settings.averaging, settings.sharing
        self.device = torch.device(settings.device)
        """Where this rank computes."""
        check_supported(self.device)
        plan = on_pages(plan, self.device)
        named = named_plan(plan)
        programs = runnable if averaging is None else averaging.programs
        asked = runnable(programs(plan))
        used = settings.used(has_muon=optimizer == "muon")
        fabric = PipelineFabric(fabric_of(world, asked.num_ranks, self.device))
        made_of = prepared(
            model,
            evaluation=settings.evaluation,
            weights=weights,
            example_inputs=example_inputs,
            loss=loss,
            seed=settings.seed,
        )
        graph = made_of.graph
        if isinstance(plan, SavedPlan) and plan.origin is not None:
            check_plan_fits(plan.origin, graph, plan.units)
        self.graph = graph
        units = units_of(graph)
        self.plan = asked.cut([work_of(graph, unit) for unit in units])
        self.layout = layout_of(graph, units, self.plan, fabric.rank, fabric.size)
        source = self.plan.source
        offloads = any(source.settled().tiers) if named is None else named.paging is not None
        used |= used_by_plan(source, self.layout, offloads=offloads)
        refuse_excluded(used)
        refuse_with_widths(self.layout.routes, used)
        if agreement is not None and self.layout.width > 1 and settings.shard == "none":
            raise BiremeError(
                f"The plan has {self.layout.width} replicas that live and die together, but they share "
                'nothing. Set shard to "optimizer" or "weights", or make each a pipeline of its own.'
            )
        sharers = sharers_of(settings.shard, self.layout)
        averagers = None
        if averaging is not None and sharers is None:
            averagers = averaging.averagers(self.layout)
        self.plan = for_replicas(plan, self.plan, settings.shard, programs, is_tied=bool(self.layout.tied))
        self.boundaries = Boundaries(graph, received_by(units, self.plan))
        """What crosses the boundaries of stages."""
        if self.plan.source.num_sliced:
            self.boundaries.check_halves(self.plan.source.name)
        self._paging = paging_of(graph, self.plan.source, self.layout, settings)
        batches = Batches()
        assembly = Assembly(
            graph,
            self.plan,
            self.layout,
            self.boundaries,
            settings,
            batches,
            self._paging,
            sharers,
            averagers,
        )
        factory = named_optimizer(optimizer, lr=1e-3) if isinstance(optimizer, str) else optimizer
        self.stages = assembly.stages(made_of.weights, factory)
        is_timed = sharing is not None or (agreement is not None and agreement.balances)
        stopwatch = Stopwatch(self.device) if is_timed else None
        self.balancer: Balancer | None = None
        """What decides about shares, if anything does."""
        if sharing is not None and stopwatch is not None:
            self.balancer = Balancer(sharing, self.layout, stopwatch, read_ahead=self.read_ahead)
        self.cutter = _cutter_of(graph, self.plan, self.layout, self.stages, settings, self.balancer)
        """What this rank takes of each batch."""
        evaluation = made_of.evaluation
        forwards = assembly.evaluation_stages(evaluation, self.stages) if evaluation is not None else None
        routes = self.layout.routes
        own_codecs = self.plan.codecs if settings.codecs is None else settings.codecs
        self.codecs = checked(own_codecs.between(routes.rank_of_stage))
        # Nothing is open yet, so whatever was refused so far has left nothing open.
        transport = fabric.transport(self.layout.pipeline, routes)
        self._fabric = fabric
        self._sharers = sharers or averagers
        overlaps = self._paging is None or self._paging.keeps_last_gradients
        # Sums of a batch whose update is delayed run beside the next batch.
        overlaps = overlaps and source.settled().rule is Rule.SYNCHRONOUS
        self._reducer = reducer_of(fabric, self.layout, transport, settings, sharers, overlaps=overlaps)
        if averagers is not None:
            averagers.join(replicas_of(fabric, self.layout), None, self.device)
        self._spare = fabric.everyone()
        if settings.reads_apart and (everyone := fabric.group(range(fabric.size), on_host=True)) is not None:
            weighs = self.plan.num_stages - 1 in self.stages
            self.cutter = replace(self.cutter, add_up=everyone.all_reduce, weighs=weighs)
        norms_of, is_apart = None, self.plan.source.settled().updates_apart
        if is_apart or (self._paging is not None and not self._paging.keeps_gradients):
            assert isinstance(self._reducer, GroupReducer), "an agreement keeps gradients until the update"
            norms_of = self._reducer.norms_of
        clip_norm = settings.clip_norm
        limits = own_limits(clip_norm, units, graph.parameters, self.layout) if is_apart else {}
        rules = UpdateSettings(settings.lr, clip_norm, limits)
        self._updates = Updates(self.stages, batches, self._reducer, rules, norms_of=norms_of)
        self._updates.more = None if self.balancer is None else self.balancer.own_seconds
        if isinstance(self._reducer, RoundReducer):
            assert agreement is not None, "its reducer is there"
            self._updates.before_update = agreement.before_updates(
                self._reducer, self.stages, self.layout, self.device, lambda: self._updates.scale
            )
            self._updates.more = None if stopwatch is None else stopwatch.alone
        self.stage_messages = StageMessages(routes, self.boundaries, transport, self.device, self.codecs)
        """What this rank sends to other stages and receives from them."""
        self._averages = None
        if averaging is not None:
            averages = self._averages = Averages(averaging, self.stages, self.layout, self.device)
            donations = Donations(
                averaging.agent,
                self.stages,
                lambda: self._updates.scale,
                averaging.rebuilt,
                averages.donated,
                self.layout.replica,
            )
            self._updates.before_update = donations.before_update
        tell = settings.on_instruction or teller(world)
        self._interpreter = Interpreter(
            self.stages, self.stage_messages, self._updates, tell, stopwatch, self._paging, self._averages
        )
        together = self.layout, self._interpreter, self._spare, self.cutter
        self._evaluator = (
            None if forwards is None else Evaluator(forwards, *together, gathers=settings.shard == "weights")
        )
        self.recording: Recording | None = None
        """When this rank's instructions of the last `train` ran, if it was asked to record them."""
        self._recorded = range(0)
        """The batches that the recording is of."""

    def train(
        self,
        batches: Iterable[Batch],
        *,
        record: bool = False,
        votes: Callable[[], float] = lambda: 0.0,
    ) -> Iterator[BatchResult]:
        """Train on batches, and give what came of each as soon as it is known.

        The pipeline stays full from the first batch to the last, so batches are read some ahead, and a result
        comes a while after its batch went in. Take all results: the ranks agree on when to stop only through
        the batches' end. When a result comes, at most `read_ahead` batches after its own have been read.

        `votes` is asked at the end of each batch for a number that is summed over all ranks and comes back
        with the batch's result, so that they can agree on something without a message of their own.
        """
        self._check_drained()
        self._updates.votes = votes
        return self._train(batches, record=record)

    def _train(self, batches: Iterable[Batch], *, record: bool) -> Iterator[BatchResult]:
        self._check_drained()  # again: another training may have begun since this one was asked for
        self._is_running = True
        try:
            yield from self._results(batches, record=record)
        except Exception as error:
            self._failure = error
            raise
        self._is_running = False

    def _results(self, batches: Iterable[Batch], *, record: bool) -> Iterator[BatchResult]:
        for stage in self.stages.values():
            stage.banks.settle()
        first = self.num_trained
        feed = Feed(batches, self.cutter, first)
        begins = None if self._paging is None else self._paging.begin
        blocks = self.plan.source.blocks(
            self.layout.pipeline_rank, feed.has, first_batch=first, begins=begins
        )
        recorder = Recorder(self.device) if record else None
        before = perf_counter()
        for finished in self._interpreter.run(blocks, feed, recorder):
            now = perf_counter()
            portion = feed.portion(finished.batch)
            result = result_of(finished, portion, now - before, is_agreed=self._reducer.weighs)
            feed.drop(finished.batch)
            self.num_trained += 1
            if self.balancer is not None:
                self.balancer.note(result.batch, result.shares, result.busy_s)
            before = now
            yield result
        for stage in self.stages.values():
            if stage.banks.shared is not None:
                stage.banks.shared.arrive_all()
        if self._paging is not None:
            self._paging.note(self.num_trained - first)
        if recorder is not None and self.num_trained > first:
            self.recording, self._recorded = recorder.recording(), range(first, self.num_trained)

    def evaluate(self, batches: Iterable[Batch], *, through_codecs: bool = False) -> Evaluation:
        """The loss over some batches, on the newest weights; the same on every rank.

        A batch may be of any size, down to one sample. Boundaries have no codec, or that of the last batch.
        """
        if self._evaluator is None:
            raise BiremeError(
                "The pipeline was made without a graph of the model in evaluation mode. Capture one with "
                "training=False and give it as PipelineSettings(evaluation=…)."
            )
        self._check_drained()
        self._make_whole()  # with the others, though this replica may have no sample to evaluate
        codecs = self.codecs.held(max(self.num_trained - 1, 0)) if through_codecs else NO_CODECS
        return self._evaluator.evaluate(batches, codecs)

    def join(self, on_first: Callable[[int], None] | None = None, *, until: int = 0) -> None:
        """Come to the first batch that this replica has a part in, with the state of the others before it.

        `on_first` is told which one that is, as soon as it is known. A replica that averages weights begins
        in a window of the places below `until`.
        """
        self._check_drained()
        if isinstance(self._reducer, RoundReducer):
            reducer = self._reducer
            self.num_trained = reducer.first = join(
                reducer.agent, self.num_trained, self.restore, follow=self._updates.follow, on_first=on_first
            )
        else:
            assert self._averages is not None, "a pipeline alone has nobody to join"
            window = Window(0, until)
            self.num_trained = join(self._averages.agent, self.num_trained, self.restore, window=window)

    def meet(self, *numbers: float) -> Met:
        """Make one mean of the weights of all replicas, when this one has drained, and add up numbers."""
        self._check_drained()
        assert self._averages is not None, "a pipeline alone has nobody to meet"
        return self._averages.meet(self.num_trained, numbers)

    def parameters(self) -> dict[str, Tensor]:
        """The newest weights of this rank's stages, by the model's own names. They are the engine's: only
        look.
        """
        return {
            name: tensor for stage in self.stages.values() for name, tensor in stage.banks.newest().items()
        }

    def gather(self, row: Sequence[float]) -> list["array[float]"]:
        """Every rank's row of numbers. All ranks must call it, when nothing is under way."""
        return gather_rows(self._spare, row)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of this rank's newest weights and of its persistent buffers, by the model's own names."""
        return {name: tensor.detach().clone() for name, tensor in self._held().items()}

    def _held(self) -> dict[str, Tensor]:
        """What there are copies of in `state_dict`."""
        persistent = {state.name for state in self.graph.buffers if state.persistent}
        buffers = {
            name: tensor
            for stage in self.stages.values()
            for name, tensor in stage.buffers.items()
            if name in persistent
        }
        return self.parameters() | buffers

    def snapshot(self, *, all_held: bool = False, but: Collection[str] = ()) -> Snapshot:
        """Copies of this rank's share of the state after the last batch whose result it has taken.

        To be called while `train` goes on, right when it gives a result, or when nothing is under way: then
        all ranks' snapshots after the same batch belong together. One rank answers for each tensor; with
        `all_held` there is all that this rank holds instead, shared or not, for its own next pipeline. What
        `but` names is left out: who restores the snapshot has it already, as frozen weights.
        """
        owners, layout = self.layout.owners, self.layout
        of_rank = {name for name, rank in owners.items() if rank == layout.pipeline_rank}
        answers_for = of_rank if layout.replica == 0 else ()
        own = {*(owners if all_held else answers_for)}.difference(but)
        pieces_of = of_rank.difference(but)
        tensors: dict[str, Tensor] = {}
        for stage in self.stages.values():
            named = None if all_held else pieces_of
            tensors |= own_sections(stage, own, replica=layout.replica, pieces_of=named)
            pieces_of.difference_update(stage.banks.names)
        if self._averages is not None:
            tensors |= self._averages.sections(own, None if all_held else of_rank)
        tensors |= feedback_sections(self._reducer.feedback, self.num_trained, layout)
        tensors |= threshold_sections(self.stage_messages.thresholds, self.num_trained, layout)
        shares = None if self.balancer is None else self.balancer.state()
        return Snapshot(self.num_trained, self._updates.scale, tensors, shares)

    def restore(self, saved: Snapshot) -> None:
        """Go on from a snapshot, which must have all tensors of this rank's stages that training changes,
        before the first batch. Of the others, what it lacks stays as it is. Replicas that share must all call
        it.

        The next batch's number is that of the batches trained. With the same plan it goes on to the last bit
        as if it had never stopped.
        """
        self._check_drained()
        for stage in self.stages.values():
            load_stage(stage, saved.tensors, version=saved.num_trained, replica=self.layout.replica)
            stage.banks.complete()
        if self._averages is not None:
            self._averages.load(saved.tensors)
        load_feedback(self._reducer.feedback, saved, self.layout)
        load_thresholds(self.stage_messages.thresholds, saved, self.layout)
        self.num_trained = saved.num_trained
        self._updates.scale = saved.clip_scale
        if self.balancer is not None:
            self.balancer.load(saved.shares, saved.num_trained)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's newest weights and persistent buffers, on the CPU of rank 0; empty on all others.

        All ranks must call it. Shared weights are there under each of their names.
        """
        wanted = [state for state in (*self.graph.parameters, *self.graph.buffers) if state.persistent]
        owners = self.layout.owners
        held = [state for state in wanted if state.name in owners]
        whole = dict(gather_tensors(self._spare, held, self._held(), owners))
        return {
            name: whole[state.name]
            for state in held
            if state.name in whole
            for name in (state.name, *state.aliases)
        }

    def timeline(self) -> Timeline:
        """When the instructions of the last recorded training ran, on one clock. All ranks must call it.

        Its ranks are those of the first replica, those of the others follow as `others`.
        """
        if self.recording is None:
            raise BiremeError("No training was recorded. Call train(batches, record=True) first.")
        program = self.plan.source.program(len(self._recorded), self._recorded.start)
        return timeline_of(program, gather_times(self._spare, self.recording))

    def begin_with(self, shares: Shares) -> None:
        """Begin with other shares than those that the pipeline was made with. All ranks must call it."""
        self._check_drained()
        assert self.balancer is not None, "who gives shares shares out"
        self.balancer.begin(shares)

    @property
    def read_ahead(self) -> int:
        """How many batches after a result's own have been read when it comes, at most and on any rank.

        A rank that ends its batches so many later ends them where the others do.
        """
        return self.plan.source.read_ahead

    @property
    def sum_bytes(self) -> SentBytes:
        """What this rank has sent in training so far for sums, for shared weights, or for averages."""
        averaged = SentBytes() if self._averages is None else self._averages.sent
        if self._averages is not None and self.layout.width == 1:
            return averaged
        sent, own = self._reducer.sent, self._sharers
        gathered, more = (0, SentBytes()) if own is None else (own.gathered_bytes, own.summed)
        return SentBytes(
            sent.raw + more.raw + averaged.raw + gathered,
            sent.sent + more.sent + averaged.sent + gathered,
            gathered,
        )

    @property
    def tiers(self) -> tuple[TierMoves, ...]:
        """What this rank's chunks have taken of each tier at most, and the bytes that were copied into it;
        empty where the rank pages nothing.
        """
        return () if self._paging is None else self._paging.tiers()

    @property
    def traffic(self) -> Mapping[tuple[bool, int], BoundaryTraffic]:
        """What this rank has sent of training so far, by direction (forward or not) and boundary."""
        return self.stage_messages.traffic

    def close(self) -> None:
        """End what runs in the background, and give back sockets and groups."""
        if self.balancer is not None:
            self.balancer.close()
        if self._failure is not None:
            self._fabric.abort_groups()  # or a sum that another rank left would be waited for
        self._reducer.close()
        if self._sharers is not None:
            self._sharers.close()
        if self._paging is not None:
            self._paging.close()
        self._fabric.close()

    def _make_whole(self) -> None:
        """Have the newest weights here whole where replicas share the optimizer; all of them must call it."""
        for stage in self.stages.values():
            if stage.banks.shared is not None:
                stage.banks.settle()
                stage.banks.shared.arrive_all()

    def _check_drained(self) -> None:
        """Refuse to go on from where nothing can."""
        if self._failure is not None:
            raise BiremeError(
                f"Training has failed in this pipeline ({self._failure}) and cannot continue. Fix that "
                "and make a new pipeline."
            ) from self._failure
        if self._is_running:
            raise BiremeError(
                "The pipeline is not drained: it is training, or a training was left before its batches had "
                "ended. Take all results of train(); to end early, end the batches."
            )
