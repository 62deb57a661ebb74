"""Paging of draft plans: what a draft would page, and what its tiers then hold and move."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add

from bireme.cluster.catalogue import tier_share
from bireme.cluster.cluster import Cluster
from bireme.errors import BiremeError
from bireme.grouping import grouped
from bireme.plan.forecast import TierForecast
from bireme.plan.partition.autopipe import costs_between
from bireme.plan.plan import Paging, Plan
from bireme.plan.plan_request import PlanRequest, TierLimits, may_delay_updates
from bireme.plan.search.contention import HopBytes, rings_s
from bireme.plan.search.draft import Draft, Grid, draft_of
from bireme.plan.search.problem import PlanningProblem
from bireme.profile.profile import Profile
from bireme.schedule.accesses import Sizes
from bireme.schedule.budgets import Budgets
from bireme.schedule.gathering import times_a_batch
from bireme.schedule.instruction import Item, Kind
from bireme.schedule.program import Rule
from bireme.schedule.residency import copied_by
from bireme.schedule.source import LONG
from bireme.schedule.tiers import LARGE_PAGE_BYTES, SMALL_CHUNK_BYTES
from bireme.simulate.copies import REPLICAS, TierLinks
from bireme.simulate.costs import Costs
from bireme.simulate.links import ring_share
from bireme.sync.slices import part_sum_bytes
from bireme.timeline.timeline import Timeline

# What the ranks of a plan may use of each tier, and how fast their chunks travel.
#
# All replicas page alike, so a rank has the least budgets of its devices in any replica.


def budgets_of(problem: PlanningProblem, grid: Grid) -> tuple[Budgets, ...]:
    """The budgets of each rank."""
    asked = problem.request.memory or TierLimits()
    used = [device for row in grid for device in row]
    return tuple(_least([_budgets(problem, device, used, asked) for device in row]) for row in grid)


def tier_links_of(problem: PlanningProblem, grid: Grid, replica: int) -> tuple[TierLinks, ...]:
    """The wires of each rank of a replica. Devices of a server share its disk."""
    used = [device for row in grid for device in row]
    found = []
    for row in grid:
        share = tier_share(problem.cluster, row[replica], used)
        is_processor = problem.cluster.devices()[row[replica]].device.kind == "cpu"
        found.append(
            TierLinks(
                share.host_bytes_per_s,
                share.disk_bytes_per_s,
                share.copy_s,
                _core_share(problem, row[replica], used),
                share.chunk_s,
                share.host_bytes_per_s if is_processor else math.inf,
                SMALL_CHUNK_BYTES if is_processor else 0,
            )
        )
    return tuple(found)


def _core_share(problem: PlanningProblem, device: int, used: Sequence[int]) -> float:
    """What of a copy a processor's work loses: the part of a core that is not spare, of all that it works on.

    Cores that no device computes on are spare for the copies of all. Where nothing says how many cores there
    are, each copy has one.
    """
    server, threads = problem.servers[device], problem.threads[device]
    machine = problem.cluster.servers[server]
    num_cores = machine.num_cores or sum(one.num_cores for one in machine.devices if one.kind == "cpu")
    if not (threads and num_cores):
        return 0.0
    here = [one for one in used if problem.servers[one] == server]
    spare = num_cores - sum(problem.threads[one] for one in here)
    return min(max(1.0 - spare / len(here), 0.0), 1.0) / threads


def _budgets(problem: PlanningProblem, device: int, used: Sequence[int], asked: TierLimits) -> Budgets:
    share = tier_share(problem.cluster, device, used)
    kind = problem.cluster.devices()[device].device.kind
    device_bytes = int(problem.limits[device])
    host_bytes = share.host_bytes if asked.host_bytes is None else asked.host_bytes
    if host_bytes is None and kind == "cpu":
        # It is the same memory.
        host_bytes = max(int(problem.room[device] - problem.copied_bytes) - device_bytes, 0)
    disk_bytes = share.disk_bytes if asked.disk_bytes is None else asked.disk_bytes
    if disk_bytes is None:
        raise BiremeError(
            f"How much of its disk {problem.names[device]} may use is not known. Say it, or give its server "
            "disk_bytes in the cluster file."
        )
    return Budgets(device_bytes, host_bytes, disk_bytes)


def _least(budgets: Sequence[Budgets]) -> Budgets:
    return Budgets(
        min(one.device_bytes for one in budgets),
        min((one.host_bytes for one in budgets if one.host_bytes is not None), default=None),
        min(one.disk_bytes for one in budgets),
    )


# What each stage of a plan that pages copies in a batch, and what recomputation takes or would take.


@dataclass(frozen=True, slots=True)
class PagedStageMemory:
    """A stage of the first replica: the bytes of each item that are copied between tiers in a batch, both
    ways, and for how long the wires carry them. `recompute_s` is for how long a batch's forwards run again,
    or would.
    """

    stage: int
    rank: int
    recomputes: bool
    copied_bytes: Mapping[Item, int]
    copies_s: float
    recompute_s: float


def stage_memory(
    plan: Plan, profile: Profile, cluster: Cluster, request: PlanRequest
) -> tuple[PagedStageMemory, ...]:
    """All stages of a plan that pages; nothing of one that does not."""
    if plan.paging is None:
        return ()
    problem, draft = PlanningProblem(profile, cluster, request), draft_of(plan, cluster)
    kinds = [problem.kinds[draft.grid[rank][0]] for rank in draft.outline.rank_of_stage]
    chain = problem.on_kinds(draft.outline.sizes[0], draft.stages(len(profile.units)), kinds)
    costs = costs_between(chain, plan.cuts)
    links, program = tier_links_of(problem, draft.grid, 0), plan.program(LONG)
    found = []
    for stage, rank in enumerate(program.rank_of_stage):
        copied: Counter[Item] = Counter()
        copies_s, tiers = 0.0, program.tiers_of(rank)
        steps, num_batches = program.tracks[rank].steady(program.num_batches)
        for page in (step.page for step in steps if step.stage == stage):
            if page is not None and page.is_copied:
                assert tiers is not None, "who copies pages"
                copied[page.item] += tiers.chunk_bytes
                copies_s += links[rank].seconds(tiers.tiers[page.tier + 1].name, tiers.chunk_bytes)
        share = 1 / num_batches
        again_s = plan.num_microbatches * costs.recompute_s[stage] / problem.speeds[draft.grid[rank][0]]
        found.append(
            PagedStageMemory(
                stage,
                rank,
                stage in plan.recompute,
                {item: round(num_bytes * share) for item, num_bytes in copied.items()},
                copies_s * share,
                again_s,
            )
        )
    return tuple(found)


# Gradients of parameters that several stages use: who holds them, and what their sums take.


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter that these stages use, two at least, and the bytes of its gradient."""

    name: str
    stages: tuple[int, ...]
    num_bytes: float


class TiedGradients:
    """The parameters that units of a profile share."""

    def __init__(self, profile: Profile) -> None:
        self._places: dict[str, list[tuple[int, int]]] = {}
        """The units that hold each, and the bytes of its gradient."""
        for place, unit in enumerate(profile.units):
            for held in unit.tied:
                if held.gradient_bytes:
                    self._places.setdefault(held.name, []).append((place, held.gradient_bytes))

    def between(self, stages: Sequence[tuple[int, int]]) -> list[Tied]:
        """Those that several of some stages use, each of which goes from one unit up to another."""
        found = []
        for name, places in self._places.items():
            holders = tuple(
                stage
                for stage, (begin, end) in enumerate(stages)
                if any(begin <= place < end for place, _ in places)
            )
            if len(holders) > 1:
                found.append(Tied(name, holders, float(places[0][1])))
        return found

    def of_stages(self, stages: Sequence[tuple[int, int]]) -> tuple[float, ...]:
        """Bytes of each stage's gradients that other stages have a part of; empty where there are none."""
        shared = self.between(stages)
        each = tuple(
            sum(one.num_bytes for one in shared if place in one.stages) for place in range(len(stages))
        )
        return each if shared else ()


@dataclass(frozen=True, slots=True)
class _TiedRing:
    """A sum of tied gradients over all devices of some ranks in a site, which these stages wait for."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    num_bytes: float
    seconds: float
    sent_bytes: float
    """What each device sends on for it."""


def tied_rings(problem: PlanningProblem, draft: Draft, tied: Sequence[Tied]) -> list[_TiedRing]:
    """The sums of tied gradients that go around in addition to those of replicas.

    What stages of one rank share, the rank adds up itself; the replicas then sum it with the rest, but where
    they share weights: then it goes around alone, when the first of the stages has it.
    """
    rank_of_stage = draft.outline.rank_of_stage
    of_ranks = grouped((tuple(sorted({rank_of_stage[stage] for stage in one.stages})), one) for one in tied)
    found = []
    for ranks, own in of_ranks.items():
        if len(ranks) == 1 and not draft.whole_weights:
            continue
        num_bytes = sum(one.num_bytes for one in own)
        stages = sorted({stage for one in own for stage in one.stages})
        rings = [
            [device for rank in ranks for device in draft.grid[rank][site]]
            for site in draft.sites(problem.request)
        ]
        hops = [HopBytes(ring, ring_share(len(ring)) * num_bytes) for ring in rings]
        seconds = max(rings_s(problem, [hop]) for hop in hops)
        width = problem.request.site_width(draft.outline.width)
        sent_bytes = ring_share(width * len(ranks)) * num_bytes
        waiting = tuple(stages if len(ranks) > 1 else stages[:1])
        found.append(_TiedRing(waiting, ranks, num_bytes, seconds, sent_bytes))
    return found


# What it changes in a plan's costs if replicas share the optimizer: memory, steps, and bytes to sync.
#
# Where they share the weights too, what that keeps and moves follows from the instructions of the program.


@dataclass(frozen=True, slots=True)
class _Exchanged:
    """The bytes that a replica sends the others in a batch: of weights that it makes or keeps, and of
    gradients.
    """

    weights: float
    gradients: float


def shared_key(request: PlanRequest, draft: Draft) -> object:
    """What the costs of stages depend on besides, where replicas share the optimizer."""
    outline = draft.outline
    if request.num_sharers(outline.width) == 1:
        return None
    return outline.width, draft.rule, outline.rank_of_stage, min(draft.whole_weights, 2)


def shared_costs(costs: Costs, request: PlanRequest, draft: Draft) -> Costs:
    """The costs of stages of which each replica steps its part only, and sums gradients part by part."""
    sharers = request.num_sharers(draft.outline.width)
    if sharers == 1:
        return costs
    kept = costs.optimizer_bytes
    is_apart = request.shares_newest(draft.rule, draft.outline.width)
    if is_apart:
        kept = tuple(own + weights for own, weights in zip(kept, costs.weight_bytes, strict=True))
    return replace(
        costs,
        optimizer_bytes=tuple(
            one / sharers + request.more_of_an_owner(sharers, one, draft.rule) for one in kept
        ),
        update_s=tuple(one / sharers for one in costs.update_s),
        master_weights=costs.master_weights or is_apart,
        workspace_bytes=_with_sums(costs, draft, sharers),
        part_sum_share=request.sums_within.part_share(sharers) * sharers / (sharers - 1),
    )


def _with_sums(costs: Costs, draft: Draft, sharers: int) -> tuple[float, ...]:
    """The workspace of each stage with what summing gradients in parts takes: a rank's thread for that sums
    those of all its stages, but where weights are shared too, stage by stage; and where those of one stage
    are whole at a time, nothing else runs then.
    """
    if draft.whole_weights:
        together = max if draft.whole_weights == 1 else add
        return tuple(
            together(own, part_sum_bytes(gradients, sharers))
            for own, gradients in zip(costs.workspace_bytes, costs.part_gradient_bytes, strict=True)
        )
    ranks = draft.outline.rank_of_stage
    of_rank: defaultdict[int, float] = defaultdict(float)
    for rank, gradients in zip(ranks, costs.gradient_bytes, strict=True):
        of_rank[rank] += gradients
    return tuple(
        own + part_sum_bytes(of_rank[rank], sharers)
        for own, rank in zip(costs.workspace_bytes, ranks, strict=True)
    )


def reduce_share(request: PlanRequest, width: int) -> float:
    """What each replica sends on for the sum of gradients in its site, for each byte of them."""
    sums, sharers = request.sums_within, request.num_sharers(width)
    return sums.part_share(sharers) if sharers > 1 else sums.hop_share(request.site_width(width))


def sync_bytes(
    costs: Costs, request: PlanRequest, draft: Draft, num_units: int, *, before_update: bool = False
) -> tuple[float, ...]:
    """What each replica sends on within its site of every stage in a batch, for sums and for what it makes
    for the others.

    With a shared optimizer that is its part of the weights, or under the FRESH rule for trial steps:
    gradients, and the weights that come of them. With `before_update` it is what an UPDATE waits for. Under
    the DELAYED rule weights travel after it, and nobody waits for them but where they are more than a link
    carries in a batch; under the others it makes no difference to the next forward whether they go before or
    after.
    """
    if request.num_sharers(draft.outline.width) == 1:
        of_stages = zip(costs.gradient_bytes, draft.stages(num_units), draft.widths, strict=True)
        return tuple(
            request.sums_within.hop_bytes(one, slice(*units), request.site_width(width))
            for one, units, width in of_stages
        )
    if before_update and draft.whole_weights:
        return (0.0,) * costs.num_stages
    each = exchanged_bytes(costs, request, draft)
    if before_update and draft.rule is Rule.DELAYED:
        return tuple(one.gradients for one in each)
    return tuple(one.weights + one.gradients for one in each)


def exchanged_bytes(costs: Costs, request: PlanRequest, draft: Draft) -> tuple[_Exchanged, ...]:
    """What each replica sends the others that share with it, stage by stage."""
    width = draft.outline.width
    sharers = request.num_sharers(width)
    share, gathered = reduce_share(request, width), (sharers - 1) / sharers
    weights = costs.weight_bytes
    if draft.whole_weights:
        frozen = costs.frozen_bytes or (0.0,) * costs.num_stages
        weights = tuple(map(add, weights, frozen))
        program = draft.program()
        gathers, scatters = (times_a_batch(program, kind) for kind in (Kind.FETCH, Kind.SCATTER))
    else:
        gathers = (1.0,) * costs.num_stages
        scatters = (2.0 if draft.rule is Rule.FRESH else 1.0,) * costs.num_stages
    return tuple(
        _Exchanged(gathered * often * whole, share * times * gradients)
        for often, whole, times, gradients in zip(
            gathers, weights, scatters, costs.part_gradient_bytes, strict=True
        )
    )


def paging_of(
    problem: PlanningProblem,
    draft: Draft,
    costs: Costs,
    *,
    host_updates: bool,
    is_summed: bool,
) -> Paging | None:
    """What a draft pages whose stages cost that, in its largest micro-batches; None where all of it fits.
    Several parts of a rank are updated together, as the copies of an update take long.

    Where no update can be made on the host, none is. Raises if the user asked for that.
    """
    kept_share = problem.kept_share(draft.outline.width)
    sizes = costs.sizes()
    if not draft.splits_backward:
        sizes = replace(sizes, waiting=(), halves=())
    # What codecs of sums keep is counted with the optimizer, and is not the optimizer's.
    residuals = [kept_share * one for one in sizes.gradient]
    sizes = _apart(sizes, residuals, num_gradients=0, num_optimizer=1)
    if problem.request.sums.gathered:
        gathered, num_units = problem.request.sums.gathered, len(problem.profile.units)
        found = [sum(one.found_bytes for one in gathered[slice(*own)]) for own in draft.stages(num_units)]
        may_delay = may_delay_updates(problem.request.schedule, synchronous=problem.request.synchronous)
        sizes = _apart(sizes, found, num_gradients=1, num_optimizer=2 if may_delay else 1)
    asked = problem.request.memory
    paging = Paging(
        budgets_of(problem, draft.grid),
        sizes,
        updates_together=draft.outline.stages_per_rank > 1,
        is_summed=is_summed,
        stashes=asked is None or asked.stashes,
        host_updates=host_updates,
    )
    devices = problem.cluster.devices()
    is_mapped_large = any(devices[one].device.kind == "cuda" for row in draft.grid for one in row)
    cut = paging.cut(draft.resident_program(), LARGE_PAGE_BYTES if is_mapped_large else 0)
    if not any(cut):
        return None
    if host_updates and not any(tiers.host_updates for tiers in cut if tiers is not None):
        if asked is not None and asked.optimizer == "host":
            if is_summed:
                why = "gradients that are summed over replicas, or over stages that share weights, stay there"
            elif draft.rule is Rule.FRESH:
                why = f"each trial step of {draft.outline.schedule} needs the optimizer's state there"
            else:
                why = "the host has no memory for the optimizer's state, or too little of it is offloaded"
            raise BiremeError(
                'memory.optimizer is "host", but all stages of the plan must be updated on the device: '
                f'{why}. Set memory.optimizer to "auto".'
            )
        paging = replace(paging, host_updates=False)
    return paging.with_chunks(cut)


def _apart(sizes: Sizes, each: Sequence[float], *, num_gradients: int, num_optimizer: int) -> Sizes:
    """The sizes with bytes that stay on the device moved to the buffers. Until now they were counted
    `num_gradients` times with a batch's gradients, of which at most two batches have some at once, and
    `num_optimizer` times with the optimizer.
    """
    of = [*zip(sizes.gradient, sizes.optimizer, sizes.buffers, each, strict=True)]
    return replace(
        sizes,
        gradient=tuple(gradient - num_gradients * one for gradient, _, _, one in of),
        optimizer=tuple(optimizer - num_optimizer * one for _, optimizer, _, one in of),
        buffers=tuple(buffers + (2 * num_gradients + num_optimizer) * one for _, _, buffers, one in of),
    )


def update_places(problem: PlanningProblem) -> tuple[bool, ...]:
    """Whether drafts are to update on the host: never, always, or both ways are tried.

    The engine steps on the host where the device is a processor: then they are the same, and equally fast.
    Where nothing pages, nothing updates there.
    """
    if problem.request.memory is None:
        return (False,)
    asked = problem.request.memory.optimizer
    devices = problem.cluster.devices()
    has_gpus = any(devices[one].device.kind == "cuda" for one in problem.devices)
    if asked == "host" and has_gpus:
        raise BiremeError(
            'memory.optimizer is "host", which Bireme supports for devices that are processors, but the plan '
            'may use GPUs. Set memory.optimizer to "auto".'
        )
    if asked == "auto":
        return (False,) if has_gpus else (True, False)
    return (asked == "host",)


def tiers_waited_for(timeline: Timeline) -> Iterator[TierForecast]:
    """How long ranks that offload wait for chunks in a batch: a brief timeline has no more of their tiers."""
    for moved in timeline.paging:
        waited_s = moved.waited_s / timeline.program.num_batches
        yield TierForecast(moved.rank, "device", None, 0.0, 0.0, waited_s)


def tier_forecasts(
    timeline: Timeline,
    exchanged: Sequence[_Exchanged],
    rings: Sequence[_TiedRing] = (),
    between: Sequence[float] = (),
) -> Iterator[TierForecast]:
    """Each tier of the ranks that offload, and what ranks that share exchange with their replicas: by stage
    what is `exchanged` in a batch, if anything is, those sums of tied gradients, and the bytes that each rank
    sends `between` sites in a batch.
    """
    program = timeline.program
    waited_s = {moved.rank: moved.waited_s / program.num_batches for moved in timeline.paging}
    for kept in timeline.memory:
        own = [exchanged[stage] for stage in program.stages_of(kept.rank)] if exchanged else []
        gathered = sum(one.weights for one in own)
        budgets = [(tier.name, tier.budget_bytes, tier.peak_bytes) for tier in kept.tiers]
        steps, num_batches = program.tracks[kept.rank].steady(program.num_batches)
        tiers = program.tiers_of(kept.rank)
        copied_bytes = [] if tiers is None else copied_by(steps, tiers)
        if exchanged and not budgets:
            budgets = [("device", None, kept.peak_bytes)]
        for number, (name, budget_bytes, peak_bytes) in enumerate(budgets):
            copied = copied_bytes[number] / num_batches if copied_bytes else 0.0
            yield TierForecast(
                rank=kept.rank,
                tier=name,
                budget_bytes=budget_bytes,
                peak_bytes=peak_bytes,
                predicted_bytes_moved=copied if number else copied + gathered,
                waited_s=0.0 if number else waited_s.get(kept.rank, 0.0),
                gathered_bytes=0.0 if number else gathered,
            )
        if exchanged:
            tied_bytes = sum(one.sent_bytes for one in rings if kept.rank in one.ranks)
            given = sum(one.gradients for one in own) + tied_bytes + (between[kept.rank] if between else 0.0)
            yield TierForecast(kept.rank, REPLICAS, None, 0.0, given)


def busiest_wire(timeline: Timeline) -> tuple[float, int, str]:
    """For how long a batch keeps the busiest wire between tiers, or to replicas that share weights, busy, of
    which rank, and the lower tier, or `REPLICAS`.
    """
    busiest = (0.0, 0, "")
    for moved in timeline.paging:
        disk_s = exchanged_s = 0.0
        for copies in moved.copies:
            seconds = (sum(copies.end_s) - sum(copies.start_s)) / timeline.program.num_batches
            ends = copies.source, copies.destination
            if "disk" in ends:
                disk_s += seconds
            elif REPLICAS in ends:
                exchanged_s += seconds
            else:
                busiest = max(busiest, (seconds, moved.rank, "host"))
        busiest = max(busiest, (disk_s, moved.rank, "disk"), (exchanged_s, moved.rank, REPLICAS))
    return busiest
