"""`metrics.jsonl`: what a run wrote down while it ran, one JSON object a line.

A run that was killed may have left half a line, at the end or just before it was resumed; such a line is
passed over. What a resumed run trained again replaces what was known of these steps.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from bireme.documents import read_json_lines, validated
from bireme.errors import BiremeError
from bireme.sync.coordinator.recoveries import Recovery


def _or(default: Any) -> BeforeValidator:
    """Let null be this value."""
    return BeforeValidator(lambda value: default if value is None else value)


_Number = Annotated[float, _or(math.nan)]
_Text = Annotated[str, _or("")]


class LearnsEvent(BaseModel):
    """The data that a run learns from, and the parameters that learn; None or "" is unknown."""

    model_config = ConfigDict(frozen=True)

    sources: Annotated[tuple[str, ...], _or(())] = ()
    num_files: int | None = None
    num_tokens: int | None = None
    num_samples: int | None = None
    num_evaluation_samples: int | None = None
    epochs: float | None = None
    num_parameters: int | None = None
    num_learning_parameters: int | None = None
    tokenizer: _Text = ""
    length: int | None = None
    loss_on: _Text = ""


class _LoggedEvent(BaseModel):
    """A line of the log: a kind, a step, and the seconds of running until then."""

    model_config = ConfigDict(frozen=True)

    kind: str = Field(exclude=True)
    step: int = Field(ge=0)
    time_s: FiniteFloat


class _TrainEvent(_LoggedEvent):
    """Figures of training; what a line lacks is nan. They are described in `TrainingLines`."""

    loss: _Number = math.nan
    grad_norm: _Number = math.nan
    learning_rate: _Number = math.nan
    tokens_per_s: _Number = math.nan
    samples_per_s: _Number = math.nan
    seconds: _Number = math.nan
    num_skipped: _Number = math.nan
    memory_bytes: Annotated[tuple[float | None, ...], _or(())] = ()


class _StartEvent(_LoggedEvent):
    """That a run began or was resumed, after so many batches, and with what."""

    schedule: _Text = ""
    num_stages: Annotated[int, _or(0)] = 0
    width: Annotated[int, _or(1)] = 1
    devices: Annotated[tuple[str, ...], _or(())] = ()
    predicted_batch_s: _Number = math.nan
    learns: LearnsEvent = LearnsEvent()


class _EvaluationEvent(_LoggedEvent):
    """The loss on samples that are not trained on; `bits_per_byte` is nan where it is unknown."""

    loss: _Number = math.nan
    num_samples: int = 0
    bits_per_byte: _Number = math.nan


class _CheckpointEvent(_LoggedEvent):
    """A checkpoint: for how long training stood still, how long the writing took, and what came of it."""

    stall_s: _Number = math.nan
    write_s: _Number = math.nan
    num_bytes: int = 0


class Shared(_LoggedEvent):
    """The samples of a batch that each replica trains, from a step on. Replicas that meet say who did."""

    shares: tuple[int, ...]
    members: tuple[int, ...] = ()

    def present(self) -> frozenset[int]:
        """The replicas that take part: those that meet, or those with samples where replicas do not meet."""
        return frozenset(self.members or (place for place, count in enumerate(self.shares) if count))


class _RecoveryEvent(_LoggedEvent):
    """How long a replica took to recover."""

    replica: int
    detect_s: float | None
    transfer_s: float
    catch_up_s: float


class _WarningEvent(_LoggedEvent):
    """A sentence that the run had to say."""

    text: str


class _StopEvent(_LoggedEvent):
    """That the run ended by itself, and why."""

    reason: str


_EVENTS: dict[str, type[_LoggedEvent]] = {
    "train": _TrainEvent,
    "start": _StartEvent,
    "evaluation": _EvaluationEvent,
    "checkpoint": _CheckpointEvent,
    "shares": Shared,
    "recovery": _RecoveryEvent,
    "warning": _WarningEvent,
    "stop": _StopEvent,
}


@dataclass(frozen=True, slots=True)
class _LoggedMoment:
    """A step, and the seconds of running until then."""

    step: int
    time_s: float


@dataclass(frozen=True, slots=True)
class ReplicaAbsence:
    """Replicas that were lost together: when, and when they were back; `end` is None if they never were.

    `last` is the last moment of the run. `name` names the host if all replicas of a host were lost.
    """

    replicas: tuple[int, ...]
    name: str
    begin: _LoggedMoment
    end: _LoggedMoment | None
    last: _LoggedMoment


def _column() -> "array[float]":
    return array("d")


@dataclass(frozen=True, slots=True)
class TrainingLines:
    """The lines about training as columns of equal length, by rising steps; what a line lacks is nan.

    `seconds` are those of a step, `num_skipped` the steps skipped since the line before.
    """

    step: "array[float]" = field(default_factory=_column)
    time_s: "array[float]" = field(default_factory=_column)
    loss: "array[float]" = field(default_factory=_column)
    grad_norm: "array[float]" = field(default_factory=_column)
    learning_rate: "array[float]" = field(default_factory=_column)
    tokens_per_s: "array[float]" = field(default_factory=_column)
    samples_per_s: "array[float]" = field(default_factory=_column)
    seconds: "array[float]" = field(default_factory=_column)
    num_skipped: "array[float]" = field(default_factory=_column)

    def __len__(self) -> int:
        return len(self.step)


_COLUMNS = tuple(one.name for one in fields(TrainingLines))


@dataclass(slots=True)
class Metrics:
    """All that the file says. `peak_bytes` is the most that each rank was seen to hold."""

    starts: list[_StartEvent] = field(default_factory=list)
    training: TrainingLines = field(default_factory=TrainingLines)
    evaluations: list[_EvaluationEvent] = field(default_factory=list)
    checkpoints: list[_CheckpointEvent] = field(default_factory=list)
    warnings: list[_WarningEvent] = field(default_factory=list)
    stop: _StopEvent | None = None
    peak_bytes: list[float] = field(default_factory=list)
    shares: list[Shared] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    """All of them: a run that is resumed before one does not undo it."""

    @property
    def last_step(self) -> int:
        """How many batches were trained, as far as the file knows."""
        trained = int(self.training.step[-1]) if len(self.training) else 0
        return max(trained, *(one.step for one in self._events()), 0)

    @property
    def last_time_s(self) -> float:
        """Seconds of running up to the last line."""
        trained_s = self.training.time_s[-1] if len(self.training) else 0.0
        return max(trained_s, *(one.time_s for one in self._events()), 0.0)

    def devices_of_replicas(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each replica at the last start; nothing if the file does not list them."""
        start = self.starts[-1] if self.starts else None
        if start is None or not start.devices or len(start.devices) % start.width:
            return ()
        per_replica = len(start.devices) // start.width
        devices = start.devices
        return tuple(devices[first : first + per_replica] for first in range(0, len(devices), per_replica))

    def absences(self) -> list[ReplicaAbsence]:
        """The replicas that were lost while the run went on, in the order in which they were lost."""
        found: list[ReplicaAbsence] = []
        last = _LoggedMoment(self.last_step, self.last_time_s)
        away: dict[int, _LoggedMoment] = {}
        before: frozenset[int] = frozenset()
        for one in self.shares:
            now, present = _LoggedMoment(one.step, one.time_s), one.present()
            away |= dict.fromkeys(before - present, now)
            found += self._ended({replica: away.pop(replica) for replica in present & set(away)}, now, last)
            before = present
        found += self._ended(away, None, last)
        return sorted(found, key=lambda one: (one.begin.step, one.replicas))

    def _ended(
        self, since: dict[int, _LoggedMoment], end: _LoggedMoment | None, last: _LoggedMoment
    ) -> Iterator[ReplicaAbsence]:
        """The absences of some replicas that end at the same moment, those that began together as one."""
        for begin in sorted(set(since.values()), key=lambda one: one.step):
            replicas = tuple(sorted(replica for replica, one in since.items() if one == begin))
            yield ReplicaAbsence(replicas, self._name(replicas), begin, end, last)

    def _name(self, replicas: tuple[int, ...]) -> str:
        """Such as `replica 2 (host-b/gpu0)`, or `host host-b (replicas 2, 3)` if these are all of a host."""
        of_replicas = self.devices_of_replicas()
        known = all(replica < len(of_replicas) for replica in replicas)
        devices = [device for replica in replicas for device in of_replicas[replica]] if known else []
        hosts = {device.rpartition("/")[0] for device in devices}
        others = [
            device
            for replica, own in enumerate(of_replicas)
            if replica not in replicas
            for device in own
            if device.rpartition("/")[0] in hosts
        ]
        numbers = f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, replicas))}"
        if len(hosts) == 1 and not others and "" not in hosts:
            return f"host {hosts.pop()} ({numbers})"
        return f"{numbers} ({', '.join(devices)})" if devices else numbers

    def _events(self) -> Iterator[_LoggedEvent]:
        yield from self.starts
        yield from self.evaluations
        yield from self.checkpoints
        if self.stop is not None:
            yield self.stop

    def take(self, event: _LoggedEvent) -> None:
        """Take in one more line; a kind that is not known is for later versions."""
        match event:
            case _TrainEvent():
                self._train(event)
            case _StartEvent():
                self._forget(event.step)
                self.stop = None
                self.starts.append(event)
            case _EvaluationEvent():
                self.evaluations.append(event)
            case _CheckpointEvent():
                self.checkpoints.append(event)
            case Shared():
                # A resumed run lists again those that it continues with.
                self.shares = [one for one in self.shares if one.step < event.step]
                known = [(one.shares, one.members) for one in self.shares[-1:]]
                if known != [(event.shares, event.members)]:
                    self.shares.append(event)
            case _RecoveryEvent():
                self.recoveries.append(Recovery(**event.model_dump(exclude={"time_s"})))
            case _WarningEvent():
                self.warnings.append(event)
            case _StopEvent():
                self.stop = event

    def _train(self, event: _TrainEvent) -> None:
        if len(self.training) and event.step <= self.training.step[-1]:
            self._forget(event.step - 1)
        for name in _COLUMNS:
            getattr(self.training, name).append(getattr(event, name))
        held = zip_longest(self.peak_bytes, event.memory_bytes, fillvalue=0.0)
        self.peak_bytes = [max(peak_bytes or 0.0, now_bytes or 0.0) for peak_bytes, now_bytes in held]

    def _forget(self, step: int) -> None:
        """Leave out what was trained past a step, because it is trained again."""
        keep = bisect_right(self.training.step, step)
        for name in _COLUMNS:
            del getattr(self.training, name)[keep:]
        self.evaluations = [one for one in self.evaluations if one.step <= step]
        self.checkpoints = [one for one in self.checkpoints if one.step <= step]
        self.shares = [one for one in self.shares if one.step <= step]


def read_metrics(path: Path) -> Metrics:
    """The file of a run that is going on, has ended, or was killed."""
    log = read_json_lines(path, start="start")
    if log.damaged:
        raise BiremeError(
            f"Line {log.damaged[0]} of {path} is not a JSON object, and more lines follow it. Take it out of "
            "the file."
        )
    metrics = Metrics()
    for place, record in log.records.items():
        kind = _EVENTS.get(str(record.get("kind")), _LoggedEvent)
        metrics.take(validated(record, kind, source=f"Line {place} of {path}"))
    return metrics
