"""`metrics.jsonl`: what a run wrote down while it ran, one JSON object a line.

A run that was killed may have left half a line, at the end or just before it was resumed; such a line is
passed over. What a resumed run trained again replaces what was known of these steps.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from bireme.documents import read_json_lines
from bireme.errors import BiremeError
from bireme.sync.coordinator.recoveries import Recovery


@dataclass(frozen=True, slots=True)
class LearnsEvent:
    """The data that a run learns from, and the parameters that learn; None or "" is unknown."""

    sources: tuple[str, ...] = ()
    num_files: int | None = None
    num_tokens: int | None = None
    num_samples: int | None = None
    num_evaluation_samples: int | None = None
    epochs: float | None = None
    num_parameters: int | None = None
    num_learning_parameters: int | None = None
    tokenizer: str = ""
    length: int | None = None
    loss_on: str = ""


@dataclass(frozen=True, slots=True)
class _StartEvent:
    """That a run began or was resumed, after so many batches, and with what."""

    step: int
    time_s: float
    schedule: str
    num_stages: int
    width: int
    devices: tuple[str, ...]
    predicted_batch_s: float
    learns: LearnsEvent | None = None
    """None in a log of an older version."""


@dataclass(frozen=True, slots=True)
class _EvaluationEvent:
    """The loss on samples that are not trained on; `bits_per_byte` is nan where it is unknown."""

    step: int
    time_s: float
    loss: float
    num_samples: int
    bits_per_byte: float = math.nan


@dataclass(frozen=True, slots=True)
class _CheckpointEvent:
    """A checkpoint: for how long training stood still, how long the writing took, and what came of it."""

    step: int
    time_s: float
    stall_s: float
    write_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Shared:
    """The samples of a batch that each replica trains, from a step on. Replicas that meet say who did."""

    step: int
    time_s: float
    shares: tuple[int, ...]
    members: tuple[int, ...] = ()

    def present(self) -> frozenset[int]:
        """The replicas that take part: those that meet, or those with samples where replicas do not meet."""
        return frozenset(self.members or (place for place, count in enumerate(self.shares) if count))


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


@dataclass(frozen=True, slots=True)
class _Warned:
    """A sentence that the run had to say."""

    step: int
    time_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Stop:
    """That the run ended by itself, and why."""

    step: int
    time_s: float
    reason: str


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

    def columns(self) -> "list[tuple[str, array[float]]]":
        """Every column with its name in the file."""
        return [(one.name, getattr(self, one.name)) for one in fields(self)]


@dataclass(slots=True)
class Metrics:
    """All that the file says. `peak_bytes` is the most that each rank was seen to hold."""

    starts: list[_StartEvent] = field(default_factory=list)
    training: TrainingLines = field(default_factory=TrainingLines)
    evaluations: list[_EvaluationEvent] = field(default_factory=list)
    checkpoints: list[_CheckpointEvent] = field(default_factory=list)
    warnings: list[_Warned] = field(default_factory=list)
    stop: Stop | None = None
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

    def _events(self) -> Iterator[_StartEvent | _EvaluationEvent | _CheckpointEvent | Stop]:
        yield from self.starts
        yield from self.evaluations
        yield from self.checkpoints
        if self.stop is not None:
            yield self.stop


def read_metrics(path: Path) -> Metrics:
    """The file of a run that is going on, has ended, or was killed."""
    log = read_json_lines(path, start="start")
    if log.damaged:
        raise BiremeError(
            f"Line {log.damaged[0]} of {path} is not a JSON object, and more lines follow it. Take it out of "
            "the file."
        )
    metrics = Metrics()
    columns = metrics.training.columns()
    for place, record in log.records.items():
        try:
            _take(metrics, columns, record)
        except KeyError as error:
            raise BiremeError(f"Line {place} of {path} lacks {error.args[0]!r}.") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise BiremeError(f"Line {place} of {path} cannot be read: {error}.") from None
    return metrics


_NamedColumns = Sequence[tuple[str, "array[float]"]]


def _take(metrics: Metrics, columns: _NamedColumns, record: dict[str, Any]) -> None:
    """One more record; a kind that is not known is for later versions."""
    step, time_s = _step(record), _time_s(record)
    match record["kind"]:
        case "train":
            _train(metrics, columns, record)
        case "start":
            _forget(metrics, columns, step)
            metrics.stop = None
            metrics.starts.append(_start(record, step, time_s))
        case "evaluation":
            loss, num_samples = _value(record, "loss"), int(record.get("num_samples", 0))
            bits = _value(record, "bits_per_byte")
            metrics.evaluations.append(_EvaluationEvent(step, time_s, loss, num_samples, bits))
        case "checkpoint":
            stall_s, write_s = _value(record, "stall_s"), _value(record, "write_s")
            num_bytes = int(record.get("num_bytes", 0))
            metrics.checkpoints.append(_CheckpointEvent(step, time_s, stall_s, write_s, num_bytes))
        case "shares":
            members = tuple(map(int, record.get("members", ())))
            _share(metrics, Shared(step, time_s, tuple(map(int, record["shares"])), members))
        case "recovery":
            metrics.recoveries.append(_recovery(record, step))
        case "warning":
            metrics.warnings.append(_Warned(step, time_s, str(record["text"])))
        case "stop":
            metrics.stop = Stop(step, time_s, str(record["reason"]))


def _share(metrics: Metrics, shared: Shared) -> None:
    """New shares; a resumed run lists again those that it continues with."""
    metrics.shares = [one for one in metrics.shares if one.step < shared.step]
    known = [(one.shares, one.members) for one in metrics.shares[-1:]]
    if known != [(shared.shares, shared.members)]:
        metrics.shares.append(shared)


def _train(metrics: Metrics, columns: _NamedColumns, record: dict[str, Any]) -> None:
    lines, peak_bytes = metrics.training, metrics.peak_bytes
    if len(lines) and record["step"] <= lines.step[-1]:
        _forget(metrics, columns, int(record["step"]) - 1)
    known = record.get
    for name, column in columns:
        value = known(name)
        column.append(math.nan if value is None else value)
    for rank, num_bytes in enumerate(record.get("memory_bytes") or ()):
        if rank == len(peak_bytes):
            peak_bytes.append(0.0)
        peak_bytes[rank] = max(peak_bytes[rank], float(num_bytes or 0))


def _forget(metrics: Metrics, columns: _NamedColumns, step: int) -> None:
    """Leave out what was trained past a step, because it is trained again."""
    keep = bisect_right(metrics.training.step, step)
    for _, column in columns:
        del column[keep:]
    metrics.evaluations = [one for one in metrics.evaluations if one.step <= step]
    metrics.checkpoints = [one for one in metrics.checkpoints if one.step <= step]
    metrics.shares = [one for one in metrics.shares if one.step <= step]


def _start(record: dict[str, Any], step: int, time_s: float) -> _StartEvent:
    return _StartEvent(
        step,
        time_s,
        str(record.get("schedule", "")),
        int(record.get("num_stages") or 0),
        int(record.get("width") or 1),
        tuple(map(str, record.get("devices") or ())),
        _value(record, "predicted_batch_s"),
        _learns(record.get("learns")),
    )


def _step(record: dict[str, Any]) -> int:
    step = int(record["step"])
    if step < 0:
        raise ValueError(f"step is {step}")
    return step


def _time_s(record: dict[str, Any]) -> float:
    time_s = float(record["time_s"])
    if not math.isfinite(time_s):
        raise ValueError(f"time_s is {time_s}")
    return time_s


def _recovery(record: dict[str, Any], step: int) -> Recovery:
    detect_s = record["detect_s"]
    return Recovery(
        int(record["replica"]),
        step,
        None if detect_s is None else float(detect_s),
        float(record["transfer_s"]),
        float(record["catch_up_s"]),
    )


def _value(record: dict[str, Any], name: str) -> float:
    value = record.get(name)
    return math.nan if value is None else float(value)


def _learns(found: object) -> LearnsEvent | None:
    """What a start says of its data; None where it says nothing."""
    if not isinstance(found, dict):
        return None

    def whole(name: str) -> int | None:
        value = found.get(name)
        return None if value is None else int(value)

    return LearnsEvent(
        sources=tuple(map(str, found.get("sources") or ())),
        num_files=whole("num_files"),
        num_tokens=whole("num_tokens"),
        num_samples=whole("num_samples"),
        num_evaluation_samples=whole("num_evaluation_samples"),
        epochs=epochs if math.isfinite(epochs := _value(found, "epochs")) else None,
        num_parameters=whole("num_parameters"),
        num_learning_parameters=whole("num_learning_parameters"),
        tokenizer=str(found.get("tokenizer") or ""),
        length=whole("length"),
        loss_on=str(found.get("loss_on") or ""),
    )
