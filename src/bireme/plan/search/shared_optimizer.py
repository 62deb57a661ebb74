"""What it changes in a plan's costs if replicas share the optimiser: memory, steps, and bytes to sync.

Where they share the weights too, what that keeps and moves follows from the instructions of the program.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from operator import add

from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.draft import Draft
from bireme.schedule.gathering import times_a_batch
from bireme.schedule.instruction import Kind
from bireme.schedule.rule import Rule
from bireme.simulate.costs import Costs
from bireme.sync.slices import part_sum_bytes

__all__ = ["Exchanged", "exchanged_bytes", "reduce_share", "shared_costs", "shared_key", "sync_bytes"]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The bytes that a replica sends the others in a batch: of weights that it makes or keeps, and of
    gradients.
    """

    weights: float
    gradients: float


def shared_key(request: PlanRequest, draft: Draft) -> object:
    """What the costs of stages depend on besides, where replicas share the optimiser."""
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
        optimizer_bytes=tuple(one / sharers for one in kept),
        update_s=tuple(one / sharers for one in costs.update_s),
        master_weights=costs.master_weights or is_apart,
        workspace_bytes=_with_sums(costs, draft, sharers),
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
    """What each replica sends on for the sum of gradients, for each byte of them."""
    if request.num_sharers(width) > 1:
        return (width - 1) / width
    return request.sums.hop_share(width)


def sync_bytes(
    costs: Costs, request: PlanRequest, draft: Draft, num_units: int, *, before_update: bool = False
) -> tuple[float, ...]:
    """What each replica sends on of every stage in a batch, for sums and for what it makes for the others.

    With a shared optimiser that is its part of the weights, or under the FRESH rule for trial steps:
    gradients, and the weights that come of them. With `before_update` it is what an UPDATE waits for. Under
    the DELAYED rule weights travel after it, and nobody waits for them but where they are more than a link
    carries in a batch; under the others it makes no difference to the next forward whether they go before or
    after.
    """
    width = draft.outline.width
    if request.num_sharers(width) == 1:
        return tuple(
            request.sums.hop_bytes(one, slice(*units), width)
            for one, units in zip(costs.gradient_bytes, draft.stages(num_units), strict=True)
        )
    if before_update and draft.whole_weights:
        return (0.0,) * costs.num_stages
    each = exchanged_bytes(costs, request, draft)
    if before_update and draft.rule is Rule.DELAYED:
        return tuple(one.gradients for one in each)
    return tuple(one.weights + one.gradients for one in each)


def exchanged_bytes(costs: Costs, request: PlanRequest, draft: Draft) -> tuple[Exchanged, ...]:
    """What each replica sends the others that share with it, stage by stage."""
    share = reduce_share(request, draft.outline.width)
    if draft.whole_weights:
        program = draft.program()
        gathers, scatters = (times_a_batch(program, kind) for kind in (Kind.GATHER, Kind.SCATTER))
    else:
        gathers = (1.0,) * costs.num_stages
        scatters = (2.0 if draft.rule is Rule.FRESH else 1.0,) * costs.num_stages
    return tuple(
        Exchanged(share * often * weights, share * times * gradients)
        for often, weights, times, gradients in zip(
            gathers, costs.weight_bytes, scatters, costs.part_gradient_bytes, strict=True
        )
    )
