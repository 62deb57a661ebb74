"""Measuring the units of a model by running them, in this process or in several at once.

What is to be measured is a `MeasuringJob` that can be handed to another process, so that a profile can be
made under the load that training will have; who does that is a `Measurer`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bireme.cluster.engine_cost import EngineCost
from bireme.model.stage import Resolve, stage_function, torch_operator
from bireme.profile.pieces import ProfiledUnits
from bireme.profile.timing import Effort, Seconds, time_benches, time_update
from bireme.profile.workbench import Workbench

__all__ = [
    "BatchEndTimes",
    "Here",
    "Measured",
    "Measurer",
    "MeasuringJob",
    "Progress",
    "bench_of",
    "measure_units",
]

Progress = Callable[[float, str], None]
"""Is told which part of the work is done, and what comes next."""

MEMORY_FRACTION = 0.25
"""Of the device's memory that units measured in turns may take together."""


@dataclass(frozen=True, slots=True)
class BatchEndTimes:
    """Seconds of a batch's end for a unit: over its gradients, a step, a step that leaves the weights."""

    reduce_s: float
    update_s: float
    trial_s: float

    def beyond(self, other: "BatchEndTimes") -> "BatchEndTimes":
        """What these seconds are more than others."""
        return BatchEndTimes(
            max(self.reduce_s - other.reduce_s, 0.0),
            max(self.update_s - other.update_s, 0.0),
            max(self.trial_s - other.trial_s, 0.0),
        )


@dataclass(frozen=True, slots=True)
class MeasuringJob:
    """What is to be measured: the units that stand for all others, by micro-batch size.

    `needed_bytes` is what running each of them takes on a device of `memory_bytes`; `message_bytes` is the
    most that goes from one to the next.
    """

    pieces: Mapping[int, ProfiledUnits]
    needed_bytes: Mapping[int, Mapping[int, int]]
    memory_bytes: int
    message_bytes: int
    device: torch.device
    optimizer: str
    examples: Mapping[str, Tensor] | None
    halves: bool
    effort: Effort

    @property
    def first(self) -> ProfiledUnits:
        """The units at the first size, which stand for the state that all sizes share."""
        return next(iter(self.pieces.values()))

    def turns(self, size: int) -> Iterator[list[int]]:
        """The units to measure at a size, in groups that fit into memory together."""
        turn: list[int] = []
        needed = 0
        for index in self.pieces[size].distinct:
            more = self.needed_bytes[size][index]
            if turn and needed + more > self.memory_bytes * MEMORY_FRACTION:
                yield turn
                turn, needed = [], 0
            turn.append(index)
            needed += more
        yield turn


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found: by size and unit, and by unit."""

    seconds: Mapping[int, Mapping[int, Seconds]]
    ends: Mapping[int, BatchEndTimes]
    engine: EngineCost | None = None


class Measurer(Protocol):
    """Measures jobs."""

    @property
    def circumstances(self) -> tuple[object, ...]:
        """What its figures depend on besides the job itself."""

    def __call__(self, job: MeasuringJob, progress: Progress) -> Measured:
        """Do a job."""


class Here:
    """Measures in this process, alone; of the engine it knows only what the optimiser takes."""

    circumstances: tuple[object, ...] = ()

    def __init__(self, resolve: Resolve = torch_operator) -> None:
        self._resolve = resolve

    def __call__(self, job: MeasuringJob, progress: Progress) -> Measured:
        """Do a job."""
        ends: dict[int, BatchEndTimes] = {}

        def update(index: int, bench: Workbench) -> None:
            seconds = time_update(bench, job.optimizer)
            ends[index] = BatchEndTimes(0.0, seconds, seconds)

        return Measured(measure_units(job, progress, resolve=self._resolve, afterwards=update), ends)


def measure_units(
    job: MeasuringJob,
    progress: Progress,
    *,
    resolve: Resolve = torch_operator,
    in_turns: Callable[[], None] = lambda: None,
    afterwards: Callable[[int, Workbench], None] = lambda index, bench: None,
) -> dict[int, dict[int, Seconds]]:
    """Run all units at all sizes. `in_turns` is run in every round too, `afterwards` once for each unit."""
    found: dict[int, dict[int, Seconds]] = {}
    num_all = len(job.pieces) * len(job.first.distinct)
    num_done = 0
    for size, one in job.pieces.items():
        found[size] = {}
        for turn in job.turns(size):
            units = "1 unit" if len(turn) == 1 else f"{len(turn)} units"
            samples = "1 sample" if size == 1 else f"{size} samples"

            def tick(
                part: float,
                what: str = f"measuring {units}, {samples}",
                before: int = num_done,
                now: int = len(turn),
            ) -> None:
                in_turns()
                progress((before + part * now) / num_all, what)

            benches = [bench_of(one, index, size, job.device, job.examples, resolve) for index in turn]
            seconds = time_benches(benches, job.effort, halves=job.halves, tick=tick)
            found[size].update(zip(turn, seconds, strict=True))
            if one is job.first:
                for index, bench in zip(turn, benches, strict=True):
                    afterwards(index, bench)
            num_done += len(turn)
    return found


def bench_of(
    pieces: ProfiledUnits,
    index: int,
    size: int,
    device: torch.device,
    examples: Mapping[str, Tensor] | None,
    resolve: Resolve,
    also: tuple[str, ...] = (),
) -> Workbench:
    """A unit with all it needs to run; `also` are values that it gives out besides."""
    function = stage_function(pieces.graph, [pieces.units[index]], resolve=resolve, also=also)
    return Workbench(
        pieces.graph, function, learned=pieces.learned, batch=size, device=device, examples=examples
    )
