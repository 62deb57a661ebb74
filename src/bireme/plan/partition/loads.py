"""What every stage that could be would take on its device: seconds, bytes, and whether it fits.

A stage is judged by the time it keeps its device busy per micro-batch. Bytes are those that the simulator
will count, and buffers and workspace besides. Entries are kept only where every stage can have a unit: stage
s of d begins at one of the units s to N − d + s.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from bireme.errors import BiremeError
from bireme.plan.partition.chain import Chain, Seconds
from bireme.plan.partition.device_row import DeviceRow
from bireme.plan.partition.holdings import Moment, holdings
from bireme.schedule.catalogue import schedule_named

__all__ = ["Loads", "Recompute", "StageSetting", "loads_of"]


class Recompute(StrEnum):
    """Which stages keep only their inputs and run their forward again before the backward."""

    NEVER = "never"
    ALWAYS = "always"
    WHERE_NEEDED = "where needed"
    """Those that do not fit otherwise."""


@dataclass(frozen=True, slots=True)
class StageSetting:
    """How the stages are run: `num_microbatches` are those of a batch."""

    schedule: str
    num_microbatches: int
    recompute: Recompute = Recompute.NEVER
    updates_early: bool = False
    has_masters: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """Tables per stage s whose entry [a, b] is for the units from s + a up to but without s + 1 + b.

    `busy_s` is infinite where a stage has no units, and says nothing about memory. `link_s[s]` is, for every
    unit that stage s + 1 could begin with, how long a micro-batch keeps the link before it busy.
    """

    chain: Chain
    line: DeviceRow
    setting: StageSetting
    busy_s: tuple[Seconds, ...]
    recomputed: tuple[npt.NDArray[np.bool_], ...]
    peak_bytes: tuple[npt.NDArray[np.float64], ...]
    link_s: tuple[Seconds, ...]

    @property
    def num_stages(self) -> int:
        """How many stages there are to be."""
        return self.line.num_stages

    def cost_s(self, stage: int) -> Seconds:
        """How long each stage is busy; forever where it does not fit."""
        limit_bytes = self.line.seats[stage].memory_bytes
        if limit_bytes == np.inf:
            return self.busy_s[stage]
        return np.where(self.peak_bytes[stage] > limit_bytes, np.inf, self.busy_s[stage])

    def missing_bytes(self, stage: int) -> npt.NDArray[np.float64]:
        """What each stage takes more than its device has, negative where it has more; no units miss all."""
        more = self.peak_bytes[stage] - self.line.seats[stage].memory_bytes
        return np.where(self.busy_s[stage] == np.inf, np.inf, more)

    def busy_of(self, stage: int, begin: int, end: int) -> float:
        """How long a stage of these units is busy."""
        return float(self.busy_s[stage][begin - stage, end - 1 - stage])

    def link_of(self, stage: int, end: int) -> float:
        """How long the link after a stage that ends before a unit is busy."""
        return float(self.link_s[stage][end - 1 - stage])

    def fits(self, stage: int, begin: int, end: int) -> bool:
        """Whether a stage of these units fits its device."""
        return self.bytes_of(stage, begin, end) <= self.line.seats[stage].memory_bytes

    def is_recomputed(self, stage: int, begin: int, end: int) -> bool:
        """Whether a stage of these units runs its forward again."""
        return bool(self.recomputed[stage][begin - stage, end - 1 - stage])

    def bytes_of(self, stage: int, begin: int, end: int) -> float:
        """The most that a stage of these units holds."""
        return float(self.peak_bytes[stage][begin - stage, end - 1 - stage])


def loads_of(chain: Chain, line: DeviceRow, setting: StageSetting) -> Loads:
    """The loads of all stages that a chain could be cut into on these devices."""
    num_stages, num_units = line.num_stages, chain.num_units
    if num_stages > num_units:
        raise BiremeError(
            f"{num_units} units cannot be cut into {num_stages} stages: each needs one unit at least."
        )
    work = _Work(chain, line, setting)
    busy_s, recomputed, peak_bytes = [], [], []
    for stage, seat in enumerate(line.seats):
        least = setting.recompute is Recompute.ALWAYS
        count = work.peak_bytes(stage, recompute=least)
        again = np.full(count.shape, least)
        seconds = work.busy_s(stage, recompute=least)
        is_over = count > seat.memory_bytes
        if setting.recompute is Recompute.WHERE_NEEDED and is_over.any():
            count = np.where(is_over, work.peak_bytes(stage, recompute=True), count)
            seconds = np.where(is_over, work.busy_s(stage, recompute=True), seconds)
            again = is_over
        seconds[work.is_empty] = np.inf
        busy_s.append(seconds)
        recomputed.append(again)
        peak_bytes.append(count)
    return Loads(
        chain, line, setting, tuple(busy_s), tuple(recomputed), tuple(peak_bytes), tuple(work.link_s())
    )


class _Work:
    """The parts of which the tables are made, each once."""

    def __init__(self, chain: Chain, line: DeviceRow, setting: StageSetting) -> None:
        self._chain = chain
        self._line = line
        self._setting = setting
        self._width = chain.num_units - line.num_stages + 1
        self.is_empty = np.tri(self._width, self._width, -1, np.bool_)
        """Where a stage would end before it begins."""
        self._through_s = {
            again: _running(
                chain.forward_s
                + (chain.recompute_backward_s if again else chain.backward_s)
                + chain.update_s / setting.num_microbatches
            )
            for again in (False, True)
        }
        self._boundary = np.concatenate(([0], chain.boundary_bytes[:-1], [0])).astype(np.float64)
        """Bytes that cross a cut, by the unit after it; 0 at both ends."""
        self._returned = np.concatenate(([0], chain.returned_bytes[:-1], [0])).astype(np.float64)
        """Those of the gradients that come back over it."""
        self._states: dict[tuple[float, float], npt.NDArray[np.float64]] = {}

    def busy_s(self, stage: int, *, recompute: bool) -> Seconds:
        through_s = self._through_s[recompute]
        begins, ends = self._ends(stage)
        seconds = (through_s[ends][None, :] - through_s[begins][:, None]) / self._line.seats[stage].speed
        if not self._line.overlap and stage > 0:
            seconds += self._message_s(stage - 1)[begins][:, None]
        if not self._line.overlap and stage < self._line.num_stages - 1:
            seconds += self._message_s(stage)[ends][None, :]
        return np.asarray(seconds)

    def peak_bytes(self, stage: int, *, recompute: bool) -> npt.NDArray[np.float64]:
        setting = self._setting
        moments = holdings(
            setting.schedule,
            self._line.num_stages,
            setting.num_microbatches,
            recompute=recompute,
            updates_early=setting.updates_early,
            has_masters=setting.has_masters,
        )[stage]
        begins, ends = self._ends(stage)
        tables = self._chain.bytes
        # Stages that run nothing again are ready sooner, so next to them one more message may wait.
        spare = 1 if recompute and setting.recompute is Recompute.WHERE_NEEDED else 0
        most: npt.NDArray[np.float64] | None = None
        for moment in moments:
            found = self._state(moment)[begins, ends].copy()
            if moment.stash:
                found += moment.stash * tables.kept[begins, ends]
            if moment.inputs:
                found += moment.inputs * tables.inputs[begins, ends]
            if moment.waiting:
                found += moment.waiting * tables.waiting[begins, ends]
            if moment.activation + spare:
                found += (moment.activation + spare) * self._boundary[begins][:, None]
            if moment.gradient_message + spare:
                found += (moment.gradient_message + spare) * self._returned[ends][None, :]
            most = found if most is None else np.maximum(most, found, out=most)
        if most is None:
            raise BiremeError(f"{setting.schedule} has nothing to do on stage {stage}.")
        return most

    def link_s(self) -> list[Seconds]:
        """Latency keeps nobody's link busy, and is left to the simulator."""
        found = []
        for stage, link in enumerate(self._line.links):
            cuts = slice(stage + 1, stage + 1 + self._width)
            num_bytes = self._boundary[cuts]
            if not link.full_duplex:
                num_bytes = num_bytes + self._returned[cuts]
            seconds = num_bytes / link.bytes_per_s
            found.append(seconds if self._line.overlap else np.zeros_like(seconds))
        return found

    def _message_s(self, link: int) -> Seconds:
        way = self._line.links[link]
        return np.asarray(self._boundary / way.bytes_per_s + way.latency_s)

    def _state(self, moment: Moment) -> npt.NDArray[np.float64]:
        """What does not depend on how many micro-batches are kept."""
        key = moment.version, moment.gradient
        found = self._states.get(key)
        if found is None:
            tables = self._chain.bytes
            always = (tables.optimizer + tables.buffer + tables.workspace).astype(np.float64)
            if schedule_named(self._setting.schedule).splits_backward:
                always += tables.halves
            found = always + moment.version * tables.parameter + moment.gradient * tables.gradient
            self._states[key] = found
        return found

    def _ends(self, stage: int) -> tuple[slice, slice]:
        return slice(stage, stage + self._width), slice(stage + 1, stage + 1 + self._width)


def _running(values: Seconds) -> Seconds:
    return np.concatenate(([0.0], np.cumsum(values)))
