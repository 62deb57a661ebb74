"""What each stage of a plan that pages copies in a batch, and what recomputation takes or would take."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bireme.cluster.cluster import Cluster
from bireme.plan.partition.stage_costs import costs_between
from bireme.plan.plan import Plan
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.draft import draft_of
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.tier_budgets import tier_links_of
from bireme.profile.profile import Profile
from bireme.schedule.instruction import Instruction, Item
from bireme.schedule.program import Program
from bireme.schedule.stream import LONG

__all__ = ["PagedStageMemory", "stage_memory"]


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
    costs = costs_between(problem.whole(draft.outline.sizes[0]), plan.cuts)
    links, program = tier_links_of(problem, draft.grid, 0), plan.program(LONG)
    found = []
    for stage, rank in enumerate(program.rank_of_stage):
        copied: Counter[Item] = Counter()
        copies_s, tiers = 0.0, program.tiers_of(rank)
        for item, tier in _copies(program, rank, stage):
            assert tiers is not None, "who copies pages"
            copied[item] += tiers.chunk_bytes
            copies_s += links[rank].seconds(tiers.tiers[tier + 1].name, tiers.chunk_bytes)
        share = 1 / _num_batches(program, rank)
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


def _copies(program: Program, rank: int, stage: int) -> Iterator[tuple[Item, int]]:
    """The items of a stage whose chunks are copied, each with the upper of the two tiers."""
    for step in _steps(program, rank):
        if step.stage == stage and step.page is not None and step.page.is_copied:
            yield step.page.item, step.page.tier


def _steps(program: Program, rank: int) -> tuple[Instruction, ...]:
    """A batch of the steady state, or the window where there is none."""
    track = program.tracks[rank]
    return track.body if track.repeats else track.head


def _num_batches(program: Program, rank: int) -> int:
    return 1 if program.tracks[rank].repeats else program.num_batches
