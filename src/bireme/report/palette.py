"""The colours of pictures: a hue for each batch, a shade of it for each kind of computation.

The hues differ in lightness as well, and neighbours in the cycle are far apart for all kinds of colour
vision; after six batches they begin again.
"""

from bireme.schedule.instruction import Kind

__all__ = ["HUES", "Colour", "fill", "on"]

Colour = tuple[int, int, int]
"""Red, green and blue from 0 to 255."""

HUES: tuple[Colour, ...] = (
    (38, 108, 172),  # blue
    (222, 128, 18),  # orange
    (18, 138, 112),  # green
    (188, 88, 150),  # purple
    (112, 112, 118),  # grey
    (150, 122, 20),  # olive
)
WHITE: Colour = (255, 255, 255)
BLACK: Colour = (20, 24, 32)

SHADES = {
    Kind.RECOMPUTE: 0.78,
    Kind.FORWARD: 0.58,
    Kind.BACKWARD_INPUT: 0.22,
    Kind.BACKWARD: 0.0,
    Kind.BACKWARD_WEIGHT: -0.34,
}
"""How much of a shade is white, or black where it is negative."""


def fill(batch: int, kind: Kind) -> Colour:
    """The colour of a computation for a batch."""
    hue, share = HUES[batch % len(HUES)], SHADES[kind]
    other = WHITE if share > 0 else BLACK
    red, green, blue = (round(a + (b - a) * abs(share)) for a, b in zip(hue, other, strict=True))
    return red, green, blue


def on(colour: Colour) -> Colour:
    """The colour of text that is legible on a fill."""
    red, green, blue = colour
    return BLACK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else WHITE
