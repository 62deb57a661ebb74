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
it passes several rounds of a fragment at once has nothing to add to all but the first. Whoever waits for a
round has offered all that were due before it, so nobody waits in a circle.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.memory.arena import Arena
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan
from bireme.plan.program_plan import ProgramPlan
from bireme.runtime.averaging.agent import AveragingAgent, Offer, RankRounds, SettledRound
from bireme.runtime.averaging.averages import Averages, GroupAverages, Met, met
from bireme.runtime.layout import AnyPlan, Layout
from bireme.runtime.quorum.peer_agent import DroppedError, fetched, heal_in
from bireme.runtime.snapshot import Snapshot, sections_of
from bireme.runtime.stage import Stage
from bireme.schedule.instruction import Instruction
from bireme.sync.coordinator.messages import CoordinatorReply, Heal, Window
from bireme.sync.coordinator.state import HealTimes
from bireme.sync.quorum.ring import Contribution

_MOMENTUM, _START = "diloco", "diloco-start"
"""The sections of snapshots."""


@dataclass(frozen=True, slots=True)
class DilocoSettings:
    """Each of so many fragments has a round every `every` batches of the run."""

    every: int
    rate: float = 0.7
    momentum: float = 0.9
    fragments: int = 1


def num_due(settings: DilocoSettings, fragment: int, batches: int) -> int:
    """How many rounds of a fragment are due in so many batches of the run, but for a constant.

    Those of each fragment follow those of the one before by the same number of batches.
    """
    return (batches - fragment * settings.every // settings.fragments) // settings.every


@dataclass(slots=True, eq=False)
class _Fragment:
    """A part of each flat; `due` rounds of it are due. `offered` is the drift that was offered last, with the
    optimizer's `moments`, after the `batch`, of so many samples; `counted` are the samples in drifts that
    were in rounds.
    """

    places: tuple[slice, ...]
    due: int = 0
    offered: list[Tensor] = field(default_factory=list)
    moments: list[Tensor] = field(default_factory=list)
    batch: int | None = None
    samples: int = 0
    counted: int = 0

    def of(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """This part of some flats."""
        return [flat[place] for flat, place in zip(flats, self.places, strict=True)]


class _DilocoAverages(Averages):
    """The averages of one rank; a batch of the run has `batch_size` samples, and `first` is its first."""

    def __init__(
        self,
        agent: AveragingAgent,
        stages: Mapping[int, Stage],
        device: torch.device,
        settings: DilocoSettings,
        batch_size: int,
        first: int,
        *,
        averages_optimizer: bool = False,
    ) -> None:
        super().__init__(agent, stages, device, averages_optimizer=averages_optimizer)
        self._settings, self._batch_size, self._first = settings, batch_size, first
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
        self.load({})
        whole = [torch.empty_like(one.flat, device="meta") for one in self._start]
        agent.bind(
            [
                *([*one.of(whole), *self._moments_like(one.places)] for one in self._fragments),
                [*whole, *self._moments_like(self._everywhere)],
            ]
        )

    def start(self, step: Instruction) -> None:
        """Offer the drift of fragments whose rounds are due."""
        deal = self.agent.deals.of(step.batch)
        self._samples += deal.num_samples
        batches = deal.samples[0].begin // self._batch_size + 1
        self._use_up()  # so that drifts are since the last rounds that there are
        for number, fragment in enumerate(self._fragments):
            due = num_due(self._settings, number, batches) - num_due(self._settings, number, self._first)
            fragment.due = max(fragment.due, due)
            if fragment.batch is None and self.agent.lines[number].at.committed < fragment.due:
                self._offer(number, step.batch)

    def end(self, step: Instruction) -> None:
        """Wait for rounds that what was offered after that batch has a part in."""
        while any(one.batch == step.batch for one in self._fragments):
            self.agent.wait_settled(self.agent.lines[:-1])
            self._use_up()

    def meet(self, num_trained: int, numbers: tuple[float, ...]) -> Met:
        """One outer step of all fragments from all drifts; all weights are what it makes.

        Until all replicas have drained, this one has a part in the rounds of others, with nothing to add.
        """
        *lines, mean = self.agent.lines
        samples = self._samples - min(one.counted for one in self._fragments)
        drifts = self._drifts(self._flats, [one.flat for one in self._start])
        offered = [*drifts, *self._moments_taken(self._everywhere)]

        def make() -> Contribution:
            return Contribution(offered, b"", float(samples), float(samples), (), numbers)

        self.agent.drain()
        self.agent.offer(mean, Offer(make, samples, num_trained))
        while not mean.settled:
            for line in lines:
                self._offer_nothing(line)
            self.agent.wait_settled(self.agent.lines)
            self._use_up()
        self._use_up()
        settled = self.agent.take(mean)
        assert settled is not None, "it was waited for"
        self._note(len(settled.parts), settled.result.flats)
        for number, fragment in enumerate(self._fragments):
            self._step(number, fragment.of(settled.result.flats[: len(drifts)]), settled)
            fragment.counted = self._samples
        banks = self.stage.banks
        banks.average(banks.newest_version, self._become_start, is_drained=True)
        if _weight(settled):
            self._put_moments(settled.result.flats[len(drifts) :], self._everywhere)
        mean.give_back(settled.result)
        return met(settled)

    def sections(self, names: Collection[str]) -> dict[str, Tensor]:
        """The outer momentum."""
        return _sections(_MOMENTUM, self._momentum, names)

    def donated(self) -> dict[str, Tensor]:
        """The momentum and the start."""
        return _sections(_MOMENTUM, self._momentum) | _sections(_START, self._start)

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """The start is what was saved of it, or the weights."""
        for momentum, start, arena in zip(
            self._momentum, self._start, self.stage.banks.newest_arenas, strict=True
        ):
            momentum.flat.zero_()
            start.flat.copy_(arena.flat)
            for section, own in ((_MOMENTUM, momentum), (_START, start)):
                for name, view in own.views.items():
                    if (found := saved.get(f"{section}/{name}")) is not None:
                        view.copy_(found)

    def _offer(self, number: int, batch: int) -> None:
        fragment = self._fragments[number]
        drifts = self._drifts(fragment.of(self._flats), fragment.of([one.flat for one in self._start]))
        fragment.offered, fragment.batch, fragment.samples = drifts, batch, self._samples
        fragment.moments = self._moments_taken(fragment.places)
        self._tell_offer(number)

    def _tell_offer(self, number: int) -> None:
        fragment = self._fragments[number]
        assert fragment.batch is not None, "it was offered after a batch"
        offered, samples = [*fragment.offered, *fragment.moments], fragment.samples - fragment.counted

        def make() -> Contribution:
            return Contribution(offered, b"", float(samples), float(samples))

        self.agent.offer(self.agent.lines[number], Offer(make, samples, fragment.batch + 1))

    def _drifts(self, weights: Sequence[Tensor], starts: Sequence[Tensor]) -> list[Tensor]:
        return [start - own.to("cpu") for own, start in zip(weights, starts, strict=True)]

    def _use_up(self) -> None:
        """Follow all rounds that count."""
        for line, fragment in zip(self.agent.lines, self._fragments, strict=False):
            while (settled := self.agent.take(line)) is not None:
                self._follow(line, fragment, settled)
                if line.at.committed >= fragment.due:
                    fragment.offered, fragment.moments, fragment.batch = [], [], None
                elif fragment.batch is not None:
                    self._tell_offer(line.number)
                else:
                    self._offer_nothing(line)

    def _offer_nothing(self, line: RankRounds) -> None:
        """Have a part in the next round of a line without anything to add."""
        self.agent.offer(line, Offer(lambda: line.nothing(0)))

    def _follow(self, line: RankRounds, fragment: _Fragment, settled: SettledRound) -> None:
        self._note(len(settled.parts), settled.result.flats)
        befores = [start.clone() for start in fragment.of([one.flat for one in self._start])]
        self._step(line.number, settled.result.flats, settled)
        changes = [
            start.sub(before)
            for start, before in zip(fragment.of([one.flat for one in self._start]), befores, strict=True)
        ]
        if fragment.batch is not None and settled.is_own:
            for change, drift in zip(changes, fragment.offered, strict=True):
                change.add_(drift)
            self._put_moments(settled.result.flats[len(changes) :], fragment.places)
            fragment.counted = fragment.samples
            fragment.offered, fragment.moments, fragment.batch = [], [], None
        line.give_back(settled.result)

        def write(flats: Sequence[Tensor]) -> None:
            for flat, change in zip(fragment.of(flats), changes, strict=True):
                flat.add_(change.to(flat.device))

        self.stage.banks.average(self.stage.banks.newest_version, write)

    @torch.no_grad()
    def _step(self, number: int, means: Sequence[Tensor], settled: SettledRound) -> None:
        """The outer step of a fragment."""
        if not _weight(settled):
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

    def _become_start(self, flats: Sequence[Tensor]) -> None:
        for flat, start in zip(flats, self._start, strict=True):
            flat.copy_(start.flat)


def _weight(settled: SettledRound) -> float:
    """Of how many samples a round is."""
    assert settled.result.summed is not None, "what counts was summed"
    return settled.result.summed.weight


def _sections(
    section: str, arenas: Sequence[Arena], names: Collection[str] | None = None
) -> dict[str, Tensor]:
    return {
        f"{section}/{name}": view.clone()
        for arena in arenas
        for name, view in arena.views.items()
        if names is None or name in names
    }


# What a pipeline needs where its replica averages weights with others: its agent, and how to join.
#
# The pipeline itself is of one replica, with a plan of width 1, and knows no rank of another one.


@dataclass(frozen=True, slots=True)
class Averaging:
    """How a pipeline averages with others: in groups, or by `diloco` steps that come `lag` batches late.

    A batch of the run has `batch_size` samples, of which each replica trains its own; it begins with `first`.
    With `averages_optimizer` what optimizers remember of the weights is averaged along with these.
    """

    agent: AveragingAgent
    batch_size: int
    diloco: DilocoSettings | None = None
    lag: int = 0
    first: int = 0
    averages_optimizer: bool = False

    def programs(self, plan: AnyPlan) -> ProgramPlan:
        """What a plan runs with averages in it."""
        named = plan.plan if isinstance(plan, SavedPlan) else plan
        if not isinstance(named, Plan):
            raise BiremeError("Replicas average weights in programs of a plan, not in one that is given.")
        if named.paging is not None:
            raise BiremeError(
                "Replicas average weights that lie on their devices, but the plan offloads them. Make a plan "
                "that does not offload."
            )
        return named.averaging(self.lag)

    def averages(self, stages: Mapping[int, Stage], layout: Layout, device: torch.device) -> Averages:
        """The averages of a rank."""
        check_untied(layout)
        if self.diloco is None:
            return GroupAverages(self.agent, stages, device, averages_optimizer=self.averages_optimizer)
        return _DilocoAverages(
            self.agent,
            stages,
            device,
            self.diloco,
            self.batch_size,
            self.first,
            averages_optimizer=self.averages_optimizer,
        )


def check_untied(layout: Layout) -> None:
    """Refuse weights that ranks share: each rank averages its own."""
    if layout.tied:
        raise BiremeError(
            f"{next(iter(layout.tied))} is shared by stages on several ranks, and replicas average "
            'weights rank by rank, so its copies would part. Untie it, or use sync.mode = "quorum".'
        )


class WeightDonations:
    """Takes snapshots for other replicas, of the rank's stage right before an update."""

    def __init__(self, averages: Averages, clip_scale: Callable[[], float]) -> None:
        self._averages, self._clip_scale = averages, clip_scale

    def before_update(self, stage: Stage, batch: int) -> None:
        """The stage is about to make the update of a batch."""
        agent = self._averages.agent
        name = agent.due(batch)
        if name is None:
            return
        names = [*stage.banks.newest(), *stage.buffers]
        tensors = sections_of(stage, names, replica=0) | self._averages.donated()
        agent.provide(name, Snapshot(batch, self._clip_scale(), tensors))


def join_averaging(agent: AveragingAgent, held: int, until: int, restore: Callable[[Snapshot], None]) -> int:
    """Come to where this replica has a part; gives the first batch that it has.

    It has the state after `held` batches. If others have gone on it gets a snapshot from one of them, which
    `restore` takes. The first window has the places below `until`.
    """
    agent.begin(Window(0, until))
    own = agent.own

    def is_member(word: CoordinatorReply) -> bool:
        """Whether that is certain, whoever coordinates next."""
        return word.is_installed and any(one.own_life == own.own_life for one in word.members)

    named_s = fetched_s = 0.0
    asked: Heal | None = None
    while True:
        before = asked

        def goes_on(word: CoordinatorReply, before: Heal | None = before) -> bool:
            heal = heal_in(word, own)
            is_new = heal is not None and (before is None or _key(heal) != _key(before))
            return is_new or is_member(word)

        word = agent.wait_for(goes_on)
        heal = heal_in(word, own)
        if heal is None or is_member(word):
            if fetched_s:
                agent.heal_times = HealTimes(fetched_s - named_s, monotonic() - fetched_s)
            return held
        if asked is not None and held == asked.batch:
            raise DroppedError(f"replica {own.replica} has lost its donor.")
        if asked is not None:  # a donor that was lost may be asked again
            agent.begin(Window(0, until), used=[0] * len(agent.lines))
        asked, named_s = heal, named_s or monotonic()
        found = fetched(agent, heal)
        if found is not None:
            fetched_s = monotonic()
            snapshot, words = found
            restore(snapshot)
            held = snapshot.num_trained
            agent.begin(Window(words["window"], words["until"]), used=words["used"], healed=heal.batch)


def _key(heal: Heal) -> tuple[int, int]:
    return heal.donor, heal.batch
