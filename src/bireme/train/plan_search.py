"""The plan of a run: what its run file asks of the planner, and what the search finds.

`bireme train` trains by this plan, and `bireme plan` and `simulate` show it. With a profile and a cluster
from files it is made without torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from bireme.bounds import ANY, bytes_text, parse_stage_widths
from bireme.cluster.cluster import Cluster, Overlap
from bireme.cluster.cluster_file import cluster_hash, load_cluster
from bireme.codec.sum_description import SumCost
from bireme.errors import BiremeError, Progress, errors_of
from bireme.model.fused_loss import fused
from bireme.model.graph import Graph
from bireme.plan.forecast import Answer, Candidate, Origin, headroom_bytes
from bireme.plan.partition.loads import Recompute
from bireme.plan.penalties import delay_warmup_of
from bireme.plan.plan import Plan, check_servers
from bireme.plan.plan_file import SavedPlan, check_kind_fits, check_plan_of, load_plan, profile_hash
from bireme.plan.plan_request import (
    Goal,
    PlanRequest,
    TierLimits,
    pins_of,
    ranges_of,
)
from bireme.plan.search.search import find_plan, forecast_of, timeline_of
from bireme.profile.optimizers import moments_share, whole_bytes
from bireme.profile.profile import KindProfile, Profile, load_profile
from bireme.report.plan_document import (
    apart_note,
    plan_document,
    plan_notes,
    shard_note,
    shared_hosts_note,
    sync_document,
    ways_note,
)
from bireme.schedule.catalogue import SCHEDULES
from bireme.schedule.program import Rule
from bireme.timeline.timeline import Timeline
from bireme.train.checkpoint.manifest import Manifest
from bireme.train.choices import (
    check_boundaries,
    gradient_document,
    rounds_of,
    sums_of,
    sums_of_profile,
    sync_choices,
    with_choices,
    with_kept_gradients,
)
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
    run = run.with_keys("plan", largest_batch=None).with_keys("balance", batch="keep")
    return run.with_keys("training", **training)


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


# Which batches of a run are recorded by instruction: a few early ones of the schedule that stays.

RECORDED = 6
"""Batches whose instructions are recorded, early in a run: the first of them fill the pipeline."""

_SETTLING, _LONG = 10, 40
"""So many batches go before them where so many are to come: the first ones of a process are slow."""


def recorded_first(run: RunFile, rule: Rule, *, step: int, delayed_from: int) -> int:
    """The step after which to record, for a schedule that begins after `step`. If what is learned depends on
    where the pipeline is drained, it must not depend on where a run stopped.
    """
    if rule is Rule.FRESH:
        return delayed_from
    return step + (_SETTLING if run.training.steps - step >= _LONG else 0)


def has_room(run: RunFile, first: int) -> bool:
    """Whether batches follow those that are recorded, or they are recorded however few there are."""
    return first + RECORDED < run.training.steps or run.log.trace


def is_recorded(run: RunFile, saved: SavedPlan) -> bool:
    """Whether a new run comes to record any."""
    rule = saved.plan.source.rule
    begin = 0 if rule is Rule.SYNCHRONOUS else first_delayed_step(run, saved)
    first = recorded_first(run, rule, step=begin, delayed_from=begin)
    return begin < run.training.steps and has_room(run, first)


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
        recompute=_RECOMPUTE[asked.recompute],
        in_parts=asked.recompute == "layers",
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


_RECOMPUTE = {
    "never": Recompute.NEVER,
    "where-needed": Recompute.WHERE_NEEDED,
    "always": Recompute.ALWAYS,
    "layers": Recompute.WHERE_NEEDED,
}


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
    if is_free and run.cluster.source is None and run.sync.mode == "allreduce":
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


# Mistakes of a run that are found before its model is measured: in its plan, its devices and its depth.


def check_searches(run: RunFile) -> None:
    """Refuse a run that has a plan already, if a plan is to be found, and wrong files of `plan.profiles`."""
    if run.plan.file is not None:
        raise BiremeError(
            f"plan.file is {run.plan.file}, which is a plan already. Leave it out to search for one: "
            "--set plan.file="
        )
    list(_named_profiles(run))


def check_devices(run: RunFile, cluster: Cluster) -> None:
    """Refuse a plan for more devices than there are, and devices and servers that are not there."""
    check_servers(run.data.private or (), cluster)
    for name in run.plan.devices or ():
        cluster.number_of(name)
    remedy = "Plan for fewer devices, or name a larger cluster."
    if run.cluster.source is None:
        remedy = "Set cluster.workers, on each machine, for {needed}, join more machines, or plan for fewer."
    than = f"the run has {cluster.num_devices} devices: each of them is a process."
    run.plan.refuse_more_devices(cluster.num_devices, than, remedy)


def check_depth(run: RunFile, num_units: int) -> None:
    """Refuse more stages than the model has units."""
    depth = run.plan.depth or 1
    if depth > num_units:
        raise BiremeError(
            f"plan.depth is {depth}, but the model has {num_units} units, and each stage needs one. Set "
            f"plan.depth to {num_units} or less."
        )


@dataclass(frozen=True, slots=True)
class ProfiledRun:
    """A run with its cluster and the profile of its model; `graph` is None if the run names no model."""

    run: RunFile
    cluster: Cluster
    graph: Graph | None
    profile: Profile

    @classmethod
    def without_model(cls, run: RunFile, file: Path) -> "ProfiledRun":
        """A run that names no model, for the model of which a file has the profile."""
        check_searches(run)
        if run.training.epochs is not None:
            raise BiremeError(
                f"training.epochs is {run.training.epochs:g}, and a profile names no data to count. Set "
                "training.steps instead."
            )
        found, cluster = load_profile(file), _planning_cluster(run)
        check_devices(run, cluster)
        check_same_optimizer(run, found, file)
        return cls(run, cluster, None, found)

    def planned(self, progress: Progress, overlaps: Mapping[str, Overlap] | None = None) -> "PlannedRun":
        """The run with the plans that a search finds; a `BiremeError` if none fits. `overlaps` is for plans
        that another framework will run (see `PlanRequest`).
        """
        run, graph = self.run, self.graph
        check_depth(run, len(self.profile.units))
        found, request = self._request(overlaps)
        is_brief = graph is not None and is_short(run, graph)
        begin_s = perf_counter()
        answer = planned(found, self.cluster, request, progress, is_brief=is_brief)
        planning_s = perf_counter() - begin_s
        check_boundaries(run, answer.best.plan)
        run = with_choices(run, answer.best.plan)
        request = request.chosen(answer.best.plan.sync_mode, answer.best.plan.sum_codec)
        if request.shard != run.memory.shard:
            request = request.sharing(run.memory.shard)
        return PlannedRun(run, self.cluster, graph, found, request, answer, planning_s)

    def given(self, file: Path, overlaps: Mapping[str, Overlap] | None = None) -> "PlannedRun":
        """The run with the plan in a file and the forecast of it, whether it fits or not."""
        saved = load_plan(file)
        run = with_choices(self.run, saved.plan)
        found, request = replace(self, run=run)._request(overlaps)
        begin_s = perf_counter()
        with errors_of(file):
            check_plan_of(saved, found)
            plan = _completed(saved.plan, self.cluster, request.batch_size)
            check_boundaries(run, plan)
            request = _request_for(saved, plan, request)
            forecast = forecast_of(plan, found, self.cluster, request)
        hashes = found.graph, profile_hash(found), cluster_hash(self.cluster)
        origin = Origin(*hashes, request.batch_size, f"the plan in {file}")
        answer = Answer((Candidate(plan, forecast),), origin, 1)
        planning_s = perf_counter() - begin_s
        return PlannedRun(run, self.cluster, self.graph, found, request, answer, planning_s)

    def _request(self, overlaps: Mapping[str, Overlap] | None) -> tuple[Profile, PlanRequest]:
        """The profile that plans of the run count with, and what the run asks of a plan."""
        run, graph, found = self.run, self.graph, self.profile
        found = _with_kinds(found, run)
        if graph is not None:
            found = with_kept_gradients(run, graph, found)
        sums = sums_of_profile(run, found) if graph is None else sums_of(run, graph)
        request = full_request_of(run, sums, graph, [unit.name for unit in found.units], self.cluster)
        choices = sync_choices(run, graph, found)
        return found, replace(request, overlaps=overlaps or {}, sync_choices=choices)


def _with_kinds(profile: Profile, run: RunFile) -> Profile:
    """The profile with those of other kinds of devices that the run names; of equal names the last counts."""
    kinds = {kind.name: kind for kind in profile.kinds}
    for file, kind in _named_profiles(run):
        with errors_of(file):
            check_kind_fits(profile, kind.profile)
        kinds[kind.name] = kind
    return replace(profile, kinds=tuple(kinds.values()))


def _named_profiles(run: RunFile) -> Iterator[tuple[str, KindProfile]]:
    """The profiles of kinds of devices that the run names, each with its file."""
    for text in run.plan.profiles or ():
        name, equals, file = text.partition("=")
        if not name or not equals or not file:
            raise BiremeError(f"plan.profiles: {text} is not NAME=FILE, such as rtx3090=profile.json.")
        found = load_profile(Path(file))
        check_same_optimizer(run, found, Path(file))
        yield file, KindProfile(name, found)


def _completed(plan: Plan, cluster: Cluster, batch_size: int) -> Plan:
    """The plan with equal micro-batches and the first devices of the cluster, if it names none."""
    if not plan.micro_batch_sizes:
        samples = plan.width * plan.num_microbatches
        if batch_size % samples:
            raise BiremeError(
                f"The plan names no micro_batch_sizes, and its {plan.width} × {plan.num_microbatches} "
                f"micro-batches do not divide training.batch_size = {batch_size}. Set a multiple of "
                f"{samples}, or give the plan its micro_batch_sizes."
            )
        plan = replace(plan, micro_batch_sizes=(batch_size // samples,) * plan.width)
    if not plan.devices:
        names = [placed.name for placed in cluster.devices()]
        if len(names) < plan.num_ranks:
            raise BiremeError(
                f"The plan is for {plan.num_ranks} devices, but the cluster has {len(names)}. Set "
                "cluster.source to a larger cluster."
            )
        if plan.stage_widths:
            bounds = pairwise(accumulate(plan.stage_widths, initial=0))
            rows = [tuple(names[begin:end]) for begin, end in bounds]
        else:
            depth = plan.num_ranks // plan.width
            rows = [tuple(names[rank : plan.num_ranks : depth]) for rank in range(depth)]
        plan = replace(plan, devices=tuple(rows))
    return plan


def _request_for(saved: SavedPlan, plan: Plan, request: PlanRequest) -> PlanRequest:
    """The request with the batch and the schedule of a plan, and without constraints on its shape."""
    if plan.sites != request.sites:
        raise BiremeError(
            f"The plan has {plan.sites} sites, the run has {request.sites}. Set sync.sites = {plan.sites}."
        )
    if bool(plan.whole_weights) != (request.shares_weights and plan.width > 1):
        shard = "weights" if plan.whole_weights else "none"
        raise BiremeError(
            f'memory.shard is "{request.shard}", which is not how the replicas of the plan share. Set '
            f'memory.shard = "{shard}".'
        )
    known = saved.forecast
    return replace(
        request,
        batch_size=plan.num_microbatches * sum(plan.micro_batch_sizes),
        largest_batch=None,
        schedule=plan.schedule,
        delay_warmup=request.delay_warmup_share if known is None else known.delay_warmup,
        depth=None,
        width=None,
        micro_batch=None,
        devices=(),
        pinned={},
        together=(),
    )


def _planning_cluster(run: RunFile) -> Cluster:
    if run.cluster.source is not None and run.cluster.workers is None and not run.memory.is_on:
        return load_cluster(run.cluster.source)
    from bireme.train.machines import planning_machines  # imports torch

    return planning_machines(run, computes=False).cluster


def names_model(run: RunFile) -> bool:
    """Whether a run file names its model, and does not leave it to the demonstration."""
    return "source" in run.model.model_fields_set


def check_same_optimizer(run: RunFile, found: Profile, file: Path) -> None:
    """Refuse a profile that was made with another optimizer than the run asks for."""
    asked = run.training
    if asked.optimizer != found.optimizer and (names_model(run) or "optimizer" in asked.model_fields_set):
        raise BiremeError(
            f"training.optimizer is {asked.optimizer}, but the profile {file} was made with "
            f"{found.optimizer}. Set training.optimizer to that, or make another profile with bireme profile."
        )


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run with the plans that a search found, and what was asked of them."""

    run: RunFile
    cluster: Cluster
    graph: Graph | None
    profile: Profile
    request: PlanRequest
    answer: Answer
    planning_s: float

    def timeline(self, num_batches: int) -> Timeline:
        """The first batches under the best plan, by the simulator: of the slowest replica."""
        best = self.answer.best.plan
        return timeline_of(best, self.profile, self.cluster, self.request, num_batches=num_batches)

    @property
    def notes(self) -> list[str]:
        """What makes the numbers of the plan doubtful, and what the plan does not guard against."""
        plan, sync = self.answer.best.plan, self.run.sync
        found = _misfits(self.answer.best)
        found += plan_notes(self.profile, self.cluster, self.request, self.answer.candidates)
        found += shard_note(self.answer)
        found += ways_note(self.answer)
        found += apart_note(plan, self.run.training.clip_norm)
        found += fused_loss_note(self.run, self.graph)
        if sync.is_coordinated:
            found += shared_hosts_note(plan, self.cluster, sync.num_sites(plan.width))
        return found

    def document(self) -> dict[str, Any]:
        """The document of `bireme plan --json` and of a dry run."""
        return {
            **plan_document(self.answer, self.profile, self.planning_s),
            "sync": sync_document(self.request),
            "notes": self.notes,
            "exports": {},
            **({} if self.graph is None else gradient_document(self.run, self.graph)),
        }


def fused_loss_note(run: RunFile, graph: Graph | None) -> list[str]:
    """A sentence if all logits of a micro-batch are in memory, though they are many."""
    if graph is None or run.model.fused_loss is not None:
        return []
    reason = fused(graph, form=run.training.gradient_form).reason
    if reason is None:
        return []
    return [f"All logits of a micro-batch are in memory at once, because {reason} (model.fused_loss)."]


def _misfits(best: Candidate) -> list[str]:
    """A sentence about the devices on which a plan does not fit, if there are any."""
    missing = {device: -left for device, left in headroom_bytes(best).items() if left < 0}
    if not missing:
        return []
    words = ", ".join(f"{bytes_text(num_bytes)} on {device}" for device, num_bytes in missing.items())
    return [
        f"The plan does not fit: {words} are missing. Use smaller micro-batches, recompute, cut elsewhere, "
        "or search for a plan that fits: leave out --file."
    ]
