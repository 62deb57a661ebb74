"""Pictures as PNG, through Pillow, which is an extra: `bireme[viz]`.

Pillow brings one font, which has no bold letters and few beyond ASCII.
"""

import io
from typing import TYPE_CHECKING

from bireme.errors import BiremeError
from bireme.report.shapes import Anchor, Flag, Line, Picture, Rect, Text

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont


_MOST_PIXELS = 40_000_000
"""Pictures are drawn twice as large for sharp screens, unless that makes more pixels than this."""

_ANCHORS = {Anchor.START: "ls", Anchor.MIDDLE: "ms", Anchor.END: "rs"}
BASELINE = 0.35
"""How far below its middle a line of text is placed, in parts of its size."""


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
