"""Paging of draft plans: what a draft would page, and what its tiers then hold and move."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bireme.errors import BiremeError
from bireme.plan.forecast import TierForecast
from bireme.plan.paging import Paging
from bireme.plan.search.draft import Draft
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.shared_optimizer import Exchanged
from bireme.plan.search.tied_gradients import TiedRing
from bireme.plan.search.tier_budgets import budgets_of
from bireme.schedule.chunks import LARGE_PAGE_BYTES
from bireme.schedule.instruction import PAGING, Kind
from bireme.schedule.program import Program
from bireme.schedule.residency import Residency
from bireme.simulate.costs import Costs
from bireme.simulate.gathering import REPLICAS
from bireme.timeline.timeline import Timeline

__all__ = ["busiest_wire", "paging_of", "shared_tiers", "tier_forecasts", "update_places"]


def paging_of(
    problem: PlanningProblem,
    draft: Draft,
    costs: Costs,
    *,
    ahead: int,
    updates_together: bool,
    host_updates: bool,
    is_summed: bool,
) -> Paging | None:
    """What a draft pages whose stages cost that, in its largest micro-batches; None where all of it fits.

    Where no update can be made on the host, none is. Raises if the user asked for that.
    """
    kept_share = problem.request.sums.kept_share if draft.outline.width > 1 else 0.0
    sizes = costs.sizes()
    if not draft.splits_backward:
        sizes = replace(sizes, waiting=(), halves=())
    # What codecs of sums keep is counted with the optimiser, and is not the optimiser's.
    residuals = [kept_share * one for one in sizes.gradient]
    sizes = replace(
        sizes,
        optimizer=tuple(own - more for own, more in zip(sizes.optimizer, residuals, strict=True)),
        buffers=tuple(own + more for own, more in zip(sizes.buffers, residuals, strict=True)),
    )
    asked = problem.request.memory
    paging = Paging(
        budgets_of(problem, draft.grid),
        sizes,
        ahead=ahead,
        updates_together=updates_together,
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
            raise BiremeError(
                "The optimizer is to step on the host, but no stage of the plan can: its gradients are "
                "summed over replicas or over stages that share weights, its updates are fresh (2bw-fresh), "
                "it has no host memory, or what its optimizer remembers is too little to be paged. Let the "
                "optimizer step on the device."
            )
        paging = replace(paging, host_updates=False)
    return paging.with_chunks(cut)


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
            "The optimizer is to step on the host, which Bireme's engine does for devices that are "
            "processors, but the plan may use GPUs. Let the optimizer step on the device."
        )
    if asked == "auto":
        return (False,) if has_gpus else (True, False)
    return (asked == "host",)


def tier_forecasts(timeline: Timeline, rings: Sequence[TiedRing] = ()) -> Iterator[TierForecast]:
    """Each tier of the ranks that page, and what ranks exchange with replicas that share their weights, with
    those sums of tied gradients.
    """
    program = timeline.program
    waited_s = {moved.rank: moved.waited_s / program.num_batches for moved in timeline.paging}
    for kept in timeline.memory:
        if program.num_sharers > 1:
            tied_bytes = sum(one.sent_bytes for one in rings if kept.rank in one.ranks)
            yield from _shared(timeline, kept, waited_s[kept.rank], tied_bytes)
        for number, tier in enumerate(kept.tiers):
            yield TierForecast(
                rank=kept.rank,
                tier=tier.name,
                budget_bytes=tier.budget_bytes,
                peak_bytes=tier.peak_bytes,
                predicted_bytes_moved=_moved_into(program, kept.rank, number),
                waited_s=0.0 if number else waited_s[kept.rank],
            )


def _shared(
    timeline: Timeline, kept: Residency, waited_s: float, tied_bytes: float
) -> Iterator[TierForecast]:
    """What a rank gathers from the replicas that share its weights, and what it gives them."""
    moved = {
        copies.destination: sum(copies.num_bytes) / timeline.program.num_batches
        for one in timeline.paging
        if one.rank == kept.rank
        for copies in one.copies
    }
    yield TierForecast(kept.rank, "device", None, kept.peak_bytes, moved.get("device", 0.0), waited_s)
    yield TierForecast(kept.rank, REPLICAS, None, 0.0, moved.get(REPLICAS, 0.0) + tied_bytes)


def shared_tiers(timeline: Timeline, exchanged: Sequence[Exchanged]) -> Iterator[TierForecast]:
    """The same of ranks that share an optimiser: the new weights they get, and the gradients they give."""
    for kept in timeline.memory:
        own = [exchanged[stage] for stage in timeline.program.stages_of(kept.rank)]
        gathered, given = sum(one.weights for one in own), sum(one.gradients for one in own)
        yield TierForecast(kept.rank, "device", None, kept.peak_bytes, gathered)
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


def _moved_into(program: Program, rank: int, tier: int) -> float:
    """The bytes that go into a tier in a batch of the steady state, or of the window where there is none."""
    tiers, track = program.tiers_of(rank), program.tracks[rank]
    assert tiers is not None, "the rank pages"
    steps, num_batches = (track.body, 1) if track.repeats else (track.head, program.num_batches)
    num_copies = sum(
        (step.page.tier == tier and step.kind is Kind.FETCH)
        or (step.page.tier == tier - 1 and step.kind is Kind.EVICT and step.page.is_copied)
        for step in steps
        if step.kind in PAGING and step.page is not None
    )
    return num_copies * tiers.chunk_bytes / num_batches
