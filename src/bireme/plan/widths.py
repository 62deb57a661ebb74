"""Widths of stages as people write them. Run files are read with this, so it imports nothing large."""

from collections.abc import Iterable

from bireme.errors import BiremeError

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
