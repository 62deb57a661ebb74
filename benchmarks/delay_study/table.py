"""What the runs say: the loss that a rule costs, and the steps."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from benchmarks.delay_study.study import Cell, Known, rate_of

__all__ = ["FIGURES", "Excess", "Row", "penalty", "rows", "table_lines", "told"]

FIGURES = ("rate", "loss", "excess", "seeds", "penalty")
"""The heads of `Row.figures`."""


@dataclass(frozen=True, slots=True)
class Excess:
    """How much more loss than the synchronous run of the same seed, both at their own best rates.

    Parts of the synchronous loss: the median over the seeds, the least and the greatest.
    """

    median: float
    least: float
    greatest: float
    num_seeds: int

    @staticmethod
    def of(found: Sequence[float]) -> "Excess":
        """Of each seed's."""
        return Excess(median(found), min(found), max(found), len(found))


def told(excess: Excess | None) -> str:
    """As a table of a document has it."""
    if excess is None:
        return ""
    if excess.num_seeds == 1:
        return f"{100 * excess.median:+.1f} %"
    return f"{100 * excess.median:+.1f} % ({100 * excess.least:+.1f} to {100 * excess.greatest:+.1f})"


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of a cell. `is_at_edge` says that the best rate has no worse one on one side yet."""

    cell: Cell
    rate: float
    is_at_edge: bool
    loss: float
    excess: Excess | None
    penalty: float | None
    through: float | None = None
    """The excess through the codecs of the boundaries, in the median over the seeds."""

    @property
    def num_seeds(self) -> int:
        """How many seeds the excess is of."""
        return 0 if self.excess is None else self.excess.num_seeds

    @property
    def figures(self) -> tuple[str, ...]:
        """The cells of a table. The rate has a mark where it is at the edge of those tried."""
        rate = f"{self.rate:.2g}{' (?)' if self.is_at_edge else ''}"
        penalty = "" if self.penalty is None else f"{self.penalty:.2f}"
        return rate, f"{self.loss:.3f}", told(self.excess), str(self.num_seeds), penalty


def table_lines(heads: Sequence[str], cells: Iterable[Iterable[object]]) -> Iterator[str]:
    """A table of a document: a line for the heads, one below it, and one for each row of cells."""
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in cells:
        yield f"| {' | '.join(map(str, row))} |"


def rows(known: Known) -> list[Row]:
    """One for every cell that has runs, in the order in which they came."""
    cells = dict.fromkeys(setting.cell for setting in known.runs)
    return [_row(cell, known) for cell in cells]


def penalty(loss: float, cell: Cell, known: Known) -> float | None:
    """Steps that a cell takes for one of a synchronous run that gets to this loss.

    Synchronous runs of several lengths, each with its own schedule and best rate, say how far so many steps
    get (their first seeds do); between two of them, and below the longest, the loss is taken to fall by the
    logarithm of the steps. None where it is above that of the shortest.
    """
    reference = cell.reference()
    lengths = {
        found.steps: run.loss
        for found in {setting.cell for setting in known.runs}
        if found == replace(reference, steps=found.steps) and (run := known.best(found)) is not None
    }
    between = list(pairwise(sorted(lengths.items())))
    for (few, high), (many, low) in between:
        is_last = (many, low) == between[-1][1]
        if loss <= high and (low <= loss or is_last) and low < high:
            part = (high - loss) / (high - low)
            return cell.steps / math.exp(math.log(few) + part * math.log(many / few))
    return None


def _row(cell: Cell, known: Known) -> Row:
    rungs = known.rungs(cell)
    best = known.best_rung(cell)
    assert best is not None
    losses, excesses, through = [], [], []
    for seed in {setting.seed for setting in known.runs if setting.cell == cell}:
        run, beside = known.best(cell, seed), known.best(cell.reference(), seed)
        if run is not None and beside is not None:
            excesses.append(run.loss / beside.loss - 1.0)
            if run.loss_through_codecs is not None:
                through.append(run.loss_through_codecs / beside.loss - 1.0)
        if run is not None:
            losses.append(run.loss)
    beside = known.best(cell.reference())
    excess = Excess.of(excesses) if excesses else None
    equal = None if beside is None or excess is None else beside.loss * (1.0 + excess.median)
    return Row(
        cell=cell,
        rate=rate_of(cell.optimizer, best),
        is_at_edge=best in (min(rungs), max(rungs)),
        loss=median(losses),
        excess=excess,
        penalty=None if equal is None else penalty(equal, cell, known),
        through=median(through) if through else None,
    )
