"""The part of the study where replicas agree on weights: its cells, and what they come to as a table."""

from collections.abc import Iterator, Sequence

from benchmarks.delay_study.meetings import agreed_named
from benchmarks.delay_study.study import Cell
from benchmarks.delay_study.table import Row

__all__ = ["replica_cells", "replica_lines"]

FIRST_RUNG = {"adamw": 2, "muon": 4}
SHAPES = {4: (4, 4), 8: (2, 2)}
"""By the number of replicas: stages, and micro-batches of a replica's part of 16 samples."""
RULES = ("synchronous", "fresh+warm-up")
GROUPS = ("groups:5", "groups:1", "groups:10", "groups:2")
OUTER = ("outer:10", "outer:50", "outer:200")
STRAGGLER = "groups:10:10"
LAST_HEADS = ("excess", "seeds", "penalty")


def replica_cells() -> Iterator[tuple[Cell, int]]:
    """Each with the rung to begin at; what tells most first."""
    for agreements in ((GROUPS[0],), GROUPS[1:], OUTER, (STRAGGLER,)):
        for optimizer, rung in FIRST_RUNG.items():
            for rule in RULES:
                for replicas, (d, m) in SHAPES.items():
                    for agreement in agreements:
                        cell = Cell(rule, optimizer, d, m, replicas=replicas, agreement=agreement)
                        yield cell, rung


def replica_lines(found: Sequence[Row]) -> Iterator[str]:
    """What agreeing on weights costs in loss at equal samples, and in steps for one."""
    heads = ("how replicas agree", "replicas", "rule", "optimiser", "d", "m", "rate", "loss", *LAST_HEADS)
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in found:
        cell = row.cell
        if cell.agreement == "all":
            continue
        excess, seeds = "", 0
        if row.excess is not None:
            seeds = row.excess.num_seeds
            excess = f"{100 * row.excess.median:+.1f} %"
            if seeds > 1:
                excess += f" ({100 * row.excess.least:+.1f} to {100 * row.excess.greatest:+.1f})"
        steps = "" if row.penalty is None else f"{row.penalty:.2f}"
        rate = f"{row.rate:.2g}{' (?)' if row.is_at_edge else ''}"
        yield (
            f"| {_told(cell.agreement)} | {cell.replicas} | {cell.rule} | {cell.optimizer} "
            f"| {cell.num_stages} | {cell.num_microbatches} | {rate} | {row.loss:.3f} | {excess} | {seeds} "
            f"| {steps} |"
        )


def _told(word: str) -> str:
    agreed = agreed_named(word)
    if agreed.is_outer:
        return f"outer, H = {agreed.every}, rate {agreed.rate:g}, momentum {agreed.momentum:g}"
    slow = "" if agreed.slowness == 1 else f", one {agreed.slowness:g} times slower"
    return f"groups, P = {agreed.every}{slow}"
