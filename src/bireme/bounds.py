"""Numbers with the bounds that a file must keep to: the types of fields that are read from files.

To the program they are plain numbers; `documents.py` refuses a file that goes beyond them. And numbers as
people write and read them: bytes, seconds, rates, counts, widths of stages.
"""

import re
from collections.abc import Iterable
from math import inf
from typing import Annotated

from annotated_types import Ge, Gt, Le

from bireme.errors import BiremeError

Count = Annotated[int, Ge(1)]
"""How many there are, of what there is at least one."""

Place = Annotated[int, Ge(0)]
"""A number counted from 0 on."""

Bytes = Annotated[int, Ge(0), Le(2**60)]
NumBytes = Annotated[float, Ge(0)]
"""Bytes as they are counted, and as they come out of a calculation. Sums of larger ones are no integers."""

Seconds = Annotated[float, Ge(0), Le(1e15)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1 + 1e-9)]
"""From 0 to 1, and a sum of shares that rounding brought a little above."""

_UNITS: dict[str, int] = {"": 1} | {unit: 1000**power for power, unit in enumerate("kmgt", 1)}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]i?|)b?", re.IGNORECASE)


def bytes_of(text: str, option: str) -> int:
    """The bytes in a text such as `6GB` (10⁹), `24GiB` (2³⁰) or `5e9`; `option` is who says it."""
    found = _AMOUNT.fullmatch(text.strip())
    num_bytes = inf if found is None else float(found[1]) * _UNITS[found[2].lower()]
    if num_bytes == inf:
        raise BiremeError(f"{option} is {text!r}; write bytes as 6GB, 24GiB or 5e9.")
    return round(num_bytes)


_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(bit/s|bps|b/s)", re.IGNORECASE)


def bytes_per_s_of(text: str, option: str) -> float:
    """The bytes a second in a text such as `50Mbit/s` or `6MB/s`; a small b is a bit. `option` is who says
    it.
    """
    found = _RATE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise BiremeError(f"{option} is {text!r}; write a rate above 0 as 50Mbit/s or 6MB/s.")
    return float(found[1]) * _UNITS[found[2].lower()] / (1 if found[3][:2] == "B/" else 8)


def bytes_text(num_bytes: float) -> str:
    """Such as `1.50 GiB` or `286 MiB`, to three digits."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.{_decimals(size, unit)}f} {unit}"
        size /= 1024
    return f"{size:.{_decimals(size, 'TiB')}f} TiB"


def _decimals(size: float, unit: str) -> int:
    if unit == "B" or size >= 100:
        return 0
    return 1 if size >= 10 else 2


# Numbers for people: seconds and bytes in the unit that fits.


def seconds_text(seconds: float) -> str:
    """Such as `240 ms`, `1.92 s` or `12,630 s`: four digits are more than anyone compares."""
    if seconds >= 1e4:
        return f"{seconds:,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.4g} ns"


def rate_text(bytes_per_s: float) -> str:
    """Such as `25 GB/s` or `1.2 MB/s`, in powers of ten as makers of links count."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.4g} {unit}/s"
    return f"{bytes_per_s:.4g} B/s"


def against_predicted(measured: float | None, predicted: float | None, *, is_time: bool) -> str:
    """Such as `+3.2% slower`: the measured value relative to the predicted one; "" if one is unknown.

    Everything that compares the two for people says it with this sign and these words.
    """
    if measured is None or not predicted:
        return ""
    change = measured / predicted - 1
    text = f"{change:+.{0 if abs(change) >= 0.0995 else 1}%}".replace("-", "−")
    if float(text[1:-1]) == 0:
        return "equal"
    more, less = ("slower", "faster") if is_time else ("more", "less")
    return f"{text} {more if change > 0 else less}"


def counted(number: int, what: str) -> str:
    """Such as `1 stage`, `4 stages` or `1,024 batches`."""
    ending = "" if number == 1 else "es" if what.endswith(("ch", "s")) else "s"
    return f"{number:,} {what}{ending}"


EQUAL, ANY = "equal", "any"
"""Widths of stages: the same for all, or whatever is best."""


def widths_text(widths: Iterable[int]) -> str:
    """The replicas of each stage as people write them, such as 3-1."""
    return "-".join(map(str, widths))


def parse_stage_widths(text: str) -> str | tuple[int, ...]:
    """Widths of stages as people write them: equal, any, or the replicas of each stage, such as 3-1."""
    word = text.strip().lower()
    if word in (EQUAL, ANY):
        return word
    parts = [part.strip() for part in word.split("-")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise BiremeError(
            f"There are no stage widths {text!r}. Use any, equal, or the replicas of each stage, such as 3-1."
        )
    return tuple(map(int, parts))
