"""How long replicas take to a loss that average weights: their steps, times the seconds of a step by the
simulator, where one replica is slow or links are.

A replica is one stage here, and a batch of a quick one takes one unit of time. On the slow links a sum over
all replicas takes four times as long as a batch.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from math import ceil

from benchmarks.delay_study.meetings import PARTS, agreed_named
from benchmarks.delay_study.replica_cells import by_agreement
from benchmarks.delay_study.table import Row, table_lines
from benchmarks.replica_speeds.mortal import UnevenSpeed
from bireme.simulate.agreements import DilocoRounds, Everyone, GroupsAgreement
from bireme.simulate.together import Agreement, Exchange, SampleWork, Speed, Together, one_stage
from bireme.sync.coordinator.samples import GroupSettings

__all__ = ["replica_time_lines"]

SLOWER, SUM_S = 10.0, 4.0
STRAGGLER, SLOW_LINKS = "one 10 times slower", "slow links"
BATCHES, BEGIN = 400, 0.25
"""Of a quick replica in a simulated run, and the share of them that does not count."""
SHARE = 12
"""Samples of a replica's batch in the simulation; only ratios are taken from it."""


def replica_time_lines(found: Sequence[Row]) -> Iterator[str]:
    """Seconds to the same loss, compared with replicas that sum gradients in the same setting. Without delay;
    what agreeing costs is what it costs equal replicas, but for the row that says otherwise.
    """
    heads = ("how replicas agree", "replicas", "optimizer", "steps for one", STRAGGLER, SLOW_LINKS)
    yield from table_lines(heads, _times(found))


def _times(found: Sequence[Row]) -> Iterator[tuple[object, ...]]:
    for row in sorted((row for row in found if row.cell.agreement != "allreduce"), key=by_agreement):
        cell, steps = row.cell, row.penalty
        if cell.rule != "synchronous" or steps is None:
            continue
        agreed = agreed_named(cell.agreement)
        word = f"{'diloco, H' if agreed.is_diloco else 'groups, P'} = {agreed.every}"
        gains = [
            _rate(cell.agreement, cell.replicas, setting) / _rate("allreduce", cell.replicas, setting)
            for setting in (STRAGGLER, SLOW_LINKS)
        ]
        told = [f"{steps / gain:.2f}" for gain in gains]
        if agreed.slowness != 1:
            word, told[1] = f"{word}, steps with one {agreed.slowness:g} times slower", ""
        yield word, cell.replicas, cell.optimizer, f"{steps:.2f}", *told


@cache
def _rate(word: str, width: int, setting: str) -> float:
    """Samples in a batch's time, over all replicas."""
    every = 1 if word == "allreduce" else agreed_named(word).every
    agreement = _agreement(word)
    speeds: list[Speed] = [Speed()] * width
    exchange = Exchange()
    if setting == STRAGGLER:
        speeds[0] = UnevenSpeed(slowness=((0.0, SLOWER),))
    else:
        exchange = Exchange(num_bytes=1.0, bytes_per_s=2 * (width - 1) / width / SUM_S)
    make = one_stage(agreement.average_lag)
    forward, backward = (part / SHARE for part in PARTS)
    work = SampleWork((forward,), (backward,))
    run = Together(make, work, speeds, agreement, exchange, batch_size=SHARE * width)
    until_s = ceil(BATCHES / every) * (every + exchange.seconds(width))
    if setting == STRAGGLER and word == "allreduce":
        until_s *= SLOWER
    return run.until(until_s, 4 * BATCHES + round(until_s)).samples_per_s(BEGIN * until_s)


def _agreement(word: str) -> Agreement:
    if word == "allreduce":
        return Everyone()
    agreed = agreed_named(word)
    if agreed.is_diloco:
        return DilocoRounds(agreed.every, sum(PARTS) / 2)
    return GroupsAgreement(GroupSettings(agreed.every), 1)
