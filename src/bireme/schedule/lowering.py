"""Lowering: put the communication into a compute-only program.

A send comes right after the instruction that makes the message. Its receive is posted on the other rank

* before the instruction that is under way there, on the clock of `ticks.py`, when the message is sent, so
  that the transfer never waits for the receiver, and
* at the latest one compute instruction before the one that uses it, so that the transfer overlaps.

Why that cannot deadlock, even where a send completes only once it is received: everything before the
posted receive on its rank ends strictly before the send starts on the made-up clock, so all instructions
run in the order of that clock. Why it needs few buffers: a receive is not posted before the clock comes
near it, whatever the number of micro-batches.

Messages from one rank to another are received in the order they are sent, whichever stages they belong
to. A transport may rely on that instead of tags.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bireme.errors import BiremeError
from bireme.schedule.instruction import COMPUTE, Instruction, Kind, Message
from bireme.schedule.program import Program, Track
from bireme.schedule.ticks import clock, providers

__all__ = ["lower"]


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A message that must cross from one rank to another: where it is made and where it is used."""

    message: Message
    from_stage: int
    from_rank: int
    made_at: int
    to_rank: int
    used_at: int


def lower(program: Program) -> Program:
    """The same program with sends and receives. It must hold none yet."""
    if program.is_lowered:
        raise BiremeError(f"{program.name} already has its sends and receives.")
    tracks = [list(track) for track in program.tracks]
    ends = clock(tracks, program.num_stages).ends
    receives: list[dict[int, list[Instruction]]] = [{} for _ in tracks]
    sends: list[dict[int, Instruction]] = [{} for _ in tracks]
    for channel in _channels(program, tracks).values():
        position = len(tracks[channel[0].to_rank])
        for transfer in reversed(channel):
            track_ends = ends[transfer.to_rank]
            sent = ends[transfer.from_rank][transfer.made_at]
            under_way = bisect_left(track_ends, sent)
            one_before = _previous_compute(tracks[transfer.to_rank], transfer.used_at)
            position = min(position, under_way, one_before)
            message = transfer.message
            receive = Kind.RECV_FORWARD if message.forward else Kind.RECV_BACKWARD
            receives[transfer.to_rank].setdefault(position, []).append(
                Instruction(receive, message.to_stage, message.batch, message.microbatch, half=message.half)
            )
            send = Kind.SEND_FORWARD if message.forward else Kind.SEND_BACKWARD
            sends[transfer.from_rank][transfer.made_at] = Instruction(
                send, transfer.from_stage, message.batch, message.microbatch, half=message.half
            )
    lowered = []
    for rank, track in enumerate(tracks):
        woven: list[Instruction] = []
        for index, instruction in enumerate(track):
            woven.extend(reversed(receives[rank].get(index, ())))
            woven.append(instruction)
            if index in sends[rank]:
                woven.append(sends[rank][index])
        lowered.append(Track(tuple(woven), versions_per_batch=program.tracks[rank].versions_per_batch))
    return replace(program, tracks=tuple(lowered))


def _channels(program: Program, tracks: list[list[Instruction]]) -> dict[tuple[int, int], list[_Transfer]]:
    """For each pair of ranks the transfers between them, in the order they are made."""
    uses: dict[Message, tuple[int, int]] = {}
    for rank, track in enumerate(tracks):
        for index, instruction in enumerate(track):
            needed = instruction.needs(program.num_stages)
            if needed is not None:
                uses[needed] = rank, index
    channels: dict[tuple[int, int], list[_Transfer]] = {}
    for rank, track in enumerate(tracks):
        for index, instruction in enumerate(track):
            for message in providers(instruction, program.num_stages):
                to_rank, used_at = uses.get(message, (rank, index))
                if to_rank != rank:
                    transfer = _Transfer(message, instruction.stage, rank, index, to_rank, used_at)
                    channels.setdefault((rank, to_rank), []).append(transfer)
    return channels


def _previous_compute(track: Sequence[Instruction], index: int) -> int:
    """The index of the last compute instruction before `index`, or of the track's begin."""
    for before in range(index - 1, -1, -1):
        if track[before].kind in COMPUTE:
            return before
    return 0
