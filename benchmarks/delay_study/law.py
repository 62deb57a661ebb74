"""What a plan counts a delay as: measured penalties as one number, or as a line in what is not seen."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from benchmarks.delay_study.pair_cells import is_pair
from benchmarks.delay_study.study import Cell
from benchmarks.delay_study.table import Excess, Row
from bireme.plan.penalties import PenaltySteps, unseen_share
from bireme.schedule.program import Rule

__all__ = ["LAWS", "LONG_ENDING", "agreement_law", "codec_law", "law", "sum_law", "topk_with_muon"]

LAWS = {
    (Rule.DELAYED, False): "2bw",
    (Rule.DELAYED, True): "2bw+warm-up",
    (Rule.FRESH, False): "2bw-fresh",
    (Rule.FRESH, True): "fresh+warm-up",
}
"""The study's name of what the engine does, by its rule and whether a run starts without delay."""

LONG_ENDING = 0.1
"""The last part of a run with codecs that plans know is no larger a share of it."""


def law(name: str, optimizer: str, rows: Sequence[Row]) -> PenaltySteps | None:
    """The least squares of what was measured on the small model in float32; a seed counts once.

    For 2bw, which never sees anything of the batch before, a mean. For fresh rules a line that never falls,
    and never takes less than a step for one. None where nothing was measured.
    """
    found = []
    for row in rows:
        cell, excess = row.cell, row.excess
        shape = cell.num_stages, cell.num_microbatches, cell.lookahead
        if cell == Cell(name, optimizer, *shape[:2], lookahead=cell.lookahead) and row.penalty and excess:
            found.append((unseen_share(*shape), row.penalty, excess.num_seeds))
    if not found:
        return None
    unseen, steps, seeds = (np.array(column, dtype=np.float64) for column in zip(*found, strict=True))
    if name.partition("+")[0] == "2bw":
        return PenaltySteps(float(np.average(steps, weights=seeds)))
    slope, seen = np.polyfit(unseen, steps, 1, w=np.sqrt(seeds))
    if seen < 1:
        slope, seen = float(np.sum(seeds * unseen * (steps - 1)) / np.sum(seeds * unseen**2)), 1.0
    return PenaltySteps(float(seen), max(float(slope), 0.0))


def codec_law(word: str, rows: Sequence[Row], *, has_ending: bool, optimizer: str = "adamw") -> Excess | None:
    """What a codec adds to the loss under 2bw-fresh with its start, of the larger model where it was run, by
    the runs with the most seeds, and of these the best.
    """
    excesses = {row.cell: row.excess for row in rows if row.excess is not None}
    for size in ("larger", "small"):
        alone = Cell("fresh+warm-up", optimizer, size=size)
        found = [
            excess
            for cell, excess in excesses.items()
            if cell == replace(alone, codec=word, ending=cell.ending, ending_codec=cell.ending_codec)
            and (cell.ending > 0) == has_ending
            and cell.ending <= LONG_ENDING
        ]
        if found and alone in excesses:
            best = min(found, key=lambda one: (-one.num_seeds, one.median))
            none = excesses[alone].median
            return Excess(best.median - none, best.least - none, best.greatest - none, best.num_seeds)
    return None


def topk_with_muon(rows: Sequence[Row], *, has_ending: bool) -> float | None:
    """What `topk` of an eighth adds to the loss with Muon, as times what it adds with AdamW."""
    muon, adamw = (
        codec_law("topk:0.125:8", rows, has_ending=has_ending, optimizer=one) for one in ("muon", "adamw")
    )
    return None if muon is None or adamw is None else muon.median / adamw.median


def agreement_law(word: str, rule: str, optimizer: str, replicas: int, rows: Sequence[Row]) -> float | None:
    """Steps for one of replicas that agree in that way; None where they are not known, or are more than the
    shortest run that was compared.
    """
    asked = word, rule, optimizer, replicas
    return next(
        (
            row.penalty
            for row in rows
            if (row.cell.agreement, row.cell.rule, row.cell.optimizer, row.cell.replicas) == asked
        ),
        None,
    )


def sum_law(word: str, optimizer: str, rows: Sequence[Row]) -> float | None:
    """Steps for one with a codec of sums, in the mean of two and four replicas; None where they are not
    known, or are more than the shortest run that was compared.
    """
    found = [
        row.penalty
        for row in rows
        if (row.cell.sums, row.cell.optimizer) == (word, optimizer) and not is_pair(row.cell)
    ]
    known = [steps for steps in found if steps is not None]
    return fmean(known) if known and len(known) == len(found) else None
