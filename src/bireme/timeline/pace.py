"""Who sets the pace: the critical path added up by what it consists of."""

from collections import defaultdict
from dataclasses import dataclass

from bireme.schedule.instruction import Kind
from bireme.timeline.critical import critical_path
from bireme.timeline.timeline import Timeline

__all__ = ["Pace", "pace"]


@dataclass(frozen=True, slots=True)
class Pace:
    """The share of the window that the critical path spends in one kind of work of one stage.

    `kind` is None for time in which the stage waited for messages or a gradient sync.
    """

    stage: int
    kind: Kind | None
    seconds: float
    share: float


def pace(timeline: Timeline) -> list[Pace]:
    """What the critical path consists of, most first."""
    seconds: defaultdict[tuple[int, Kind | None], float] = defaultdict(float)
    for step in critical_path(timeline):
        instruction = step.interval.instruction
        seconds[instruction.stage, instruction.kind] += step.interval.end_s - step.interval.start_s
        if step.waited_s > 0:
            seconds[instruction.stage, None] += step.waited_s
    whole = timeline.makespan_s
    found = [Pace(stage, kind, spent, spent / whole) for (stage, kind), spent in seconds.items() if spent > 0]
    return sorted(found, key=lambda p: (-p.seconds, p.stage))
