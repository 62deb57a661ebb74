"""Pictures in files: a timeline, and the lifetimes of memory blocks; each with a heading and a legend.

A file is SVG with nothing installed, a timeline is PNG too with `bireme[viz]`, and lifetimes are a page too.
"""

import io
import math
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from bireme.bounds import bytes_text, counted
from bireme.errors import BiremeError, printable
from bireme.files import write_bytes_atomically, write_text_atomically
from bireme.profile.behavior import Behavior, MemoryBlock, Owner
from bireme.profile.swapping import Swap, SwapPlan
from bireme.report import palette
from bireme.report.lanes import Lanes, drawn_batches, end_of, lanes_of, legend, plain_seconds
from bireme.report.markup import BASELINE, svg
from bireme.report.palette import Colour
from bireme.report.profile_table import footprint
from bireme.report.shapes import (
    Anchor,
    Flag,
    Line,
    Picture,
    Quantity,
    Rect,
    Scale,
    Shape,
    Text,
    heading,
    text_width,
)
from bireme.schedule.grid import rank_name
from bireme.timeline.timeline import Timeline

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

WIDTH = 1400
MARGIN = 24
_TOP = 80
RIGHT = WIDTH - MARGIN - 24


def write_picture(timeline: Timeline, path: Path) -> None:
    """Draw who computed what when; the suffix of `path` says in which format."""
    if check_suffix(path, (".svg", ".png")) == ".svg":
        write_text_atomically(path, svg(laid_out(timeline)))
    else:
        write_bytes_atomically(path, png(laid_out(timeline)))


def check_suffix(path: Path, known: Sequence[str]) -> str:
    """The suffix of a file. Refuses a suffix that is not among the `known` ones."""
    suffix = path.suffix.lower()
    if suffix not in known:
        kind = f"ends in {path.suffix}" if suffix else "has no ending"
        raise BiremeError(
            f"{path} {kind}, but this picture can only be {' or '.join(known)}. Name such a file."
        )
    return suffix


def laid_out(timeline: Timeline) -> Picture:
    """The picture of a timeline, 1400 pixels wide and as high as its ranks need."""
    program = timeline.program
    num_batches = drawn_batches(timeline)
    widest = max(text_width(rank_name(program, rank), 13) for rank in range(program.num_ranks))
    left = MARGIN + widest + 14
    scale = Scale(0.0, end_of(timeline, num_batches) or 1.0, left, RIGHT, Quantity.SECONDS)
    lanes = lanes_of(timeline, num_batches, scale, MARGIN, program.num_ranks)
    bottom = _TOP + lanes.height
    key = legend([lanes], MARGIN, bottom + 50, WIDTH - 2 * MARGIN)
    title = _title(timeline)
    head = heading(title, _figures(lanes), MARGIN, WIDTH - 2 * MARGIN)
    shapes = (*head, *_axis(scale, bottom), *lanes.beds(_TOP), *lanes.work(_TOP), *key)
    lowest = max(shape.y for shape in key if isinstance(shape, Text))
    return Picture(WIDTH, math.ceil(lowest) + MARGIN, title, shapes)


def _title(timeline: Timeline) -> str:
    program = timeline.program
    ranks = "" if program.num_ranks == program.num_stages else f" on {program.num_ranks} ranks"
    counts = (
        counted(program.num_stages, "stage") + ranks,
        counted(program.num_microbatches, "micro-batch"),
        counted(program.num_batches, "batch"),
    )
    return printable(f"{program.name} · {' · '.join(counts)} · {timeline.source}")


def _figures(lanes: Lanes) -> str:
    timeline, num_batches = lanes.timeline, lanes.timeline.program.num_batches
    text = f"window {plain_seconds(timeline.makespan_s)}, bubble {timeline.bubble_fraction:.1%} of it"
    if num_batches > 1:
        steady = (
            f"{plain_seconds(timeline.steady_batch_s)} a batch, bubble {timeline.steady_bubble_fraction:.1%}"
        )
        text += f" · steady state {steady}"
    if lanes.num_batches < num_batches:
        text += f" · drawn: the first {counted(lanes.num_batches, 'batch')} of {num_batches}"
    return text


def _axis(scale: Scale, bottom: float) -> Iterator[Shape]:
    """Round times, and lines from them through all lanes."""
    for moment_s in scale.marks(10):
        x = scale.at(moment_s)
        yield Line(x, _TOP, x, bottom + 4, palette.AXIS)
        yield Text(x, bottom + 14, plain_seconds(moment_s), 12, palette.PALE_INK, Anchor.MIDDLE)


# The lifetimes of memory blocks: time to the right, bytes upwards, a color for each owner.
#
# Above it is how much lives at each moment. A block is a rectangle from its birth to its death, dark where
# it is used and pale while it could be swapped out. Blocks lower than half a pixel are left out, and counted.
#
# Rows for blocks that come and go: each gets a range of bytes that no other block has while it lives.
#
# It is what an allocator would do that knew the whole iteration, so a picture of it is about as high as the
# peak. Real addresses are of no use there: they lie too far apart.


def packed(blocks: Iterable[MemoryBlock], num_events: int) -> dict[int, int]:
    """The lowest byte of each block, by its number: what stays at the bottom, then what takes most room."""
    offsets: dict[int, int] = {}
    placed: list[tuple[int, int, MemoryBlock]] = []
    for block in sorted(blocks, key=lambda block: _order(block, num_events)):
        offset = 0
        for low, _, other in placed:
            if low >= offset + block.num_bytes:
                break
            if _meet(block, other, num_events):
                offset = max(offset, low + other.num_bytes)
        offsets[block.id] = offset
        insort(placed, (offset, block.id, block))
    return offsets


def _order(block: MemoryBlock, num_events: int) -> tuple[bool, str, int, int]:
    owner = block.owner if block.is_persistent else ""
    lived = _end(block, num_events) - block.birth_event
    return not block.is_persistent, owner, -block.num_bytes * lived, block.id


def _meet(block: MemoryBlock, other: MemoryBlock, num_events: int) -> bool:
    """Whether both live at some moment."""
    return block.birth_event < _end(other, num_events) and other.birth_event < _end(block, num_events)


def _end(block: MemoryBlock, num_events: int) -> int:
    return num_events if block.death_event is None else block.death_event


GANTT = (".svg", ".html")
"""The suffixes of files that lifetimes are drawn to."""

LEFT = 110
_LEGEND = 86
_PHASES, _PHASE = 116, 20
_ABOVE, _FOOTPRINT = 24, 110
SPACE = 14
_LIVES = 560
"""The parts of the picture from above: the tops of the first, and the heights of the others."""
_BOTTOM = _PHASES + _PHASE + _ABOVE + _FOOTPRINT + SPACE + _LIVES
_LEAST = 0.5
"""The height in pixels below which a block is left out."""
_MARKED = 4
"""The height from which the uses of a block are marked."""
_MOST_BLOCKS, _MOST_MARKS = 4000, 20_000
_STEP = 2
"""The width of a step of the footprint."""
_MOST_TICKS = 6

_COLOURS: dict[Owner, Colour] = {
    Owner.PARAMETER: palette.HUES[0],
    Owner.BUFFER: palette.darker(palette.HUES[0]),
    Owner.GRADIENT: palette.HUES[1],
    Owner.OPTIMIZER: palette.HUES[3],
    Owner.ACTIVATION: palette.HUES[2],
    Owner.INPUT: palette.HUES[5],
    Owner.WORKSPACE: palette.HUES[4],
}
_FOOTPRINT_FILL: Colour = (196, 203, 212)
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ margin: 0; background: #fff; }}
svg {{ display: block; margin: auto; max-width: 100%; height: auto; }}
.block:hover {{ stroke: #000; stroke-width: 1.5; }}
.use {{ pointer-events: none; }}
</style>
</head>
<body>
{picture}</body>
</html>
"""


def write_gantt(title: str, behavior: Behavior, plan: SwapPlan, path: Path) -> None:
    """Draw the lifetimes; the suffix of `path` says whether as a picture or as a page to point into."""
    check_suffix(path, GANTT)
    text = svg(gantt(title, behavior, plan))
    if path.suffix.lower() == ".html":
        text = _PAGE.format(title=escape(title), picture=text)
    write_text_atomically(path, text)


def gantt(title: str, behavior: Behavior, plan: SwapPlan) -> Picture:
    """The picture, 1400 pixels wide."""
    view = _view(behavior)
    title = printable(title)
    shapes = [
        *heading(title, _figures_of_blocks(view, plan), MARGIN, WIDTH - 2 * MARGIN),
        *_legend(view),
        *_axes(view),
        *_footprint(view),
        *_lives(view, plan.swaps),
        *_peak(view),
    ]
    return Picture(WIDTH, _BOTTOM + 40, title, tuple(shapes))


@dataclass(frozen=True, slots=True)
class _View:
    """What is drawn, and how large."""

    behavior: Behavior
    blocks: tuple[MemoryBlock, ...]
    offsets: dict[int, int]
    time: Scale
    room: Scale
    """Of bytes, from the bottom of the lives to their top."""

    def x(self, at_s: float) -> float:
        """Where a moment is."""
        return self.time.at(at_s)

    def y(self, offset: float) -> float:
        """Where a byte is among the lives."""
        return self.room.at(offset)

    def height(self, num_bytes: float) -> float:
        """The height of `num_bytes` in pixels."""
        return self.room.start - self.y(num_bytes)

    def left_out(self) -> list[MemoryBlock]:
        """Blocks too small to be seen."""
        drawn = {block.id for block in self.blocks}
        return [block for block in self.behavior.blocks if block.id not in drawn]


def _view(behavior: Behavior) -> _View:
    least_bytes = behavior.peak.num_bytes * _LEAST / _LIVES
    large = sorted(behavior.blocks, key=lambda block: -block.num_bytes)[:_MOST_BLOCKS]
    blocks = tuple(block for block in large if block.num_bytes >= least_bytes)
    offsets = packed(blocks, behavior.num_events)
    highest = max((offsets[block.id] + block.num_bytes for block in blocks), default=1)
    time = Scale(0.0, behavior.duration_s or 1.0, LEFT, RIGHT, Quantity.SECONDS)
    whole_bytes = max(highest, behavior.peak.num_bytes, 1)
    return _View(behavior, blocks, offsets, time, Scale(0, whole_bytes, _BOTTOM, _BOTTOM - _LIVES))


def _figures_of_blocks(view: _View, plan: SwapPlan) -> str:
    behavior = view.behavior
    text = (
        f"{plain_seconds(behavior.duration_s)} on {behavior.device}"
        f" · {len(behavior.blocks)} blocks, {behavior.num_events} events"
        f" · peak {bytes_text(behavior.peak.num_bytes)}"
    )
    if plan.saved_bytes:
        text += f", {bytes_text(plan.peak_bytes)} with {len(plan.swaps)} blocks swapped out"
    left_out = view.left_out()
    if left_out:
        largest = max(block.num_bytes for block in left_out)
        text += f" · not drawn: {len(left_out)} blocks of {bytes_text(largest)} or less"
    return text


def _legend(view: _View) -> Iterator[Shape]:
    at_peak = view.behavior.by_owner()
    occurring = {block.owner for block in view.behavior.blocks}
    entries = [(_COLOURS[o], f"{o} {bytes_text(at_peak[o])}") for o in Owner if o in occurring]
    x: float = MARGIN
    for colour, text in entries:
        yield Rect(x, _LEGEND - 8, 16, 16, colour, role="key")
        yield Text(x + 22, _LEGEND, text, 12, palette.INK)
        x += 22 + text_width(text, 12) + 18
    yield Rect(x, _LEGEND - 8, 16, 16, palette.paler(_COLOURS[Owner.ACTIVATION]), role="key")
    yield Text(x + 22, _LEGEND, "pale: could be swapped out", 12, palette.INK)


def _axes(view: _View) -> Iterator[Shape]:
    """The phases on top, round times at the bottom, and bytes at the left."""
    behavior = view.behavior
    for span in behavior.spans:
        left, right = view.x(span.start_s), view.x(span.end_s)
        width = max(right - left - 1, 1)
        yield Rect(left, _PHASES, width, _PHASE, palette.LINK_BED, role="phase", title=span.phase)
        if text_width(span.phase, 12) <= right - left:
            yield Text((left + right) / 2, _PHASES + _PHASE / 2, span.phase, 12, palette.INK, Anchor.MIDDLE)
        yield Line(left, _PHASES, left, _BOTTOM, palette.AXIS)
    for moment_s in view.time.marks(10):
        x = view.x(moment_s)
        yield Line(x, _BOTTOM, x, _BOTTOM + 5, palette.PALE_INK)
        yield Text(x, _BOTTOM + 16, plain_seconds(moment_s), 12, palette.PALE_INK, Anchor.MIDDLE)
    yield Line(LEFT, _BOTTOM, RIGHT, _BOTTOM, palette.PALE_INK)
    step_bytes = 2 ** math.ceil(math.log2(max(view.room.most / _MOST_TICKS, 1)))
    for num_bytes in range(0, int(view.room.most) + 1, step_bytes):
        y = view.y(num_bytes)
        yield Line(LEFT - 5, y, RIGHT, y, palette.AXIS)
        yield Text(LEFT - 9, y, bytes_text(num_bytes), 12, palette.PALE_INK, Anchor.END)
    middle = _PHASES + _PHASE + _ABOVE + _FOOTPRINT / 2
    yield Text(LEFT - 9, middle, "all blocks", 12, palette.PALE_INK, Anchor.END)


def _footprint(view: _View) -> Iterator[Shape]:
    """The most that lives within each step of time."""
    bottom = _PHASES + _PHASE + _ABOVE + _FOOTPRINT
    for i, live in enumerate(footprint(view.behavior, (RIGHT - LEFT) // _STEP)):
        height = live / max(view.behavior.peak.num_bytes, 1) * _FOOTPRINT
        yield Rect(LEFT + i * _STEP, bottom - height, _STEP, height, _FOOTPRINT_FILL, role="footprint")


def _lives(view: _View, swaps: Sequence[Swap]) -> Iterator[Shape]:
    drawn = {block.id: block for block in view.blocks}
    for block in view.blocks:
        end_s = view.behavior.duration_s if block.death_s is None else block.death_s
        yield _rect(view, block, block.birth_s, end_s, _COLOURS[block.owner])
    for swap in swaps:
        block = swap.idle.block
        if block.id in drawn:
            for start_s, end_s in _absences(view.behavior, swap):
                yield _rect(view, block, start_s, end_s, palette.paler(_COLOURS[block.owner]))
    yield from _marks(view)


def _rect(view: _View, block: MemoryBlock, start_s: float, end_s: float, colour: Colour) -> Rect:
    height = view.height(block.num_bytes)
    left, right = view.x(start_s), view.x(end_s)
    gap = 0.5 if height > 3 else 0.0
    y = view.y(view.offsets[block.id] + block.num_bytes)
    width = max(right - left, 0.75)
    return Rect(left, y, width, height - gap, colour, role="block", title=_told(block))


def _absences(behavior: Behavior, swap: Swap) -> list[tuple[float, float]]:
    """When a swapped block is away, within the iteration."""
    end_s = behavior.duration_s
    parts = [(swap.out_s, min(swap.in_s, end_s)), (max(swap.out_s - end_s, 0.0), swap.in_s - end_s)]
    return [(start_s, until_s) for start_s, until_s in parts if start_s < until_s]


def _marks(view: _View) -> Iterator[Shape]:
    high = [block for block in view.blocks if view.height(block.num_bytes) >= _MARKED]
    places = ((block, access) for block in high for access in block.accesses)
    for (block, access), _ in zip(places, range(_MOST_MARKS), strict=False):
        left, right = view.x(access.start_s), view.x(access.end_s)
        y = view.y(view.offsets[block.id] + block.num_bytes)
        height = view.height(block.num_bytes) - 0.5
        yield Rect(
            left, y, max(right - left, 0.75), height, palette.darker(_COLOURS[block.owner]), role="use"
        )


def _peak(view: _View) -> Iterator[Shape]:
    peak = view.behavior.peak
    x = view.x(peak.at_s)
    yield Line(x, _PHASES + _PHASE, x, _BOTTOM, palette.TRIAL, 1.2)
    text = f"peak {bytes_text(peak.num_bytes)}"
    is_right = x + text_width(text, 12) + 8 > RIGHT
    anchor = Anchor.END if is_right else Anchor.START
    yield Text(
        x - 6 if is_right else x + 6, _PHASES + _PHASE + 11, text, 12, palette.TRIAL, anchor, bold=True
    )


def _told(block: MemoryBlock) -> str:
    """What a reader sees who points at a block."""
    born = f"born {plain_seconds(block.birth_s)}" if block.birth_operator else "there before"
    ends = "stays" if block.death_s is None else f"freed {plain_seconds(block.death_s)}"
    by = f" by {block.birth_operator}" if block.birth_operator else ""
    return (
        f"{block.owner} {block.title()} · {bytes_text(block.num_bytes)} · {born}{by} · {ends} · "
        f"{len(block.accesses)} uses"
    )


# Pictures as PNG, through Pillow, which is an extra: `bireme[viz]`.
#
# Pillow brings one font, which has no bold letters and few beyond ASCII.

_MOST_PIXELS = 40_000_000
"""Pictures are drawn twice as large for sharp screens, unless that makes more pixels than this."""

_ANCHORS = {Anchor.START: "ls", Anchor.MIDDLE: "ms", Anchor.END: "rs"}


def png(picture: Picture) -> bytes:
    """The whole file."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise BiremeError(
            "A .png picture needs Pillow, which is not installed. Run pip install 'bireme[viz]', or write an "
            ".svg instead."
        ) from error
    scale = 2 if 4 * picture.width * picture.height <= _MOST_PIXELS else 1
    image = Image.new("RGB", (picture.width * scale, picture.height * scale), "white")
    pen = _Pen(ImageDraw.Draw(image), scale)
    for shape in picture.shapes:
        match shape:
            case Rect():
                pen.rect(shape)
            case Flag():
                for rect in shape.rects():
                    pen.rect(rect)
            case Line():
                pen.line(shape)
            case Text():
                pen.text(shape)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


class _Pen:
    """Draws shapes, `scale` pixels for one."""

    def __init__(self, draw: "ImageDraw", scale: int) -> None:
        self.draw = draw
        self.scale = scale
        self.fonts: dict[float, FreeTypeFont | ImageFont] = {}

    def rect(self, shape: Rect) -> None:
        left, top = round(shape.x * self.scale), round(shape.y * self.scale)
        right = max(round((shape.x + shape.width) * self.scale), left + 1) - 1
        bottom = max(round((shape.y + shape.height) * self.scale), top + 1) - 1
        self.draw.rectangle((left, top, right, bottom), fill=shape.fill)
        if shape.stripes is not None:
            self._stripes(left, top, right, bottom, shape.stripes)

    def _stripes(self, left: int, top: int, right: int, bottom: int, colour: tuple[int, int, int]) -> None:
        """Lines up to the right, each cut off where it leaves the rectangle."""
        height = bottom - top
        step = round(8.5 * self.scale)
        for foot in range(left - height, right + 1, step):
            begin, end = max(foot, left), min(foot + height, right)
            if begin < end:
                ends = (begin, bottom - (begin - foot), end, bottom - (end - foot))
                self.draw.line(ends, fill=colour, width=2 * self.scale)

    def line(self, shape: Line) -> None:
        ends = (shape.x1, shape.y1, shape.x2, shape.y2)
        width = max(round(shape.width * self.scale), 1)
        self.draw.line([round(v * self.scale) for v in ends], fill=shape.colour, width=width)

    def text(self, shape: Text) -> None:
        place = (shape.x * self.scale, (shape.y + BASELINE * shape.size) * self.scale)
        font = self._font(shape.size * self.scale)
        self.draw.text(place, shape.text, shape.colour, font, anchor=_ANCHORS[shape.anchor])

    def _font(self, size: float) -> "FreeTypeFont | ImageFont":
        from PIL import ImageFont

        if size not in self.fonts:
            self.fonts[size] = ImageFont.load_default(size)
        return self.fonts[size]
