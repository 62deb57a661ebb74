"""What AVERAGE_START and AVERAGE_END do on a rank: its weights go to the agent, and means come back.

`Averages` is what both modes share: a rank averages all its stages at once, and at the end of each window all
replicas make one mean. Here are the averages of groups; those by outer steps are in `diloco.py`.
"""

from abc import ABC, abstractmethod
from binascii import crc32
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bireme.codec.sum_description import DENSE, SumCodec
from bireme.devices import is_accelerator
from bireme.errors import BiremeError
from bireme.memory.arena import Arena, Slots
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan
from bireme.plan.program_plan import ProgramPlan
from bireme.runtime.banks import WeightBanks
from bireme.runtime.exchange.agent import ExchangeAgent
from bireme.runtime.exchange.rounds import HowOfRound, Offer, RoundLine, RoundSum, SettledRound
from bireme.runtime.layout import AnyPlan, Layout
from bireme.runtime.shared_weights import Sharers
from bireme.runtime.snapshot import piece_name
from bireme.runtime.stage import Stage
from bireme.schedule.instruction import Instruction
from bireme.sync.coded import GradientSummation
from bireme.sync.exchange import FlatViews, SentBytes
from bireme.sync.feedback import RESIDUAL
from bireme.sync.rounds.contribution import CodedFlats, Contribution, bases_in

# How a pipeline averages weights with those of other replicas.
#
# The pipeline knows no rank of another one. It may be of a site of several replicas, which sum gradients.
# Each of their ranks then averages its part of the weights, and gets the parts of the others in its site.


@dataclass(frozen=True, slots=True)
class DilocoSettings:
    """Each of so many fragments has a round every `every` batches of the run."""

    every: int
    rate: float = 0.7
    momentum: float = 0.9
    fragments: int = 1


@dataclass(frozen=True, slots=True)
class Averaging:
    """How a pipeline averages with others: in groups, or by `diloco` steps that come `lag` batches late.

    A batch of the run has `batch_size` samples, of which each replica trains its own; it begins with `first`.
    With `averages_optimizer` what optimizers remember of the weights is averaged along with these. Drifts of
    weights go through `codec`.
    """

    agent: ExchangeAgent
    batch_size: int
    diloco: DilocoSettings | None = None
    lag: int = 0
    first: int = 0
    averages_optimizer: bool = False
    rebuilt: frozenset[str] = frozenset()
    """The weights that every life of a replica has by itself, and that none is sent."""
    codec: SumCodec = DENSE

    def programs(self, plan: AnyPlan) -> ProgramPlan:
        """What a plan runs with averages in it."""
        named = plan.plan if isinstance(plan, SavedPlan) else plan
        if not isinstance(named, Plan):
            raise BiremeError("Replicas average weights in programs of a plan, not in one that is given.")
        return named.averaging(self.lag)

    def averagers(self, layout: Layout) -> Sharers | None:
        """The replicas that this pipeline has in it, if each averages a part of the weights; None if there is
        one, or if moments are averaged too, which each of them has whole.
        """
        if layout.width == 1 or self.averages_optimizer:
            return None
        return Sharers(layout.replica, layout.width)


# The weights of a rank as the flats that are averaged: the arenas of all its stages, in their order.
#
# A weight that several stages of a replica hold is a flat of its own. The order of the additions in its mean
# follows from its name, so the mean has the same bits in all these stages, whatever else lies on their ranks.


@dataclass(frozen=True, slots=True)
class _Part:
    """A flat: a range of an arena of a stage, with the slots of its weights in it. Where other stages hold
    its weight too, `first` fixes the order in which its mean is summed.
    """

    stage: int
    arena: int
    begin: int
    slots: Slots
    first: int | None

    def of(self, arena: Tensor) -> Tensor:
        """This part of an arena's flat."""
        return arena[self.begin : self.begin + self.slots.num_elements]


def _parts_of(stages: Sequence[Stage], shared: Collection[str]) -> Iterator[_Part]:
    """The parts of these stages; `shared` are the weights that several stages of the replica hold."""
    for number, stage in enumerate(stages):
        for place, (own, _) in enumerate(stage.banks.averaged):
            groups: list[list[str]] = []
            for name in own:
                if name in shared or not groups or groups[-1][-1] in shared:
                    groups.append([])
                groups[-1].append(name)
            for names in groups:
                slots = Slots({name: own[name].shape for name in names})
                first = crc32(names[0].encode()) if names[0] in shared else None
                yield _Part(number, place, own[names[0]].begin, slots, first)


# What the optimizer of a rank remembers of each weight, as flats that are averaged along with the weights.
#
# For each flat of weights there is a flat for each key of the optimizer's state, with elements at the same
# places, so a fragment of the weights is one of them too. What an optimizer has not made yet counts as zeros,
# with which it would begin, and is not written to.


@dataclass(frozen=True, slots=True)
class _Row:
    """What is remembered under a key of the weights in a part, which has that number."""

    number: int
    part: _Part
    key: str
    dtype: torch.dtype


class _Moments:
    """The flats of one rank; `places` are those of its elements in each flat of weights."""

    def __init__(self, stages: Sequence[Stage], parts: Sequence[_Part]) -> None:
        self._banks: list[WeightBanks] = [stage.banks for stage in stages]
        kinds = [banks.state_kinds() for banks in self._banks]
        self._rows: list[_Row] = []
        for number, part in enumerate(parts):
            keys = dict(kind for name in part.slots for kind in kinds[part.stage].get(name, {}).items())
            self._rows += [_Row(number, part, key, keys[key]) for key in sorted(keys)]

    @property
    def firsts(self) -> list[int | None]:
        """What fixes the order of the additions in each flat."""
        return [row.part.first for row in self._rows]

    def like(self, places: Sequence[slice]) -> list[Tensor]:
        """Flats of the same lengths and kinds, without memory."""
        return [torch.empty(_length(row, places), dtype=row.dtype, device="meta") for row in self._rows]

    def taken(self, places: Sequence[slice]) -> list[Tensor]:
        """Copies on the host."""
        states = [banks.optimizer_state() for banks in self._banks]
        found = []
        for row in self._rows:
            flat = torch.zeros(_length(row, places), dtype=row.dtype)
            for own, place in _held(row, states[row.part.stage], places[row.number]):
                flat[place].copy_(own)
            found.append(flat)
        return found

    def put(self, flats: Sequence[Tensor], places: Sequence[slice]) -> None:
        """Have the optimizer remember this from now on."""
        states = [banks.optimizer_state() for banks in self._banks]
        for row, flat in zip(self._rows, flats, strict=True):
            for own, place in _held(row, states[row.part.stage], places[row.number]):
                own.copy_(flat[place])
        for banks, state in zip(self._banks, states, strict=True):
            banks.put_back_state(state)


def _length(row: _Row, places: Sequence[slice]) -> int:
    place = places[row.number]
    return int(place.stop - place.start)


def _held(row: _Row, state: Mapping[str, Mapping[str, Any]], whole: slice) -> Iterator[tuple[Tensor, slice]]:
    """The parts of an optimizer's tensors within a place, and where each of them is in its flat."""
    for name, slot in row.part.slots.items():
        own = state.get(name, {}).get(row.key)
        begin, end = max(slot.begin, whole.start), min(slot.end, whole.stop)
        if begin < end and isinstance(own, Tensor) and tuple(own.shape) == slot.shape:
            part = own.view(-1)[begin - slot.begin : end - slot.begin]
            yield part, slice(begin - whole.start, end - whole.start)


# Averages through a codec: what goes through it is how far weights are from where all replicas had them.
#
# A codec loses a share of what it is given, and that share is kept and given to it next time. Of the weights
# themselves that would be much; of their drift since all replicas had the same it is little. What optimizers
# remember goes as it is.

_UNSENT = "unsent"
"""The section of snapshots for what codecs keep."""


class _CodedDrifts:
    """The drifts of some places of a rank's weights, in sums through a codec."""

    def __init__(
        self,
        codec: SumCodec,
        parts: Sequence[_Part],
        places: Sequence[slice],
        moments: Sequence[Tensor],
        firsts: Sequence[int | None],
        sent: SentBytes,
        *,
        keeps_basis: bool,
    ) -> None:
        self._coded, self._sent = GradientSummation(codec, keeps_basis=keeps_basis), sent
        slots: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        for number, (part, place) in enumerate(zip(parts, places, strict=True)):
            for name, slot in part.slots.items():
                begin, end = max(slot.begin, place.start), min(slot.end, place.stop)
                if begin >= end:
                    continue
                is_whole = end - begin == slot.end - slot.begin
                label = name if is_whole else f"{name}:{begin - slot.begin}"
                label = f"{label}@{number}" if label in slots else label
                slots[label] = number, begin - place.start, slot.shape if is_whole else (end - begin,)
        for number, one in enumerate(moments, len(parts)):
            slots[f"{number}"] = number, 0, (one.numel(),)
        self._views = FlatViews(slots)
        self._num_parts = len(parts)
        self._plain = {label for label, (number, _, _) in slots.items() if number >= len(parts)}
        self._apart = {label for label, (number, _, _) in slots.items() if firsts[number] is not None}

    def how(self, number: int) -> CodedFlats:
        """How the contributions to the round of that number are added up."""
        return CodedFlats(number, self._views, self._coded, self._sent, plain=self._plain, apart=self._apart)

    def settle(self, result: RoundSum, *, is_own: bool) -> None:
        """A round counts, whose result this is: what it left is kept if this rank's own drift is in it."""
        assert result.summed is not None, "what counts was summed"
        is_own = is_own and result.is_own
        self._coded.settle(counts=is_own, common=None if is_own else bases_in(result.summed.more))

    def drop(self) -> None:
        """A round does not count after all."""
        self._coded.settle(counts=False)

    def add_unsent(self, drifts: Sequence[Tensor]) -> None:
        """Add what was not sent to drifts, in place."""
        feedback = self._coded.feedback
        if feedback is None:
            return
        views = self._views.in_([*drifts, *(drifts[0].new_empty(0) for _ in self._plain)])
        for label, kept in feedback.after(feedback.num_batches).items():
            if RESIDUAL in kept:
                views[label].add_(kept[RESIDUAL])

    def clear(self) -> None:
        """All replicas have the same weights: nothing is unsent."""
        if self._coded.feedback is not None:
            self._coded.feedback.clear_residuals()

    def sections(self, line: int) -> dict[str, Tensor]:
        """What is kept, by the names of a snapshot; copied."""
        feedback = self._coded.feedback
        if feedback is None:
            return {}
        return {
            f"{_UNSENT}/{line}/{label}/{key}": value.clone()
            for label, kept in feedback.after(feedback.num_batches).items()
            for key, value in kept.items()
        }

    def load(self, line: int, saved: Mapping[str, Tensor]) -> None:
        """Continue with what was kept elsewhere, or with nothing."""
        if self._coded.feedback is None:
            return
        found: dict[str, dict[str, Tensor]] = {}
        begin = f"{_UNSENT}/{line}/"
        for key, value in saved.items():
            if key.startswith(begin):
                label, _, what = key.removeprefix(begin).rpartition("/")
                found.setdefault(label, {})[what] = value
        self._coded.feedback.load(found, num_batches=0)


@dataclass(frozen=True, slots=True)
class Met:
    """A mean over all replicas: who had a part in it, and the sums of what they gave along."""

    parts: tuple[int, ...]
    numbers: tuple[float, ...]


class Averages(ABC):
    """The averages of one rank as `asked` for. `shared` are the weights that several stages of its replica
    hold.
    """

    def __init__(
        self, asked: Averaging, stages: Mapping[int, Stage], device: torch.device, shared: Collection[str]
    ) -> None:
        self.agent, self._codec = asked.agent, asked.codec
        self._stages = [stages[index] for index in sorted(stages)]
        self._device = device
        self._parts = tuple(_parts_of(self._stages, shared))
        self._moments = _Moments(self._stages, self._parts) if asked.averages_optimizer else None
        self._num_started = self._num_ended = 0
        """Of the stages, those that have come to the start or the end of the present average."""
        self.sent = SentBytes()
        """What this rank has sent to others."""

    def start(self, step: Instruction) -> None:
        """AVERAGE_START: the weights of an update may be averaged, once those of all stages may."""
        self._num_started += 1
        if self._num_started == len(self._stages):
            self._num_started = 0
            self._start_batch(step.batch)

    def end(self, step: Instruction) -> None:
        """AVERAGE_END: wait for the new weights of all stages, and write them; no stage uses them before."""
        self._num_ended += 1
        if self._num_ended == len(self._stages):
            self._num_ended = 0
            self._end_batch(step.batch)

    @abstractmethod
    def _start_batch(self, batch: int) -> None:
        """All stages have made their update of a batch."""

    @abstractmethod
    def _end_batch(self, batch: int) -> None:
        """The average after a batch is to be written."""

    @abstractmethod
    def meet(self, num_trained: int, numbers: tuple[float, ...]) -> Met:
        """Make one mean of all replicas' weights, once a window has drained."""

    def sections(self, names: Collection[str], pieces_of: Collection[str] | None = None) -> dict[str, Tensor]:
        """What a checkpoint needs in addition to the weights, of the parameters named: of those that are
        averaged in pieces, this rank's pieces of the parameters in `pieces_of`. If that is None, pieces are
        there as they are, for this rank alone.
        """
        del names, pieces_of
        return {}

    def donated(self) -> dict[str, Tensor]:
        """What another replica needs in addition to a snapshot to continue from here."""
        return {}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from loaded weights, with what was saved with them."""
        del saved

    def _coded(self, places: Sequence[slice], *, keeps_basis: bool) -> _CodedDrifts | None:
        """Sums of drifts at these places through the codec, if there is one."""
        if self._codec == DENSE:
            return None
        moments = self._moments_like(places)
        return _CodedDrifts(
            self._codec, self._parts, places, moments, self._firsts, self.sent, keeps_basis=keeps_basis
        )

    def _line(self, number: int, like: Sequence[Tensor], how: HowOfRound | None = None) -> RoundLine:
        """A line of rounds whose sums are like these."""
        return RoundLine(number, like, self._firsts, self._device, how)

    def _start_arenas(self) -> list[Arena]:
        """Room on the host for weights as all replicas had them."""
        host = torch.device("cpu")
        return [
            Arena(part.slots, flat.dtype, host) for part, flat in zip(self._parts, self._flats, strict=True)
        ]

    def _note(self, num_members: int, flats: Sequence[Tensor]) -> None:
        """Count flats that have been sent as they are."""
        num_bytes = sum(flat.nbytes for flat in flats)
        self.sent.note(num_members, raw=num_bytes, sent=num_bytes)

    def _moments_like(self, places: Sequence[slice]) -> list[Tensor]:
        """What is averaged of the optimizer's state along with these places of the weights."""
        return [] if self._moments is None else self._moments.like(places)

    def _moments_taken(self, places: Sequence[slice]) -> list[Tensor]:
        return [] if self._moments is None else self._moments.taken(places)

    @torch.no_grad()
    def _put_moments(self, flats: Sequence[Tensor], places: Sequence[slice]) -> None:
        if self._moments is not None:
            self._moments.put(flats, places)

    @property
    def _firsts(self) -> list[int | None]:
        """What fixes the order of the additions in each flat that is averaged."""
        own = [part.first for part in self._parts]
        return own if self._moments is None else [*own, *self._moments.firsts]

    @property
    def _everywhere(self) -> list[slice]:
        """The places of all weights."""
        return [slice(0, part.slots.num_elements) for part in self._parts]

    @property
    def _flats(self) -> list[Tensor]:
        """The newest weights."""
        flats = [[flat for _, flat in stage.banks.averaged] for stage in self._stages]
        return [part.of(flats[part.stage][part.arena]) for part in self._parts]

    def _write(self, write: Callable[[int, Tensor], object], *, is_drained: bool = False) -> None:
        """Have the newest weights changed in place: `write` is given the number of each flat and the flat."""
        for place, stage in enumerate(self._stages):

            def write_all(flats: Sequence[Tensor], place: int = place) -> None:
                for number, part in enumerate(self._parts):
                    if part.stage == place:
                        write(number, part.of(flats[part.arena]))

            stage.banks.average(stage.banks.newest_version, write_all, is_drained=is_drained)

    def _sections(
        self,
        section: str,
        arenas: Sequence[Arena],
        names: Collection[str] | None = None,
        pieces_of: Collection[str] | None = None,
    ) -> dict[str, Tensor]:
        """Copies of what lies in arenas like the parts; all if no names are given."""
        found: dict[str, Tensor] = {}
        for name, view, place in self._placed(arenas):
            key = f"{section}/{name}"
            if place is not None and pieces_of is not None:
                piece, shape = place
                if name in pieces_of:
                    found[piece_name(piece.start, shape, key)] = view.reshape(-1).clone()
            elif names is None or name in names:
                found[key] = view.clone()
        return found

    def _load_section(self, section: str, arenas: Sequence[Arena], saved: Mapping[str, Tensor]) -> None:
        """Copy what was saved into arenas like the parts."""
        for part, arena in zip(self._parts, arenas, strict=True):
            for name, view in arena.views.items():
                if (found := saved.get(f"{section}/{name}")) is None:
                    continue
                place = self._stages[part.stage].banks.averaged_piece(name)
                is_whole = place is not None and found.shape != view.shape
                view.copy_(found.reshape(-1)[place[0]] if is_whole and place is not None else found)

    def _placed(
        self, arenas: Sequence[Arena]
    ) -> Iterator[tuple[str, Tensor, tuple[slice, tuple[int, ...]] | None]]:
        """The name of each parameter in arenas like the parts, its place there, and the piece that it is; of
        the first stage that has it.
        """
        stage_of: dict[str, int] = {}
        for part, arena in zip(self._parts, arenas, strict=True):
            for name, view in arena.views.items():
                if stage_of.setdefault(name, part.stage) == part.stage:
                    yield name, view, self._stages[part.stage].banks.averaged_piece(name)

    def _event(self) -> torch.Event | None:
        """What the rank's stream has had to do by now, on an accelerator."""
        if not is_accelerator(self._device):
            return None
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event


class GroupAverages(Averages):
    """Weights are averaged with the group that is ready: each counts alike, whatever it has trained."""

    def __init__(
        self, asked: Averaging, stages: Mapping[int, Stage], device: torch.device, shared: Collection[str]
    ) -> None:
        super().__init__(asked, stages, device, shared)
        like = [torch.empty_like(flat, device="meta") for flat in self._flats]
        # The members of groups change, so no basis is the same on all of them.
        self._drifts = self._coded(self._everywhere, keeps_basis=False)
        self._start = [] if self._drifts is None else self._start_arenas()
        self.load({})
        line = self._line(0, [*like, *self._moments_like(self._everywhere)])
        self.agent.bind([line], None if self._drifts is None else self._drifts.how)

    def donated(self) -> dict[str, Tensor]:
        """The weights that drifts are from, and what was not sent of drifts."""
        if self._drifts is None:
            return {}
        return self._sections(START, self._start) | self._drifts.sections(0)

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Drifts are from what was saved so, or from the weights."""
        for start, flat in zip(self._start, self._flats, strict=bool(self._start)):
            start.flat.copy_(flat)
        if self._start:
            self._load_section(START, self._start, saved)
        if self._drifts is not None:
            self._drifts.load(0, saved)

    def _start_batch(self, batch: int) -> None:
        """Nothing writes to these weights before the mean is part of them, so they are not copied."""
        flats, ready, firsts = self._flats, self._event(), self._firsts
        moments = self._moments_taken(self._everywhere)

        def make() -> Contribution:
            own = copied(flats, ready)
            if self._drifts is not None:
                own = [flat - start.flat for flat, start in zip(own, self._start, strict=True)]
            own = [*own, *moments]
            return Contribution(own, b"", 1.0, 1.0, firsts=firsts)

        self.agent.arrive(batch, make)

    def _end_batch(self, batch: int) -> None:
        job = self.agent.group(batch)
        if job.result is None:
            if self._drifts is not None:
                self._drifts.drop()
            return
        if self._drifts is None:
            self._note(job.size, job.result.flats)
        else:
            self._drifts.settle(job.result, is_own=True)
            for mean, start in zip(job.result.flats, self._start, strict=False):
                mean.add_(start.flat)
        self._become(job.result.flats)
        self.agent.groups.give_back(job)

    def meet(self, num_trained: int, numbers: tuple[float, ...]) -> Met:
        """All weights become their mean."""
        mean, flats, ready, firsts = self.agent.lines[-1], self._flats, self._event(), self._firsts
        moments = self._moments_taken(self._everywhere)

        def make() -> Contribution:
            own = copied(flats, ready)
            if self._drifts is not None:
                own = [flat.clone() for flat in own]
                self._drifts.add_unsent(own)
            own = [*own, *moments]
            return Contribution(own, b"", 1.0, 1.0, (), numbers, firsts=firsts)

        self.agent.drain()
        self.agent.offer(mean, Offer(make, trained=num_trained))
        self.agent.wait_settled([mean])
        settled = self.agent.take(mean)
        assert settled is not None, "it was waited for"
        self._note(len(settled.parts), settled.result.flats)
        self._become(settled.result.flats, is_drained=True)
        if self._drifts is not None:
            self._drifts.clear()
            for start, found in zip(self._start, settled.result.flats, strict=False):
                start.flat.copy_(found)
        mean.give_back(settled.result)
        return met(settled)

    def _become(self, means: Sequence[Tensor], *, is_drained: bool = False) -> None:
        self._write(lambda number, flat: flat.copy_(means[number]), is_drained=is_drained)
        self._put_moments(means[len(self._parts) :], self._everywhere)


def met(settled: SettledRound) -> Met:
    """What a mean over all replicas says."""
    return Met(settled.parts, settled.summed.numbers)


def copied(flats: Sequence[Tensor], ready: torch.Event | None) -> Sequence[Tensor]:
    """Flats as others are sent them: on the host, where they stay if they are there."""
    if ready is None:
        return flats
    ready.synchronize()
    return [flat.to("cpu") for flat in flats]


START = "start"
"""The section of snapshots for weights as all replicas had them."""
