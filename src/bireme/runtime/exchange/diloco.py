"""Averages by outer steps (DiLoCo): the drift of weights since the last round, averaged over replicas.

A rank keeps on the host what its weights were after the last round (`start`) and the outer momentum, which
are the same in all replicas. The weights are cut into fragments, each with rounds of its own:

    drift  = start - weights                              of each replica, weighted by samples in the mean
    buffer = momentum * buffer + mean drift
    start  = start - rate * (mean drift + momentum * buffer)                             Nesterov's momentum

What optimizers remember is averaged along with drifts, where that is asked for: whoever had samples in a
round remembers the mean from there on, in the place of what it has by then.

A replica's weights move with the start, and keep what it has trained since it offered its drift. One that was
not in a round keeps its drift for the next one.

Rounds are due by batches of the run, so all replicas have the same ones. One that trains so few batches that
it passes several rounds of a fragment at once has nothing to add to all but the first. A rank offers at
AVERAGE_START and follows rounds at AVERAGE_END alone, so all ranks of a replica follow the same rounds after
the same batches, and weights that several of them hold stay the same to the last bit.

A replica waits for a round only where it has offered all that were due before it, as far as it has got the
rounds before those. So a replica that others wait for is at an earlier place of the run than they are, and no
replicas wait in a circle.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bireme.runtime.exchange.averages import (
    START,
    Averages,
    Averaging,
    DilocoSettings,
    GroupAverages,
    Met,
    met,
)
from bireme.runtime.exchange.rounds import Offer, RoundLine, SettledRound
from bireme.runtime.layout import Layout
from bireme.runtime.snapshot import joined
from bireme.runtime.stage import Stage
from bireme.sync.rounds.contribution import Contribution

_MOMENTUM = "diloco"
"""The section of snapshots for the outer momentum."""


def num_due(settings: DilocoSettings, fragment: int, batches: int) -> int:
    """How many rounds of a fragment are due in so many batches of the run, but for a constant.

    Those of each fragment follow those of the one before by the same number of batches.
    """
    return (batches - fragment * settings.every // settings.fragments) // settings.every


@dataclass(slots=True, eq=False)
class _Fragment:
    """A part of each flat. Rounds below `due` were due after the `batch`, and the replica has not got all of
    them. `offered` is the drift after that batch, with the optimizer's `moments`, as long as it has not been
    in a round; it is of so many `samples`, and `counted` are those in drifts that were in rounds.
    """

    places: tuple[slice, ...]
    due: int = 0
    offered: list[Tensor] | None = None
    moments: list[Tensor] = field(default_factory=list)
    batch: int | None = None
    samples: int = 0
    counted: int = 0

    def forget(self) -> None:
        """The replica has got all rounds that were due."""
        self.offered, self.moments, self.batch = None, [], None

    def of(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """This part of some flats."""
        return [flat[place] for flat, place in zip(flats, self.places, strict=True)]


class _DilocoAverages(Averages):
    """The averages of one rank by outer steps."""

    def __init__(
        self, asked: Averaging, stages: Mapping[int, Stage], device: torch.device, shared: Collection[str]
    ) -> None:
        super().__init__(asked, stages, device, shared)
        assert asked.diloco is not None, "it is asked for"
        settings = self._settings = asked.diloco
        self._batch_size, self._first = asked.batch_size, asked.first
        flats = self._flats
        self._start, self._momentum = self._start_arenas(), self._start_arenas()
        sizes = [flat.numel() for flat in flats]
        num = settings.fragments
        self._fragments = [
            _Fragment(tuple(slice(size * one // num, size * (one + 1) // num) for size in sizes))
            for one in range(num)
        ]
        coded = [self._coded(one.places, keeps_basis=True) for one in self._fragments]
        self._coded_drifts = [one for one in coded if one is not None]
        """Those of each fragment, if drifts go through a codec."""
        self._samples = self._batches = 0
        """Samples that this replica has trained, and batches of the run, as far as its own are."""
        self.load({})
        whole = [torch.empty_like(flat, device="meta") for flat in flats]
        likes = [[*one.of(whole), *self._moments_like(one.places)] for one in self._fragments]
        likes.append([*whole, *self._moments_like(self._everywhere)])
        hows = [*(one.how for one in self._coded_drifts), *[None] * len(likes)]
        self.agent.bind([self._line(*one) for one in zip(range(len(likes)), likes, hows, strict=False)])

    def _start_batch(self, batch: int) -> None:
        """Offer the drift of fragments whose rounds are due."""
        deal = self.agent.deals.of(batch)
        self._samples += deal.num_samples
        # Samples that are dealt again may be of an earlier batch of the run.
        self._batches = max(self._batches, deal.samples[0].begin // self._batch_size + 1)
        for number, fragment in enumerate(self._fragments):
            due = num_due(self._settings, number, self._batches) - num_due(
                self._settings, number, self._first
            )
            if fragment.batch is None and self.agent.lines[number].at.committed < due:
                fragment.due, fragment.batch = due, batch
                self._offer(number)

    def _end_batch(self, batch: int) -> None:
        """Follow the rounds of all fragments that were due after that batch."""
        while lines := [self.agent.lines[n] for n, one in enumerate(self._fragments) if one.batch == batch]:
            self.agent.wait_settled(lines)
            self._use_up(lines)

    def meet(self, num_trained: int, numbers: tuple[float, ...]) -> Met:
        """One outer step of all fragments from all drifts; all weights are what it makes.

        Until all replicas have drained, this one has a part in the rounds of others, with nothing to add.
        """
        *lines, mean = self.agent.lines
        samples = self._samples - min(one.counted for one in self._fragments)
        drifts = self._drifts(self._flats, [one.flat for one in self._start])
        offered = [*drifts, *self._moments_taken(self._everywhere)]

        def make() -> Contribution:
            for coded, fragment in zip(self._coded_drifts, self._fragments, strict=False):
                coded.add_unsent(fragment.of(drifts))
            return Contribution(
                offered, b"", float(samples), float(samples), (), numbers, firsts=self._firsts
            )

        self.agent.drain()
        self.agent.offer(mean, Offer(make, samples, num_trained))
        while not mean.settled:
            for line in lines:
                self._offer_nothing(line)
            self.agent.wait_settled(self.agent.lines)
            self._use_up(lines)
        self._use_up(lines)
        settled = self.agent.take(mean)
        assert settled is not None, "it was waited for"
        self._note(len(settled.parts), settled.result.flats)
        for number, fragment in enumerate(self._fragments):
            self._step(number, fragment.of(settled.result.flats[: len(drifts)]), settled)
            fragment.counted = self._samples
        for coded in self._coded_drifts:
            coded.clear()
        self._write(lambda number, flat: flat.copy_(self._start[number].flat), is_drained=True)
        if settled.summed.weight:
            self._put_moments(settled.result.flats[len(drifts) :], self._everywhere)
        mean.give_back(settled.result)
        return met(settled)

    def sections(self, names: Collection[str], pieces_of: Collection[str] | None = None) -> dict[str, Tensor]:
        """The outer momentum."""
        return self._sections(_MOMENTUM, self._momentum, names, pieces_of)

    def donated(self) -> dict[str, Tensor]:
        """The momentum, the start, and what was not sent of drifts."""
        found = self._sections(_MOMENTUM, self._momentum) | self._sections(START, self._start)
        for line, coded in enumerate(self._coded_drifts):
            found |= coded.sections(line)
        return found

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """The start is what was saved of it, or the weights."""
        for momentum, start, flat in zip(self._momentum, self._start, self._flats, strict=True):
            momentum.flat.zero_()
            start.flat.copy_(flat)
        whole = joined(saved)
        self._load_section(_MOMENTUM, self._momentum, whole)
        self._load_section(START, self._start, whole)
        for line, coded in enumerate(self._coded_drifts):
            coded.load(line, saved)

    def _offer(self, number: int) -> None:
        fragment = self._fragments[number]
        fragment.offered = self._drifts(
            fragment.of(self._flats), fragment.of([one.flat for one in self._start])
        )
        fragment.moments, fragment.samples = self._moments_taken(fragment.places), self._samples
        self._tell_offer(number)

    def _tell_offer(self, number: int) -> None:
        """Have a part in the next round of a line with what was offered and has not been in one."""
        fragment, line = self._fragments[number], self.agent.lines[number]
        if fragment.offered is None:
            self._offer_nothing(line, is_due=True)
            return
        assert fragment.batch is not None, "it was offered after a batch"
        offered, samples = [*fragment.offered, *fragment.moments], fragment.samples - fragment.counted

        def make() -> Contribution:
            return Contribution(offered, b"", float(samples), float(samples), firsts=self._firsts)

        self.agent.offer(line, Offer(make, samples, fragment.batch + 1))

    def _drifts(self, weights: Sequence[Tensor], starts: Sequence[Tensor]) -> list[Tensor]:
        return [start - own.to("cpu") for own, start in zip(weights, starts, strict=True)]

    def _use_up(self, lines: Sequence[RoundLine]) -> None:
        """Follow the rounds of these lines that count, but none of a fragment after those that were due."""
        for line in lines:
            fragment = self._fragments[line.number]
            while (settled := self.agent.take(line)) is not None:
                self._follow(line, fragment, settled)
                if line.at.committed < fragment.due:
                    self._tell_offer(line.number)
                    continue
                if fragment.batch is not None:
                    fragment.forget()
                    break

    def _offer_nothing(self, line: RoundLine, *, is_due: bool = False) -> None:
        """Have a part in the next round of a line without anything to add."""
        self.agent.offer(line, Offer(lambda: line.nothing(0), is_due=is_due))

    def _follow(self, line: RoundLine, fragment: _Fragment, settled: SettledRound) -> None:
        if self._coded_drifts:
            self._coded_drifts[line.number].settle(settled.result, is_own=settled.is_own)
        else:
            self._note(len(settled.parts), settled.result.flats)
        starts = fragment.of([one.flat for one in self._start])
        befores = [start.clone() for start in starts]
        self._step(line.number, settled.result.flats, settled)
        changes = [start.sub(before) for start, before in zip(starts, befores, strict=True)]
        if fragment.offered is not None and settled.is_own:
            for change, drift in zip(changes, fragment.offered, strict=True):
                change.add_(drift)
            self._put_moments(settled.result.flats[len(changes) :], fragment.places)
            fragment.counted, fragment.offered, fragment.moments = fragment.samples, None, []
        line.give_back(settled.result)
        self._write(lambda number, flat: flat[fragment.places[number]].add_(changes[number].to(flat.device)))

    @torch.no_grad()
    def _step(self, number: int, means: Sequence[Tensor], settled: SettledRound) -> None:
        """The outer step of a fragment."""
        if not settled.summed.weight:
            return
        fragment, asked = self._fragments[number], self._settings
        for start, buffer, mean in zip(
            fragment.of([one.flat for one in self._start]),
            fragment.of([one.flat for one in self._momentum]),
            means[: len(self._start)],
            strict=True,
        ):
            buffer.mul_(asked.momentum).add_(mean)
            start.sub_((mean + asked.momentum * buffer) * asked.rate)


def averages_of(
    asked: Averaging, stages: Mapping[int, Stage], layout: Layout, device: torch.device
) -> Averages:
    """The averages of a rank. Weights that several stages of its replica hold are averaged alike in each."""
    kind = GroupAverages if asked.diloco is None else _DilocoAverages
    return kind(asked, stages, device, layout.tied.keys() | layout.repeated)
