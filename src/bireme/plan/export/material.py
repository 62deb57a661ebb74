"""What an export is made of."""

from dataclasses import dataclass
from functools import cached_property

from bireme.model.graph import Graph
from bireme.plan.forecast import Candidate
from bireme.plan.plan import Plan
from bireme.plan.summary import PlanSummary, summarize

__all__ = ["NEEDS_MODEL", "Material"]

NEEDS_MODEL = (
    "{} needs names of modules, which a profile does not have. Give the model with --model too; it is not "
    "measured again."
)
"""Why an export cannot be made of a profile alone."""


@dataclass(frozen=True)
class Material:
    """A candidate and the names of the model's units; the `graph` where the model is at hand.

    `csv` names the schedule file that is written along with it, if one is.
    """

    candidate: Candidate
    unit_names: tuple[str, ...]
    graph: Graph | None = None
    csv: str = ""

    @property
    def plan(self) -> Plan:
        """The plan to say."""
        return self.candidate.plan

    @cached_property
    def short(self) -> PlanSummary:
        """Its shape in numbers."""
        return summarize(self.candidate)

    @cached_property
    def num_ranks(self) -> int:
        """The processes of one replica."""
        return self.plan.num_ranks // self.plan.width
