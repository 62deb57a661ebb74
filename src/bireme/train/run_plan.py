"""The plan of a run whose model has a profile: what is asked of the planner, and what it finds.

`bireme train` trains by this plan, and `bireme plan` and `simulate` show it. With a profile and a cluster
from files it is made without torch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from bireme.bounds import bytes_text
from bireme.cluster.cluster import Cluster, Overlap
from bireme.cluster.cluster_file import cluster_hash, load_cluster
from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.plan.forecast import Answer, Candidate, Origin, headroom_bytes
from bireme.plan.plan import Plan, check_servers
from bireme.plan.plan_file import SavedPlan, check_kind_fits, check_plan_of, load_plan, profile_hash
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.search import forecast_of, timeline_of
from bireme.profile.profile import KindProfile, Profile, load_profile
from bireme.report.plan_document import (
    apart_note,
    plan_document,
    plan_notes,
    shard_note,
    shared_hosts_note,
    sync_document,
)
from bireme.timeline.timeline import Timeline
from bireme.train.link_codecs import (
    check_boundaries,
    gradient_document,
    sums_of,
    sums_of_profile,
    with_kept_gradients,
)
from bireme.train.plan_search import full_request_of, is_short, planned, with_shard
from bireme.train.run_file import RunFile

Progress = Callable[[float, str], None]

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
        remedy = "Set cluster.workers to {needed}, or plan for fewer devices."
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
        run = with_shard(run, answer.best.plan.known_shard)
        if request.shard != run.memory.shard:
            request = request.sharing(run.memory.shard)
        return PlannedRun(run, self.cluster, graph, found, request, answer, planning_s)

    def given(self, file: Path, overlaps: Mapping[str, Overlap] | None = None) -> "PlannedRun":
        """The run with the plan in a file and the forecast of it, whether it fits or not."""
        saved = load_plan(file)
        run = with_shard(self.run, saved.plan.known_shard)
        found, request = replace(self, run=run)._request(overlaps)
        begin_s = perf_counter()
        try:
            check_plan_of(saved, found)
            plan = _completed(saved.plan, self.cluster, request.batch_size)
            check_boundaries(run, plan)
            request = _request_for(saved, plan, request)
            forecast = forecast_of(plan, found, self.cluster, request)
        except BiremeError as error:
            raise BiremeError(f"{file}: {error}") from None
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
        return found, replace(request, overlaps=overlaps or {})


def _with_kinds(profile: Profile, run: RunFile) -> Profile:
    """The profile with those of other kinds of devices that the run names; of equal names the last counts."""
    kinds = {kind.name: kind for kind in profile.kinds}
    for file, kind in _named_profiles(run):
        try:
            check_kind_fits(profile, kind.profile)
        except BiremeError as error:
            raise BiremeError(f"{file}: {error}") from None
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
        found += apart_note(plan, self.run.training.clip_norm)
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
