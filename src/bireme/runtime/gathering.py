"""What the ranks of a run put together when nothing is under way: tensors by name, numbers, their clocks."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from bireme.model.graph import ModelState
from bireme.runtime.recorder import Recording
from bireme.sync.group import Group, MessageGroup

__all__ = ["clock_offset_s", "gather_rows", "gather_tensors", "gather_times"]

NUM_ROUNDS = 15
"""Of looking at the clocks together."""

PIECE_ELEMENTS = 4 * 2**20
"""How much of a tensor goes in one message: 16 MiB in float32."""


def clock_offset_s(group: Group) -> float:
    """What to add to this rank's `perf_counter` to have rank 0's, to about the time a small message takes.

    Ranks come out of a barrier at nearly the same time.
    """
    if group.size == 1:
        return 0.0
    differences = []
    for _ in range(NUM_ROUNDS):
        group.barrier()
        now = perf_counter()
        first = torch.tensor([now], dtype=torch.float64)
        group.broadcast(first, 0)
        differences.append(float(first) - now)
    return median(differences)


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
    offset_s = clock_offset_s(group)
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


DTYPES = (
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
    row = [float(DTYPES.index(own[s.name])) + 1.0 if s.name in own else 0.0 for s in states]
    rows = gather_rows(group, row)
    return [DTYPES[int(max(column)) - 1] for column in zip(*rows, strict=True)]
