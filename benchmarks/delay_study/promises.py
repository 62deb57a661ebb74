"""What documents promise of the study, what is wanted of it, and how near plans come to what was measured."""

from collections.abc import Iterator, Sequence

from benchmarks.common.verdicts import Verdict, at_most
from benchmarks.delay_study.codec_cells import MOST_EXCESS, bits_of, is_judged
from benchmarks.delay_study.law import LAWS, law
from benchmarks.delay_study.study import Cell
from benchmarks.delay_study.table import Row
from bireme.plan.penalties import MEASURED

__all__ = ["verdicts"]

MOST_OF_RULE = {"fresh+warm-up": 0.01, "2bw-fresh": 0.03}
"""Above the loss of the synchronous run, which docs/convergence.md promises of a rule."""
MOST_OFF = 0.01
WANTED_SEEDS = 3


def verdicts(found: Sequence[Row]) -> Iterator[Verdict]:
    """Of the rows of the study's tables."""
    yield from _of_rules(found)
    yield from _of_codecs(found)


def _of_rules(found: Sequence[Row]) -> Iterator[Verdict]:
    excesses = {row.cell: row.excess for row in found}
    for name, most in MOST_OF_RULE.items():
        for optimizer in ("adamw", "muon", "sgd"):
            for m in (4, 8):
                excess = excesses.get(Cell(name, optimizer, num_microbatches=m))
                if excess is not None:
                    words = f"{name}, {optimizer}, m = {m}: loss above that of the synchronous run"
                    yield at_most(words, excess.median, most)
    for (rule, starts), name in LAWS.items():
        for optimizer, counted in MEASURED[rule, starts].items():
            steps = law(name, optimizer, found)
            if steps is not None:
                off = max(abs(counted.at(unseen) - steps.at(unseen)) for unseen in (0.0, 1.0))
                yield at_most(f"{name}, {optimizer}: steps for one that plans count, off by", off, MOST_OFF)


def _of_codecs(found: Sequence[Row]) -> Iterator[Verdict]:
    """The best codec of so many bits, of those with enough seeds."""
    for bits, most in MOST_EXCESS.items():
        within = [
            row
            for row in found
            if row.cell.codec != "none"
            and is_judged(row.cell)
            and row.num_seeds >= WANTED_SEEDS
            and bits_of(row.cell) <= bits
        ]
        excesses = {row.cell: row.excess.median for row in within if row.excess is not None}
        if excesses:
            best = min(excesses, key=excesses.__getitem__)
            ending = f", then {best.ending_codec}" if best.ending else ""
            words = f"{best.codec}{ending}, at most {bits:g} bits: loss above that of the synchronous run"
            yield at_most(words, excesses[best], most)
