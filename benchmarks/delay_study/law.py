"""What a plan counts a delay as: measured penalties as one number, or as a line in what is not seen."""

from collections.abc import Sequence

import numpy as np

from benchmarks.delay_study.study import Cell
from benchmarks.delay_study.table import Row
from bireme.plan.penalties import Steps, unseen_share
from bireme.schedule.rule import Rule

__all__ = ["LAWS", "law"]

LAWS = {
    (Rule.DELAYED, False): "2bw",
    (Rule.DELAYED, True): "2bw+warm-up",
    (Rule.FRESH, False): "2bw-fresh",
    (Rule.FRESH, True): "fresh+warm-up",
}
"""The study's name of what the engine does, by its rule and whether a run starts without delay."""


def law(name: str, optimizer: str, rows: Sequence[Row]) -> Steps | None:
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
        return Steps(float(np.average(steps, weights=seeds)))
    slope, seen = np.polyfit(unseen, steps, 1, w=np.sqrt(seeds))
    if seen < 1:
        slope, seen = float(np.sum(seeds * unseen * (steps - 1)) / np.sum(seeds * unseen**2)), 1.0
    return Steps(float(seen), max(float(slope), 0.0))
