"""When each instruction ran: what the measured `Timeline` is made of.

Two numbers are kept for each instruction, in arrays. Clocks of several machines differ; `clock_offset`
finds by how much.
"""

from array import array

from bireme.schedule.program import Program
from bireme.schedule.residency import resident
from bireme.timeline.timeline import RankTimeline, Timeline

__all__ = ["Recorder", "Recording", "timeline_of"]

Recording = tuple["array[float]", "array[float]"]
"""The starts and the ends of a rank's instructions, in seconds on a clock that all ranks share."""


class Recorder:
    """Notes the times of one rank's instructions. `offset_s` is added to bring them to the common clock."""

    def __init__(self, offset_s: float = 0.0) -> None:
        self._offset_s = offset_s
        self._starts: array[float] = array("d")
        self._ends: array[float] = array("d")

    def note(self, start_s: float, end_s: float) -> None:
        """The next instruction ran from then to then."""
        self._starts.append(start_s + self._offset_s)
        self._ends.append(end_s + self._offset_s)

    def recording(self) -> Recording:
        """All that was noted."""
        return self._starts, self._ends


def timeline_of(program: Program, recordings: list[Recording]) -> Timeline:
    """The timeline of a window from what its ranks recorded; its clock starts with the first instruction."""
    begin = min((starts[0] for starts, _ in recordings if starts), default=0.0)
    ranks = tuple(
        RankTimeline(
            rank,
            program.tracks[rank],
            array("d", (start - begin for start in starts)),
            array("d", (end - begin for end in ends)),
        )
        for rank, (starts, ends) in enumerate(recordings)
    )
    memory = tuple(resident(program, rank) for rank in range(program.num_ranks))
    return Timeline(program, ranks, (), memory, source="measured")
