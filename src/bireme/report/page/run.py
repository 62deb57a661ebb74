"""The folder of a run, read once: everything the page tells is in a `Run`.

Only `metrics.jsonl` must be there. What else is missing is None, and what is there and cannot be read
becomes a sentence in `notes`, so that a page comes out of every run.
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from bireme.bounds import counted
from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import read_cluster
from bireme.documents import read_json
from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan, load_plan
from bireme.report.page.metrics import LearnsEvent, Metrics, read_metrics
from bireme.report.timeline_document import read_recorded
from bireme.timeline.timeline import Timeline

_METRICS = "metrics.jsonl"

_Read = TypeVar("_Read")

_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True)


class ReportedStage(_Table):
    """A stage at the end of a run."""

    units: tuple[int, int] = Field(description="its first and its last unit")
    device: str = ""
    predicted_peak_bytes: _Amount | None = None
    measured_peak_bytes: _Amount | None = None
    busy_share: _Amount | None = None
    predicted_busy_share: _Amount | None = None
    bytes: dict[str, _Amount] = Field(default_factory=dict)

    @field_validator("device", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        return ", ".join(map(str, value)) if isinstance(value, list) else value


class _ReportedShared(_Table):
    """What replicas that share an optimizer or weights have sent each other."""

    gathered_bytes: _Amount
    predicted_gathered_bytes: _Amount | None = None
    summed_bytes: _Amount
    predicted_summed_bytes: _Amount | None = None


class _ReportedSync(_Table):
    """What replicas have sent each other, as far as the page uses it."""

    shared: _ReportedShared | None = None


class ReportedSummary(_Table):
    """What a run says of itself at its end, as far as the page uses it; a loss may have become nan."""

    steps: int | None = None
    train_loss: float | None = None
    eval_loss: float | None = None
    eval_bits_per_byte: float | None = None
    tokens_per_s: float | None = None
    predicted_batch_s: float | None = None
    measured_batch_s: float | None = None
    stages: tuple[ReportedStage, ...] = ()
    sync: _ReportedSync = _ReportedSync()
    schedule: str | None = None
    why: tuple[str, ...] = ()
    sample: str | None = None

    @field_validator("why", mode="before")
    @classmethod
    def _sentences(cls, value: Any) -> Any:
        return () if value is None else (value,) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Run:
    """A run. `written_s` is when its metrics were last written, in seconds of the usual epoch."""

    folder: Path
    written_s: float
    metrics: Metrics
    settings: str = ""
    """The text of the run file."""
    model: str = ""
    planned_steps: int | None = None
    plan: SavedPlan | None = None
    cluster: Cluster | None = None
    summary: ReportedSummary | None = None
    predicted: Timeline | None = None
    measured: Timeline | None = None
    learns: LearnsEvent = field(default_factory=LearnsEvent)
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.resolve().name


def read_run(folder: Path) -> Run:
    """The run in a folder."""
    if not folder.is_dir():
        raise BiremeError(f"{folder} is not a folder. Name the folder of a run, such as runs/my-run.")
    metrics = folder / _METRICS
    if not metrics.is_file():
        inside = sorted(path.parent.name for path in folder.glob(f"*/{_METRICS}"))
        hint = (
            f"Name one of the runs in it, such as {folder / inside[-1]}." if inside else "Name another one."
        )
        raise BiremeError(f"{folder} is not the folder of a run: there is no {_METRICS} in it. {hint}")
    reading = _Reading(folder)
    settings = reading.part("run.toml", _text) or ""
    table = _tables(settings)
    log = read_metrics(metrics)
    saved = _of_run(reading, reading.part("plan.json", load_plan), log)
    predicted = measured = None
    if saved is not None:
        plan = saved.plan
        predicted = reading.part(
            "timeline-predicted.json", lambda path: _alone(read_recorded(path, plan), plan)
        )
        measured = reading.part("timeline-measured.json", lambda path: read_recorded(path, plan))
    return Run(
        folder=folder,
        written_s=metrics.stat().st_mtime,
        metrics=log,
        settings=settings,
        model=_at(table, "model", "source", str, ""),
        planned_steps=_at(table, "training", "steps", int, 0) or None,
        plan=saved,
        cluster=reading.part("cluster.toml", read_cluster),
        summary=reading.part("summary.json", lambda path: read_json(path, ReportedSummary)),
        predicted=predicted,
        measured=measured,
        learns=log.starts[-1].learns if log.starts else LearnsEvent(),
        notes=tuple(reading.notes),
    )


def _of_run(reading: "_Reading", saved: SavedPlan | None, log: Metrics) -> SavedPlan | None:
    """The plan, unless the log says that the run has another shape: then plan.json is not of this run."""
    start = log.starts[-1] if log.starts else None
    if saved is None or start is None or start.num_stages < 1:
        return saved
    plan = saved.plan
    if (plan.num_stages, plan.width) == (start.num_stages, start.width):
        return saved
    shapes = [
        f"{counted(stages, 'stage')} × {counted(width, 'replica')}"
        for stages, width in ((plan.num_stages, plan.width), (start.num_stages, start.width))
    ]
    reading.notes.append(
        f"{reading.folder / 'plan.json'} is the plan of another run: it has {shapes[0]}, but {_METRICS} says "
        f"{shapes[1]}. The plan and the timelines are left out."
    )
    return None


def _alone(timeline: Timeline, plan: Plan) -> Timeline:
    """The timeline without syncs with replicas, if the plan has one replica of each stage.

    A prediction lists as such that the ranks of the pipeline agree, and sums of gradients of tied weights.
    """
    if plan.width > 1 or plan.stage_widths:
        return timeline
    return replace(timeline, transfers=tuple(one for one in timeline.transfers if not one.is_sync))


class _Reading:
    """Reads the parts of a run that need not be there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []

    def part(self, name: str, read: Callable[[Path], _Read]) -> _Read | None:
        """What is in a file; None where there is none, or nothing that can be read."""
        path = self.folder / name
        if not path.is_file():
            return None
        try:
            return read(path)
        except BiremeError as error:
            self.notes.append(str(error))
        except OSError as error:
            self.notes.append(f"{path} cannot be read: {error.strerror or error}.")
        return None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _tables(text: str) -> dict[str, Any]:
    """A run file's tables; whether its keys are right is for who trains to say."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}


def _at(tables: dict[str, Any], table: str, key: str, kind: type[_Read], default: _Read) -> _Read:
    """The value of a key where it is there and of its kind."""
    found = tables.get(table)
    value = found.get(key) if isinstance(found, dict) else None
    return value if isinstance(value, kind) else default
