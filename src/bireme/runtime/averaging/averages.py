"""What AVERAGE_START and AVERAGE_END do on a rank: its weights go to the agent, and means come back.

`Averages` is what both modes share: the rank has one stage, and at the end of each window all replicas make
one mean. Here are the averages of groups; those by outer steps are in `outer.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.devices import is_accelerator
from bireme.errors import BiremeError
from bireme.runtime.averaging.agent import AveragingAgent
from bireme.runtime.averaging.lines import Offer, SettledRound
from bireme.runtime.averaging.moments import Moments
from bireme.runtime.stage import Stage
from bireme.schedule.instruction import Instruction
from bireme.sync.exchange import SentBytes
from bireme.sync.quorum.ring import Contribution

__all__ = ["Averages", "GroupAverages", "Met", "copied", "met"]


@dataclass(frozen=True, slots=True)
class Met:
    """A mean over all replicas: who had a part in it, and the sums of what they gave along."""

    parts: tuple[int, ...]
    numbers: tuple[float, ...]


class Averages(ABC):
    """The averages of one rank, which has one stage; of its weights, or of its optimiser's state too."""

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
        self._moments = Moments(self.stage.banks) if averages_optimizer else None
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
        """What is averaged of the optimiser's state along with these places of the weights."""
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
        """What gives the weights as they are, and the optimiser's state, where and when they are needed."""
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
