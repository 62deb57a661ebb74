"""What a run file asks of a plan, and the search for it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from bireme.cluster.cluster import Cluster
from bireme.codec.sum_description import SumCost
from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.plan.forecast import Answer
from bireme.plan.partition.loads import Recompute
from bireme.plan.penalties import delay_warmup_of
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan
from bireme.plan.plan_request import (
    AUTO,
    Goal,
    PlanRequest,
    TierLimits,
    pins_of,
    ranges_of,
)
from bireme.plan.search.search import find_plan
from bireme.plan.widths import ANY, parse_stage_widths
from bireme.profile.optimizers import moments_share, whole_bytes
from bireme.profile.profile import Profile
from bireme.schedule.catalogue import SCHEDULES
from bireme.schedule.program import Rule
from bireme.train.checkpoint.manifest import Manifest
from bireme.train.link_codecs import rounds_of
from bireme.train.run_file import Memory, RunFile

# Runs whose batch is not the run file's: the planner has chosen it, or it grew with the replicas' speed.
#
# Once chosen it is kept: the run that a folder remembers has it as its own.

_WARMUP = 0.05
"""Of the steps of a run: the warm-up of a learning rate that was made larger, where it had none."""


def chooses_batch(run: RunFile) -> bool:
    """Whether the size of the batch is still to be chosen."""
    return run.plan.largest_batch is not None or run.balance.batch == "grow"


def with_batch(run: RunFile, batch_size: int) -> RunFile:
    """The run with the batch that was chosen, which it keeps from then on."""
    return _changed(run, {"batch_size": batch_size})


def with_batch_of(run: RunFile, begun: RunFile) -> RunFile:
    """The run with the batch of the one that was begun, and with the learning rate if that grew along."""
    if run.balance.batch != "grow" or begun.balance.batch == "grow":
        return with_batch(run, begun.training.batch_size)
    names = ("batch_size", "learning_rate", "warmup_steps", "warmup_fraction")
    return _changed(run, {name: getattr(begun.training, name) for name in names})


def grown(run: RunFile, batch_size: int) -> RunFile:
    """The run with a batch of another size and the learning rate in proportion, after a warm-up."""
    training = run.training
    changed: dict[str, object] = {
        "batch_size": batch_size,
        "learning_rate": training.learning_rate * batch_size / training.batch_size,
    }
    if not training.num_warmup_steps and batch_size > training.batch_size:
        changed |= {"warmup_steps": max(1, round(_WARMUP * training.steps)), "warmup_fraction": None}
    return _changed(run, changed)


def _changed(run: RunFile, training: dict[str, object]) -> RunFile:
    return run.model_copy(
        update={
            "plan": run.plan.model_copy(update={"largest_batch": None}),
            "balance": run.balance.model_copy(update={"batch": "keep"}),
            "training": run.training.model_copy(update=training),
        }
    )


def with_shard(run: RunFile, shard: str) -> RunFile:
    """The run with what its replicas share, if it left that to the planner; it keeps the choice."""
    if run.memory.shard != AUTO:
        return run
    return run.model_copy(update={"memory": run.memory.model_copy(update={"shard": shard})})


# How long a run will take, roughly and before anything is measured.

_SHORT_S = 10.0
"""A run that is over sooner is measured and planned briefly."""

_FLOPS_PER_S, _CALL_S, _MICRO_BATCHES = 2e10, 2e-5, 4
"""What a slow core computes, what it takes to call an operator, and how often one is called in a step."""


def is_short(run: RunFile, graph: Graph) -> bool:
    """Whether a run will be over so soon that to measure and to plan well would take longer than it saves.

    That is a guess from what its operators compute, and how many they are.
    """
    computed = 3 * run.training.batch_size * sum(one.flops for one in graph.operators) / graph.batch
    called = 3 * _MICRO_BATCHES * len(graph.operators)  # a backward is worth two forwards
    return run.training.steps * (computed / _FLOPS_PER_S + called * _CALL_S) < _SHORT_S


# Steps without delayed updates at the beginning of a run: the same stages, under a schedule that flushes.


def first_delayed_step(run: RunFile, saved: SavedPlan, resumed: Manifest | None = None) -> int:
    """The step after which updates are delayed, if the plan delays any: as asked, or as planned. A run that
    was `resumed` under the plan's own schedule, and was made longer, does not go back to another one.
    """
    step = run.plan.num_delay_warmup_steps(run.training.steps)
    if step is None:
        step = 0 if saved.forecast is None else round(saved.forecast.delay_warmup * run.training.steps)
    is_under_way = resumed is not None and resumed.schedule == saved.plan.schedule
    return min(step, resumed.step) if resumed is not None and is_under_way else step


def flush_twin(plan: Plan) -> Plan | None:
    """The same plan under 1f1b, which takes no more memory; None where no update is delayed anyway."""
    if plan.source.rule is Rule.SYNCHRONOUS:
        return None
    return replace(plan, schedule="1f1b")


def plans_of(run: RunFile, saved: SavedPlan) -> tuple[Plan, ...]:
    """The plans that a run trains with, one after the other."""
    twin = flush_twin(saved.plan) if first_delayed_step(run, saved) else None
    return (saved.plan,) if twin is None else (twin, saved.plan)


Progress = Callable[[float, str], None]


def plan_request_of(run: RunFile, sums: SumCost, graph: Graph | None) -> PlanRequest:
    """What a run file asks of a plan, where sums over replicas cost this; without its units by name. Without
    the graph, the largest matrix that Muon steps is taken to be as large as the largest unit.
    """
    asked = run.plan
    penalties = {Rule.DELAYED: asked.penalties.delayed, Rule.FRESH: asked.penalties.fresh}
    return PlanRequest(
        batch_size=run.training.batch_size,
        largest_batch=asked.largest_batch,
        schedule=asked.schedule,
        synchronous=asked.synchronous,
        goal=Goal(asked.objective),
        penalties={rule: steps for rule, steps in penalties.items() if steps is not None},
        delay_warmup=_start(run),
        memory_fraction=asked.memory_fraction,
        depth=asked.depth,
        width=asked.width,
        stage_widths=parse_stage_widths(asked.stage_widths),
        micro_batch=asked.micro_batch,
        devices=asked.devices or (),
        recompute=Recompute(asked.recompute.replace("-", " ")),
        lookahead=asked.lookahead,
        owners=tuple(sorted(run.data.private or ())),
        sums=sums,
        codec=run.links.codec or "none",
        boundaries=tuple((one.number, one.codecs) for one in run.links.boundaries or ()),
        has_ending=run.links.schedule.last_fraction > 0,
        value_bytes=2 if run.model.dtype == "bfloat16" else 4,
        memory=_tier_limits(run.memory, compiles=run.model.compile),
        whole_backwards=run.training.gradient_form is not None,
        shard=run.memory.shard,
        whole_bytes=0 if graph is None else whole_bytes(graph.parameters, run.training.optimizer),
        sites=run.sync.sites or 1,
        rounds=rounds_of(run, graph),
        copied_share=_copied_share(run, graph),
    )


def _copied_share(run: RunFile, graph: Graph | None) -> float:
    """What second copies keep on hosts for each byte of gradients: at most two versions of the weights and of
    what the optimizer remembers, here and on the next host.
    """
    if graph is None or not run.has_copies(run.plan.width or 0):
        return 0.0
    num_hosts = 2 if run.sync.is_coordinated else 1
    num_weights = (2 if run.model.dtype == "bfloat16" else 1) * (2 if run.plan.schedule in _DELAYED else 1)
    return 2 * num_hosts * (num_weights + moments_share(graph.parameters, run.training.optimizer))


_DELAYED = [name for name, one in SCHEDULES.items() if one.rule is not Rule.SYNCHRONOUS]
"""The schedules whose state has the weights before the newest too."""


def _tier_limits(memory: Memory, *, compiles: bool) -> TierLimits | None:
    """What each process may use of each tier; None where nothing is paged.

    What torch compiles keeps its activations itself.
    """
    if not memory.is_on:
        return None
    return TierLimits(
        memory.device_bytes,
        memory.host_bytes,
        memory.most_disk_bytes,
        memory.stashes and not compiles,
        memory.optimizer,
        memory.updates == "apart",
    )


def _start(run: RunFile) -> float | None:
    """The share of the run without delayed updates; None leaves it to what a plan does by itself."""
    steps = run.training.steps
    asked = run.plan.num_delay_warmup_steps(steps)
    if asked is not None:
        return asked / steps
    return delay_warmup_of(steps, run.training.num_warmup_steps) if run.plan.schedule == "auto" else None


def full_request_of(
    run: RunFile, sums: SumCost, graph: Graph | None, names: Sequence[str], cluster: Cluster
) -> PlanRequest:
    """All that a run file asks of a plan on a cluster, for a model whose units have these names."""
    asked = run.plan
    request = replace(
        plan_request_of(run, sums, graph),
        pinned=pins_of(asked.pin or (), names, "plan.pin"),
        together=ranges_of(asked.together or (), names, "plan.together", whole_layers=asked.whole_layers),
    )
    is_free = asked.depth is None and asked.width is None and asked.stage_widths == ANY
    if is_free and run.cluster.source is None and not run.sync.is_coordinated:
        # On this machine alone a run shows the pipeline; who wants replicas says so.
        num_devices = len(request.devices) or cluster.num_devices
        request = replace(request, depth=min(num_devices, len(names)))
    return request


def planned(
    measured: Profile, cluster: Cluster, request: PlanRequest, progress: Progress, *, is_brief: bool
) -> Answer:
    """The plans that a search finds; a `BiremeError` if none fits."""
    found = find_plan(
        measured,
        cluster,
        request,
        progress=lambda done: progress(done, "planning"),
        is_brief=is_brief,
    )
    if not isinstance(found, Answer):
        raise BiremeError(str(found))
    return found
