"""A program's grid in the terminal: batches by hue, passes by shade, idle time as dim dots.

Without colour it is the ascii picture.
"""

from collections.abc import Iterable

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from bireme.report.palette import HUES, Colour, fill, on
from bireme.schedule.grid import MARKS, Drawing, GridText, drawn, grid, opening
from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.program import Program, Rule

_MOST_BANDS = 4
_MOST_LINES = 48
"""Longer programs are cut off at the width of the screen."""

_SIGNS = frozenset(sign for sign, _ in MARKS.values())
_DIM, _BOLD = Style(dim=True), Style(bold=True)


def print_program(program: Program, console: Console) -> None:
    """Draw who does what in which order, each forward as long as every other."""
    max_bands = min(max(_MOST_LINES // program.num_ranks, 1), _MOST_BANDS)
    # A rank needs a column for every forward at least, so what is drawn lies in these batches.
    enough = -(-console.width * max_bands // (2 * program.num_microbatches))
    begin = opening(program, enough)
    cells = grid(begin)
    picture = drawn(cells, console.width, max_bands)
    coloured = console.color_system is not None and not console.no_color
    for number, band in enumerate(picture.bands):
        if number:
            console.print()
        for line in band:
            _print(console, (_styled(piece, begin.rule, coloured=coloured) for piece in line))
    _print(console, [Text(picture.legend)])
    if coloured:
        _print(console, _colours(picture, begin.rule))
    if picture.num_columns < cells.num_columns:
        of = f" of {cells.num_columns}" if begin is program else ""
        console.print(
            f"Showing the first {picture.num_columns}{of} columns; widen the terminal for more.",
            style="yellow",
            soft_wrap=True,
            highlight=False,
        )


def _print(console: Console, texts: Iterable[Text]) -> None:
    console.print(Text.assemble(*texts), soft_wrap=True)


def _styled(piece: GridText, rule: Rule, *, coloured: bool) -> Text:
    if not coloured:
        return Text(piece.text)
    if piece.cell is None:
        return Text(piece.text, _BOLD if piece.text in _SIGNS else _DIM)
    step = piece.cell.instruction
    return Text(piece.text, _DIM if step is None else _style(step, rule))


def _style(step: Instruction, rule: Rule) -> Style:
    underline = rule is not Rule.SYNCHRONOUS and (step.version or 0) % 2 == 1
    return _on(fill(step.batch, step.kind), underline=underline)


def _on(colour: Colour, *, underline: bool = False) -> Style:
    return Style(
        color=Color.from_rgb(*on(colour)), bgcolor=Color.from_rgb(*colour), underline=underline or None
    )


def _colours(picture: Drawing, rule: Rule) -> list[Text]:
    """A legend of the batches that are seen, and of the underline."""
    steps = [
        piece.cell.instruction
        for band in picture.bands
        for line in band
        for piece in line
        if piece.cell is not None and piece.cell.instruction is not None
    ]
    batches = sorted({step.batch for step in steps})
    legend: list[Text] = []
    for first in batches[: len(HUES)]:
        same = ", ".join(str(batch) for batch in batches if batch % len(HUES) == first % len(HUES))
        legend += [Text(f" batch {same} ", _on(fill(first, Kind.FORWARD))), Text(" ")]
    if rule is not Rule.SYNCHRONOUS and any((step.version or 0) % 2 for step in steps):
        legend += [Text(" "), Text("underlined", Style(underline=True)), Text(": on an odd weight version")]
    return legend
