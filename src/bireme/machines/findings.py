"""Findings: what was checked on a machine or a line, and what to do about it."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """How a check came out."""

    WELL = "ok"
    NOTE = "note"
    """Works, and may be slow or may surprise."""
    FAILS = "fails"
    """Training over this line or on this machine will fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked. `text` says what was found, `remedy` what to do, if anything is. `measured`
    are the numbers in the text, in seconds or bytes per second.
    """

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""
    measured: tuple[float, ...] = ()

    @property
    def line(self) -> str:
        """The finding as one line."""
        return f"{self.verdict.value:5} {self.sentence}"

    @property
    def sentence(self) -> str:
        """The finding with its remedy."""
        return f"{self.check}: {self.text}{f' {self.remedy}' if self.remedy else ''}"

    def document(self) -> dict[str, Any]:
        """For JSON."""
        found = asdict(self)
        del found["measured"]  # which the text has
        return found


def well(check: str, text: str, *measured: float) -> Finding:
    """A check that came out well."""
    return Finding(check, Verdict.WELL, text, measured=measured)


def note(check: str, text: str, remedy: str = "") -> Finding:
    """Something that works, and may surprise."""
    return Finding(check, Verdict.NOTE, text, remedy)


def fails(check: str, text: str, remedy: str) -> Finding:
    """Something that will not work."""
    return Finding(check, Verdict.FAILS, text, remedy)
