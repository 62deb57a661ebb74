"""A program as a picture: one row per rank, time to the right, on the made-up clock of `ticks.py`.

`grid` cuts a program into cells. `ascii_picture` writes them as text for docs and docstrings; `drawn` gives
the same text in pieces that know their cell, so that others may colour them. A column is as long as a
forward, or half as long where forwards are sliced.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from bireme.schedule.instruction import AVERAGES, COMPUTE, HALF_LETTERS, Instruction, Kind
from bireme.schedule.program import Program, Track
from bireme.schedule.ticks import clock

__all__ = [
    "Cell",
    "Drawing",
    "Grid",
    "GridText",
    "ascii_picture",
    "drawn",
    "grid",
    "label",
    "number",
    "opening",
    "rank_name",
]

MAKES_VERSION = frozenset({Kind.UPDATE, Kind.TRIAL, *AVERAGES})
"""The steps that make a weight version or a part of one."""
LETTERS = {
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
    MAKES_VERSION: ("@", "update, average starts and ends, trial step"),
}
"""What is seen of the steps that make weight versions, instead of the space before the next cell."""

MOST_STAGES = 4
"""Of a rank that are all named."""

WIDTH = 110
"""Characters to a line of our source."""


@dataclass(frozen=True, slots=True)
class Cell:
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
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class GridText:
    """Some characters of a line, and the cell they show; rank names, spaces and marks have none."""

    text: str
    cell: Cell | None = None


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
    wanted = COMPUTE | MAKES_VERSION | {Kind.REDUCE}
    tracks = [[step for step in track if step.kind in wanted] for track in program.tracks]
    ticks = clock(tracks, program.num_stages)
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
    letter = LETTERS[step.kind]
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
    if len(stages) > MOST_STAGES:
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
    up if they can still be told apart; else the picture goes on in a second band.
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


def _cells(timed: Iterable[tuple[Instruction, int, int]], num_columns: int) -> Iterator[Cell]:
    column = 0
    marks: tuple[Instruction, ...] = ()
    for step, start, end in timed:
        if step.kind not in COMPUTE:
            marks = (*marks, step) if step.kind in MAKES_VERSION else marks
            continue
        if start > column:
            yield Cell(column, start - column, None, marks)
            marks = ()
        yield Cell(start, end - start, step, marks)
        marks = ()
        column = end
    if column < num_columns or marks:
        yield Cell(column, num_columns - column, None, marks)


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


def _pieces(program: Program, cell: Cell, pitch: int) -> Iterator[GridText]:
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


def _mark(cell: Cell) -> str:
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
    items = [f"{LETTERS[kind]} {NAMES[kind]}" for kind in LETTERS if kind in kinds]
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
