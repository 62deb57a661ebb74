"""Figures of Li et al. (ISPASS 2021) on memory behaviour, to compare with those of a traced iteration."""

from dataclasses import dataclass

__all__ = ["PUBLISHED", "PublishedFigure"]


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """What a figure is of, and its value; `source` is where we have it from."""

    name: str
    value: str
    source: str


TABLE = "the authors' table of a multilayer perceptron"
QUOTED = "quoted from the paper, not checked against its text"

PUBLISHED: tuple[PublishedFigure, ...] = (
    PublishedFigure("intermediates of all memory, 400 samples, width 3", "82.66 %", TABLE),
    PublishedFigure("intermediates of all memory, 3,200 samples, width 192", "99.33 %", TABLE),
    PublishedFigure("intermediates of all memory, 3,200 samples, width 12,288", "99.95 %", TABLE),
    PublishedFigure("90 % of the times between two accesses are at most", "25 µs", QUOTED),
    PublishedFigure("which lets out and in, at 6.4 and 6.3 GB/s", "79.37 kB", QUOTED),
    PublishedFigure("a block that is worth swapping: 1,200 MB, idle for", "840.2 ms", QUOTED),
)
