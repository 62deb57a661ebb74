"""Averages by outer steps (DiLoCo): the drift of weights since the last round, averaged over replicas.

A rank keeps on the host what its weights were after the last round (`start`) and the outer momentum, which are
the same in all replicas. The weights are cut into fragments, each with rounds of its own:

    drift  = start - weights                              of each replica, weighted by samples in the mean
    buffer = momentum * buffer + mean drift
    start  = start - rate * (mean drift + momentum * buffer)                             Nesterov's momentum

A replica's weights move with the start, and keep what it has trained since it offered its drift; one that was
not in the round keeps all its drift, which is in the next one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bireme.memory.arena import Arena
from bireme.runtime.averaging.agent import AveragingAgent
from bireme.runtime.averaging.averages import Averages, Met, met
from bireme.runtime.averaging.lines import Line, Offer, Settled
from bireme.runtime.stage import Stage
from bireme.schedule.instruction import Instruction
from bireme.sync.quorum.ring import Contribution

__all__ = ["OuterAverages", "OuterSettings", "due_fragments"]

MOMENTUM, START = "outer", "outer-start"
"""The sections of snapshots."""


@dataclass(frozen=True, slots=True)
class OuterSettings:
    """Each of so many fragments has a round every `every` batches of the run."""

    every: int
    rate: float = 0.7
    momentum: float = 0.9
    fragments: int = 1


def due_fragments(settings: OuterSettings, before: int, after: int) -> list[int]:
    """The fragments that have a round between a batch of the run and a later one, which is in.

    The rounds of a fragment follow those of the one before by the same number of batches.
    """
    every, num = settings.every, settings.fragments
    offsets = [one * every // num for one in range(num)]
    return [
        one for one, offset in enumerate(offsets) if (after + 1 - offset) // every > (before + 1 - offset) // every
    ]


@dataclass(slots=True, eq=False)
class _Fragment:
    """A part of each flat. `offered` is the drift that was offered last, after so many batches and samples;
    `counted` are the samples in drifts that were in rounds.
    """

    places: tuple[slice, ...]
    offered: list[Tensor] = field(default_factory=list)
    batch: int | None = None
    samples: int = 0
    counted: int = 0

    def of(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """This part of some flats."""
        return [flat[place] for flat, place in zip(flats, self.places, strict=True)]


class OuterAverages(Averages):
    """The averages of one rank; a batch of the run has `batch_size` samples."""

    def __init__(
        self,
        agent: AveragingAgent,
        stages: Mapping[int, Stage],
        device: torch.device,
        settings: OuterSettings,
        batch_size: int,
    ) -> None:
        super().__init__(agent, stages, device)
        self._settings, self._batch_size = settings, batch_size
        host = torch.device("cpu")
        arenas = self.stage.banks.newest_arenas
        self._start = [Arena(one.slots, one.flat.dtype, host) for one in arenas]
        self._momentum = [Arena(one.slots, one.flat.dtype, host) for one in arenas]
        sizes = [arena.flat.numel() for arena in arenas]
        num = settings.fragments
        self._fragments = [
            _Fragment(tuple(slice(size * one // num, size * (one + 1) // num) for size in sizes))
            for one in range(num)
        ]
        self._samples = 0
        self._place: int | None = None
        """The batch of the run that was trained last."""
        self.load({})
        whole = [torch.empty_like(one.flat, device="meta") for one in self._start]
        agent.bind([*(one.of(whole) for one in self._fragments), whole])

    def start(self, step: Instruction) -> None:
        """Offer the drift of fragments whose rounds are due."""
        deal = self.agent.deal_of(step.batch)
        self._samples += deal.num_samples
        place = deal.samples[0].begin // self._batch_size
        before = place - 1 if self._place is None else self._place
        self._place = max(place, before)
        for number in due_fragments(self._settings, before, self._place):
            self._use_up(number)  # so that the drift is since the last round that there is
            self._offer(number, step.batch)

    def end(self, step: Instruction) -> None:
        """Wait for the rounds of what was offered after that batch."""
        for number, fragment in enumerate(self._fragments):
            if fragment.batch == step.batch:
                self.agent.wait_settled([self.agent.lines[number]])
                self._use_up(number)

    def meet(self, num_trained: int, votes: float) -> Met:
        """One outer step of all fragments from all drifts; all weights are what it makes.

        Until all replicas have drained, this one has a part in the rounds of others, with nothing to add.
        """
        *lines, mean = self.agent.lines
        samples = self._samples - min(one.counted for one in self._fragments)
        drifts = self._drifts(self._flats, [one.flat for one in self._start])

        def make() -> Contribution:
            return Contribution(drifts, b"", float(samples), float(samples), (), (votes,))

        self.agent.drain()
        self.agent.offer(mean, Offer(make, samples, num_trained))
        while not mean.settled:
            for line in lines:
                self.agent.offer(line, Offer(lambda line=line: line.nothing(0)))  # type: ignore[misc]
            self.agent.wait_settled(self.agent.lines)
            for number in range(len(lines)):
                self._use_up(number)
        for number in range(len(lines)):
            self._use_up(number)
        settled = self.agent.take(mean)
        assert settled is not None, "it was waited for"
        for number, fragment in enumerate(self._fragments):
            self._step(number, fragment.of(settled.result.flats), settled)
            fragment.counted = self._samples
        self.stage.banks.average(self.stage.banks.newest_version, self._become_start)
        mean.give_back(settled.result)
        return met(settled)

    def sections(self, names: Collection[str]) -> dict[str, Tensor]:
        """The outer momentum."""
        return _sections(MOMENTUM, self._momentum, names)

    def donated(self) -> dict[str, Tensor]:
        """The momentum and the start."""
        return _sections(MOMENTUM, self._momentum) | _sections(START, self._start)

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """The start is what was saved of it, or the weights."""
        for momentum, start, arena in zip(
            self._momentum, self._start, self.stage.banks.newest_arenas, strict=True
        ):
            momentum.flat.zero_()
            start.flat.copy_(arena.flat)
            for section, own in ((MOMENTUM, momentum), (START, start)):
                for name, view in own.views.items():
                    if (found := saved.get(f"{section}/{name}")) is not None:
                        view.copy_(found)

    def _offer(self, number: int, batch: int) -> None:
        fragment, line = self._fragments[number], self.agent.lines[number]
        drifts = self._drifts(fragment.of(self._flats), fragment.of([one.flat for one in self._start]))
        fragment.offered, fragment.batch, fragment.samples = drifts, batch, self._samples
        samples = self._samples - fragment.counted

        def make() -> Contribution:
            return Contribution(drifts, b"", float(samples), float(samples))

        self.agent.offer(line, Offer(make, samples, batch + 1))

    def _drifts(self, weights: Sequence[Tensor], starts: Sequence[Tensor]) -> list[Tensor]:
        return [start - own.to("cpu") for own, start in zip(weights, starts, strict=True)]

    def _use_up(self, number: int) -> None:
        """Follow all rounds of a fragment that count."""
        line, fragment = self.agent.lines[number], self._fragments[number]
        while (settled := self.agent.take(line)) is not None:
            self._follow(line, fragment, settled)

    def _follow(self, line: Line, fragment: _Fragment, settled: Settled) -> None:
        befores = [start.clone() for start in fragment.of([one.flat for one in self._start])]
        self._step(line.number, settled.result.flats, settled)
        changes = [
            start.sub(before)
            for start, before in zip(
                fragment.of([one.flat for one in self._start]), befores, strict=True
            )
        ]
        if settled.is_own and fragment.batch is not None:
            for change, drift in zip(changes, fragment.offered, strict=True):
                change.add_(drift)
            fragment.counted = fragment.samples
        fragment.offered, fragment.batch = [], None
        line.give_back(settled.result)

        def write(flats: Sequence[Tensor]) -> None:
            for flat, change in zip(fragment.of(flats), changes, strict=True):
                flat.add_(change.to(flat.device))

        self.stage.banks.average(self.stage.banks.newest_version, write)

    @torch.no_grad()
    def _step(self, number: int, means: Sequence[Tensor], settled: Settled) -> None:
        """The outer step of a fragment."""
        assert settled.result.summed is not None, "what counts was summed"
        if not settled.result.summed.weight:
            return
        fragment, asked = self._fragments[number], self._settings
        for start, buffer, mean in zip(
            fragment.of([one.flat for one in self._start]),
            fragment.of([one.flat for one in self._momentum]),
            means,
            strict=True,
        ):
            buffer.mul_(asked.momentum).add_(mean)
            start.sub_((mean + asked.momentum * buffer) * asked.rate)

    def _become_start(self, flats: Sequence[Tensor]) -> None:
        for flat, start in zip(flats, self._start, strict=True):
            flat.copy_(start.flat)


def _sections(
    section: str, arenas: Sequence[Arena], names: Collection[str] | None = None
) -> dict[str, Tensor]:
    return {
        f"{section}/{name}": view.clone()
        for arena in arenas
        for name, view in arena.views.items()
        if names is None or name in names
    }
