"""A program's compute instructions on a made-up clock.

Lowering and pictures need to know what comes before what across ranks, not how long things take. So every
forward lasts 2 ticks (half a micro-batch 1), a full backward 4, its two parts 2 each, and everything else
nothing; messages take no time. The clock is exact, and it stops only when the order can never run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bireme.errors import BiremeError
from bireme.schedule.instruction import COMPUTE, Instruction, Kind, Message

__all__ = ["Ticks", "clock", "duration", "providers"]


@dataclass(frozen=True, slots=True)
class Ticks:
    """For each rank, when each of its instructions starts and ends."""

    starts: list[list[int]]
    ends: list[list[int]]


def duration(instruction: Instruction) -> int:
    """How many ticks an instruction lasts."""
    if instruction.kind not in COMPUTE:
        return 0
    if instruction.kind is Kind.BACKWARD:
        return 4
    return 2 if instruction.half is None else 1


def providers(instruction: Instruction, num_stages: int) -> tuple[Message, ...]:
    """The messages that are ready when a compute instruction ends.

    The second half of a sliced forward has its own half ready, and with it the whole micro-batch: the
    stage behind may run on halves or on the whole.
    """
    made = instruction.makes(num_stages)
    if made is None:
        return ()
    if made.half == 1:
        return (made, made._replace(half=None))
    return (made,)


def clock(tracks: Sequence[Iterable[Instruction]], num_stages: int) -> Ticks:
    """Start and end of every instruction when each rank goes through its track as early as it can."""
    starts: list[list[int]] = [[] for _ in tracks]
    ends: list[list[int]] = [[] for _ in tracks]
    ready: dict[Message, int] = {}
    waiting: dict[Message, int] = {}
    rest = [iter(track) for track in tracks]
    held: list[Instruction | None] = [next(steps, None) for steps in rest]
    runnable = list(range(len(tracks)))
    while runnable:
        rank = runnable.pop()
        now = ends[rank][-1] if ends[rank] else 0
        while (instruction := held[rank]) is not None:
            needed = instruction.needs(num_stages)
            if needed is not None:
                arrival = ready.get(needed)
                if arrival is None:
                    waiting[needed] = rank
                    break
                now = max(now, arrival)
            starts[rank].append(now)
            now += duration(instruction)
            ends[rank].append(now)
            for message in providers(instruction, num_stages):
                ready[message] = now
                if message in waiting:
                    runnable.append(waiting.pop(message))
            held[rank] = next(rest[rank], None)
    if waiting:
        message, rank = min(waiting.items(), key=lambda item: item[1])
        raise BiremeError(
            f"This order can never run: rank {rank} waits at {held[rank]} for the {message}, which is not "
            f"computed before. {len(waiting)} of {len(tracks)} ranks wait for ever. Check that every stage "
            "runs every micro-batch, and that no two ranks wait for each other."
        )
    return Ticks(starts, ends)
