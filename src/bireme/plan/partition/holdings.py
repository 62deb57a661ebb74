"""How many of each thing a stage's device holds at its worst moments, for a schedule.

The counts come from the schedule's own program and the account of `schedule/residency.py`, which the
simulator uses too. So a planner's bytes are the simulator's, whatever the schedule, before any stage is cut.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

from bireme.errors import BiremeError
from bireme.schedule.catalogue import generate, schedule_named
from bireme.schedule.program import Program
from bireme.schedule.residency import resident
from bireme.schedule.rule import Rule
from bireme.schedule.sizes import Sizes

__all__ = ["DEEP", "Moment", "holdings"]


@dataclass(frozen=True, slots=True, order=True)
class Moment:
    """What is there at once: each field counts the bytes of the same name in `Sizes`.

    `activation` and `gradient_message` are buffers for messages from the stages before and after.
    """

    version: float
    gradient: float
    stash: float
    inputs: float
    activation: float
    gradient_message: float
    waiting: float


DEEP = 7
"""Stages from which on one stage more adds the same each time."""

EVENLY = frozenset({"gpipe", "1f1b", "2bw", "2bw-fresh"})
"""The schedules of which that holds."""

DRAINING, FLOWING = 2, 4
"""Batches of a window in which everything there can be at once is there: the next batch's first message
before an update, all weight versions."""


@lru_cache(maxsize=4096)
def holdings(
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    *,
    recompute: bool = False,
    updates_early: bool = False,
    has_masters: bool = False,
) -> tuple[tuple[Moment, ...], ...]:
    """For each stage, one on each device, the moments that are not surpassed by another in everything.

    With `has_masters` the newest weights are the optimiser's master copy, and no version.
    """
    if schedule_named(schedule).stages_per_rank != 1:
        raise BiremeError(
            f"{schedule} puts several stages on a device, and their bytes share its memory. Cut the chain "
            "for a schedule with one stage on each, and let the simulator count the bytes of this one."
        )
    if num_stages > DEEP and num_microbatches >= num_stages and schedule in EVENLY:
        # For a longer batch all but gpipe keep what they keep for one longer by a micro-batch.
        more = num_microbatches - num_stages
        longer = more if schedule == "gpipe" else min(more, 1)
        return _of_deep(schedule, num_stages, longer, recompute, updates_early, has_masters)
    few = 2 * num_stages + 2
    if num_microbatches <= few:
        return _counted(schedule, num_stages, num_microbatches, recompute, updates_early, has_masters)
    # From there on a micro-batch more adds the same each time: none in 1f1b, one that is kept in gpipe.
    fewer, base = (
        _counted(schedule, num_stages, m, recompute, updates_early, has_masters) for m in (few - 1, few)
    )
    more = num_microbatches - few
    return tuple(
        tuple(
            Moment(*(b + more * (b - f) for f, b in zip(astuple(one), astuple(other), strict=True)))
            for one, other in zip(before, after, strict=True)
        )
        for before, after in zip(fewer, base, strict=True)
    )


@lru_cache(maxsize=4096)
def _of_deep(
    schedule: str, num_stages: int, longer: int, recompute: bool, updates_early: bool, has_masters: bool
) -> tuple[tuple[Moment, ...], ...]:
    """The moments of a deep pipeline, from what one more stage before or after adds in shallow ones.

    A batch has so many micro-batches more than the pipeline has stages, here as there. Counts are those of a
    stage as far from the end, or more by the same for each stage in between.
    """
    # What gpipe keeps depends on the micro-batches alone.
    of_gpipe = num_stages + longer if schedule == "gpipe" else None
    shallow, deeper = (
        holdings(
            schedule,
            depth,
            of_gpipe or depth + longer,
            recompute=recompute,
            updates_early=updates_early,
            has_masters=has_masters,
        )
        for depth in (DEEP - 1, DEEP)
    )
    more = num_stages - DEEP

    def further(one: tuple[Moment, ...], other: tuple[Moment, ...], steps: int) -> list[Moment]:
        return [
            Moment(*(b + steps * (b - a) for a, b in zip(astuple(first), astuple(second), strict=True)))
            for first, second in zip(one, other, strict=True)
        ]

    def between(stage: int) -> list[Moment]:
        """The effect of one more stage before it and one more after it, from the middle."""
        middle = DEEP // 2
        num_after = num_stages - 1 - stage
        base = deeper[middle]
        later = further(shallow[middle - 1], base, stage - middle)
        earlier = further(shallow[middle], base, num_after - (DEEP - 1 - middle))
        return [
            Moment(*(a + b - c for a, b, c in zip(astuple(one), astuple(two), astuple(three), strict=True)))
            for one, two, three in zip(later, earlier, base, strict=True)
        ]

    first = further(shallow[0], deeper[0], more)
    last = further(shallow[-1], deeper[-1], more)
    inner = [between(stage) for stage in range(1, num_stages - 1)]
    return tuple(map(tuple, (first, *inner, last)))


@lru_cache(maxsize=4096)
def _counted(
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    recompute: bool,
    updates_early: bool,
    has_masters: bool = False,
) -> tuple[tuple[Moment, ...], ...]:
    drains = schedule_named(schedule).rule is Rule.SYNCHRONOUS
    program = generate(
        schedule,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_batches=DRAINING if drains else FLOWING,
        recompute=range(num_stages) if recompute else (),
        updates_early=updates_early,
    )
    found: list[tuple[Moment, ...]] = []
    for rank in range(num_stages):
        is_large = max(num_stages, num_microbatches) > MOST_DIGITS
        count = _one_by_one if is_large else _at_once
        found.append(_unsurpassed(count(program, rank, has_masters)))
    return tuple(found)


DIGITS = {
    "version": 8,
    "gradient": 5,
    "stash": 8,
    "inputs": 8,
    "activation": 8,
    "gradient_message": 7,
    "waiting": 8,
}
"""Binary digits for the count of each thing in halves, which together a float holds exactly."""

MOST_DIGITS = 60
"""Stages and micro-batches for which they are more than enough."""


def _at_once(program: Program, rank: int, has_masters: bool = False) -> set[Moment]:
    """What a rank keeps at each instruction, all counted in one number, each in digits of its own."""
    shift = 0
    shifts: dict[str, int] = {}
    for name, digits in DIGITS.items():
        shifts[name] = shift
        shift += digits
    weights = [(float(2 << at),) * program.num_stages for at in shifts.values()]
    series = resident(program, rank, _sizes(weights, has_masters), series=True).series or ()
    return {
        Moment(*(((int(count) >> shifts[name]) & ((1 << DIGITS[name]) - 1)) / 2 for name in DIGITS))
        for count in set(series)
    }


def _one_by_one(program: Program, rank: int, has_masters: bool = False) -> set[Moment]:
    """The same, counted for each thing apart."""
    nothing, one = (0.0,) * program.num_stages, (1.0,) * program.num_stages
    series = []
    for counted in DIGITS:
        each = [one if name == counted else nothing for name in DIGITS]
        series.append(resident(program, rank, _sizes(each, has_masters), series=True).series or ())
    return {Moment(*counts) for counts in set(zip(*series, strict=True))}


def _sizes(each: Sequence[tuple[float, ...]], has_masters: bool) -> Sizes:
    """The sizes of what is counted; the optimiser's state is not, as it is always there."""
    version, gradient, stash, inputs, activation, message, waiting = each
    nothing = tuple(0.0 for _ in version)
    return Sizes(version, gradient, nothing, stash, inputs, activation, message, has_masters, waiting=waiting)


def _unsurpassed(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    kept: list[Moment] = []
    for moment in sorted(moments, reverse=True):
        counts = astuple(moment)
        if not any(all(a <= b for a, b in zip(counts, astuple(other), strict=True)) for other in kept):
            kept.append(moment)
    return tuple(kept)
