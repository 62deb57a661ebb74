"""What is quoted of a figure that was measured several times: its median, and how far it went."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Spread", "ratios"]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some figures, with the least and the greatest."""

    median: float
    least: float
    greatest: float

    @staticmethod
    def of(figures: Iterable[float]) -> "Spread":
        """Of at least one figure."""
        found = list(figures)
        return Spread(statistics.median(found), min(found), max(found))

    def show(self, form: str) -> str:
        """Such as `1.97 (1.91 to 2.02)`."""
        return f"{self.median:{form}} ({self.least:{form}} to {self.greatest:{form}})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Theirs over ours, round by round: more than one says that ours took less."""
    return Spread.of(their / our for our, their in zip(ours, theirs, strict=True))
