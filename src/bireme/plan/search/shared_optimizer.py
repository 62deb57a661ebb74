"""What it changes in a plan's costs if replicas share the optimiser: memory, steps, and bytes to sync.

Where they share the weights too, what that keeps and moves follows from the instructions of the program.
"""

from dataclasses import replace

from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.draft import Draft
from bireme.schedule.gathering import times_a_batch
from bireme.schedule.instruction import Kind
from bireme.schedule.rule import Rule
from bireme.simulate.costs import Costs

__all__ = ["reduce_share", "shared_costs", "shared_key", "sync_bytes"]


def shared_key(request: PlanRequest, draft: Draft) -> object:
    """What the costs of stages depend on besides, where replicas share the optimiser."""
    width = draft.outline.width
    return (width, draft.rule) if request.num_sharers(width) > 1 else None


def shared_costs(costs: Costs, request: PlanRequest, draft: Draft) -> Costs:
    """The costs of stages of which each replica steps its part only."""
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
    width, rule = draft.outline.width, draft.rule
    if request.num_sharers(width) == 1:
        return tuple(
            request.sums.hop_bytes(one, slice(*units), width)
            for one, units in zip(costs.gradient_bytes, draft.stages(num_units), strict=True)
        )
    share = reduce_share(request, width)
    if draft.whole_weights:
        return (0.0,) * costs.num_stages if before_update else _gathered_bytes(costs, draft, share)
    sums = tuple(share * one for one in costs.gradient_bytes)
    if before_update and rule is Rule.DELAYED:
        return sums
    made = zip(sums, costs.gradient_bytes, costs.weight_bytes, strict=True)
    return tuple(
        own + share * (weights + (gradients if rule is Rule.FRESH else 0.0))
        for own, gradients, weights in made
    )


def _gathered_bytes(costs: Costs, draft: Draft, share: float) -> tuple[float, ...]:
    """What each replica sends on of every stage in a batch where weights are gathered."""
    program = draft.program()
    times = zip(times_a_batch(program, Kind.GATHER), times_a_batch(program, Kind.SCATTER), strict=True)
    return tuple(
        share * (gathers * weights + scatters * gradients)
        for (gathers, scatters), weights, gradients in zip(
            times, costs.weight_bytes, costs.gradient_bytes, strict=True
        )
    )
