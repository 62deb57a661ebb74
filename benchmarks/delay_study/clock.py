"""How long a batch takes by the simulator: what a rule's steps must be multiplied with.

All stages are alike: a forward takes one unit of time, a backward two, an update or a trial step a tenth.
On the fast network a message takes a fiftieth of a forward, on the slow one as long as a forward.
"""

from dataclasses import dataclass
from enum import Enum

from bireme.schedule.catalogue import generate, schedule_named
from bireme.simulate.comparison import Contest, solve_lookahead
from bireme.simulate.costs import Costs
from bireme.simulate.links import Links
from bireme.simulate.simulator import simulate

__all__ = ["NetworkSpeed", "Time", "batch_time"]

NUM_BATCHES = 6
FORWARD_S, BACKWARD_S, UPDATE_S = 1.0, 2.0, 0.1


class NetworkSpeed(Enum):
    """How long a message takes, in forwards."""

    FAST = 0.02
    SLOW = 1.0


@dataclass(frozen=True, slots=True)
class Time:
    """A batch in steady state, as a multiple of what its computation takes on a stage."""

    schedule: str
    lookahead: int
    batch: float


def batch_time(
    schedule: str, num_stages: int, num_microbatches: int, speed: NetworkSpeed, *, may_look_ahead: bool
) -> Time:
    """With the least lookahead that is as good as any, where the schedule has one and may have it."""
    costs = Costs.per_stage(
        num_stages,
        forward_s=FORWARD_S,
        backward_s=BACKWARD_S,
        update_s=UPDATE_S,
        message_bytes=1.0,
    )
    links = Links(1.0 / speed.value)
    lookahead = 0
    if may_look_ahead and schedule_named(schedule).most_lookahead is not None:
        lookahead = solve_lookahead(schedule, Contest(costs, num_microbatches, links.network)).lookahead
    program = generate(
        schedule,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_batches=NUM_BATCHES,
        lookahead=lookahead,
    )
    timeline = simulate(program, costs, links.network(program), agree=True)
    compute = num_microbatches * (FORWARD_S + BACKWARD_S)
    return Time(schedule, lookahead, timeline.steady_batch_s / compute)
