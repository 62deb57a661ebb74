"""What several replicas on one clock are like, and what comes of their run: the nouns of `together.py`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from bireme.errors import BiremeError
from bireme.schedule.instruction import Instruction, Kind

__all__ = ["Averaged", "Exchange", "Kill", "Ran", "SampleWork", "Speed", "Trained"]

FORWARD_TICKS = frozenset({Kind.FORWARD, Kind.RECOMPUTE})


@dataclass(frozen=True, slots=True)
class Speed:
    """How slow a replica is: each pair of `slowness` says from when on it takes how many times as long.

    `held_s` is for how long a forward or backward is held up, with the probability `held_chance`. With a
    `deviation` each takes longer or shorter, by that standard deviation as a share of its time.
    """

    slowness: tuple[tuple[float, float], ...] = ()
    held_s: float = 0.0
    held_chance: float = 0.0
    deviation: float = 0.0

    def __post_init__(self) -> None:
        for _, times in self.slowness:
            if times <= 0:
                raise BiremeError(f"slowness has the value {times}; it must be greater than 0.")
        if self.held_s < 0 or not 0 <= self.held_chance <= 1:
            raise BiremeError(
                f"held_s is {self.held_s} and held_chance {self.held_chance}; seconds must be 0 or more, and "
                "a chance between 0 and 1."
            )

    def slowness_at(self, now_s: float) -> float:
        """How many times as long everything takes."""
        found = 1.0
        for begin_s, times in self.slowness:
            if now_s >= begin_s:
                found = times
        return found

    def seconds(self, work_s: float, now_s: float, random: Random) -> float:
        """How long a computation takes that begins now."""
        times = self.slowness_at(now_s)
        if self.deviation:
            times *= max(random.gauss(1.0, self.deviation), 0.0)
        held_s = self.held_s if self.held_chance and random.random() < self.held_chance else 0.0
        return work_s * times + held_s


@dataclass(frozen=True, slots=True)
class SampleWork:
    """What a sample costs on each stage, and what a batch costs besides.

    `message_s` is a micro-batch's way to the next stage, `agree_s` the time in which the ranks of a replica
    agree on a batch.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: float = 0.0
    message_s: float = 0.0
    agree_s: float = 0.0

    def seconds(self, step: Instruction, samples: float) -> float:
        """Of a computation with so many samples."""
        forward, backward = self.forward_s[step.stage], self.backward_s[step.stage]
        if step.kind in FORWARD_TICKS:
            return samples * forward * (1.0 if step.half is None else 0.5)
        return samples * backward * (1.0 if step.kind is Kind.BACKWARD else 0.5)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What it takes to average or sum the same bytes on several replicas, stage by stage at the same time.

    Two swap them; more form a ring. `control_s` is the way of a few integers to the coordinator and back.
    """

    num_bytes: float = 0.0
    bytes_per_s: float = float("inf")
    latency_s: float = 0.0
    control_s: float = 0.0

    def seconds(self, num_members: int) -> float:
        """In a group of so many."""
        if num_members < 2:
            return 0.0
        if num_members == 2:
            return self.latency_s + self.num_bytes / self.bytes_per_s
        part_s = self.num_bytes / num_members / self.bytes_per_s
        return 2 * (num_members - 1) * (self.latency_s + part_s)


@dataclass(frozen=True, slots=True)
class Kill:
    """A replica dies at a moment. Its launcher has it running again `back_s` later, without any weights."""

    replica: int
    at_s: float
    back_s: float


@dataclass(frozen=True, slots=True)
class Trained:
    """Samples that count, and when they did: of a replica's batch, or of a round of several replicas."""

    batch: int
    replicas: tuple[int, ...]
    samples: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Averaged:
    """The weights of a stage were averaged over `members`, each after its own batch."""

    stage: int
    members: Mapping[int, int]
    at_s: float


@dataclass(slots=True)
class Ran:
    """What came of a run until `until_s`."""

    until_s: float
    trained: list[Trained] = field(default_factory=list)
    averages: list[Averaged] = field(default_factory=list)

    def samples_per_s(self, begin_s: float = 0.0) -> float:
        """From a moment on until the end."""
        found = sum(one.samples for one in self.trained if begin_s < one.at_s <= self.until_s)
        return found / (self.until_s - begin_s)
