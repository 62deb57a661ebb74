"""What somebody asks of a placement: the objective, the way, and for how long."""

from dataclasses import dataclass
from enum import StrEnum

from bireme.errors import BiremeError
from bireme.placement.workload import Objective

__all__ = ["Granularity", "Method", "Request"]


class Method(StrEnum):
    """The ways to place. `AUTO` takes the best that the graph and the time allow."""

    AUTO = "auto"
    DP = "dp"
    DPL = "dpl"
    MILP = "milp"
    ANNEAL = "anneal"
    LOCAL_SEARCH = "local-search"
    PIPEDREAM = "pipedream"
    GREEDY = "greedy"
    SINGLE = "single"
    EXPERT = "expert"


class Granularity(StrEnum):
    """What of a model is placed: every operator by itself, or the units that a plan may cut between."""

    OPERATORS = "operators"
    UNITS = "units"


@dataclass(frozen=True, slots=True)
class Request:
    """What to place for and how.

    `contiguous` asks for devices that can be in a line, each with one connected stretch of it. Latency has
    a rule of its own: up to `num_pieces` connected stretches on each accelerator. `expert` are the devices of
    the nodes as somebody has chosen them, and `expert_pieces` their pieces for latency, if any. `seed` is
    that of the methods that draw.
    """

    objective: Objective = Objective.THROUGHPUT
    method: Method = Method.AUTO
    contiguous: bool = True
    time_limit_s: float | None = None
    seed: int = 0
    num_pieces: int = 1
    expert: tuple[int, ...] | None = None
    expert_pieces: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise BiremeError(f"The time limit is {self.time_limit_s} s; it must be more than 0.")
        if not 1 <= self.num_pieces <= 64:
            raise BiremeError(f"An accelerator runs 1 to 64 pieces in turn, not {self.num_pieces}.")
        if (self.method is Method.EXPERT) != (self.expert is not None):
            raise BiremeError("The method `expert` and the file of the expert's split go together.")
