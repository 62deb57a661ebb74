"""What a picture is made of: rectangles, lines, text and scales, in pixels from the top left corner.

A layout makes them once; each writer turns them into a file format. So a layout must know how wide text
comes out without asking a writer: `text_width` is a little more than any usual font needs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from bireme.bounds import seconds_text
from bireme.report.palette import INK, PALE_INK, Colour


class Anchor(StrEnum):
    """Which end of a text its position is."""

    START = "start"
    MIDDLE = "middle"
    END = "end"


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled rectangle; `stripes` is the colour of diagonal lines across it.

    `role` says what it stands for and `title` what a reader sees who points at it, where the format can.
    """

    x: float
    y: float
    width: float
    height: float
    fill: Colour
    stripes: Colour | None = None
    role: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: Colour
    width: float = 1.0


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text whose middle height is at `y`.

    `within` is the width of the rectangle that it is in, 0 if it is in none: a page that draws the rectangle
    narrower leaves the text out.
    """

    x: float
    y: float
    text: str
    size: float
    colour: Colour
    anchor: Anchor = Anchor.START
    bold: bool = False
    within: float = 0.0


CLOTH = (6.0, 5.0)
"""The width and the height of a flag's cloth."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A pole from `y` down, its middle at `x`, with a small cloth on top to one side.

    It stands for a moment, so it keeps its shape where a page stretches what is drawn.
    """

    x: float
    y: float
    height: float
    colour: Colour
    is_left: bool
    title: str = ""

    def rects(self) -> Iterator[Rect]:
        """The same in rectangles."""
        width, height = CLOTH
        yield Rect(self.x - 1, self.y, 2, self.height, self.colour, role="mark")
        yield Rect(
            self.x - width if self.is_left else self.x, self.y, width, height, self.colour, role="flag"
        )


Shape = Rect | Line | Text | Flag


@dataclass(frozen=True, slots=True)
class Picture:
    """Shapes on a white page, later ones above earlier ones."""

    width: int
    height: int
    title: str
    shapes: tuple[Shape, ...]


_NARROW = frozenset("fijlrtI.,:;|'!()[]- ·")
_WIDE = frozenset("mwMW%@&")


def text_width(text: str, size: float) -> float:
    """The pixels a text takes at most."""
    return sum(map(_ems, text)) * size


def _ems(c: str) -> float:
    if c in _NARROW:
        return 0.38
    if c.isdigit():
        return 0.6
    if c in _WIDE:
        return 0.95
    return 0.76 if c.isupper() or not c.isascii() else 0.66


def heading(title: str, figures: str, left: float, width: float) -> Iterator[Text]:
    """The title of a picture, and a line of figures below it."""
    yield Text(left, 28, fitted(title, 20, width), 20, INK, bold=True)
    yield Text(left, 54, fitted(figures, 13, width), 13, PALE_INK)


def fitted(text: str, size: float, width: float) -> str:
    """The text, cut off with dots where it is too wide."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "...", size) > width:
        text = text[:-1]
    return text.rstrip() + "..."


# Scales of charts and pictures: from values to pixels, with round marks and the words at them.

_CLOCK_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Round distances on a clock, in seconds; past them whole days."""


class Quantity(StrEnum):
    """What an axis is about, which says how its numbers are written."""

    STEPS = "steps"
    CLOCK = "clock"
    SECONDS = "seconds"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Scale:
    """From values between `least` and `most` to pixels between `start` and `end`."""

    least: float
    most: float
    start: float
    end: float
    quantity: Quantity = Quantity.PLAIN
    is_log: bool = False

    def at(self, value: float) -> float:
        """Where a value is; outside of the range it is at its end."""
        least, most, value = map(self._bent, (self.least, self.most, value))
        share = (value - least) / (most - least) if most > least else 0.5
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)

    def marks(self, count: int) -> Iterator[float]:
        """Round values within the range, about so many."""
        if self.is_log:
            yield from self._log_marks(count)
            return
        step = self._step(count)
        place = math.ceil(self.least / step - 1e-9)
        while place * step <= self.most + 1e-9 * step:
            yield place * step
            place += 1

    def _bent(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.is_log else value

    def _step(self, count: int) -> float:
        least = (self.most - self.least) / count
        if self.quantity is Quantity.CLOCK and least > _CLOCK_STEPS_S[0]:
            known = next((step for step in _CLOCK_STEPS_S if step >= least * (1 - 1e-9)), None)
            return known if known is not None else 86400.0 * round_step(least / 86400)
        return max(round_step(least), 1.0) if self.quantity is Quantity.STEPS else round_step(least)

    def _log_marks(self, count: int) -> Iterator[float]:
        """Powers of ten where they are enough, else with what lies between them."""
        low, high = math.floor(self._bent(self.least)), math.ceil(self._bent(self.most))
        skip = max(math.ceil((high - low) / count), 1)
        for factors in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
            marks = [factor * 10.0**power for power in range(low, high + 1, skip) for factor in factors]
            inside = [mark for mark in marks if self.least <= mark <= self.most]
            if len(inside) >= 3:
                break
        yield from inside if len(inside) >= 2 else (self.least, self.most)


def round_step(least: float) -> float:
    """The least of 1, 2, 5, 10, … and their tenths that is no less."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def value_text(value: float, quantity: Quantity) -> str:
    """A value in few letters."""
    match quantity:
        case Quantity.STEPS:
            return f"{value:,.0f}"
        case Quantity.CLOCK:
            return clock_text(value)
        case Quantity.SECONDS:
            return seconds_text(value)
    return number_text(value)


def number_text(value: float) -> str:
    """Such as `2.413`, `1,230`, `45.6 k`, `7.2 B` (billions), `3.1e-05`: four digits at most."""
    size = abs(value)
    if size >= 1e9:
        return f"{value / 1e9:.4g} B"
    if size >= 1e6:
        return f"{value / 1e6:.4g} M"
    if size >= 1e4:
        return f"{value / 1e3:.4g} k"
    if size >= 1e3:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def clock_text(seconds: float) -> str:
    """Such as `45 s`, `3:20 min`, `2:05 h` or `1 d 4 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.3g} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    if whole < 86400:
        return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
