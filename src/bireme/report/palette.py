"""The colours of pictures: a hue for each batch, a shade of it for each kind of computation.

The hues differ in lightness as well, and neighbors in the cycle are far apart for all kinds of colour
vision; after six batches they begin again.
"""

from bireme.schedule.instruction import Kind

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
_WHITE: Colour = (255, 255, 255)
_BLACK: Colour = (20, 24, 32)
INK: Colour = (32, 36, 44)
PALE_INK: Colour = (96, 102, 112)
AXIS: Colour = (204, 208, 214)
IDLE: Colour = (248, 246, 242)
IDLE_STRIPES: Colour = (219, 211, 196)
LINK_BED: Colour = (241, 242, 245)
SYNC: Colour = (120, 126, 136)
UPDATE: Colour = (20, 24, 32)
TRIAL: Colour = (204, 24, 72)
AVERAGE: Colour = (116, 62, 196)
_VERSIONS: tuple[Colour, ...] = ((74, 80, 92), (196, 200, 208))
"""Even and odd weight versions."""
_ENOUGH_CONTRAST = 3.5
"""Between what the guidelines for the web ask for text and for large text."""

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
    share = SHADES[kind]
    return _mixed(HUES[batch % len(HUES)], _WHITE if share > 0 else _BLACK, abs(share))


def darker(colour: Colour) -> Colour:
    """The colour of a bar that is seen on a fill."""
    return _mixed(colour, _BLACK, 0.55)


def paler(colour: Colour) -> Colour:
    """The colour of something that could be absent."""
    return _mixed(colour, _WHITE, 0.72)


def version_fill(version: int) -> Colour:
    """The shade of a weight version."""
    return _VERSIONS[version % len(_VERSIONS)]


def on(colour: Colour) -> Colour:
    """The colour of text that is legible on a fill: white as long as it contrasts enough."""
    return _WHITE if 1.05 / (_luminance(colour) + 0.05) >= _ENOUGH_CONTRAST else _BLACK


def hex_of(colour: Colour) -> str:
    """A colour as the web writes it."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _mixed(colour: Colour, other: Colour, share: float) -> Colour:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(colour, other, strict=True))
    return red, green, blue


def _luminance(colour: Colour) -> float:
    """Relative luminance from 0 to 1, as the Web Content Accessibility Guidelines define it."""
    red, green, blue = (
        v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in colour)
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
