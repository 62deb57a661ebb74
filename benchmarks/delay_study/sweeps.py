"""In which order cells are searched: those of delayed updates, and what the other parts of the study use."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.delay_study.study import Bank, Cell

__all__ = ["FIRST_RUNG", "Study", "Sweep", "delay_sweeps"]

FIRST_RUNG = {"adamw": 2, "muon": 4}
"""The best rates of a synchronous run without codecs."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A cell to be searched, from which learning rate on and with how many seeds. One that is not searched
    has this learning rate alone.
    """

    cell: Cell
    first_rung: int
    num_seeds: int = 1
    is_searched: bool = True


Study = Callable[[], Iterator[Sweep]]
"""A part of the study, what tells most first."""


def delay_sweeps() -> Iterator[Sweep]:
    """What updating late costs, what tells most first."""
    yield Sweep(Cell("synchronous"), 2, 3)
    for m in (8, 4):
        yield Sweep(Cell("2bw-fresh", num_microbatches=m), 1, 3)
    yield Sweep(Cell("fresh+switch"), 2, 3)
    yield Sweep(Cell("2bw"), 0, 3)
    for rule in ("fresh-last", "repeat", "2bw+switch"):
        yield Sweep(Cell(rule), 1)
    for steps in (240, 180, 120):
        yield Sweep(Cell("synchronous", steps=steps), 2)
    yield Sweep(Cell("synchronous", "muon"), 4, 3)
    yield Sweep(Cell("synchronous", "sgd"), 2, 3)
    for rule in ("2bw-fresh", "2bw", "fresh+switch"):
        yield Sweep(Cell(rule, "muon"), 4)
        yield Sweep(Cell(rule, "sgd"), 2)
    for optimizer, rung in (("muon", 4), ("sgd", 2)):
        yield Sweep(Cell("2bw-fresh", optimizer, num_microbatches=4), rung)
    for rule in ("2bw-fresh", "fresh+switch"):
        yield Sweep(Cell(rule, num_microbatches=16), 1, 3)
    yield Sweep(Cell("2bw-fresh", lookahead=3), 1)
    yield Sweep(Cell("2bw+feedback"), 1)
    yield Sweep(Cell("momentum"), 1)
    for d, m in ((8, 16), (2, 4)):
        yield Sweep(Cell("2bw-fresh", num_stages=d, num_microbatches=m), 1)
    yield Sweep(Cell("2bw-fresh", num_stages=1), 1)
    for rule in ("2bw", "2bw-fresh", "fresh+switch"):
        yield Sweep(Cell(rule, "muon"), 4, 3)
    yield Sweep(Cell("fresh+warm-up"), 1, 3)
    yield Sweep(Cell("fresh+warm-up", num_microbatches=4), 1, 3)
    yield Sweep(Cell("fresh+switch+warm-up"), 2)
    for rule, rung in (("synchronous", 1), ("2bw-fresh", 1), ("2bw", 0)):
        yield Sweep(Cell(rule, size="larger"), rung)
    yield Sweep(Cell("2bw+warm-up"), 1)
    for rule in ("synchronous", "2bw-fresh"):
        yield Sweep(Cell(rule, bank=Bank.BFLOAT16), 1)
    for rule in ("2bw-fresh", "fresh+switch"):
        yield Sweep(Cell(rule, "sgd"), 2, 3)
    yield Sweep(Cell("fresh+short warm-up"), 2, 3)
    yield from _optimizers()
    yield from _shapes()
    yield Sweep(Cell("synchronous", steps=1200), 1)
    yield Sweep(Cell("2bw-fresh", steps=1200), 1)
    yield Sweep(Cell("2bw", steps=1200), 0)
    yield Sweep(Cell("synchronous", steps=600), 1)
    yield Sweep(Cell("fresh+switch", size="larger"), 1)
    yield Sweep(Cell("fresh+switch", num_microbatches=16, lookahead=3), 1)
    yield Sweep(Cell("2bw-fresh", num_stages=8, num_microbatches=8), 1)
    yield Sweep(Cell("fresh+switch", bank=Bank.BFLOAT16), 1)
    for rule in ("synchronous", "2bw-fresh", "fresh+switch", "2bw"):
        yield Sweep(Cell(rule, "muon, slow rest"), 4)
    yield Sweep(Cell("2bw-fresh", "muon, slow rest", num_microbatches=4), 4)
    for rule in ("2bw", "last-gradient", "fresh-zero"):
        yield Sweep(Cell(rule, num_microbatches=4 if rule == "fresh-zero" else 8), 1)
    yield Sweep(Cell("synchronous", steps=60), 2)
    yield from _clipping()


def _clipping() -> Iterator[Sweep]:
    """Stages that step before the norm of the whole gradient is known."""
    for optimizer, rung in (("adamw", 2), ("muon", 4), ("sgd", 2)):
        yield Sweep(Cell("apart", optimizer, num_stages=8), rung, 3)
    for rule in ("apart, guessed", "apart, norm before"):
        yield Sweep(Cell(rule, num_stages=8), 2, 3, is_searched=False)


def _optimizers() -> Iterator[Sweep]:
    """What the engine does by default, and what it costs in steps, with the other optimizers."""
    for optimizer, rung in (("muon", 4), ("sgd", 1)):
        for m in (8, 4):
            yield Sweep(Cell("fresh+warm-up", optimizer, num_microbatches=m), rung, 3)
        for steps in (240, 180, 120, 60):
            yield Sweep(Cell("synchronous", optimizer, steps=steps), rung)
        yield Sweep(Cell("2bw+warm-up", optimizer), rung)
        yield Sweep(Cell("2bw-fresh", optimizer, num_microbatches=4), rung, 3)


def _shapes() -> Iterator[Sweep]:
    """What the engine does by default on other pipelines, models and banks."""
    for d in (2, 4, 8):
        for of_stages in (1, 2, 4):
            # Those of four stages are above, and a batch of sixteen windows makes no more micro-batches.
            if (d, of_stages) not in ((4, 1), (4, 2), (8, 4)):
                cell = Cell("fresh+warm-up", num_stages=d, num_microbatches=of_stages * d)
                yield Sweep(cell, 2, 1 if of_stages == 4 else 3)
    yield Sweep(Cell("fresh+warm-up", lookahead=3), 2, 3)
    yield Sweep(Cell("synchronous", bank=Bank.BFLOAT16), 1, 3)
    for m in (8, 4):
        yield Sweep(Cell("fresh+warm-up", bank=Bank.BFLOAT16, num_microbatches=m), 2, 3)
    for optimizer, rung in (("muon", 4), ("sgd", 1)):
        for rule in ("synchronous", "fresh+warm-up"):
            yield Sweep(Cell(rule, optimizer, bank=Bank.BFLOAT16), rung)
    yield Sweep(Cell("synchronous", size="larger"), 1, 3)
    yield Sweep(Cell("fresh+warm-up", size="larger"), 1, 3)
    yield Sweep(Cell("fresh+warm-up", size="larger", num_microbatches=4), 1)
    for optimizer, rung in (("muon", 4), ("sgd", 1)):
        for rule in ("synchronous", "fresh+warm-up"):
            yield Sweep(Cell(rule, optimizer, size="larger"), rung)
    for d in (2, 8):
        for optimizer, rung in (("muon", 4), ("sgd", 1)):
            yield Sweep(Cell("fresh+warm-up", optimizer, num_stages=d, num_microbatches=2 * d), rung)
