"""Measuring the units of a model by running them, in this process or in several at once.

What is to be measured is a `MeasuringJob` that can be handed to another process, so that a profile can be
made under the load that training will have; who does that is a `Measurer`.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from bireme.cluster.device import EngineCost
from bireme.devices import is_accelerator, process_bytes
from bireme.errors import Progress
from bireme.model.graph import Graph, ModelState, learned_values
from bireme.model.stage import Resolve, StageFunction, torch_operator
from bireme.model.units import Unit, units_of
from bireme.profile.estimate import Seconds
from bireme.profile.optimizers import frozen_bytes, gradient_bytes, optimizer_bytes
from bireme.profile.profile import KeptMemory, SharedState
from bireme.profile.timing import Effort, Workbench, time_benches, time_update

# The pieces of a graph to profile: its units, which of them do the same work, and what they share.
#
# Two units of the same structure cost the same unless a gradient goes back from one and not from the other.


@dataclass(frozen=True, slots=True)
class ProfiledUnits:
    """A graph's units. `firsts[i]` is the first unit of the same work as unit i, often i itself.

    `learned` are the values that a gradient comes back to, `common` those that several units make for
    themselves.
    """

    graph: Graph
    units: tuple[Unit, ...]
    firsts: tuple[int, ...]
    learned: frozenset[str]
    common: frozenset[str]

    @property
    def distinct(self) -> tuple[int, ...]:
        """The units that stand for all others."""
        return tuple(dict.fromkeys(self.firsts))

    def translated(self, kept: tuple[KeptMemory, ...], index: int) -> tuple[KeptMemory, ...]:
        """What the first unit of the same work shares, in the names that it has at this one."""
        there, here = self.units[self.firsts[index]], self.units[index]
        pairs = zip(_outside(self.graph, there), _outside(self.graph, here), strict=True)
        name_here = dict(pairs)
        return tuple(replace(one, names=tuple(name_here[name] for name in one.names)) for one in kept)

    def returned_bytes(self, index: int, size: int) -> int | None:
        """The bytes of the gradients that come back to a unit; None if all that it sends has one."""
        sent = set(self.units[index].sends)
        if sent <= self.learned:
            return None
        values = self.graph.values
        return sum(values[name].num_bytes(size) for name in sent & self.learned)

    def tied(self, unit: Unit, optimizer: str) -> tuple[SharedState, ...]:
        """The parameters and buffers of a unit that others use too."""
        uses = Counter(name for other in self.units for name in (*other.parameters, *other.buffers))
        states = {state.name: state for state in (*self.graph.parameters, *self.graph.buffers)}
        names = [name for name in (*unit.parameters, *unit.buffers) if uses[name] > 1]
        return tuple(state_bytes(name, [states[name]], optimizer) for name in names)


def state_bytes(name: str, states: Sequence[ModelState], optimizer: str) -> SharedState:
    """The bytes that parameters and buffers take from one micro-batch to the next, under one name."""
    return SharedState(
        name=name,
        parameter_bytes=sum(state.num_bytes for state in states if state.trainable),
        gradient_bytes=sum(map(gradient_bytes, states)),
        optimizer_bytes=sum(optimizer_bytes(state, optimizer) for state in states),
        buffer_bytes=sum(state.num_bytes for state in states if not state.trainable),
        frozen_bytes=sum(map(frozen_bytes, states)),
    )


def pieces_of(graph: Graph) -> ProfiledUnits:
    """The pieces of a graph."""
    units = units_of(graph)
    learned = learned_values(graph)
    times_made = Counter(name for unit in units for name in _made(graph, unit))
    first: dict[tuple[str, tuple[bool, ...]], int] = {}
    keys = [(unit.structure, tuple(name in learned for name in unit.receives)) for unit in units]
    return ProfiledUnits(
        graph=graph,
        units=units,
        firsts=tuple(first.setdefault(key, index) for index, key in enumerate(keys)),
        learned=learned,
        common=frozenset(name for name, times in times_made.items() if times > 1),
    )


def _made(graph: Graph, unit: Unit) -> list[str]:
    return [value.name for place in unit.operators for value in graph.operators[place].made]


def _outside(graph: Graph, unit: Unit) -> list[str]:
    """All names that a unit and another one may both know, in an order that equal units agree on."""
    return [*unit.receives, *unit.sends, *unit.inputs, *_made(graph, unit)]


_MEMORY_FRACTION = 0.25
"""Of the device's memory that units measured in turns may take together."""


@dataclass(frozen=True, slots=True)
class BatchEndTimes:
    """Seconds of a batch's end for a unit: over its gradients, a step, a step that leaves the weights."""

    reduce_s: float
    update_s: float
    trial_s: float

    def beyond(self, other: "BatchEndTimes") -> "BatchEndTimes":
        """What these seconds are more than others."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return BatchEndTimes(*(max(own - less, 0.0) for own, less in pairs))


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
            if turn and needed + more > self.memory_bytes * _MEMORY_FRACTION:
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
    """Measures in this process, alone; of the engine it knows only what the optimizer takes and, on an
    accelerator, what the process holds beside tensors.
    """

    circumstances: tuple[object, ...] = ()

    def __init__(self, resolve: Resolve = torch_operator) -> None:
        self._resolve = resolve

    def __call__(self, job: MeasuringJob, progress: Progress) -> Measured:
        """Do a job."""
        ends: dict[int, BatchEndTimes] = {}

        def update(index: int, bench: Workbench) -> None:
            seconds = time_update(bench, job.optimizer)
            ends[index] = BatchEndTimes(0.0, seconds, seconds)

        seconds = measure_units(job, progress, resolve=self._resolve, afterwards=update)
        if not is_accelerator(job.device):
            return Measured(seconds, ends)
        gc.collect()  # what units were measured with
        return Measured(seconds, ends, EngineCost(process_bytes=process_bytes(job.device)))


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
    function = StageFunction(pieces.graph, [pieces.units[index]], resolve=resolve, also=also)
    return Workbench(
        pieces.graph, function, learned=pieces.learned, batch=size, device=device, examples=examples
    )
