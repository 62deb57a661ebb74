"""AVERAGE_START and AVERAGE_END on a rank: the means of weights over replicas, by groups or DiLoCo's rounds.

A rank averages all its stages at once. At the end of each window all replicas make one mean. In groups the
weights become the mean of a group: each member counts alike, whatever it has trained. Drifts, where a codec
needs them, are from where all replicas had the same weights (`start`).

In DiLoCo the drift since the last round is averaged. A rank keeps on the host what its weights were after
that round (`start`) and the outer momentum, which are the same in all replicas. The weights are cut into
fragments, each with rounds of its own:

    drift  = start - weights                              of each replica, weighted by samples in the mean
    buffer = momentum * buffer + mean drift
    start  = start - rate * (mean drift + momentum * buffer)                             Nesterov's momentum

The optimizer's state is averaged along with the weights if the run asks for it: a replica with samples in a
round takes the mean in the place of its own state.

A replica's weights move with the start, and keep what the replica has trained since it offered its drift. A
replica that was not in a round keeps its drift for the next one.

Rounds are due by batches of the run, so all replicas have the same ones. A replica that trains so few batches
that it passes several rounds of a fragment at once has nothing to add to all but the first. A rank offers at
AVERAGE_START and follows rounds at AVERAGE_END alone, so all ranks of a replica follow the same rounds after
the same batches, and weights that several of them hold stay the same to the last bit.

A replica waits for a round only if it has offered all rounds that were due before it, as far as it has got
the rounds before those. So a replica that others wait for is at an earlier place of the run than they are,
and no replicas wait in a circle.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bireme.codec.sum_description import DENSE, SumCodec
from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan
from bireme.plan.program_plan import ProgramPlan
from bireme.runtime.exchange.agent import ExchangeAgent
from bireme.runtime.exchange.averaged import AveragedWeights, CodedDrifts, Moments
from bireme.runtime.exchange.rounds import Offer, RoundLine, RoundSum
from bireme.runtime.layout import AnyPlan, Layout
from bireme.runtime.shared_weights import Sharers
from bireme.runtime.snapshot import joined
from bireme.runtime.stage import Stage
from bireme.schedule.instruction import Instruction
from bireme.sync.exchange import SentBytes
from bireme.sync.rounds.contribution import Contribution

START, _MOMENTUM = "start", "diloco"
"""The sections of snapshots for weights as all replicas had them, and for the outer momentum."""

# How a pipeline averages weights with those of other replicas.
#
# The pipeline knows no rank of another one. It may be of a site of several replicas, which sum gradients.
# Each of their ranks then averages its part of the weights, and gets the parts of the others in its site.


@dataclass(frozen=True, slots=True)
class DilocoSettings:
    """Each of the `fragments` has a round every `every` batches of the run."""

    every: int
    rate: float = 0.7
    momentum: float = 0.9
    fragments: int = 1

    def num_due(self, fragment: int, batches: int) -> int:
        """How many rounds of a fragment are due in that many batches of the run, but for a constant.

        The rounds of each fragment follow those of the one before by the same number of batches.
        """
        return (batches - fragment * self.every // self.fragments) // self.every


@dataclass(frozen=True, slots=True)
class Averaging:
    """How a pipeline averages with others: in groups, or by `diloco` steps that come `lag` batches late.

    A batch of the run has `batch_size` samples, of which each replica trains its own; it begins with `first`.
    With `averages_optimizer` the optimizer's state is averaged along with the weights. Drifts of weights go
    through `codec`.
    """

    agent: ExchangeAgent
    batch_size: int
    diloco: DilocoSettings | None = None
    lag: int = 0
    first: int = 0
    averages_optimizer: bool = False
    rebuilt: frozenset[str] = frozenset()
    """Weights that each incarnation of a replica makes by itself, and that are not sent."""
    codec: SumCodec = DENSE

    def programs(self, plan: AnyPlan) -> ProgramPlan:
        """What a plan runs with averages in it."""
        named = plan.plan if isinstance(plan, SavedPlan) else plan
        if not isinstance(named, Plan):
            raise BiremeError("Replicas average weights in programs of a plan, not in one that is given.")
        return named.averaging(self.lag)

    def averagers(self, layout: Layout) -> Sharers | None:
        """The replicas that this pipeline has in it, if each averages a part of the weights; None if there is
        one, or if the optimizer's state is averaged too, which each of them has whole.
        """
        if layout.width == 1 or self.averages_optimizer:
            return None
        return Sharers(layout.replica, layout.width)


@dataclass(frozen=True, slots=True)
class Met:
    """A mean over all replicas: the replicas in it, and the sums of the numbers that they gave along."""

    parts: tuple[int, ...]
    numbers: tuple[float, ...]


@dataclass(slots=True, eq=False)
class _Fragment:
    """A part of each flat. Rounds below `due` were due after the `batch`, and the replica has not got all of
    them. `offered` is the drift after that batch, with the optimizer's `moments`, as long as it has not been
    in a round; it is of that many `samples`, and `counted` are those in drifts that were in rounds.
    """

    places: tuple[slice, ...]
    due: int = 0
    offered: list[Tensor] | None = None
    moments: list[Tensor] = field(default_factory=list)
    batch: int | None = None
    samples: int = 0
    counted: int = 0

    def of(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """This part of some flats."""
        return [flat[place] for flat, place in zip(flats, self.places, strict=True)]


class Averages:
    """The averages of one rank as `asked` for. Weights that several stages of its replica hold are averaged
    alike in each.
    """

    def __init__(
        self, asked: Averaging, stages: Mapping[int, Stage], layout: Layout, device: torch.device
    ) -> None:
        self.agent, self._asked = asked.agent, asked
        shared = layout.tied.keys() | layout.repeated
        own = self._weights = AveragedWeights([stages[index] for index in sorted(stages)], shared, device)
        self._moments = Moments(own, is_on=asked.averages_optimizer)
        self._firsts = [*(part.first for part in own.parts), *self._moments.firsts]
        self._num_started = self._num_ended = 0
        """The number of stages that have come to the start or the end of the present average."""
        self.sent = SentBytes()
        """What this rank has sent to others."""
        self._samples = self._batches = 0
        """In DiLoCo: samples that this replica has trained, and batches of the run, as far as its own are."""
        num, ends = asked.diloco.fragments if asked.diloco else 1, [one.stop for one in own.everywhere]
        self._fragments = [
            _Fragment(tuple(slice(end * one // num, end * (one + 1) // num) for end in ends))
            for one in range(num)
        ]
        # The members of groups change, so no basis is the same on all of them.
        keeps = asked.diloco is not None
        self._drifts = [
            CodedDrifts(asked.codec, own, one.places, self._moments, self.sent, keeps_basis=keeps)
            for one in (self._fragments if asked.codec != DENSE else ())
        ]
        """The drifts of each fragment, if they go through a codec."""
        self._start = own.arenas() if asked.diloco or self._drifts else []
        self._momentum = own.arenas() if asked.diloco else []
        self.load({})
        whole = [torch.empty_like(flat, device="meta") for flat in own.flats]
        likes = [[*one.of(whole), *self._moments.like(one.places)] for one in self._fragments if asked.diloco]
        likes.append([*whole, *self._moments.like(own.everywhere)])
        hows = [one.how for one in self._drifts]
        of_lines = [*(hows if asked.diloco else ()), *[None] * len(likes)]
        self.agent.bind(
            [RoundLine(n, like, self._firsts, device, of_lines[n]) for n, like in enumerate(likes)],
            None if asked.diloco or not hows else hows[0],
        )

    def start(self, step: Instruction) -> None:
        """AVERAGE_START: the weights of an update may be averaged, once those of all stages may."""
        self._num_started += 1
        if self._num_started == len(self._weights.stages):
            self._num_started = 0
            (self._arrive if self._asked.diloco is None else self._offer_due)(step.batch)

    def end(self, step: Instruction) -> None:
        """AVERAGE_END: wait for the new weights of all stages, and write them; no stage uses them before."""
        self._num_ended += 1
        if self._num_ended == len(self._weights.stages):
            self._num_ended = 0
            (self._leave if self._asked.diloco is None else self._follow_due)(step.batch)

    def meet(self, num_trained: int, numbers: tuple[float, ...]) -> Met:
        """Make one mean of all replicas' weights, once a window has drained: in DiLoCo one outer step of all
        fragments from all drifts.

        Until all replicas have drained, this one has a part in the rounds of others, with nothing to add.
        """
        *lines, mean = self.agent.lines
        samples = self._samples - min(one.counted for one in self._fragments)
        if self._asked.diloco is None:
            own = [flat.to("cpu", copy=bool(self._drifts)) for flat in self._weights.flats]
        else:
            own = self._drift(self._weights.flats, self._starts)
        offered = [*own, *self._moments.taken(self._weights.everywhere)]

        def make() -> Contribution:
            for drifts, fragment in zip(self._drifts, self._fragments, strict=False):
                drifts.add_unsent(fragment.of(own))
            return self._contribution(offered, samples, numbers)

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
        self._note(len(settled.parts), settled.flats)
        made, moments = settled.flats[: len(own)], settled.flats[len(own) :]
        for number, fragment in enumerate(self._fragments if self._asked.diloco else ()):
            self._step(number, fragment.of(made), settled)
            fragment.counted = self._samples
        for drifts in self._drifts:
            drifts.clear()
        if self._asked.diloco is None:
            for start, flat in zip(self._starts, made, strict=False):
                start.copy_(flat)
        else:
            made = self._starts
        self._weights.write(lambda number, flat: flat.copy_(made[number]), is_drained=True)
        if settled.summed.weight:
            self._moments.put(moments, self._weights.everywhere)
        settled.give_back()
        return Met(settled.parts, settled.summed.numbers)

    def sections(self, names: Collection[str], pieces_of: Collection[str] | None = None) -> dict[str, Tensor]:
        """What a checkpoint needs in addition to the weights, of the parameters named: of those that are
        averaged in pieces, this rank's pieces of the parameters in `pieces_of`. If that is None, pieces are
        there as they are, for this rank alone.
        """
        return self._weights.sections(_MOMENTUM, self._momentum, names, pieces_of)

    def donated(self) -> dict[str, Tensor]:
        """What a replica that heals needs in addition: the momentum, the start, and the unsent drifts."""
        found = self._weights.sections(_MOMENTUM, self._momentum)
        found |= self._weights.sections(START, self._start)
        for line, drifts in enumerate(self._drifts):
            found |= drifts.sections(line)
        return found

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from loaded weights, with the sections that were saved with them. Without a saved start,
        the weights are the start.
        """
        for momentum in self._momentum:
            momentum.flat.zero_()
        for start, flat in zip(self._start, self._weights.flats, strict=bool(self._start)):
            start.flat.copy_(flat)
        whole = joined(saved)
        self._weights.load_section(_MOMENTUM, self._momentum, whole)
        self._weights.load_section(START, self._start, whole)
        for line, drifts in enumerate(self._drifts):
            drifts.load(line, saved)

    # Groups.

    def _arrive(self, batch: int) -> None:
        """Have the weights after a batch averaged. Nothing writes to them before the mean does, so they are
        not copied.
        """
        flats, ready = self._weights.flats, self._weights.event()
        moments = self._moments.taken(self._weights.everywhere)

        def make() -> Contribution:
            if ready is not None:
                ready.synchronize()
            own = [flat.to("cpu") for flat in flats]
            if self._drifts:
                own = [flat - start for flat, start in zip(own, self._starts, strict=True)]
            return self._contribution([*own, *moments], 0)

        self.agent.arrive(batch, make)

    def _leave(self, batch: int) -> None:
        """Write the mean of the group after a batch."""
        job = self.agent.group(batch)
        if job.result is None:
            for drifts in self._drifts:
                drifts.drop()
            return
        means = job.result.flats
        if not self._drifts:
            self._note(job.size, means)
        for drifts in self._drifts:
            drifts.settle(job.result, is_own=True)
            for mean, start in zip(means, self._starts, strict=False):
                mean.add_(start)
        self._weights.write(lambda number, flat: flat.copy_(means[number]))
        self._moments.put(means[len(self._weights.parts) :], self._weights.everywhere)
        job.result.give_back()

    # DiLoCo.

    def _offer_due(self, batch: int) -> None:
        """Offer the drift of fragments whose rounds are due."""
        settings, deal = self._asked.diloco, self.agent.deals.of(batch)
        assert settings is not None, "it is asked for"
        self._samples += deal.num_samples
        # Samples that are assigned again may be of an earlier batch of the run.
        self._batches = max(self._batches, deal.samples[0].begin // self._asked.batch_size + 1)
        for number, fragment in enumerate(self._fragments):
            due = settings.num_due(number, self._batches) - settings.num_due(number, self._asked.first)
            if fragment.batch is None and self.agent.lines[number].at.committed < due:
                fragment.due, fragment.batch = due, batch
                fragment.offered = self._drift(fragment.of(self._weights.flats), fragment.of(self._starts))
                fragment.moments, fragment.samples = self._moments.taken(fragment.places), self._samples
                self._offer(number)

    def _follow_due(self, batch: int) -> None:
        """Follow the rounds of all fragments that were due after that batch."""
        while lines := [self.agent.lines[n] for n, one in enumerate(self._fragments) if one.batch == batch]:
            self.agent.wait_settled(lines)
            self._use_up(lines)

    def _offer(self, number: int) -> None:
        """Have a part in the next round of a line with the drift that was offered and not yet in a round."""
        fragment, line = self._fragments[number], self.agent.lines[number]
        if fragment.offered is None:
            self._offer_nothing(line, is_due=True)
            return
        assert fragment.batch is not None, "it was offered after a batch"
        offered, samples = [*fragment.offered, *fragment.moments], fragment.samples - fragment.counted
        make = lambda: self._contribution(offered, samples)  # noqa: E731
        self.agent.offer(line, Offer(make, samples, fragment.batch + 1))

    def _offer_nothing(self, line: RoundLine, *, is_due: bool = False) -> None:
        """Have a part in the next round of a line without anything to add."""
        self.agent.offer(line, Offer(lambda: line.nothing(0), is_due=is_due))

    def _use_up(self, lines: Sequence[RoundLine]) -> None:
        """Follow the rounds of these lines that count, but none of a fragment after those that were due."""
        for line in lines:
            fragment = self._fragments[line.number]
            while (settled := self.agent.take(line)) is not None:
                self._follow(line, fragment, settled)
                if line.at.committed < fragment.due:
                    self._offer(line.number)
                    continue
                if fragment.batch is not None:
                    fragment.offered, fragment.moments, fragment.batch = None, [], None
                    break

    def _follow(self, line: RoundLine, fragment: _Fragment, settled: RoundSum) -> None:
        means = settled.flats
        if self._drifts:
            self._drifts[line.number].settle(settled, is_own=settled.has_own)
        else:
            self._note(len(settled.parts), means)
        starts = fragment.of(self._starts)
        befores = [start.clone() for start in starts]
        self._step(line.number, means[: len(starts)], settled)
        changes = [start.sub(before) for start, before in zip(starts, befores, strict=True)]
        if fragment.offered is not None and settled.has_own:
            for change, drift in zip(changes, fragment.offered, strict=True):
                change.add_(drift)
            self._moments.put(means[len(changes) :], fragment.places)
            fragment.counted, fragment.offered, fragment.moments = fragment.samples, None, []
        settled.give_back()
        self._weights.write(
            lambda number, flat: flat[fragment.places[number]].add_(changes[number].to(flat.device))
        )

    @torch.no_grad()
    def _step(self, number: int, means: Sequence[Tensor], settled: RoundSum) -> None:
        """The outer step of a fragment."""
        fragment, settings = self._fragments[number], self._asked.diloco
        if settings is None or not settled.summed.weight:
            return
        buffers = fragment.of([one.flat for one in self._momentum])
        for start, buffer, mean in zip(fragment.of(self._starts), buffers, means, strict=True):
            buffer.mul_(settings.momentum).add_(mean)
            start.sub_((mean + settings.momentum * buffer) * settings.rate)

    # Both.

    def _contribution(
        self, flats: Sequence[Tensor], samples: int, numbers: tuple[float, ...] = ()
    ) -> Contribution:
        """In DiLoCo it counts by its samples, in groups alike for all."""
        weight = 1.0 if self._asked.diloco is None else float(samples)
        return Contribution(flats, b"", weight, weight, (), numbers, firsts=self._firsts)

    @property
    def _starts(self) -> list[Tensor]:
        return [one.flat for one in self._start]

    def _drift(self, weights: Sequence[Tensor], starts: Sequence[Tensor]) -> list[Tensor]:
        return [start - own.to("cpu") for own, start in zip(weights, starts, strict=True)]

    def _note(self, num_members: int, flats: Sequence[Tensor]) -> None:
        """Count flats that have been sent as they are."""
        num_bytes = sum(flat.nbytes for flat in flats)
        self.sent.note(num_members, raw=num_bytes, sent=num_bytes)
