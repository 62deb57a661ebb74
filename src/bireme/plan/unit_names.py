"""Units of a model as people name them: by number, by name, or by the beginning of several names."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from bireme.errors import BiremeError, closest
from bireme.plan.partition.chain import layer_bounds

__all__ = ["pins_of", "ranges_of"]


def pins_of(texts: Iterable[str], names: Sequence[str], what: str) -> dict[int, str]:
    """Units by number, and the device that each must be on, from texts as UNIT=DEVICE.

    `names` are those of all units; `what` is the option or key that the texts are of.
    """
    found: dict[int, str] = {}
    for text in texts:
        unit, equals, device = text.partition("=")
        if not equals or not device:
            raise BiremeError(f"{what} {text} is not UNIT=DEVICE, such as 0=server0/gpu1.")
        for number in _units(unit, names, f"{what} {text}"):
            if found.setdefault(number, device) != device:
                raise BiremeError(
                    f"Unit {number} ({names[number]}) is pinned to {found[number]} and to {device}. Leave "
                    "out one of the two."
                )
    return found


def ranges_of(
    texts: Iterable[str], names: Sequence[str], what: str, *, whole_layers: bool
) -> tuple[tuple[int, int], ...]:
    """First and last units of what must not be cut, from texts as FIRST..LAST; with `whole_layers` those of
    all layers as well.
    """
    found = []
    for text in texts:
        first, dots, last = text.partition("..")
        place = f"{what} {text}"
        if not dots:
            raise BiremeError(f"{place} is not FIRST..LAST, such as 0..3 or layers.0..layers.1.")
        begin, end = _units(first, names, place)[0], _units(last, names, place)[-1]
        if begin > end:
            raise BiremeError(f"{place} ends before it begins: at unit {end}, and begins at {begin}.")
        found.append((begin, end))
    if whole_layers:
        found += [(begin, end - 1) for begin, end in pairwise(layer_bounds(names)) if end > begin + 1]
    return tuple(found)


def _units(text: str, names: Sequence[str], where: str) -> list[int]:
    """The units that a number, a name or the beginning of names means."""
    if text.isdecimal():
        if int(text) >= len(names):
            raise BiremeError(f"{where}: there is no unit {text}; they are 0 to {len(names) - 1}.")
        return [int(text)]
    found = [place for place, name in enumerate(names) if name == text or name.startswith(f"{text}.")]
    if not text or not found:
        raise BiremeError(f"{where}: there is no unit {text!r}. {closest(text, set(names))}")
    return found
