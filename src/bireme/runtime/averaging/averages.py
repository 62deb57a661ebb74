"""What AVERAGE_START and AVERAGE_END do on a rank: its weights go to the agent, and means come back.

`Averages` is what both modes share: the rank has one stage, and at the end of each window all replicas make
one mean. Here are the averages of groups; those by outer steps are in `diloco.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bireme.devices import is_accelerator
from bireme.errors import BiremeError
from bireme.memory.arena import Slots
from bireme.runtime.averaging.agent import AveragingAgent, Offer, SettledRound
from bireme.runtime.banks import WeightBanks
from bireme.runtime.stage import Stage
from bireme.schedule.instruction import Instruction
from bireme.sync.exchange import SentBytes
from bireme.sync.quorum.ring import Contribution

# What the optimizer of a stage remembers of each weight, as flats that are averaged along with the weights.
#
# For each arena of weights there is a flat for each key of the optimizer's state, with elements at the same
# places, so a fragment of the weights is one of them too. What an optimizer has not made yet counts as zeros,
# with which it would begin, and is not written to.


@dataclass(frozen=True, slots=True)
class _Row:
    """What is remembered under a key of the weights in an arena."""

    arena: int
    slots: Slots
    key: str
    dtype: torch.dtype


class _Moments:
    """The flats of one stage; `places` are those of its elements in each arena of weights."""

    def __init__(self, banks: WeightBanks) -> None:
        self._banks = banks
        kinds = banks.state_kinds()
        self._rows: list[_Row] = []
        for number, arena in enumerate(banks.newest_arenas):
            keys = dict(kind for name in arena.slots for kind in kinds.get(name, {}).items())
            self._rows += [_Row(number, arena.slots, key, keys[key]) for key in sorted(keys)]

    def like(self, places: Sequence[slice]) -> list[Tensor]:
        """Flats of the same lengths and kinds, without memory."""
        return [torch.empty(_length(row, places), dtype=row.dtype, device="meta") for row in self._rows]

    def taken(self, places: Sequence[slice]) -> list[Tensor]:
        """Copies on the host."""
        state = self._banks.optimizer_state()
        found = []
        for row in self._rows:
            flat = torch.zeros(_length(row, places), dtype=row.dtype)
            for own, place in _held(row, state, places[row.arena]):
                flat[place].copy_(own)
            found.append(flat)
        return found

    def put(self, flats: Sequence[Tensor], places: Sequence[slice]) -> None:
        """Have the optimizer remember this from now on."""
        state = self._banks.optimizer_state()
        for row, flat in zip(self._rows, flats, strict=True):
            for own, place in _held(row, state, places[row.arena]):
                own.copy_(flat[place])


def _length(row: _Row, places: Sequence[slice]) -> int:
    place = places[row.arena]
    return int(place.stop - place.start)


def _held(row: _Row, state: Mapping[str, Mapping[str, Any]], whole: slice) -> Iterator[tuple[Tensor, slice]]:
    """The parts of an optimizer's tensors within a place, and where each of them is in its flat."""
    for name, slot in row.slots.items():
        own = state.get(name, {}).get(row.key)
        begin, end = max(slot.begin, whole.start), min(slot.end, whole.stop)
        if begin < end and isinstance(own, Tensor) and tuple(own.shape) == slot.shape:
            part = own.view(-1)[begin - slot.begin : end - slot.begin]
            yield part, slice(begin - whole.start, end - whole.start)


@dataclass(frozen=True, slots=True)
class Met:
    """A mean over all replicas: who had a part in it, and the sums of what they gave along."""

    parts: tuple[int, ...]
    numbers: tuple[float, ...]


class Averages(ABC):
    """The averages of one rank, which has one stage; of its weights, or of its optimizer's state too."""

    def __init__(
        self,
        agent: AveragingAgent,
        stages: Mapping[int, Stage],
        device: torch.device,
        *,
        averages_optimizer: bool = False,
    ) -> None:
        if len(stages) != 1:
            raise BiremeError(
                f"Replicas average weights rank by rank, and a rank has {len(stages)} stages. Use a schedule "
                "with one stage on each rank, such as 1f1b, 2bw or 2bw-fresh."
            )
        self.agent = agent
        self.stage = next(iter(stages.values()))
        self._device = device
        self._moments = _Moments(self.stage.banks) if averages_optimizer else None
        self.sent = SentBytes()
        """What this rank has sent to others."""

    @abstractmethod
    def start(self, step: Instruction) -> None:
        """AVERAGE_START: the weights of an update may be averaged."""

    @abstractmethod
    def end(self, step: Instruction) -> None:
        """AVERAGE_END: wait for what the weights become, and write it."""

    @abstractmethod
    def meet(self, num_trained: int, numbers: tuple[float, ...]) -> Met:
        """Make one mean of all replicas' weights, once a window has drained."""

    def sections(self, names: Collection[str]) -> dict[str, Tensor]:
        """What a checkpoint needs in addition to the weights."""
        del names
        return {}

    def donated(self) -> dict[str, Tensor]:
        """What another replica needs in addition to a snapshot to continue from here."""
        return {}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from loaded weights, with what was saved with them."""
        del saved

    def _note(self, num_members: int, flats: Sequence[Tensor]) -> None:
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
    def _everywhere(self) -> list[slice]:
        """The places of all weights."""
        return [slice(0, flat.numel()) for flat in self._flats]

    @property
    def _flats(self) -> list[Tensor]:
        return [arena.flat for arena in self.stage.banks.newest_arenas]

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
        self,
        agent: AveragingAgent,
        stages: Mapping[int, Stage],
        device: torch.device,
        *,
        averages_optimizer: bool = False,
    ) -> None:
        super().__init__(agent, stages, device, averages_optimizer=averages_optimizer)
        like = [torch.empty_like(flat, device="meta") for flat in self._flats]
        agent.bind([[*like, *self._moments_like(self._everywhere)]])

    def start(self, step: Instruction) -> None:
        """Nobody writes to these weights before the mean is part of them, so they are not copied."""
        offered = self._offered()
        self.agent.arrive(step.batch, lambda: Contribution(offered(), b"", 1.0, 1.0))

    def end(self, step: Instruction) -> None:
        """Wait for the group."""
        assert step.version is not None
        job = self.agent.group(step.batch)
        if job.result is not None:
            self._note(job.size, job.result.flats)
            self._write(step.version, job.result.flats)
            self.agent.give_back(job)

    def meet(self, num_trained: int, numbers: tuple[float, ...]) -> Met:
        """All weights become their mean."""
        offered, mean = self._offered(), self.agent.lines[-1]

        def make() -> Contribution:
            return Contribution(offered(), b"", 1.0, 1.0, (), numbers)

        self.agent.drain()
        self.agent.offer(mean, Offer(make, trained=num_trained))
        self.agent.wait_settled([mean])
        settled = self.agent.take(mean)
        assert settled is not None, "it was waited for"
        self._note(len(settled.parts), settled.result.flats)
        self._write(self.stage.banks.newest_version, settled.result.flats, is_drained=True)
        mean.give_back(settled.result)
        return met(settled)

    def _offered(self) -> Callable[[], Sequence[Tensor]]:
        """What gives the weights as they are, and the optimizer's state, where and when they are needed."""
        flats, ready = self._flats, self._event()
        return lambda: [*copied(flats, ready), *self._moments_taken(self._everywhere)]

    def _write(self, version: int, means: Sequence[Tensor], *, is_drained: bool = False) -> None:
        num = len(self._flats)

        def write(flats: Sequence[Tensor]) -> None:
            for flat, mean in zip(flats, means[:num], strict=True):
                flat.copy_(mean)

        self.stage.banks.average(version, write, is_drained=is_drained)
        self._put_moments(means[num:], self._everywhere)


def met(settled: SettledRound) -> Met:
    """What a mean over all replicas says."""
    assert settled.result.summed is not None, "what counts was summed"
    return Met(settled.parts, settled.result.summed.numbers)


def copied(flats: Sequence[Tensor], ready: torch.Event | None) -> Sequence[Tensor]:
    """Flats as others are sent them: on the host, where they stay if they are there."""
    if ready is None:
        return flats
    ready.synchronize()
    return [flat.to("cpu") for flat in flats]
