"""The part of the study where replicas agree on weights: its cells, and what they come to as a table."""

from collections.abc import Iterator, Sequence
from itertools import product

from benchmarks.delay_study.meetings import agreed_named
from benchmarks.delay_study.study import Cell
from benchmarks.delay_study.sweeps import FIRST_RUNG, Sweep
from benchmarks.delay_study.table import FIGURES, Row, table_lines

__all__ = ["by_agreement", "replica_lines", "replica_sweeps"]

SHAPES = {4: (4, 4), 8: (2, 2)}
"""By the number of replicas: stages, and micro-batches of a replica's part of 16 samples."""
RULES = ("fresh+warm-up", "synchronous")
GROUPS = ("groups:5", "groups:1", "groups:10", "groups:2")
DILOCO = ("diloco:50", "diloco:10", "diloco:200")
STRAGGLER = "groups:10:10"
COUNTED = ("groups:5", "groups:1", "groups:10")
"""Those, and outer steps every 50 batches, are what plans count steps of."""


def replica_sweeps() -> Iterator[Sweep]:
    """What plans count first, then one seed of all with AdamW and four replicas, then some of all others, at
    the best rate of summed gradients; at last a search of every cell, with three seeds.
    """
    for agreement in COUNTED:
        yield _sweep("synchronous", "adamw", 4, agreement, 3, is_searched=False)
    yield _sweep("synchronous", "adamw", 4, DILOCO[0], 1)
    for rule in RULES:
        for agreement in (*GROUPS, *DILOCO):
            yield _sweep(rule, "adamw", 4, agreement, 1, is_searched=False)
    shapes = [*product(FIRST_RUNG, SHAPES, RULES)]
    for agreement in (GROUPS[0], DILOCO[0], GROUPS[2]):
        for optimizer, replicas, rule in shapes:
            yield _sweep(rule, optimizer, replicas, agreement, 1, is_searched=False)
    for num_seeds in (1, 3):
        for optimizer, replicas, rule in shapes:
            for agreement in (*DILOCO, STRAGGLER, *GROUPS):
                yield _sweep(rule, optimizer, replicas, agreement, num_seeds)


def _sweep(
    rule: str, optimizer: str, replicas: int, agreement: str, num_seeds: int, *, is_searched: bool = True
) -> Sweep:
    cell = Cell(rule, optimizer, *SHAPES[replicas], replicas=replicas, agreement=agreement)
    # Outer steps are best at a lower rate.
    first_rung = FIRST_RUNG[optimizer] - (agreement in DILOCO)
    return Sweep(cell, first_rung, num_seeds, is_searched=is_searched)


def replica_lines(found: Sequence[Row]) -> Iterator[str]:
    """What agreeing on weights costs in loss at equal samples, and in steps for one."""
    agreed = sorted((row for row in found if row.cell.agreement != "allreduce"), key=by_agreement)
    yield from table_lines(
        ("how replicas agree", "replicas", "rule", "optimizer", "d", "m", *FIGURES),
        ((*_shape(row.cell), *row.figures) for row in agreed),
    )


def by_agreement(row: Row) -> tuple[object, ...]:
    """The order in which tables have them."""
    cell, agreed = row.cell, agreed_named(row.cell.agreement)
    return cell.optimizer, cell.replicas, agreed.is_diloco, agreed.slowness, agreed.every, cell.rule


def _shape(cell: Cell) -> tuple[object, ...]:
    shape = cell.num_stages, cell.num_microbatches
    return _told(cell.agreement), cell.replicas, cell.rule, cell.optimizer, *shape


def _told(word: str) -> str:
    agreed = agreed_named(word)
    if agreed.is_diloco:
        return f"diloco, H = {agreed.every}, rate {agreed.rate:g}, momentum {agreed.momentum:g}"
    slow = "" if agreed.slowness == 1 else f", one {agreed.slowness:g} times slower"
    return f"groups, P = {agreed.every}{slow}"
