"""The critical path: the chain of instructions that set the pace of a window.

Walk back from the instruction that ended last. What kept an instruction from starting earlier is whatever
ended last before it: the instruction before it on its rank, or the message it waited for. What kept the
message is the instruction that made it or, where its receive was posted only later, what the receiving rank
did before that.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from bireme.schedule.instruction import COMPUTE, RECEIVES
from bireme.timeline.timeline import BUSY, Interval, Timeline, Transfers

__all__ = ["PathStep", "critical_path"]


@dataclass(frozen=True, slots=True)
class PathStep:
    """One step of the path: an instruction, and how long the path stood still before it."""

    rank: int
    interval: Interval
    waited_s: float


def critical_path(timeline: Timeline) -> Iterator[PathStep]:
    """The steps that set the pace, last to first."""
    walk = _Walk(timeline)
    ends = [rank.end_s[-1] if rank.end_s else 0.0 for rank in timeline.ranks]
    place = walk.busy(ends.index(max(ends)), None) if ends else None
    while place is not None:
        before = walk.before(place)
        ended_s = 0.0 if before is None else timeline.ranks[before.rank].end_s[before.index]
        interval = walk.interval(place)
        yield PathStep(place.rank, interval, max(interval.start_s - ended_s, 0.0))
        place = before


@dataclass(frozen=True, slots=True)
class _Place:
    """An instruction, by its rank and its index there."""

    rank: int
    index: int


class _Walk:
    """Looks back from an instruction, without a picture of the whole timeline: that may be millions long."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.channels: dict[int, list[Transfers]] = {}
        for transfers in timeline.transfers:
            if not transfers.is_sync:
                self.channels.setdefault(transfers.destination, []).append(transfers)

    def interval(self, place: _Place) -> Interval:
        rank = self.timeline.ranks[place.rank]
        return Interval(
            rank.track[place.index], place.index, rank.start_s[place.index], rank.end_s[place.index]
        )

    def busy(self, rank: int, below: int | None) -> _Place | None:
        """The last instruction that uses the device below an index."""
        track = self.timeline.ranks[rank].track
        index = (len(track) if below is None else below) - 1
        while index >= 0 and track[index].kind not in BUSY:
            index -= 1
        return _Place(rank, index) if index >= 0 else None

    def before(self, place: _Place) -> _Place | None:
        """What this instruction had to wait for."""
        local = self.busy(place.rank, place.index)
        local_s = 0.0 if local is None else self.timeline.ranks[local.rank].end_s[local.index]
        found = self._message(place)
        if found is None:
            return local
        transfers, number = found
        if transfers.end_s[number] <= local_s:
            return local
        maker = self.busy(transfers.source, transfers.sent_by[number])
        posted_s = self.timeline.ranks[place.rank].start_s[transfers.received_by[number]]
        made_s = self.timeline.ranks[transfers.source].start_s[transfers.sent_by[number]]
        if posted_s == transfers.start_s[number] > made_s:
            return self.busy(place.rank, transfers.received_by[number])
        return maker

    def _message(self, place: _Place) -> tuple[Transfers, int] | None:
        """The transfer that brought what this instruction uses."""
        track = self.timeline.ranks[place.rank].track
        instruction = track[place.index]
        if instruction.kind not in COMPUTE:
            return None
        needed = instruction.needs(self.timeline.program.num_stages)
        if needed is None:
            return None
        index = place.index
        while index >= 0 and not (track[index].kind in RECEIVES and track[index].carries() == needed):
            index -= 1
        for received_by in (index, place.index):  # where communication blocks, the use is the receipt
            for transfers in self.channels.get(place.rank, ()):
                number = _position(transfers, received_by)
                if number is not None:
                    return transfers, number
        return None


def _position(transfers: Transfers, received_by: int) -> int | None:
    """Which transfer was received by that instruction; they are in order."""
    number = bisect_left(transfers.received_by, received_by)
    if number < len(transfers.received_by) and transfers.received_by[number] == received_by:
        return number
    return None
