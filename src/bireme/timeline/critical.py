"""The critical path: the chain of instructions that set the pace of a window.

Walk back from the instruction that ended last. What kept an instruction from starting earlier is whatever
ended last before it: the instruction before it on its rank, or the message it waited for, and then the one
that made the message.
"""

from dataclasses import dataclass

from bireme.schedule.instruction import COMPUTE, RECEIVES, Message
from bireme.timeline.timeline import BUSY, Interval, Timeline

__all__ = ["Link", "PathStep", "critical_path"]


@dataclass(frozen=True, slots=True)
class PathStep:
    """One step of the path: an instruction, and how long the path waited for a message before it."""

    rank: int
    interval: Interval
    waited_s: float


@dataclass(frozen=True, slots=True)
class Link:
    """Where a used message came from and when it was there."""

    rank: int
    index: int
    arrived_s: float


def critical_path(timeline: Timeline) -> list[PathStep]:
    """The steps that set the pace, first to last."""
    ranks = [list(rank.intervals()) for rank in timeline.ranks]
    arrivals = _arrivals(timeline, ranks)
    num_stages = timeline.program.num_stages
    ends = [intervals[-1].end_s if intervals else 0.0 for intervals in ranks]
    if not any(ranks):
        return []
    rank = ends.index(max(ends))
    index = _busy_at_or_before(ranks[rank], len(ranks[rank]) - 1)
    path: list[PathStep] = []
    while index is not None:
        interval = ranks[rank][index]
        before = _busy_at_or_before(ranks[rank], index - 1)
        local_s = 0.0 if before is None else ranks[rank][before].end_s
        needed = interval.instruction.needs(num_stages) if interval.instruction.kind in COMPUTE else None
        link = None if needed is None else arrivals.get((rank, needed))
        if link is not None and link.arrived_s > local_s:
            sender = _busy_at_or_before(ranks[link.rank], link.index)
            made_s = 0.0 if sender is None else ranks[link.rank][sender].end_s
            path.append(PathStep(rank, interval, max(interval.start_s - made_s, 0.0)))
            rank, index = link.rank, sender
        else:
            path.append(PathStep(rank, interval, max(interval.start_s - local_s, 0.0)))
            index = before
    return path[::-1]


def _busy_at_or_before(intervals: list[Interval], index: int) -> int | None:
    while index >= 0 and intervals[index].instruction.kind not in BUSY:
        index -= 1
    return index if index >= 0 else None


def _arrivals(timeline: Timeline, ranks: list[list[Interval]]) -> dict[tuple[int, Message], Link]:
    arrivals = {}
    for transfers in timeline.transfers:
        if transfers.is_sync:
            continue
        for place, received_by in enumerate(transfers.received_by):
            step = ranks[transfers.destination][received_by].instruction
            message = step.carries() if step.kind in RECEIVES else step.needs(timeline.program.num_stages)
            if message is not None:
                arrivals[transfers.destination, message] = Link(
                    transfers.source, transfers.sent_by[place], transfers.end_s[place]
                )
    return arrivals
