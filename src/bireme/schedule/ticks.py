"""A program's compute instructions on a made-up clock.

Lowering and pictures need to know what comes before what across ranks, not how long things take. So every
forward lasts 2 ticks (half a micro-batch 1), a full backward 4, its two parts 2 each, and everything else
nothing; messages and sums take no time. The clock is exact, and it stops only when the order can never run.

The UPDATE of a batch waits until every stage has come to the batch's REDUCE: all ranks agree on its norm and
on whether it is finite. Updates that are apart do not wait, nor do any where each micro-batch has an
update of its own (STASHED).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bireme.errors import BiremeError
from bireme.schedule.instruction import COMPUTE, Instruction, Kind, Message

__all__ = ["NeverRunsError", "Ticks", "circle", "clock", "duration", "providers", "sum_of"]

Need = Message | int
"""What an instruction waits for: a message, or the sum of the batch of that number."""


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
    next stage may run on halves or on the whole.
    """
    made = instruction.makes(num_stages)
    if made is None:
        return ()
    if made.half == 1:
        return (made, made._replace(half=None))
    return (made,)


def sum_of(instruction: Instruction) -> int | None:
    """The batch whose sum over all stages REDUCE adds to and UPDATE waits for."""
    is_part = instruction.kind in (Kind.REDUCE, Kind.UPDATE) and instruction.microbatch is None
    is_part = is_part and not instruction.is_apart
    return instruction.batch if is_part else None


def clock(tracks: Sequence[Iterable[Instruction]], num_stages: int) -> Ticks:
    """Start and end of every instruction when each rank goes through its track as early as it can."""
    starts: list[list[int]] = [[] for _ in tracks]
    ends: list[list[int]] = [[] for _ in tracks]
    ready: dict[Need, int] = {}
    waiting: dict[Need, list[int]] = {}
    reduced: dict[int, dict[int, int]] = {}
    """For each batch the stages that have come to its REDUCE, and when."""
    rest = [iter(track) for track in tracks]
    held: list[Instruction | None] = [next(steps, None) for steps in rest]
    runnable = list(range(len(tracks)))
    while runnable:
        rank = runnable.pop()
        now = ends[rank][-1] if ends[rank] else 0
        while (instruction := held[rank]) is not None:
            needed = _need(instruction, num_stages)
            if needed is not None:
                arrival = ready.get(needed)
                if arrival is None:
                    waiting.setdefault(needed, []).append(rank)
                    break
                now = max(now, arrival)
            starts[rank].append(now)
            now += duration(instruction)
            ends[rank].append(now)
            made: dict[Need, int] = dict.fromkeys(providers(instruction, num_stages), now)
            if instruction.kind is Kind.REDUCE and (batch := sum_of(instruction)) is not None:
                parts = reduced.setdefault(batch, {})
                parts[instruction.stage] = now
                if len(parts) == num_stages:
                    made[batch] = max(parts.values())
            ready |= made
            for one in made:
                runnable.extend(waiting.pop(one, ()))
            held[rank] = next(rest[rank], None)
    if waiting:
        raise _never_runs(tracks, held, waiting, reduced, num_stages)
    return Ticks(starts, ends)


def _need(instruction: Instruction, num_stages: int) -> Need | None:
    """What must be there before an instruction can start."""
    if instruction.kind is Kind.UPDATE:
        return sum_of(instruction)
    return instruction.needs(num_stages)


def _never_runs(
    tracks: Sequence[Iterable[Instruction]],
    held: Sequence[Instruction | None],
    waiting: Mapping[Need, Sequence[int]],
    reduced: Mapping[int, Iterable[int]],
    num_stages: int,
) -> NeverRunsError:
    """Who waits for whom, and the circle among them if there is one."""
    homes = {instruction.stage: rank for rank, track in enumerate(tracks) for instruction in track}
    makers = {
        message: homes[instruction.stage]
        for track in tracks
        for instruction in track
        for message in providers(instruction, num_stages)
    }
    waits: dict[int, str] = {}
    waits_for: dict[int, int] = {}
    for needed, ranks in waiting.items():
        if isinstance(needed, Message):
            maker, what = makers.get(needed), f"the {needed}"
        else:
            missing = min(set(range(num_stages)).difference(reduced.get(needed, ())))
            maker, what = homes.get(missing), f"the REDUCE of batch {needed} on stage {missing}"
        for rank in ranks:
            waits[rank] = f"rank {rank} waits at {held[rank]} for {what}"
            if maker is not None:
                waits_for[rank] = maker
    cycle = circle(waits_for)
    shown = [waits[rank] for rank in cycle] or [waits[min(waits)]]
    return NeverRunsError(
        f"This order deadlocks: {'; '.join(shown)}. Check that every stage runs every micro-batch, and "
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
