"""What the colours and signs in the picture of a timeline mean, in rows under it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bireme.report import palette
from bireme.report.shapes import Rect, Shape, Text, text_width
from bireme.schedule.grid import NAMES
from bireme.schedule.instruction import AVERAGES, Kind

_ROW = 26
SWATCH = 16
SIZE = 12
SPACE = 22
"""Between two entries."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What occurs in a picture; nothing else is explained."""

    batches: tuple[int, ...]
    kinds: frozenset[Kind]
    has_versions: bool
    has_links: bool
    has_syncs: bool
    has_copies: bool
    has_averages: bool
    most_stages: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A sample, drawn from its top left corner, and its meaning."""

    width: float
    sample: Callable[[float, float], list[Rect]]
    text: str


def legend(contents: Contents, left: float, top: float, width: float) -> list[Shape]:
    """The legend from a corner on, in rows no wider than `width`: the batches, then the rest."""
    shapes: list[Shape] = []
    y = top
    for row in (_batches(contents), _signs(contents)):
        x = left
        for entry in row:
            needed = entry.width + 6 + text_width(entry.text, SIZE)
            if x > left and x + needed > left + width:
                x, y = left, y + _ROW
            shapes += entry.sample(x, y)
            shapes.append(Text(x + entry.width + 6, y + SWATCH / 2, entry.text, SIZE, palette.INK))
            x += needed + SPACE
        y += _ROW
    return shapes


def entries(contents: Contents) -> Iterator[Entry]:
    """All entries, for a page that lets them flow."""
    yield from _batches(contents)
    yield from _signs(contents)


def _batches(contents: Contents) -> Iterator[Entry]:
    kinds = [kind for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT) if kind in contents.kinds]
    for hue in range(len(palette.HUES)):
        same = [str(batch) for batch in contents.batches if batch % len(palette.HUES) == hue]
        if same:
            colours = [palette.fill(hue, kind) for kind in kinds]
            yield Entry(SWATCH * len(colours), _beside(colours), f"batch {', '.join(same)}")
    yield Entry(-6, _nothing, "numbers: micro-batches, counted through all batches")


def _signs(contents: Contents) -> Iterator[Entry]:
    first = contents.batches[0] if contents.batches else 0
    for kind in palette.SHADES:
        if kind in contents.kinds:
            yield Entry(SWATCH, _beside([palette.fill(first, kind)]), NAMES[kind])
    yield Entry(2 * SWATCH, _idle, "idle (bubble)")
    if Kind.UPDATE in contents.kinds:
        yield Entry(8, _flag(-6, palette.UPDATE), "update")
    if Kind.TRIAL in contents.kinds:
        yield Entry(8, _flag(0, palette.TRIAL), "trial step")
    if AVERAGES & contents.kinds:
        yield Entry(8, _flag(0, palette.AVERAGE), "average of weights starts, ends")
    if contents.has_versions:
        colours = [palette.version_fill(0), palette.version_fill(1)]
        yield Entry(2 * SWATCH, _beside(colours, 12), "weight version computed on, even and odd")
    if contents.most_stages > 1:
        low = SWATCH if contents.most_stages == 2 else SWATCH / 2
        meaning = "bar: stage of the rank; higher is earlier in the model"
        yield Entry(2 * SWATCH, _stage_bars(first, low - 3), meaning)
    if contents.has_links:
        colours = [palette.fill(first, Kind.FORWARD), palette.fill(first, Kind.BACKWARD)]
        yield Entry(2 * SWATCH, _beside(colours, 6), "activations and gradients sent to the rank")
    if contents.has_syncs:
        yield Entry(SWATCH, _beside([palette.SYNC], 6), "gradient sync with replicas")
    if contents.has_averages:
        yield Entry(SWATCH, _beside([palette.AVERAGE], 6), "average of weights with replicas")
    if contents.has_copies:
        colours = [palette.fill(first, Kind.FORWARD), palette.fill(first, Kind.BACKWARD)]
        yield Entry(2 * SWATCH, _beside(colours, 6), "chunks fetched from the tier below and evicted to it")


def _beside(colours: list[palette.Colour], height: float = SWATCH) -> Callable[[float, float], list[Rect]]:
    def sample(x: float, y: float) -> list[Rect]:
        top = y + (SWATCH - height) / 2
        return [
            Rect(x + SWATCH * i, top, SWATCH, height, colour, role="key") for i, colour in enumerate(colours)
        ]

    return sample


def _idle(x: float, y: float) -> list[Rect]:
    return [Rect(x, y, 2 * SWATCH, SWATCH, palette.IDLE, palette.IDLE_STRIPES, role="key")]


def _flag(offset: float, colour: palette.Colour) -> Callable[[float, float], list[Rect]]:
    def sample(x: float, y: float) -> list[Rect]:
        pole = x - offset
        return [
            Rect(pole - 1, y, 2, SWATCH, colour, role="key"),
            Rect(pole + offset, y, 6, 5, colour, role="key"),
        ]

    return sample


def _stage_bars(batch: int, low: float) -> Callable[[float, float], list[Rect]]:
    colour = palette.fill(batch, Kind.FORWARD)
    bar = palette.darker(colour)

    def sample(x: float, y: float) -> list[Rect]:
        return [
            Rect(x, y, SWATCH - 1, SWATCH, colour, role="key"),
            Rect(x, y, SWATCH - 1, 3, bar, role="key"),
            Rect(x + SWATCH, y, SWATCH - 1, SWATCH, colour, role="key"),
            Rect(x + SWATCH, y + low, SWATCH - 1, 3, bar, role="key"),
        ]

    return sample


def _nothing(_x: float, _y: float) -> list[Rect]:
    return []
