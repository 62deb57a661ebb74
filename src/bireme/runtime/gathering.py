"""What the ranks of a run put together when nothing is under way: tensors by name, numbers, their clocks."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bireme.devices import is_accelerator, mark, synchronize
from bireme.model.graph import ModelState
from bireme.schedule.program import Program
from bireme.schedule.residency import resident
from bireme.sync.group import Group, MessageGroup
from bireme.timeline.timeline import RankTimeline, Timeline

# When each instruction ran: what the measured `Timeline` is made of.
#
# Two moments are kept for each instruction: of the device that it runs on, which is not always the host.
# Clocks of several machines differ; `gather_times` brings them together.

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
        self._device, self._is_marked = device, is_accelerator(device)
        self._starts: MutableSequence[Any] = [] if self._is_marked else array("d")
        self._ends: MutableSequence[Any] = [] if self._is_marked else array("d")
        self.now: Callable[[], Moment] = partial(mark, device) if self._is_marked else perf_counter
        """This moment of the device."""
        if self._is_marked:  # a moment that is known on both clocks, the host's and the device's
            synchronize(device)
            self._mark, self._mark_s = mark(device), perf_counter()

    def note(self, start: Moment, end: Moment) -> None:
        """The next instruction ran from then to then."""
        self._starts.append(start)
        self._ends.append(end)

    def recording(self) -> Recording:
        """All that was noted, in seconds of the host's clock; waits until the device has done it."""
        if self._is_marked:
            synchronize(self._device)
        return self._seconds(self._starts), self._seconds(self._ends)

    def _seconds(self, moments: Iterable[Any]) -> "array[float]":
        """Torch gives milliseconds between two marks as a float32: to the microsecond over some seconds."""
        if self._is_marked:
            moments = (self._mark_s + self._mark.elapsed_time(moment) / 1e3 for moment in moments)
        return array("d", moments)


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


_NUM_ROUNDS = 15
"""Of looking at the clocks together."""

PIECE_ELEMENTS = 4 * 2**20
"""How much of a tensor goes in one message: 16 MiB in float32."""


def _clock_offset_s(group: Group) -> float:
    """What to add to this rank's `perf_counter` to have rank 0's, to about the time a small message takes.

    Ranks come out of a sum at nearly the same time, if each sends its numbers to all.
    """
    if group.size == 1:
        return 0.0
    moments = list[float]()
    for _ in range(_NUM_ROUNDS):
        group.all_reduce(torch.zeros(1)).wait()
        moments.append(perf_counter())
    own = torch.tensor(moments, dtype=torch.float64)
    first = own.clone()
    group.copy_from(first, 0).wait()
    return float((first - own).median())


def gather_rows(group: Group, row: Sequence[float]) -> list["array[float]"]:
    """Every rank's row of numbers; rows may be of different lengths."""
    lengths = torch.zeros(group.size, dtype=torch.float64)
    lengths[group.rank] = len(row)
    group.all_reduce(lengths).wait()
    rows = torch.zeros(group.size, max(int(lengths.max()), 1), dtype=torch.float64)
    rows[group.rank, : len(row)] = torch.tensor(row, dtype=torch.float64)
    group.all_reduce(rows).wait()
    return [array("d", one[: int(n)].tolist()) for one, n in zip(rows, lengths.tolist(), strict=True)]


def gather_times(group: Group, recording: Recording) -> list[Recording]:
    """Every rank's recording, with all times on rank 0's clock."""
    offset_s = _clock_offset_s(group)
    starts, ends = (gather_rows(group, [time + offset_s for time in times]) for times in recording)
    return list(zip(starts, ends, strict=True))


def gather_tensors(
    group: MessageGroup, states: Sequence[ModelState], own: Mapping[str, Tensor], owner: Mapping[str, int]
) -> Iterator[tuple[str, Tensor]]:
    """Each of the states from the rank that owns it, one after the other, as a new tensor on rank 0's CPU.

    Other ranks are given nothing: they send what they own, in pieces, and need room for one piece.
    """
    kinds = _agreed_dtypes(group, states, {name: tensor.dtype for name, tensor in own.items()})
    for state, kind in zip(states, kinds, strict=True):
        source = owner[state.name]
        if source == group.rank == 0:
            yield state.name, own[state.name].detach().cpu().clone()
        elif source == group.rank:
            for piece in _pieces(own[state.name].detach().reshape(-1)):
                group.send(piece.cpu(), 0)
        elif group.rank == 0:
            whole = torch.empty(state.shape, dtype=kind)
            for piece in _pieces(whole.view(-1)):
                group.receive(piece, source)
            yield state.name, whole


def _pieces(flat: Tensor) -> tuple[Tensor, ...]:
    """A tensor in views of bounded size; nothing of one without elements."""
    return torch.split(flat, PIECE_ELEMENTS) if flat.numel() else ()


_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def _agreed_dtypes(
    group: Group, states: Sequence[ModelState], own: Mapping[str, torch.dtype]
) -> list[torch.dtype]:
    """The dtype each is held in, which its owner alone knows: master weights are longer than the graph's."""
    row = [float(_DTYPES.index(own[s.name])) + 1.0 if s.name in own else 0.0 for s in states]
    rows = gather_rows(group, row)
    return [_DTYPES[int(max(column)) - 1] for column in zip(*rows, strict=True)]
