"""What each way to save memory would take alone, compared with the plan that would be best with room for
everything.

The planner mixes them; this says which of them pays. Each is planned for again, within the budgets.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from bireme.cluster.cluster import Cluster
from bireme.errors import BiremeError
from bireme.plan.forecast import Answer, MemoryWay, NothingFits
from bireme.plan.partition.loads import Recompute
from bireme.plan.plan_request import PlanRequest
from bireme.plan.summary import summarize
from bireme.profile.profile import Profile

__all__ = ["with_single_ways"]

Search = Callable[[Profile, Cluster, PlanRequest], Answer | NothingFits]
"""Finds the best plan within the budgets that pages nothing."""


def with_single_ways(
    profile: Profile, cluster: Cluster, request: PlanRequest, answer: Answer, search: Search
) -> Answer:
    """The answer with these ways among its `memory_ways`; itself where memory is not short."""
    if not answer.memory_ways:
        return answer
    roomy = answer.memory_ways[-1].candidate
    assert roomy is not None, "there is always a plan with room for everything"
    first, *others = answer.memory_ways
    short = summarize(roomy)
    singles = [
        _way(words, partial(search, profile, cluster, asked))
        for words, asked in _asked(request, short.depth, short.width, max(short.micro_batch_sizes))
    ]
    return replace(answer, memory_ways=(first, *singles, *others))


def _asked(request: PlanRequest, depth: int, width: int, size: int) -> Iterator[tuple[str, PlanRequest]]:
    if request.recompute is not Recompute.NEVER:
        yield "only recomputation", replace(request, depth=depth, width=width, micro_batch=size)
    plain = replace(request, recompute=Recompute.NEVER)
    yield "only more stages", replace(plain, micro_batch=size)
    yield "only smaller micro-batches", replace(plain, depth=depth, width=width)


def _way(words: str, search: Callable[[], Answer | NothingFits]) -> MemoryWay:
    try:
        found = search()
    except BiremeError as error:
        return MemoryWay(words, None, str(error))
    return (
        MemoryWay(words, None, str(found)) if isinstance(found, NothingFits) else MemoryWay(words, found.best)
    )
