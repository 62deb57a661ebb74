"""What instructions and messages take, read off what ranks of a machine did with messages of two sizes.

The last rank has much to do and the others little, so that what goes forward has come long before it is
used, and what comes back is waited for. That tells apart what a message costs the rank that takes it and how
long it is under way.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn

from bireme.cluster.engine_cost import EngineCost
from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.plan.plan import Plan
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.world import World
from bireme.schedule.instruction import RECEIVES, SENDS, Kind, Message
from bireme.timeline.timeline import Timeline

__all__ = ["lopsided_graph", "message_costs", "read_off"]

WIDTH = 64
HEAVY = 320
"""Rows and columns of a matrix that the last rank multiplies by itself."""

SMALL_BYTES = 4 * 2**10
NUM_MICROBATCHES = 6
NUM_SETTLING_MESSAGES, NUM_COUNTED_MESSAGES = 4, 8

SURELY_S = 2e-4
"""A message that was sent so long before has come, and one that is sent so long after has not."""


class _Lopsided(nn.Module):
    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_ranks)))
        self.heavy = nn.Parameter(torch.empty(HEAVY, HEAVY))

    def forward(self, given: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        """How far the result is from what is wanted; the heavy part counts as well."""
        heavy = (self.heavy @ self.heavy @ self.heavy).mean()
        return {"loss": nn.functional.mse_loss(self.layers(given), wanted) + heavy}


def lopsided_graph(num_ranks: int) -> Graph:
    """The model for so many ranks, captured, so that they need not do it: what that takes no rank of a run
    takes.
    """
    batch = {name: torch.ones(2, WIDTH) for name in ("given", "wanted")}
    return capture(_Lopsided(num_ranks), batch, name="lopsided")


def message_costs(world: World, graph: Graph, large_bytes: int) -> EngineCost:
    """The costs of a message and of instructions, the same on all ranks, found with that model.

    `large_bytes` is about as much as a message of the model to be trained has; between it and a small one
    costs grow evenly.
    """
    # Large ones first: what a process does for the first time it does slowly.
    large_bytes = max(large_bytes, 2 * SMALL_BYTES)
    large = read_off(_run_messages(world, graph, large_bytes))
    small = read_off(_run_messages(world, graph, SMALL_BYTES))
    more = large_bytes - SMALL_BYTES
    send, take, late = (
        max(one - other, 0.0) / more
        for one, other in (
            (large.send_s, small.send_s),
            (large.take_s, small.take_s),
            (large.late_s, small.late_s),
        )
    )
    return replace(
        small,
        send_s=max(small.send_s - send * SMALL_BYTES, 0.0),
        send_s_per_byte=send,
        take_s=max(small.take_s - take * SMALL_BYTES, 0.0),
        take_s_per_byte=take,
        late_s=max(small.late_s - late * SMALL_BYTES, 0.0),
        late_s_per_byte=late,
    )


def _run_messages(world: World, graph: Graph, num_bytes: int) -> Timeline:
    samples = max(1, num_bytes // (4 * WIDTH))
    num_microbatches = max(NUM_MICROBATCHES, world.size)
    torch.manual_seed(0)
    batch = {name: torch.randn(samples * num_microbatches, WIDTH) for name in ("given", "wanted")}
    pipeline = Pipeline(
        graph,
        Plan(tuple(range(1, world.size)), num_microbatches, "2bw"),
        world,
        weights=lambda names: {
            state.name: torch.full(state.shape, 1e-3) for state in graph.parameters if state.name in names
        },
        optimizer="sgd",
    )

    def batches(count: int) -> Iterator[Mapping[str, Tensor]]:
        for _ in range(count):
            yield batch

    for _ in pipeline.train(batches(NUM_SETTLING_MESSAGES)):
        pass
    for _ in pipeline.train(batches(NUM_COUNTED_MESSAGES), record=True):
        pass
    timeline = pipeline.timeline()
    pipeline.close()
    return timeline


def read_off(timeline: Timeline) -> EngineCost:
    """What messages of one size and instructions took in a measured run of several batches; the cost of a
    message is all in the part that does not grow.
    """
    num_stages = timeline.program.num_stages
    sent_s: dict[Message, float] = {}
    reduced_s: dict[int, float] = {}
    for one in (one for rank in timeline.ranks for one in rank.intervals()):
        if one.instruction.kind in SENDS:
            sent_s[one.instruction.carries()] = one.end_s
        elif one.instruction.kind is Kind.REDUCE:
            reduced_s[one.instruction.batch] = max(reduced_s.get(one.instruction.batch, 0.0), one.end_s)
    lasts: dict[bool, list[float]] = {True: [], False: []}
    plain, taken, late, agreed, turns = (list[float]() for _ in range(5))
    for rank in timeline.ranks:
        by_place: dict[int, list[float]] = {}
        for before, one in pairwise(one for one in rank.intervals() if one.instruction.batch > 0):
            step, gap_s = one.instruction, one.start_s - before.end_s
            message = step.needs(num_stages)
            if step.kind in SENDS | RECEIVES:
                lasts[step.kind in SENDS].append(one.end_s - one.start_s)
            if step.kind is Kind.UPDATE:
                if before.end_s < reduced_s[step.batch]:
                    agreed.append(one.start_s - reduced_s[step.batch])
            elif message is None:
                plain.append(gap_s)
                if rank.track.body:
                    place = (one.index - len(rank.track.head)) % len(rank.track.body)
                    by_place.setdefault(place, []).append(gap_s)
            elif sent_s[message] < before.end_s - SURELY_S:
                taken.append(gap_s)
            elif sent_s[message] > before.end_s + SURELY_S:
                late.append(one.start_s - sent_s[message])
        turns.append(max((_median(gaps) for gaps in by_place.values()), default=0.0))
    instruction_s, take_s = _median(plain), _median(taken)
    return EngineCost(
        instruction_s=instruction_s,
        send_s=_median(lasts[True]),
        receive_s=_median(lasts[False]),
        take_s=max(take_s - instruction_s, 0.0),
        late_s=max(_median(late) - take_s, 0.0),
        # What reads the next batch does so at one place of the loop.
        batch_s=max(_median(turns) - instruction_s, 0.0),
        agree_s=_median(agreed),
    )


def _median(values: list[float]) -> float:
    return max(median(values), 0.0) if values else 0.0
