"""A program as a picture: one row per rank, time to the right, on the made-up clock of `ticks.py`.

`grid` cuts a program into cells. `ascii_picture` writes them as text for docs and docstrings; `drawn` gives
the same text in pieces that know their cell, so that others may colour them. A column is as long as a
forward, or half as long where forwards are sliced.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from bireme.errors import BiremeError
from bireme.schedule.instruction import AVERAGES, COMPUTE, HALF_LETTERS, Instruction, Kind, Message
from bireme.schedule.program import Program, Track
from bireme.schedule.routes import Routes

# A program's compute instructions on a made-up clock.
#
# Lowering and pictures need the order of instructions across ranks, not how long they take. So every forward
# lasts 2 ticks (half a micro-batch 1), a full backward 4, its two parts 2 each, and everything else nothing;
# on a stage of w ranks w times as long, so that all stages keep pace. Messages and sums take no time. The
# clock is exact, and it stops only when the order can never run.
#
# The UPDATE of a batch waits until every rank of every stage has come to the batch's REDUCE: all ranks agree
# on its norm and on whether it is finite. Updates that are apart do not wait, nor do any if each micro-batch
# has an update of its own (STASHED).

_Need = Message | int
"""What an instruction waits for: a message, or the sum of the batch of that number."""


class NeverRunsError(BiremeError):
    """An order in which ranks wait for ever; `cycle` is the circle of waits, empty where there is none."""

    def __init__(self, message: str, cycle: tuple[str, ...]) -> None:
        super().__init__(message)
        self.cycle = cycle


@dataclass(frozen=True, slots=True)
class _Ticks:
    """For each rank, when each of its instructions starts and ends; where messages are made and used."""

    starts: list[list[int]]
    ends: list[list[int]]
    made: list[list[tuple[int, Message]]]
    """For each rank its messages, with the index of the instruction that makes each."""
    used: dict[Message, tuple[int, int]]
    """The rank that uses a message, and the index of the instruction there."""


_TICKS = {kind: 4 if kind is Kind.BACKWARD else 2 for kind in COMPUTE}


def duration(instruction: Instruction) -> int:
    """How many ticks an instruction lasts."""
    ticks = _TICKS.get(instruction.kind, 0)
    return 1 if ticks == 2 and instruction.half is not None else ticks


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


def clock(tracks: Sequence[Iterable[Instruction]], routes: Routes) -> _Ticks:
    """Start and end of every instruction when each rank goes through its track as early as it can."""
    num_stages = routes.num_stages
    widths = [len(routes.ranks_of(stage)) for stage in range(num_stages)]
    starts: list[list[int]] = [[] for _ in tracks]
    ends: list[list[int]] = [[] for _ in tracks]
    made: list[list[tuple[int, Message]]] = [[] for _ in tracks]
    used: dict[Message, tuple[int, int]] = {}
    ready: dict[_Need, int] = {}
    waiting: dict[_Need, list[int]] = {}
    reduced: dict[int, dict[tuple[int, int], int]] = {}
    """For each batch the stages and ranks that have come to its REDUCE, and when."""
    rest = [iter(track) for track in tracks]
    held: list[Instruction | None] = [next(steps, None) for steps in rest]
    runnable = list(range(len(tracks)))
    while runnable:
        rank = runnable.pop()
        starts_here, ends_here, made_here, steps = starts[rank], ends[rank], made[rank], rest[rank]
        now = ends_here[-1] if ends_here else 0
        instruction = held[rank]
        while instruction is not None:
            kind = instruction.kind
            ticks = _TICKS.get(kind)
            needed: _Need | None = None
            if ticks:
                needed = instruction.needs(num_stages)
            elif kind is Kind.UPDATE:
                needed = sum_of(instruction)
            if needed is not None:
                arrival = ready.get(needed)
                if arrival is None:
                    waiting.setdefault(needed, []).append(rank)
                    break
                if arrival > now:
                    now = arrival
                if isinstance(needed, Message):
                    used[needed] = rank, len(starts_here)
            starts_here.append(now)
            if ticks:
                lasts = ticks if instruction.half is None else duration(instruction)
                now += lasts * widths[instruction.stage]
                message = instruction.makes(num_stages)
                while message is not None:
                    made_here.append((len(ends_here), message))
                    ready[message] = now
                    if message in waiting:
                        runnable += waiting.pop(message)
                    message = message._replace(half=None) if message.half == 1 else None
            elif kind is Kind.REDUCE and (batch := sum_of(instruction)) is not None:
                parts = reduced.setdefault(batch, {})
                parts[instruction.stage, rank] = now
                if len(parts) == routes.num_places:
                    ready[batch] = max(parts.values())
                    runnable += waiting.pop(batch, ())
            ends_here.append(now)
            instruction = next(steps, None)
        held[rank] = instruction
    if waiting:
        raise _never_runs(tracks, held, waiting, reduced, routes)
    return _Ticks(starts, ends, made, used)


def _never_runs(
    tracks: Sequence[Iterable[Instruction]],
    held: Sequence[Instruction | None],
    waiting: Mapping[_Need, Sequence[int]],
    reduced: Mapping[int, Iterable[tuple[int, int]]],
    routes: Routes,
) -> NeverRunsError:
    """Who waits for whom, and the circle among them if there is one."""
    makers = {
        message: rank
        for rank, track in enumerate(tracks)
        for instruction in track
        for message in providers(instruction, routes.num_stages)
    }
    waits: dict[int, str] = {}
    waits_for: dict[int, int] = {}
    for needed, ranks in waiting.items():
        if isinstance(needed, Message):
            maker, what = makers.get(needed), f"the {needed}"
        else:
            missing, maker = min(set(routes.places()).difference(reduced.get(needed, ())))
            what = f"the REDUCE of batch {needed} on stage {missing}"
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


_MAKES_VERSION = frozenset({Kind.UPDATE, Kind.TRIAL, *AVERAGES})
"""The steps that make a weight version or a part of one."""
_LETTERS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
    Kind.RECOMPUTE: "R",
}
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward for the inputs",
    Kind.BACKWARD_WEIGHT: "backward for the weights",
    Kind.RECOMPUTE: "recomputation",
}
MARKS = {
    frozenset({Kind.UPDATE}): ("|", "update"),
    frozenset({Kind.TRIAL}): ("'", "trial step"),
    frozenset({Kind.UPDATE, Kind.TRIAL}): ("!", "update and trial step"),
    frozenset({Kind.UPDATE, Kind.AVERAGE_START}): ("{", "update, average starts"),
    frozenset({Kind.AVERAGE_END}): ("}", "average ends"),
    frozenset({Kind.UPDATE, *AVERAGES}): ("#", "update, average starts and ends"),
    frozenset({Kind.AVERAGE_END, Kind.TRIAL}): (")", "average ends, trial step"),
    frozenset({Kind.UPDATE, Kind.AVERAGE_START, Kind.TRIAL}): ("(", "update, average starts, trial step"),
    _MAKES_VERSION: ("@", "update, average starts and ends, trial step"),
}
"""What is seen of the steps that make weight versions, instead of the space before the next cell."""

_MOST_STAGES = 4
"""Of a rank that are all named."""

WIDTH = 110
"""Characters to a line of our source."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """So many columns of a rank: a compute instruction, or idle time where there is none.

    `marks` are the updates and trial steps just before it.
    """

    start: int
    width: int
    instruction: Instruction | None
    marks: tuple[Instruction, ...] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """A program's cells, rank by rank. Each row covers all columns without gaps.

    A row may end with a cell of no width, where a rank that works to the end makes its last version.
    """

    program: Program
    ticks_per_column: int
    num_columns: int
    rows: tuple[tuple[_Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class GridText:
    """Some characters of a line, and the cell they show; rank names, spaces and marks have none."""

    text: str
    cell: _Cell | None = None


@dataclass(frozen=True, slots=True)
class Drawing:
    """A grid as text: bands of lines, one below the other where all columns are too wide for one.

    Each band has a line per rank. `legend` says what the signs in it mean.
    """

    bands: tuple[tuple[tuple[GridText, ...], ...], ...]
    legend: str
    num_columns: int
    """How many columns are in it: fewer than the grid has where the bands did not suffice."""


def grid(program: Program) -> Grid:
    """The program's cells."""
    wanted = COMPUTE | _MAKES_VERSION | {Kind.REDUCE}
    tracks = [[step for step in track if step.kind in wanted] for track in program.tracks]
    ticks = clock(tracks, program.routes)
    unit = math.gcd(*(end for ends in ticks.ends for end in ends)) or 2
    num_columns = max((ends[-1] for ends in ticks.ends if ends), default=0) // unit
    rows = []
    for track, starts, ends in zip(tracks, ticks.starts, ticks.ends, strict=True):
        timed = zip(track, (start // unit for start in starts), (end // unit for end in ends), strict=True)
        rows.append(tuple(_cells(timed, num_columns)))
    return Grid(program, unit, num_columns, tuple(rows))


def opening(program: Program, num_batches: int) -> Program:
    """The first batches of a program, as if the window ended with them."""
    if num_batches >= program.num_batches:
        return program
    end = program.first_batch + num_batches
    tracks = (
        Track(
            tuple(
                step.shifted(block.batches, block.versions)
                for block in track.blocks()
                for step in block.instructions
                if step.batch + block.batches < end
            ),
            versions_per_batch=track.versions_per_batch,
        )
        for track in program.tracks
    )
    return replace(program, num_batches=num_batches, tracks=tuple(tracks))


def label(program: Program, step: Instruction) -> str:
    """Such as `F5`, `0b` for half a forward, or `f5` on the second stage of a rank."""
    stages = program.stages_of(program.rank_of_stage[step.stage])
    most = _most_stages(program.rank_of_stage)
    letter = _LETTERS[step.kind]
    if most > 2:
        letter = f"{step.stage}{letter}"
    elif stages.index(step.stage) == 1:
        letter = letter.lower()
    elif most == 1 and step.half is not None:
        letter = ""
    return letter + number(program, step)


def number(program: Program, step: Instruction) -> str:
    """The micro-batch of a compute instruction, counted on through batches, and its half."""
    half = "" if step.half is None else HALF_LETTERS[step.half]
    return f"{step.batch * program.num_microbatches + (step.microbatch or 0)}{half}"


def rank_name(program: Program, rank: int) -> str:
    """Such as `rank 0 · stages 0, 7`; of many stages the first two and the last."""
    stages = [str(stage) for stage in program.stages_of(rank)]
    if len(stages) > _MOST_STAGES:
        stages = [*stages[:2], "...", stages[-1]]
    return f"rank {rank} · stage{'s' if len(stages) > 1 else ''} {', '.join(stages)}"


def ascii_picture(program: Program, width: int = WIDTH) -> str:
    """The program as text, in lines of at most so many characters if at all possible."""
    picture = drawn(grid(program), width)
    bands = ("\n".join("".join(piece.text for piece in line) for line in band) for band in picture.bands)
    return "\n\n".join(bands) + "\n" + picture.legend


def drawn(cells: Grid, width: int, max_bands: int | None = None) -> Drawing:
    """The grid in pieces of text.

    Cells stand apart, each with a space or a mark before it. Where that is wider than `width` they close
    up if they stay distinct; else the picture goes on in a second band.
    """
    names = [f"rank {rank}:" for rank in range(cells.program.num_ranks)]
    longest = max(map(len, names))
    room = max(width - longest, 1)
    pitch, tight = _pitch(cells, spaced=True), _pitch(cells, spaced=False)
    if cells.num_columns * pitch > room > cells.num_columns * tight and _stays_legible(cells, tight):
        pitch = tight
        longest += 1
    columns = max(room // pitch, 1)
    num_bands = max(-(-cells.num_columns // columns), 1)
    if max_bands is None or num_bands <= max_bands:
        columns = -(-cells.num_columns // num_bands)
    else:
        num_bands = max_bands
    rows = [[piece for cell in row for piece in _pieces(cells.program, cell, pitch)] for row in cells.rows]
    bands = []
    for band in range(num_bands):
        begin, end = band * columns, (band + 1) * columns
        past_the_end = end >= cells.num_columns  # where a last mark may stand
        window = begin * pitch, end * pitch + past_the_end
        bands.append(
            tuple(_line(name.ljust(longest), row, *window) for name, row in zip(names, rows, strict=True))
        )
    return Drawing(tuple(bands), _legend(cells, width), min(num_bands * columns, cells.num_columns))


def _cells(timed: Iterable[tuple[Instruction, int, int]], num_columns: int) -> Iterator[_Cell]:
    column = 0
    marks: tuple[Instruction, ...] = ()
    for step, start, end in timed:
        if step.kind not in COMPUTE:
            marks = (*marks, step) if step.kind in _MAKES_VERSION else marks
            continue
        if start > column:
            yield _Cell(column, start - column, None, marks)
            marks = ()
        yield _Cell(start, end - start, step, marks)
        marks = ()
        column = end
    if column < num_columns or marks:
        yield _Cell(column, num_columns - column, None, marks)


@cache
def _most_stages(rank_of_stage: tuple[int, ...]) -> int:
    return max(map(rank_of_stage.count, set(rank_of_stage)))


def _pitch(cells: Grid, *, spaced: bool) -> int:
    """The fewest characters to a column in which every label fits, with a space before it or without."""
    pitch = 2
    for row in cells.rows:
        for cell in row:
            if cell.instruction is not None:
                length = len(label(cells.program, cell.instruction)) + (spaced or bool(cell.marks))
                pitch = max(pitch, -(-length // cell.width))
    return pitch


def _stays_legible(cells: Grid, pitch: int) -> bool:
    """Whether no two labels touch, but for those of halves."""
    for row in cells.rows:
        for cell, following in pairwise(row):
            steps = cell.instruction, following.instruction
            full = [step is not None and len(label(cells.program, step)) >= pitch for step in steps]
            is_half = following.instruction is not None and following.instruction.half is not None
            if cell.width == following.width == 1 and all(full) and not is_half:
                return False
    return True


def _pieces(program: Program, cell: _Cell, pitch: int) -> Iterator[GridText]:
    """A cell's characters: `pitch` for each column."""
    mark = _mark(cell)
    if cell.instruction is None:
        if not cell.width:
            yield GridText(mark)
        for column in range(cell.width):
            yield GridText(" " if column else mark)
            yield GridText(".".ljust(pitch - 1), cell)
        return
    text = label(program, cell.instruction)
    length = pitch * cell.width
    if len(text) < length:
        yield GridText(mark)
        length -= 1
    yield GridText(text.ljust(length, "=" if cell.width > 1 else " "), cell)


def _mark(cell: _Cell) -> str:
    return MARKS[frozenset(step.kind for step in cell.marks)][0] if cell.marks else " "


def _line(name: str, row: Iterable[GridText], begin: int, end: int) -> tuple[GridText, ...]:
    """The characters of a row from `begin` to before `end`, without spaces at its end."""
    line = [GridText(name)]
    position = 0
    for piece in row:
        text = piece.text[max(begin - position, 0) : max(end - position, 0)]
        position += len(piece.text)
        if text:
            line.append(GridText(text, piece.cell))
    while line and not (kept := line[-1].text.rstrip()):
        line.pop()
    if line:
        line[-1] = GridText(kept, line[-1].cell)
    return tuple(line)


def _legend(cells: Grid, width: int) -> str:
    """What the signs that occur mean, in as few lines as hold it."""
    found = [cell for row in cells.rows for cell in row]
    steps = [cell.instruction for cell in found if cell.instruction is not None]
    kinds = {step.kind for step in steps}
    most = _most_stages(cells.program.rank_of_stage)
    items = [f"{_LETTERS[kind]} {NAMES[kind]}" for kind in _LETTERS if kind in kinds]
    if any(step.half is not None for step in steps):
        items.append("0a 0b halves of a forward")
    if most == 2:
        items.append("small letters: second stage of the rank")
    elif most > 2:
        items.append("number in front: stage")
    if any(cell.instruction is None and cell.width for cell in found):
        items.append(". idle")
    made = {frozenset(step.kind for step in cell.marks) for cell in found}
    items += [f"{sign} {name}" for kinds_made, (sign, name) in MARKS.items() if kinds_made in made]
    lines = [""]
    for item in items:
        longer = f"{lines[-1]}   {item}" if lines[-1] else item
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(item)
    return "\n".join(lines)
