"""How many of each thing a stage's device holds at its worst moments, for a schedule.

The counts come from the schedule's own program and the account of `schedule/residency.py`, which the
simulator uses too. So a planner's bytes are the simulator's, whatever the schedule, before any stage is cut.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from functools import lru_cache

from bireme.errors import BiremeError
from bireme.schedule.catalogue import generate, schedule_named
from bireme.schedule.residency import Sizes, resident
from bireme.schedule.rule import Rule

__all__ = ["Moment", "holdings"]


@dataclass(frozen=True, slots=True, order=True)
class Moment:
    """What is there at once: each field counts the bytes of the same name in `Sizes`.

    `activation` and `gradient_message` are buffers for messages from before and from behind.
    """

    version: float
    gradient: float
    stash: float
    inputs: float
    activation: float
    gradient_message: float


DRAINING, FLOWING = 2, 4
"""Batches of a window in which everything there can be at once is there: the next batch's first message
before an update, all weight versions."""


@lru_cache(maxsize=4096)
def holdings(
    schedule: str, num_stages: int, num_microbatches: int, *, recompute: bool = False
) -> tuple[tuple[Moment, ...], ...]:
    """For each stage, one on each device, the moments that are not surpassed by another in everything."""
    if schedule_named(schedule).stages_per_rank != 1:
        raise BiremeError(
            f"{schedule} puts several stages on a device, and their bytes share its memory. Cut the chain "
            "for a schedule with one stage on each, and let the simulator count the bytes of this one."
        )
    few = 2 * num_stages + 2
    if num_microbatches <= few:
        return _counted(schedule, num_stages, num_microbatches, recompute)
    # From there on a micro-batch more adds the same each time: none in 1f1b, one that is kept in gpipe.
    fewer, base = (_counted(schedule, num_stages, m, recompute) for m in (few - 1, few))
    more = num_microbatches - few
    return tuple(
        tuple(
            Moment(*(b + more * (b - f) for f, b in zip(astuple(one), astuple(other), strict=True)))
            for one, other in zip(before, after, strict=True)
        )
        for before, after in zip(fewer, base, strict=True)
    )


@lru_cache(maxsize=4096)
def _counted(
    schedule: str, num_stages: int, num_microbatches: int, recompute: bool
) -> tuple[tuple[Moment, ...], ...]:
    drains = schedule_named(schedule).rule is Rule.SYNCHRONOUS
    program = generate(
        schedule,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_batches=DRAINING if drains else FLOWING,
        recompute=range(num_stages) if recompute else (),
    )
    nothing, one = (0.0,) * num_stages, (1.0,) * num_stages
    names = [field.name for field in fields(Moment)]
    found: list[tuple[Moment, ...]] = []
    for rank in range(num_stages):
        series = []
        for counted in names:
            each = (one if name == counted else nothing for name in names)
            version, gradient, stash, inputs, activation, message = each
            sizes = Sizes(version, gradient, nothing, stash, inputs, activation, message)
            series.append(resident(program, rank, sizes, series=True).series or ())
        found.append(_unsurpassed(Moment(*counts) for counts in set(zip(*series, strict=True))))
    return tuple(found)


def _unsurpassed(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    kept: list[Moment] = []
    for moment in sorted(moments, reverse=True):
        counts = astuple(moment)
        if not any(all(a <= b for a, b in zip(counts, astuple(other), strict=True)) for other in kept):
            kept.append(moment)
    return tuple(kept)
