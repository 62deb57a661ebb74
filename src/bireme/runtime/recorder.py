"""When each instruction ran: what the measured `Timeline` is made of.

Two moments are kept for each instruction: of the device that it runs on, which is not always the host.
Clocks of several machines differ; `gather_times` brings them together.
"""

from array import array
from collections.abc import Callable, Iterable, MutableSequence
from functools import partial
from time import perf_counter
from typing import Any

import torch

from bireme.devices import is_accelerator, mark, synchronize
from bireme.schedule.program import Program
from bireme.schedule.residency import resident
from bireme.timeline.timeline import RankTimeline, Timeline

__all__ = ["Moment", "Recorder", "Recording", "timeline_of"]

CPU = torch.device("cpu")

Recording = tuple["array[float]", "array[float]"]
"""The starts and the ends of a rank's instructions, in seconds."""


Moment = float | torch.Event
"""A time on the host's clock in seconds, or a point in the stream of an accelerator."""


class Recorder:
    """Notes the times of one rank's instructions on a device.

    On a CPU an instruction is done when its call returns, so moments are the host's. On an accelerator calls
    return long before, so a moment is a mark in the device's stream. What the stream waits for, such as a
    message, is between two marks, as on a CPU it is between two calls.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._anchor = _Anchor(device) if is_accelerator(device) else None
        self._starts: MutableSequence[Any] = array("d") if self._anchor is None else []
        self._ends: MutableSequence[Any] = array("d") if self._anchor is None else []
        self.now: Callable[[], Moment] = perf_counter if self._anchor is None else partial(mark, device)
        """This moment of the device."""

    def note(self, start: Moment, end: Moment) -> None:
        """The next instruction ran from then to then."""
        self._starts.append(start)
        self._ends.append(end)

    def recording(self) -> Recording:
        """All that was noted, in seconds of the host's clock; waits until the device has done it."""
        if self._anchor is not None:
            self._anchor.settle()
        return self._seconds(self._starts), self._seconds(self._ends)

    def _seconds(self, moments: Iterable[Any]) -> "array[float]":
        if self._anchor is not None:
            moments = map(self._anchor.second, moments)
        return array("d", moments)


class _Anchor:
    """A moment known on both clocks, the host's and the device's.

    Torch gives milliseconds between two marks as a float32, which is to the microsecond over some seconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        synchronize(device)
        self._mark = mark(device)
        self._mark_s = perf_counter()

    def settle(self) -> None:
        """Wait until the marks made so far are reached."""
        synchronize(self._device)

    def second(self, moment: torch.Event) -> float:
        """A mark on the host's clock."""
        return self._mark_s + self._mark.elapsed_time(moment) / 1e3


def timeline_of(program: Program, recordings: list[Recording]) -> Timeline:
    """The timeline of a window from the recordings of its ranks, replica by replica.

    Its clock starts with the first instruction of the first replica.
    """
    begin = min((starts[0] for starts, _ in recordings[: program.num_ranks] if starts), default=0.0)
    replicas = [
        tuple(
            RankTimeline(
                rank,
                track,
                array("d", (start - begin for start in starts)),
                array("d", (end - begin for end in ends)),
            )
            for rank, (track, (starts, ends)) in enumerate(
                zip(program.tracks, recordings[first : first + program.num_ranks], strict=True)
            )
        )
        for first in range(0, len(recordings), program.num_ranks)
    ]
    memory = tuple(resident(program, rank) for rank in range(program.num_ranks))
    return Timeline(program, replicas[0], (), memory, source="measured", others=tuple(replicas[1:]))
