"""What the engine itself takes, read off a timeline that it has measured, so that predictions can count it.

On a CPU the rank's own thread packs and sends, waits, unpacks, and calls what computes. None of that is in
the seconds of a stage, and a tenth of a step can go there. One recorded run of one schedule tells it for all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from bireme.bench.emulated import StagePace
from bireme.schedule.instruction import BACKWARDS, RECEIVES, SENDS, Kind
from bireme.simulate.costs import Costs
from bireme.timeline.timeline import Interval, Timeline

__all__ = ["EngineOverhead", "own_cost"]

SURELY_S = 1e-3
"""A message that was sent so long before has come, and one that is sent so long after has not."""


@dataclass(frozen=True, slots=True)
class EngineOverhead:
    """Seconds: of each pass besides its work, of sending and of taking a message, of a batch's end.

    `late_s` is how long after it is sent a message lets a rank go on that waits for it.
    """

    forward_s: float
    backward_s: float
    send_s: float
    take_s: float
    batch_s: float
    late_s: float

    def costs(self, num_stages: int, pace: StagePace, *, num_backwards: int = 1) -> Costs:
        """The costs of equal stages of that pace; `num_backwards` is 2 where backwards run in halves."""
        last = num_stages - 1
        forward, backward, halves = [], [], []
        for stage in range(num_stages):
            after_s, ahead_s = (self.send_s, self.take_s) if stage < last else (0.0, 0.0)
            into_s, back_s = (self.take_s, self.send_s) if stage else (0.0, 0.0)
            forward.append(pace.forward_s + self.forward_s + into_s + after_s)
            backward.append(pace.backward_s + num_backwards * self.backward_s + ahead_s + back_s)
            # Nothing that comes into the first stage has a gradient.
            halves.append(pace.backward_s / 2 + self.backward_s + ahead_s + back_s if stage else 0.0)
        return Costs.per_stage(
            num_stages,
            forward_s=forward,
            backward_s=backward,
            backward_input_s=halves,
            update_s=self.batch_s,
        )


def own_cost(timeline: Timeline, pace: StagePace) -> EngineOverhead:
    """What came on top of the pace in a measured run of at least two batches, one stage to a rank."""
    sent_s = {
        interval.instruction.carries(): interval.end_s
        for rank in timeline.ranks
        for interval in rank.intervals()
        if interval.instruction.kind in SENDS
    }
    num_stages = timeline.program.num_stages
    steps = [pair for rank in timeline.ranks for pair in pairwise(_steady(timeline, rank.intervals()))]

    def lasts(*kinds: Kind) -> float:
        return _median(one.end_s - one.start_s for one, _ in steps if one.instruction.kind in kinds)

    taken, late = [], []
    for before, one in steps:
        message = one.instruction.needs(num_stages)
        if message is None or message not in sent_s:
            continue
        if sent_s[message] < before.end_s - SURELY_S:
            taken.append(one.start_s - before.end_s)
        elif sent_s[message] > before.end_s + SURELY_S:
            late.append(one.start_s - sent_s[message])
    take_s = _median(taken)
    between = _median(
        one.start_s - before.end_s
        for before, one in steps
        if before.instruction.kind is Kind.UPDATE and one.instruction.needs(num_stages) is None
    )
    return EngineOverhead(
        forward_s=max(lasts(Kind.FORWARD) - pace.forward_s, 0.0),
        backward_s=max(lasts(*BACKWARDS) - pace.backward_s, 0.0),
        send_s=lasts(*SENDS),
        take_s=take_s + lasts(*RECEIVES),
        batch_s=lasts(Kind.REDUCE) + lasts(Kind.UPDATE) + between,
        late_s=max(_median(late) - take_s, 0.0),
    )


def _steady(timeline: Timeline, intervals: Iterator[Interval]) -> list[Interval]:
    """Without the first batch, in which much happens for the first time."""
    return [one for one in intervals if one.instruction.batch > timeline.program.first_batch]


def _median(values: Iterator[float] | list[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0
