"""What one replica of a draft plan has to do, before devices and links are known."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bireme.cluster.engine_cost import MOST_SENDS
from bireme.plan.search.draft import Draft
from bireme.schedule.rule import Rule
from bireme.simulate.costs import Costs

__all__ = ["ReplicaWork"]


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """What the stages of one replica take per micro-batch and per batch, on a device of speed 1."""

    costs: Costs
    again_s: tuple[float, ...]

    def passes_s(self, stage: int, num_microbatches: int) -> float:
        """For how long the passes of a batch keep the stage busy."""
        costs = self.costs
        return num_microbatches * (costs.forward_s[stage] + costs.backward_s[stage] + self.again_s[stage])

    def busy_s(self, stage: int, num_microbatches: int, rule: Rule) -> float:
        """For how long a batch keeps the stage busy, with what its end takes under an update rule."""
        costs = self.costs
        end_s = costs.reduce_busy_s[stage] + costs.update_s[stage]
        if rule is Rule.FRESH:
            end_s += costs.trial_s[stage]
        return self.passes_s(stage, num_microbatches) + end_s

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
