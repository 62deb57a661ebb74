"""What the options of `bireme plan` say, as wishes and as files to write."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from bireme.errors import BiremeError, closest

if TYPE_CHECKING:
    from bireme.schedule.rule import Rule

__all__ = [
    "Exporting",
    "exports_of",
    "penalties_of",
    "pins_of",
    "ranges_of",
]


@dataclass(frozen=True, slots=True)
class Exporting:
    """An export that was asked for, and the file for it; None where it is to be printed."""

    name: str
    path: Path | None


def exports_of(texts: Iterable[str], *, has_model: bool) -> list[Exporting]:
    """Such as `torch-csv:schedule.csv`, or `megatron` to print it."""
    from bireme.plan.export.exports import NEEDS_MODEL, export_named

    found = []
    for text in texts:
        name, colon, file = text.partition(":")
        if export_named(name).needs_graph and not has_model:
            raise BiremeError(NEEDS_MODEL.format(name))
        if colon and not file:
            raise BiremeError(f"--export {text} names no file. Leave out the colon to have it printed.")
        found.append(Exporting(name, Path(file) if file else None))
    return found


def penalties_of(texts: Iterable[str]) -> "dict[Rule, float]":
    """Penalties that the user has measured himself, each as `RULE=STEPS`."""
    from bireme.schedule.catalogue import SCHEDULES
    from bireme.schedule.rule import Rule

    found: dict[Rule, float] = {}
    late = (Rule.DELAYED, Rule.FRESH)
    rules: dict[str, Rule] = {rule.value: rule for rule in late}
    rules |= {name: known.rule for name, known in SCHEDULES.items() if known.rule in late}
    for text in texts:
        name, _, steps = text.partition("=")
        if name not in rules:
            raise BiremeError(f"--penalty {text} is for no update rule. {closest(name, rules)}")
        try:
            found[rules[name]] = float(steps)
        except ValueError:
            raise BiremeError(
                f"--penalty {text} is not RULE=STEPS, such as {name}=1.2: steps needed for one of a "
                "synchronous run."
            ) from None
    return found


def pins_of(texts: Iterable[str], names: Sequence[str]) -> dict[int, str]:
    """Units by number, and the device that each must be on."""
    found: dict[int, str] = {}
    for text in texts:
        unit, equals, device = text.partition("=")
        if not equals or not device:
            raise BiremeError(f"--pin {text} is not UNIT=DEVICE, such as 0=server0/gpu1.")
        for number in _units(unit, names, f"--pin {text}"):
            if found.setdefault(number, device) != device:
                raise BiremeError(
                    f"Unit {number} ({names[number]}) is pinned to {found[number]} and to {device}. Leave "
                    "out one of the two."
                )
    return found


def ranges_of(
    texts: Iterable[str], names: Sequence[str], *, whole_layers: bool
) -> tuple[tuple[int, int], ...]:
    """First and last units of what must not be cut; all layers as well if they are to stay whole."""
    found = []
    for text in texts:
        first, dots, last = text.partition("..")
        option = f"--together {text}"
        if not dots:
            raise BiremeError(f"{option} is not FIRST..LAST, such as 0..3 or layers.0..layers.1.")
        begin, end = _units(first, names, option)[0], _units(last, names, option)[-1]
        if begin > end:
            raise BiremeError(f"{option} ends before it begins: at unit {end}, and begins at {begin}.")
        found.append((begin, end))
    if whole_layers:
        from bireme.plan.partition.chain import layer_bounds

        found += [(begin, end - 1) for begin, end in pairwise(layer_bounds(names)) if end > begin + 1]
    return tuple(found)


def _units(text: str, names: Sequence[str], option: str) -> list[int]:
    """The units that a number, a name or the beginning of names stands for."""
    if text.isdecimal():
        if int(text) >= len(names):
            raise BiremeError(f"{option}: there is no unit {text}; they are 0 to {len(names) - 1}.")
        return [int(text)]
    found = [place for place, name in enumerate(names) if name == text or name.startswith(f"{text}.")]
    if not text or not found:
        raise BiremeError(f"{option}: there is no unit {text!r}. {closest(text, set(names))}")
    return found
