"""A timeline as a picture: its lanes with a heading, round times, and what the colours mean.

A file of it is SVG with nothing installed, PNG with `bireme[viz]`.
"""

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bireme.bounds import counted
from bireme.errors import BiremeError
from bireme.files import write_bytes_atomically, write_text_atomically
from bireme.report import palette
from bireme.report.lanes import Lanes, drawn_batches, end_of, lanes_of, legend, plain_seconds
from bireme.report.markup import BASELINE, svg
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
    printable,
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
    match path.suffix.lower():
        case ".svg":
            write_text_atomically(path, svg(laid_out(timeline)))
        case ".png":
            write_bytes_atomically(path, png(laid_out(timeline)))
        case suffix:
            kind = f"ends in {suffix}" if suffix else "has no ending"
            raise BiremeError(f"{path} {kind}, but a picture can only be .svg or .png. Name such a file.")


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
