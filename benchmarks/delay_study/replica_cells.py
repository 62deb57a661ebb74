"""The part of the study where replicas agree on weights: its cells, and what they come to as a table."""

from collections.abc import Iterator, Sequence
from itertools import product

from benchmarks.delay_study.meetings import agreed_named
from benchmarks.delay_study.study import Cell
from benchmarks.delay_study.sweeps import Sweep
from benchmarks.delay_study.table import Row, told

__all__ = ["replica_lines", "replica_sweeps"]

FIRST_RUNG = {"adamw": 2, "muon": 4}
SHAPES = {4: (4, 4), 8: (2, 2)}
"""By the number of replicas: stages, and micro-batches of a replica's part of 16 samples."""
RULES = ("fresh+warm-up", "synchronous")
GROUPS = ("groups:5", "groups:1", "groups:10", "groups:2")
OUTER = ("outer:50", "outer:10", "outer:200")
STRAGGLER = "groups:10:10"
FIRST = ("groups:5", "groups:1", "groups:10", "outer:50", "groups:2", "outer:10", "outer:200")


def replica_sweeps() -> Iterator[Sweep]:
    """AdamW and four replicas first: groups at the best rate of summed gradients, outer steps at their own.
    Then one seed of all others, and at last a search of every cell.
    """
    for agreement in FIRST:
        for rule in RULES:
            is_outer = agreement in OUTER
            yield _sweep(rule, "adamw", 4, agreement, 1 if is_outer else 3, is_searched=is_outer)
    for optimizer, replicas, rule in product(FIRST_RUNG, SHAPES, RULES):
        for agreement in GROUPS:
            yield _sweep(rule, optimizer, replicas, agreement, 1, is_searched=False)
    for num_seeds in (1, 3):
        for optimizer, replicas, rule in product(FIRST_RUNG, SHAPES, RULES):
            for agreement in (*OUTER, STRAGGLER, *GROUPS):
                yield _sweep(rule, optimizer, replicas, agreement, num_seeds)


def _sweep(
    rule: str, optimizer: str, replicas: int, agreement: str, num_seeds: int, *, is_searched: bool = True
) -> Sweep:
    cell = Cell(rule, optimizer, *SHAPES[replicas], replicas=replicas, agreement=agreement)
    return Sweep(cell, FIRST_RUNG[optimizer], num_seeds, is_searched=is_searched)


def replica_lines(found: Sequence[Row]) -> Iterator[str]:
    """What agreeing on weights costs in loss at equal samples, and in steps for one."""
    yield (
        "| how replicas agree | replicas | rule | optimiser | d | m | rate | loss | excess | seeds "
        "| penalty |"
    )
    yield "|---" * 11 + "|"
    for row in found:
        cell = row.cell
        if cell.agreement != "all":
            yield (
                f"| {_told(cell.agreement)} | {cell.replicas} | {cell.rule} | {cell.optimizer} "
                f"| {cell.num_stages} | {cell.num_microbatches} | {row.told_rate} | {row.loss:.3f} "
                f"| {told(row.excess)} | {row.num_seeds} | {row.told_penalty} |"
            )


def _told(word: str) -> str:
    agreed = agreed_named(word)
    if agreed.is_outer:
        return f"outer, H = {agreed.every}, rate {agreed.rate:g}, momentum {agreed.momentum:g}"
    slow = "" if agreed.slowness == 1 else f", one {agreed.slowness:g} times slower"
    return f"groups, P = {agreed.every}{slow}"
