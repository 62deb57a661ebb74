"""What the replicas of a draft plan have to do, before devices and links are known."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bireme.cluster.device import MOST_SENDS, ResourceSeconds, Speeds
from bireme.plan.codec_costs import coded
from bireme.plan.partition.autopipe import costs_between
from bireme.plan.search.draft import Draft
from bireme.plan.search.draft_paging import TiedGradients, shared_costs, shared_key
from bireme.plan.search.problem import PlanningProblem
from bireme.schedule.program import Rule
from bireme.simulate.costs import Costs

_MOST_KEPT = 4096
"""Costs of partitions that are not worked out again."""


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """What the stages of one replica take per micro-batch and per batch, on a device of speed 1."""

    costs: Costs
    again_s: tuple[float, ...]

    def passes_s(self, stage: int, num_microbatches: int) -> float:
        """For how long the passes of a batch keep the stage busy."""
        costs = self.costs
        return num_microbatches * (costs.forward_s[stage] + costs.backward_s[stage] + self.again_s[stage])

    def busy_s(self, stage: int, num_microbatches: int, rule: Rule, speeds: Speeds) -> float:
        """For how long a batch keeps the stage busy on a device, with what its end takes under a rule."""
        costs = self.costs
        end_s = costs.reduce_busy_s[stage] + costs.update_s[stage]
        if rule is Rule.FRESH:
            end_s += costs.trial_s[stage]
        return ResourceSeconds(self.passes_s(stage, num_microbatches), end_s).on(speeds)

    def sent_bytes(self, rank: int, rank_of_stage: Sequence[int]) -> float:
        """What the engine keeps of the messages that a rank sends to others: copies of the last ones, and
        room for the next one where it is made from a message.
        """
        forward, backward = self.costs.forward_bytes, self.costs.backward_bytes
        found = 0.0
        for stage, (here, there) in enumerate(pairwise(rank_of_stage)):
            if here == there:
                continue
            if here == rank:
                is_made_of_one = stage > 0 and rank_of_stage[stage - 1] != rank
                found += (MOST_SENDS + is_made_of_one) * forward[stage]
            if there == rank:
                is_made_of_one = stage + 2 < len(rank_of_stage) and rank_of_stage[stage + 2] != rank
                found += (MOST_SENDS + is_made_of_one) * backward[stage]
        return found

    def kept_bytes(self, stage: int, draft: Draft) -> float:
        """What the stage keeps of a micro-batch that waits for its backward."""
        return (self.costs.input_bytes if stage in draft.recompute else self.costs.stash_bytes)[stage]


class ReplicaWorks:
    """The work of the replicas of draft plans; what is alike is worked out once."""

    def __init__(self, problem: PlanningProblem, tied: TiedGradients) -> None:
        self._problem = problem
        self._tied = tied
        self._known: dict[object, ReplicaWork] = {}

    def kinds(self, draft: Draft, replica: int) -> tuple[int, ...]:
        """The kind of the device of each rank, in one replica; empty if all devices are of one kind."""
        if len(self._problem.profiles) == 1:
            return ()
        return tuple(self._problem.kinds[row[replica]] for row in draft.grid)

    def of_replicas(self, draft: Draft) -> list[ReplicaWork]:
        """The work of each replica on its devices."""
        alike = [(size, self.kinds(draft, replica)) for replica, size in enumerate(draft.outline.sizes)]
        works = {one: self.of(draft, *one) for one in set(alike)}
        return [works[one] for one in alike]

    def of_stages(self, draft: Draft) -> list[list[ReplicaWork]]:
        """The work of each replica of each stage."""
        if draft.outline.stage_widths:
            work = self.of(draft, draft.outline.sizes[0])
            return [[work] * len(row) for row in draft.grid]
        return [self.of_replicas(draft)] * draft.outline.num_stages

    def of(self, draft: Draft, size: int, kinds: tuple[int, ...] = ()) -> ReplicaWork:
        """The work of a replica with micro-batches of a size whose ranks have devices of these kinds: all of
        the first if none are given, as for bytes, which are the same on all.
        """
        problem = self._problem
        kept_share = problem.kept_share(draft.outline.width)
        codecs = problem.codecs(draft.outline.rank_of_stage, draft.codecs)
        shared = shared_key(problem.request, draft)
        passes = draft.recompute, bool(draft.num_sliced), draft.splits_backward
        of_stages = tuple(kinds[rank] for rank in draft.outline.rank_of_stage) if any(kinds) else (0,)
        key = size, of_stages, draft.cuts, passes, codecs, kept_share, shared
        if key not in self._known:
            stages, half = draft.stages(len(problem.profile.units)), None
            if draft.num_sliced and size % 2 == 0 and size // 2 in problem.known_sizes:
                half = problem.on_kinds(size // 2, stages, of_stages).forward_s
            chain = problem.on_kinds(size, stages, of_stages)
            costs = costs_between(chain, draft.cuts, half_forward_s=half)
            costs = replace(costs, master_weights=problem.request.has_masters)
            costs = costs.in_halves() if draft.splits_backward else costs
            costs = coded(costs, codecs, problem.request.value_bytes, problem.profile.codecs)
            if draft.whole_weights:
                costs = replace(costs, tied_gradient_bytes=self._tied.of_stages(stages))
            costs = shared_costs(costs, problem.request, draft)
            if kept_share:
                kept = zip(costs.optimizer_bytes, costs.gradient_bytes, strict=True)
                costs = replace(costs, optimizer_bytes=tuple(own + kept_share * one for own, one in kept))
            again_s = tuple(
                one_s if stage in draft.recompute else 0.0 for stage, one_s in enumerate(costs.recompute_s)
            )
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            self._known[key] = ReplicaWork(costs, again_s)
        return self._known[key]
