"""A program's compute instructions on a made-up clock.

Lowering and pictures need to know what comes before what across ranks, not how long things take. So every
forward lasts 2 ticks (half a micro-batch 1), a full backward 4, its two parts 2 each, and everything else
nothing; messages take no time. The clock is exact, and it stops only when the order can never run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bireme.errors import BiremeError
from bireme.schedule.instruction import COMPUTE, Instruction, Kind, Message

__all__ = ["NeverRunsError", "Ticks", "circle", "clock", "duration", "providers"]


class NeverRunsError(BiremeError):
    """An order in which ranks wait for ever; `cycle` is the circle of waits, empty where there is none."""

    def __init__(self, message: str, cycle: tuple[str, ...]) -> None:
        super().__init__(message)
        self.cycle = cycle


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
        raise _never_runs(tracks, held, waiting, num_stages)
    return Ticks(starts, ends)


def _never_runs(
    tracks: Sequence[Iterable[Instruction]],
    held: Sequence[Instruction | None],
    waiting: dict[Message, int],
    num_stages: int,
) -> NeverRunsError:
    """Who waits for whom, and the circle among them if there is one."""
    makers = {
        message: rank
        for rank, track in enumerate(tracks)
        for instruction in track
        for message in providers(instruction, num_stages)
    }
    waits = {
        rank: f"rank {rank} waits at {held[rank]} for the {message}" for message, rank in waiting.items()
    }
    waits_for = {rank: makers[message] for message, rank in waiting.items() if message in makers}
    cycle = circle(waits_for)
    shown = [waits[rank] for rank in cycle] or [waits[min(waits)]]
    return NeverRunsError(
        f"This order can never run: {'; '.join(shown)}. Check that every stage runs every micro-batch, and "
        "that no two ranks wait for each other.",
        tuple(waits[rank] for rank in cycle),
    )


def circle(waits_for: Mapping[int, int]) -> tuple[int, ...]:
    """Ranks that each wait for the next and the last for the first; empty where there are none."""
    for start in sorted(waits_for):
        path: list[int] = []
        rank = start
        while rank in waits_for and rank not in path:
            path.append(rank)
            rank = waits_for[rank]
        if rank in path:
            return tuple(path[path.index(rank) :])
    return ()
