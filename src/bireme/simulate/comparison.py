"""All schedules on the same devices, with the same work: which is fastest, and what does it keep?

Every device gets one stage's work. Schedules that want several stages on a device get each stage cut into
equal parts, so that the work of each device stays what it is while the messages multiply.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from bireme.errors import BiremeError
from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.generators.shape import Schedule, Shape
from bireme.schedule.program import Program
from bireme.schedule.rule import Rule
from bireme.simulate.costs import Costs
from bireme.simulate.lookahead import Lookahead, solve_lookahead
from bireme.simulate.network import Network
from bireme.simulate.simulator import simulate
from bireme.simulate.slicing import solve_slices
from bireme.timeline.timeline import Timeline

__all__ = ["ScheduleOutcome", "compare", "spread"]


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """One schedule's outcome, or why it cannot run in this shape.

    `advice` says what a lookahead would bring, for schedules that have one.
    """

    schedule: Schedule
    timeline: Timeline | None = None
    refused: str | None = None
    advice: Lookahead | None = None


def compare(
    costs: Costs,
    *,
    num_microbatches: int,
    num_batches: int,
    network: Callable[[Program], Network],
    recompute: bool = False,
    overlap: bool = True,
    overlap_reduce: bool = True,
    agree: bool = False,
) -> Iterator[ScheduleOutcome]:
    """Each schedule in turn, on as many devices as the costs have stages; `network` joins its ranks."""
    for schedule in SCHEDULES.values():
        num_stages = costs.num_stages * schedule.stages_per_rank
        shape = Shape(num_stages, num_microbatches, num_batches, schedule.stages_per_rank)
        parts = spread(costs, schedule.rank_of_stage(shape))
        slices = None
        if schedule.slices:
            slices = solve_slices(costs, num_microbatches, network, recompute=recompute, overlap=overlap)
        try:
            program = generate(
                schedule.name,
                num_stages=parts.num_stages,
                num_microbatches=num_microbatches,
                num_batches=num_batches,
                num_sliced=slices,
                recompute=range(parts.num_stages) if recompute else (),
            )
        except BiremeError as error:
            yield ScheduleOutcome(schedule, refused=str(error))
            continue
        timeline = simulate(
            program,
            parts,
            network(program),
            overlap=overlap,
            overlap_reduce=overlap_reduce,
            agree=agree and schedule.rule is not Rule.STASHED,
        )
        advice = None
        if schedule.most_lookahead is not None and overlap:
            advice = solve_lookahead(
                schedule.name,
                parts,
                num_microbatches,
                network,
                recompute=recompute,
                overlap_reduce=overlap_reduce,
            )
        yield ScheduleOutcome(schedule, timeline, advice=advice)


def spread(costs: Costs, rank_of_stage: Sequence[int]) -> Costs:
    """The costs where each device keeps its work, cut into as many equal parts as it has stages.

    What a part sends is as large as what its device's whole stage sends, and on the last device as what
    that one gets.
    """
    parts = [rank_of_stage.count(rank) for rank in rank_of_stage]
    if set(parts) == {1}:
        return costs

    def share(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(values[rank] / part for rank, part in zip(rank_of_stage, parts, strict=True))

    sent = (*costs.message_bytes[:-1], costs.input_bytes[-1])
    borders = tuple(sent[rank] for rank in rank_of_stage)
    back = (*(costs.gradient_message_bytes or costs.message_bytes)[:-1], costs.input_bytes[-1])
    return replace(
        costs,
        forward_s=share(costs.forward_s),
        backward_s=share(costs.backward_s),
        backward_input_s=share(costs.backward_input_s),
        backward_weight_s=share(costs.backward_weight_s),
        half_forward_s=share(costs.half_forward_s),
        recompute_s=share(costs.recompute_s),
        update_s=share(costs.update_s),
        trial_s=share(costs.trial_s),
        reduce_s=share(costs.reduce_s),
        reduce_busy_s=share(costs.reduce_busy_s),
        reduce_bytes=share(costs.reduce_bytes),
        message_bytes=borders,
        gradient_message_bytes=tuple(back[rank] for rank in rank_of_stage),
        weight_bytes=share(costs.weight_bytes),
        gradient_bytes=share(costs.gradient_bytes),
        optimizer_bytes=share(costs.optimizer_bytes),
        buffer_bytes=share(costs.buffer_bytes),
        frozen_bytes=share(costs.frozen_bytes) if costs.frozen_bytes else (),
        stash_bytes=share(costs.stash_bytes),
        input_bytes=(costs.input_bytes[0], *borders[:-1]),
        workspace_bytes=tuple(costs.workspace_bytes[rank] for rank in rank_of_stage),
        waiting_bytes=share(costs.waiting_bytes) if costs.waiting_bytes else (),
        halves_bytes=share(costs.halves_bytes) if costs.halves_bytes else (),
    )
