"""What every stage that could be would take on its device: seconds, bytes, and whether it fits.

A stage is judged by the time it keeps its device busy per micro-batch. Bytes are those that the simulator
will count, and buffers and workspace besides. Entries are kept only where every stage can have a unit: stage
s of d begins at one of the units s to N − d + s.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from operator import le
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bireme.cluster.cluster import Link, Overlap
from bireme.errors import BiremeError
from bireme.plan.partition.chain import Chain, Seconds
from bireme.schedule.accesses import Sizes
from bireme.schedule.catalogue import generate, schedule_named
from bireme.schedule.program import Program, Rule
from bireme.schedule.residency import resident
from bireme.schedule.weave import UpdateTiming
from bireme.simulate.network import busy_bytes

# How many of each thing a stage's device holds at its worst moments, for a schedule.
#
# The counts come from the schedule's own program and the account of `schedule/residency.py`, which the
# simulator uses too. So a planner's bytes are the simulator's, whatever the schedule, before any stage is
# cut.


class _Moment(NamedTuple):
    """What is there at once: each field counts the bytes of the same name in `Sizes`.

    `activation` and `gradient_message` are buffers for messages from the stages before and after.
    """

    version: float
    gradient: float
    stash: float
    inputs: float
    activation: float
    gradient_message: float
    waiting: float


DEEP = 7
"""Stages from which on one stage more adds the same each time."""

EVENLY = frozenset({"gpipe", "1f1b", "2bw", "2bw-fresh"})
"""The schedules of which that holds."""

_DRAINING, _FLOWING = 2, 4
"""Batches of a window in which everything there can be at once is there: the next batch's first message
before an update, all weight versions."""


@lru_cache(maxsize=4096)
def holdings(
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    *,
    recompute: bool = False,
    updates_early: bool = False,
    has_masters: bool = False,
) -> tuple[tuple[_Moment, ...], ...]:
    """For each stage, one on each device, the moments that are not surpassed by another in everything.

    With `has_masters` the newest weights are the optimizer's master copy, and no version.
    """
    if schedule_named(schedule).stages_per_rank != 1:
        raise BiremeError(
            f"{schedule} puts several stages on a device, and their bytes share its memory. Cut the chain "
            "for a schedule with one stage on each, and let the simulator count the bytes of this one."
        )
    if num_stages > DEEP and num_microbatches >= num_stages and schedule in EVENLY:
        # For a longer batch all but gpipe keep what they keep for one longer by a micro-batch.
        more = num_microbatches - num_stages
        longer = more if schedule == "gpipe" else min(more, 1)
        return _of_deep(schedule, num_stages, longer, recompute, updates_early, has_masters)
    few = 2 * num_stages + 2
    if num_microbatches <= few:
        return _counted(schedule, num_stages, num_microbatches, recompute, updates_early, has_masters)
    # From there on a micro-batch more adds the same each time: none in 1f1b, one that is kept in gpipe.
    fewer, base = (
        _counted(schedule, num_stages, m, recompute, updates_early, has_masters) for m in (few - 1, few)
    )
    more = num_microbatches - few
    return tuple(_further(before, after, more) for before, after in zip(fewer, base, strict=True))


def _further(one: Sequence[_Moment], other: Sequence[_Moment], steps: int) -> tuple[_Moment, ...]:
    """The moments after more `steps`, each of which adds what it took from one to the other."""
    return tuple(
        _Moment(*(b + steps * (b - a) for a, b in zip(first, second, strict=True)))
        for first, second in zip(one, other, strict=True)
    )


@lru_cache(maxsize=4096)
def _of_deep(
    schedule: str, num_stages: int, longer: int, recompute: bool, updates_early: bool, has_masters: bool
) -> tuple[tuple[_Moment, ...], ...]:
    """The moments of a deep pipeline, from what one more stage before or after adds in shallow ones.

    A batch has so many micro-batches more than the pipeline has stages, here as there. Counts are those of a
    stage as far from the end, or more by the same for each stage in between.
    """
    # What gpipe keeps depends on the micro-batches alone.
    of_gpipe = num_stages + longer if schedule == "gpipe" else None
    shallow, deeper = (
        holdings(
            schedule,
            depth,
            of_gpipe or depth + longer,
            recompute=recompute,
            updates_early=updates_early,
            has_masters=has_masters,
        )
        for depth in (DEEP - 1, DEEP)
    )
    more = num_stages - DEEP

    def between(stage: int) -> tuple[_Moment, ...]:
        """The effect of one more stage before it and one more after it, from the middle."""
        middle = DEEP // 2
        num_after = num_stages - 1 - stage
        base = deeper[middle]
        later = _further(shallow[middle - 1], base, stage - middle)
        earlier = _further(shallow[middle], base, num_after - (DEEP - 1 - middle))
        return tuple(
            _Moment(*(a + b - c for a, b, c in zip(one, two, three, strict=True)))
            for one, two, three in zip(later, earlier, base, strict=True)
        )

    first = _further(shallow[0], deeper[0], more)
    last = _further(shallow[-1], deeper[-1], more)
    return (first, *map(between, range(1, num_stages - 1)), last)


@lru_cache(maxsize=4096)
def _counted(
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    recompute: bool,
    updates_early: bool,
    has_masters: bool = False,
) -> tuple[tuple[_Moment, ...], ...]:
    drains = schedule_named(schedule).rule is Rule.SYNCHRONOUS
    program = generate(
        schedule,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_batches=_DRAINING if drains else _FLOWING,
        recompute=range(num_stages) if recompute else (),
        timing=UpdateTiming(early=updates_early),
    )
    count = _one_by_one if max(num_stages, num_microbatches) > _MOST_DIGITS else _at_once
    return tuple(_unsurpassed(count(program, rank, has_masters)) for rank in range(num_stages))


_DIGITS = {
    "version": 8,
    "gradient": 5,
    "stash": 8,
    "inputs": 8,
    "activation": 8,
    "gradient_message": 7,
    "waiting": 8,
}
"""Binary digits for the count of each thing in halves, which together a float holds exactly."""

_MOST_DIGITS = 60
"""Stages and micro-batches for which they are more than enough."""


def _at_once(program: Program, rank: int, has_masters: bool = False) -> set[_Moment]:
    """What a rank keeps at each instruction, all counted in one number, each in digits of its own."""
    shifts = dict(zip(_DIGITS, accumulate(_DIGITS.values(), initial=0), strict=False))
    weights = [(float(2 << at),) * program.num_stages for at in shifts.values()]
    series = resident(program, rank, _sizes(weights, has_masters), series=True).series or ()
    return {
        _Moment(*(((int(count) >> shifts[name]) & ((1 << _DIGITS[name]) - 1)) / 2 for name in _DIGITS))
        for count in set(series)
    }


def _one_by_one(program: Program, rank: int, has_masters: bool = False) -> set[_Moment]:
    """The same, counted for each thing apart."""
    nothing, one = (0.0,) * program.num_stages, (1.0,) * program.num_stages
    series = []
    for counted in _DIGITS:
        each = [one if name == counted else nothing for name in _DIGITS]
        series.append(resident(program, rank, _sizes(each, has_masters), series=True).series or ())
    return {_Moment(*counts) for counts in set(zip(*series, strict=True))}


def _sizes(each: Sequence[tuple[float, ...]], has_masters: bool) -> Sizes:
    """The sizes of what is counted; the optimizer's state is not, as it is always there."""
    version, gradient, stash, inputs, activation, message, waiting = each
    nothing = tuple(0.0 for _ in version)
    return Sizes(version, gradient, nothing, stash, inputs, activation, message, has_masters, waiting=waiting)


def _unsurpassed(moments: Iterable[_Moment]) -> tuple[_Moment, ...]:
    kept: list[_Moment] = []
    for moment in sorted(moments, reverse=True):
        if not any(all(map(le, moment, other)) for other in kept):
            kept.append(moment)
    return tuple(kept)


# Devices in a fixed order, one per stage, and the links between neighbors.


@dataclass(frozen=True, slots=True)
class DeviceSlot:
    """The device of one stage: `speed` divides the chain's seconds, 0.5 is half as fast, and `update_speed`
    those of optimizer steps; left out, it is the `speed`. `unit_speeds`, if given, divide the seconds of each
    unit, and `speed` is what they come to for all units.
    """

    name: str
    speed: float = 1.0
    memory_bytes: float = math.inf
    update_speed: float | None = None
    unit_speeds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RowLink:
    """The way between two neighbors. `overlap` says which end computes while a message crosses, and `curved`
    are the links on which small messages are slower.
    """

    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    overlap: Overlap = Overlap.FULL
    curved: tuple[Link, ...] = ()

    def seconds(self, num_bytes: Seconds) -> Seconds:
        """How long messages of these bytes keep the way busy."""
        if self.curved:
            num_bytes = np.array([busy_bytes(self.curved, one) for one in num_bytes.tolist()])
        return np.asarray(num_bytes / self.bytes_per_s)

    @property
    def stops(self) -> bool:
        """Whether a stage waits while what it needs comes in, so that messages add to its work; else a link
        only limits the pace. Stages that wait for what they send do so while they wait for what comes back.
        """
        return self.overlap is not Overlap.FULL


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """The seats in the order of the stages; `links[s]` joins seat s to seat s + 1."""

    seats: tuple[DeviceSlot, ...]
    links: tuple[RowLink, ...]

    @property
    def num_stages(self) -> int:
        """How many stages it has seats for."""
        return len(self.seats)


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
    work, peaks = _Work(chain, line, setting), _peaks(chain, num_stages, setting)
    busy_s, recomputed, peak_bytes = [], [], []
    for stage, seat in enumerate(line.seats):
        least = setting.recompute is Recompute.ALWAYS
        count = peaks.of(stage, recompute=least)
        again = np.full(count.shape, least)
        seconds = work.busy_s(stage, recompute=least)
        is_over = count > seat.memory_bytes
        if setting.recompute is Recompute.WHERE_NEEDED and is_over.any():
            count = np.where(is_over, peaks.of(stage, recompute=True), count)
            seconds = np.where(is_over, work.busy_s(stage, recompute=True), seconds)
            again = is_over
        seconds[work.is_empty] = np.inf
        busy_s.append(seconds)
        recomputed.append(again)
        peak_bytes.append(count)
    return Loads(
        chain, line, setting, tuple(busy_s), tuple(recomputed), tuple(peak_bytes), tuple(work.link_s())
    )


def overflows(chain: Chain, line: DeviceRow, setting: StageSetting) -> bool:
    """Whether no cuts fit these devices, not even if each stage, from the first on, took all units whose
    weights, gradients and optimizer's state its device has room for. A stage of more units has more of these.
    Other bytes depend on where it begins, so they are left out. That takes much less time than all loads.
    """
    peaks, begin = _peaks(chain, line.num_stages, setting), 0
    for stage, seat in enumerate(line.seats):
        if begin < chain.num_units:
            begin = peaks.reach(stage, begin, seat.memory_bytes)
    return begin < chain.num_units


class _Work:
    """The parts of which the tables are made, each once."""

    def __init__(self, chain: Chain, line: DeviceRow, setting: StageSetting) -> None:
        self._chain = chain
        self._line = line
        self._setting = setting
        self._width = chain.num_units - line.num_stages + 1
        self.is_empty = np.tri(self._width, self._width, -1, np.bool_)
        """Where a stage would end before it begins."""
        self._passes_s = {
            again: chain.forward_s + (chain.recompute_backward_s if again else chain.backward_s)
            for again in (False, True)
        }
        self._through_s = {again: _running(seconds) for again, seconds in self._passes_s.items()}
        self._updates_s = _running(chain.update_s / setting.num_microbatches)
        self._boundary = _crossing(chain.boundary_bytes)

    def busy_s(self, stage: int, *, recompute: bool) -> Seconds:
        seat = self._line.seats[stage]
        through_s = self._through_s[recompute] / seat.speed
        if seat.unit_speeds:
            through_s = _running(self._passes_s[recompute] / np.array(seat.unit_speeds))
        through_s = through_s + self._updates_s / (seat.update_speed or seat.speed)
        begins, ends = (slice(first, first + self._width) for first in (stage, stage + 1))
        seconds = through_s[ends][None, :] - through_s[begins][:, None]
        if stage > 0 and self._line.links[stage - 1].stops:
            seconds += self._message_s(stage - 1)[begins][:, None]
        if stage < self._line.num_stages - 1 and self._line.links[stage].stops:
            seconds += self._message_s(stage)[ends][None, :]
        return np.asarray(seconds)

    def link_s(self) -> list[Seconds]:
        """Latency keeps nobody's link busy, and is left to the simulator."""
        found = []
        for stage, link in enumerate(self._line.links):
            cuts = slice(stage + 1, stage + 1 + self._width)
            seconds = link.seconds(self._boundary[cuts])
            found.append(np.zeros_like(seconds) if link.stops else seconds)
        return found

    def _message_s(self, link: int) -> Seconds:
        """How long a message over a link stops a stage."""
        way = self._line.links[link]
        return way.seconds(self._boundary) + way.latency_s


class _Peaks:
    """The tables of bytes, each once: they do not depend on the devices."""

    def __init__(self, chain: Chain, num_stages: int, setting: StageSetting) -> None:
        self._chain = chain
        self._num_stages = num_stages
        self._setting = setting
        self._width = chain.num_units - num_stages + 1
        self._boundary = _crossing(chain.boundary_bytes)
        self._returned = _crossing(chain.returned_bytes)
        """The bytes of the gradients that come back over a cut."""
        self._states: dict[tuple[float, float], npt.NDArray[np.float64]] = {}
        self._known: dict[tuple[int, bool], npt.NDArray[np.float64]] = {}

    def of(self, stage: int, *, recompute: bool) -> npt.NDArray[np.float64]:
        """The most that a stage of any units holds, which nobody may write to."""
        key = stage, recompute
        if key not in self._known:
            self._known[key] = self._counted(stage, recompute=recompute)
        return self._known[key]

    def reach(self, stage: int, begin: int, limit_bytes: float) -> int:
        """The unit up to which a device has room for the state of a stage from that unit on."""
        tables, row = self._chain.bytes, (begin, slice(begin + 1, None))
        always = tables.optimizer[row] + tables.buffer[row]
        is_always = self._setting.recompute is Recompute.ALWAYS  # versions are as many if nothing runs again
        held = [
            always + moment.version * tables.parameter[row] + moment.gradient * tables.gradient[row]
            for moment in self._moments(stage, recompute=is_always)
        ]
        return begin + int((np.maximum.reduce(held) <= limit_bytes).sum())

    def _moments(self, stage: int, *, recompute: bool) -> Sequence[_Moment]:
        setting = self._setting
        return holdings(
            setting.schedule,
            self._num_stages,
            setting.num_microbatches,
            recompute=recompute,
            updates_early=setting.updates_early,
            has_masters=setting.has_masters,
        )[stage]

    def _counted(self, stage: int, *, recompute: bool) -> npt.NDArray[np.float64]:
        setting, moments = self._setting, self._moments(stage, recompute=recompute)
        begins, ends = slice(stage, stage + self._width), slice(stage + 1, stage + 1 + self._width)
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

    def _state(self, moment: _Moment) -> npt.NDArray[np.float64]:
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


_peaks = lru_cache(maxsize=2)(_Peaks)
"""The tables for mappings that follow each other, of which only the devices differ."""


def _crossing(boundary_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Bytes that cross a cut, by the unit after it; 0 at both ends."""
    return np.concatenate(([0], boundary_bytes[:-1], [0])).astype(np.float64)


def _running(values: Seconds) -> Seconds:
    return np.concatenate(([0.0], np.cumsum(values)))
