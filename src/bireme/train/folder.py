"""The folder of a run and the paths in it."""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.sync.coordinator.ledger_line import LEDGER
from bireme.train.run_file import (
    RunFile,
    load_run_file,
    settings_within,
    to_toml,
    with_absolute_paths,
    with_paths_within,
)

__all__ = ["RunFolder", "load_asked"]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths within a run's folder."""

    path: Path

    @classmethod
    def check_new(cls, run: RunFile) -> None:
        """Refuse a run whose folder cannot be a new one; nothing is made yet."""
        parent = Path(run.log.folder)
        path = parent if run.log.name is None else parent / run.log.name
        if run.log.name is not None and path.exists() and (not path.is_dir() or any(path.iterdir())):
            folder = shlex.quote(str(path))
            is_run = cls(path).run_file.is_file()
            remedy = f"Resume it with `bireme resume {folder}`, or give" if is_run else "Give"
            raise BiremeError(
                f"{path} already exists. {remedy} the new run another name with --set log.name=NAME."
            )
        there = next(one for one in (path, *path.absolute().parents) if one.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "cannot be written to" if there.is_dir() else "is not a folder"
            raise BiremeError(
                f"The folder {path} of the run cannot be created: {there} {why}. Set another log.folder."
            )

    @classmethod
    def named(cls, run: RunFile, now: datetime) -> "RunFolder":
        """The folder that a new run would get; it is not made."""
        parent = Path(run.log.folder)
        if run.log.name is not None:
            return cls(parent / run.log.name)
        words = re.sub(r"[^A-Za-z0-9]+", "-", run.model.source.partition(",")[0]).strip("-").lower()
        first = path = parent / f"{now:%Y%m%d-%H%M%S}-{words[:40]}"
        number = 2
        while path.exists():
            path, number = first.with_name(f"{first.name}-{number}"), number + 1
        return cls(path)

    @classmethod
    def new(cls, run: RunFile, now: datetime) -> "RunFolder":
        """A new folder for a run, of the name it asks for or one made of the date and the model."""
        folder = cls.named(run, now)
        if run.log.name is not None:
            cls.check_new(run)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BiremeError(
                f"The folder {folder.path} of the run cannot be created: {error.strerror}."
            ) from None
        return folder

    @classmethod
    def of(cls, path: Path) -> "RunFolder":
        """The folder of a run that was begun."""
        folder = cls(path)
        if not path.is_dir():
            raise BiremeError(f"There is no folder {path}. Name the folder of a run.")
        missing = [one.name for one in (folder.run_file, folder.plan, folder.graph) if not one.is_file()]
        if missing:
            raise BiremeError(
                f"{path} is not the folder of a run: it lacks {', '.join(missing)}. `bireme "
                "train` starts one."
            )
        return folder

    @property
    def is_begun(self) -> bool:
        """Whether a run has begun here."""
        return all(one.is_file() for one in (self.run_file, self.plan, self.graph))

    def load_run(self, sets: Sequence[str] = ()) -> RunFile:
        """The run file of this run, with each `table.key=value` of `sets` in its place; paths are absolute.

        Those in the file that begin with `./` are of this folder, wherever it is now.
        """
        own = settings_within(load_run_file(self.run_file), self.path)
        return with_absolute_paths(load_run_file(self.run_file, [*own, *sets]), Path.cwd())

    def write_run(self, run: RunFile) -> None:
        """Write the run file, all keys and their values; it can be read when the folder has been moved."""
        write_text_atomically(self.run_file, to_toml(with_paths_within(run, self.path)))

    @property
    def run_file(self) -> Path:
        """The run file with all that was set and all defaults."""
        return self.path / "run.toml"

    @property
    def plan(self) -> Path:
        """The plan, with what it promises."""
        return self.path / "plan.json"

    @property
    def windows(self) -> Path:
        """The windows of a plan that pages, which ranks read; only where it does."""
        return self.path / "windows.json"

    @property
    def profile(self) -> Path:
        """What the plan was made from."""
        return self.path / "profile.json"

    @property
    def cluster(self) -> Path:
        """The devices."""
        return self.path / "cluster.toml"

    @property
    def graph(self) -> Path:
        """The model as it is trained."""
        return self.path / "graph.json"

    @property
    def evaluation_graph(self) -> Path:
        """The model as it is evaluated."""
        return self.path / "evaluation-graph.json"

    @property
    def data(self) -> Path:
        """Which data it is trained on."""
        return self.path / "data.json"

    @property
    def base(self) -> Path:
        """Which frozen weights it trains a part on; only where checkpoints leave these out."""
        return self.path / "base.json"

    @property
    def metrics(self) -> Path:
        """What happened, a line each."""
        return self.path / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        """Which samples each committed round trained, where a coordinator deals them."""
        return self.path / LEDGER

    @property
    def hosts(self) -> Path:
        """Where a host that is started again finds the others, where replicas may die."""
        return self.path / "hosts.json"

    @property
    def private(self) -> Path:
        """How many private samples each server holds, where some do."""
        return self.path / "private.json"

    @property
    def starts(self) -> Path:
        """How often it was started again from the same checkpoint."""
        return self.path / "starts.json"

    @property
    def predicted_timeline(self) -> Path:
        """A few batches as the simulator sees them."""
        return self.path / "timeline-predicted.json"

    @property
    def measured_timeline(self) -> Path:
        """A few batches as they ran."""
        return self.path / "timeline-measured.json"

    @property
    def summary(self) -> Path:
        """What came of it."""
        return self.path / "summary.json"

    @property
    def model(self) -> Path:
        """The trained model, for others."""
        return self.path / "model"

    def checkpoints(self, run: RunFile) -> Path:
        """Where its checkpoints are."""
        return self.path / run.checkpoint.folder


def load_asked(path: Path | None, sets: Sequence[str]) -> RunFile:
    """The run that somebody asks for by a run file, or by none; its paths are absolute.

    They are relative to where the command is called. The run file of a run that was begun is one too.
    """
    if path is not None and (folder := RunFolder(path.parent)).is_begun and path.name == folder.run_file.name:
        return folder.load_run(sets)
    return with_absolute_paths(load_run_file(path, sets), Path.cwd())
