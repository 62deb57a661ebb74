"""All schedules by name, and the one way to make a program of them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from bireme.errors import BiremeError, closest
from bireme.schedule.generators.one_f_one_b import GPIPE, INTERLEAVED, ONE_F_ONE_B, SEQUENTIAL, SLICED
from bireme.schedule.generators.shape import Schedule, Shape
from bireme.schedule.generators.two_buffer import PIPEDREAM, TWO_BUFFER, TWO_BUFFER_FRESH
from bireme.schedule.generators.zero_bubble import ZERO_BUBBLE_H1, ZERO_BUBBLE_V
from bireme.schedule.program import Program, banks_needed
from bireme.schedule.source import ProgramSource, Window, fold
from bireme.schedule.weave import LATE_UPDATES, UpdateTiming, lower, weave

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        SEQUENTIAL,
        GPIPE,
        ONE_F_ONE_B,
        SLICED,
        TWO_BUFFER,
        TWO_BUFFER_FRESH,
        PIPEDREAM,
        INTERLEAVED,
        ZERO_BUBBLE_H1,
        ZERO_BUBBLE_V,
    )
}


def schedule_named(name: str) -> Schedule:
    """The schedule of that name, which may be in capital letters."""
    found = SCHEDULES.get(name.lower())
    if found is None:
        raise BiremeError(f"There is no schedule {name!r}. {closest(name.lower(), SCHEDULES)}")
    return found


def generate(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    num_batches: int = 1,
    stages_per_rank: int | None = None,
    num_sliced: int | None = None,
    lookahead: int = 0,
    sweep: int = 1,
    shares: Sequence[Sequence[int]] = (),
    recompute: Iterable[int] = (),
    first_batch: int = 0,
    timing: UpdateTiming = LATE_UPDATES,
) -> Program:
    """A program of the schedule `name`; long windows come as loops.

    With `stages_per_rank`, a schedule of one stage on each rank has so many neighbors there, which compute
    what the one would of which they are parts. `num_sliced` is for `1f1b-sliced`; left out, it is the least
    that is best for equal stages whose backward takes twice the forward. `lookahead` lets 1f1b, 2bw and
    2bw-fresh run further ahead where links are slow; it counts sweeps of `sweep` micro-batches, which go
    through a stage one after the other. With `shares` each stage is on several ranks, one for each of its
    shares, which is how many micro-batches of a batch the rank takes. `recompute` names the stages that keep
    only their inputs. `timing` is for pipelines that sum no gradients over ranks, or whose replicas share an
    optimizer or average weights.
    """
    if first_batch < 0:
        raise BiremeError(f"Batches count from 0, so a window cannot start at batch {first_batch}.")
    schedule, stages = schedule_named(name), frozenset(recompute)
    wished = Shape(
        num_stages,
        num_microbatches,
        num_batches,
        schedule.stages_per_rank if stages_per_rank is None else stages_per_rank,
        lookahead=lookahead,
        sweep=sweep,
        shares=tuple(map(tuple, shares)),
    )
    shape = _checked(schedule, wished, num_sliced, stages)

    def make(batches: int) -> Program:
        window = replace(shape, num_batches=batches)
        program = weave(
            schedule.name,
            schedule.rule,
            schedule.routes(window),
            schedule.in_order(window),
            num_microbatches=num_microbatches,
            num_batches=batches,
            first_batch=first_batch,
            recompute=stages,
            timing=timing,
        )
        return lower(program)

    return fold(make, num_batches)


def source_named(
    name: str,
    window: Window,
    *,
    num_stages: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    num_sliced: int | None = None,
    lookahead: int = 0,
    sweep: int = 1,
    recompute: Iterable[int] = (),
) -> ProgramSource:
    """The source of the windows of a schedule, which `generate` makes with these arguments. Generates none,
    and refuses the same.
    """
    schedule, stages = schedule_named(name), frozenset(recompute)
    per_rank = schedule.stages_per_rank if stages_per_rank is None else stages_per_rank
    wished = Shape(num_stages, num_microbatches, 1, per_rank, lookahead=lookahead, sweep=sweep)
    shape = _checked(schedule, wished, num_sliced, stages)
    return ProgramSource(
        name=schedule.name,
        rule=schedule.rule,
        routes=schedule.routes(shape),
        num_microbatches=num_microbatches,
        banks=tuple(banks_needed(schedule.rule, stage, num_stages) for stage in range(num_stages)),
        recomputed=stages,
        num_sliced=shape.num_sliced,
        splits_backward=schedule.splits_backward,
        window=window,
    )


def _checked(schedule: Schedule, shape: Shape, num_sliced: int | None, recompute: frozenset[int]) -> Shape:
    """The shape with the number of sliced micro-batches; raises if no program has it."""
    if num_sliced is not None and not schedule.slices:
        raise BiremeError(f"{schedule.name} slices no micro-batches. Use 1f1b-sliced for that.")
    if num_sliced is None and schedule.slices:
        depth = schedule.whole(shape).num_stages
        num_sliced = min(max(1, -(-(depth - 1) // 4)), depth, shape.num_microbatches)
    shape = replace(shape, num_sliced=num_sliced or 0)
    schedule.refuse(shape)
    _check_lookahead(schedule, schedule.whole(shape))
    if not recompute <= set(range(shape.num_stages)):
        wrong = min(recompute - set(range(shape.num_stages)))
        raise BiremeError(f"Stage {wrong} cannot be recomputed: the stages are 0 to {shape.num_stages - 1}.")
    return shape


def _check_lookahead(schedule: Schedule, shape: Shape) -> None:
    if shape.lookahead == 0:
        return
    if schedule.most_lookahead is None:
        able = ", ".join(known.name for known in SCHEDULES.values() if known.most_lookahead is not None)
        raise BiremeError(f"{schedule.name} has no lookahead to set. These have: {able}.")
    most = schedule.most_lookahead(shape)
    if shape.lookahead > most:
        raise BiremeError(
            f"{schedule.name} allows a lookahead of {most} with {shape.num_ranks_from(0)} "
            f"{'ranks' if shape.shares else 'stages'} and {shape.num_microbatches} micro-batches, not "
            f"{shape.lookahead}: further ahead it may start nothing yet. Use more micro-batches in a batch, "
            "or a smaller lookahead."
        )
