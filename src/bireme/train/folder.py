"""The folder of a run, the paths in it, and the record of its files.

The record is one file with a copy of every file that a resume reads, sealed with its own checksum and written
after them. So after a power cut the files are those of one start: of the last one, or of the one before.
"""

import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bireme.documents import read_json_object
from bireme.errors import BiremeError, Tell, system_errors, tell
from bireme.files import write_bytes_atomically, write_text_atomically
from bireme.sync.coordinator.samples import LEDGER
from bireme.train.checkpoint.manifest import RECORD, read_manifest, sealed, unsealed
from bireme.train.run_file import (
    RunFile,
    load_run_file,
    settings_within,
    to_toml,
    with_absolute_paths,
    with_paths_of_machine,
    with_paths_within,
)

ABOUT = "bireme.json"
"""The file beside an exported model that describes it."""
_RECORD_KEY = "record_sha256"
_MOST_CHANGES = 3
"""Keys of `run.toml` that a sentence lists."""


RECORDED = list[str]()
"""The files that a resume reads."""


class _PathWithin:
    """A file or a folder of this name in that of a run; with `is_recorded` a resume reads it."""

    def __init__(self, name: str, *, is_recorded: bool = False) -> None:
        self._name = name
        RECORDED.extend([name] * is_recorded)

    def __get__(self, folder: "RunFolder", _kind: type["RunFolder"]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths within a run's folder."""

    path: Path

    run_file = _PathWithin("run.toml", is_recorded=True)
    """The run file with all that was set and all defaults."""
    plan = _PathWithin("plan.json", is_recorded=True)
    """The plan, with what it promises."""
    fetched = _PathWithin("fetched.json")
    """Where this machine has the data and the model's files that it fetched from another one."""
    served = _PathWithin("served.json")
    """The files and folders that this machine served to the others beside this folder, in their order."""
    windows = _PathWithin("windows.json", is_recorded=True)
    """The windows of a plan that pages, which ranks read; only where it does."""
    profile = _PathWithin("profile.json", is_recorded=True)
    """What the plan was made from."""
    cluster = _PathWithin("cluster.toml", is_recorded=True)
    """The devices."""
    graph = _PathWithin("graph.json", is_recorded=True)
    """The model as it is trained."""
    evaluation_graph = _PathWithin("evaluation-graph.json", is_recorded=True)
    """The model as it is evaluated."""
    data = _PathWithin("data.json", is_recorded=True)
    """Which data it is trained on."""
    base = _PathWithin("base.json", is_recorded=True)
    """Which frozen weights it trains a part on; only where checkpoints leave these out."""
    initial = _PathWithin("initial")
    """The weights that a function of the user made for the run's begin; removed when it has ended."""
    metrics = _PathWithin("metrics.jsonl")
    """What happened, a line each."""
    ledger = _PathWithin(LEDGER)
    """Which samples each committed round trained, if a coordinator assigns them."""
    hosts = _PathWithin("hosts.json")
    """Where a host that is started again finds the others, where replicas may die."""
    private = _PathWithin("private.json", is_recorded=True)
    """How many private samples each server holds, where some do."""
    starts = _PathWithin("starts.json")
    """How often it was started again from the same checkpoint."""
    predicted_timeline = _PathWithin("timeline-predicted.json")
    """A few batches as the simulator sees them."""
    measured_timeline = _PathWithin("timeline-measured.json")
    """A few batches as they ran."""
    summary = _PathWithin("summary.json")
    """What came of it."""
    model = _PathWithin("model")
    """The trained model, for others."""

    @classmethod
    def check_new(cls, run: RunFile) -> None:
        """Refuse a run whose folder cannot be a new one; nothing is made yet."""
        parent = Path(run.log.folder)
        path = parent if run.log.name is None else parent / run.log.name
        if taken := cls(path).taken(run):
            raise BiremeError(taken)
        there = next(one for one in (path, *path.absolute().parents) if one.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "cannot be written to" if there.is_dir() else "is not a folder"
            raise BiremeError(
                f"The folder {path} of the run cannot be created: {there} {why}. Set another log.folder."
            )

    def taken(self, run: RunFile) -> str:
        """Why a new run of this name cannot have this folder, in a sentence; empty if it can."""
        path = self.path
        if run.log.name is None or not path.exists() or (path.is_dir() and not any(path.iterdir())):
            return ""
        is_run = self.run_file.is_file()
        remedy = f"Resume it with `bireme resume {shlex.quote(str(path))}`, or give" if is_run else "Give"
        return f"{path} already exists. {remedy} the new run another name with --set log.name=NAME."

    @classmethod
    def named(cls, run: RunFile, now: datetime) -> "RunFolder":
        """The folder that a new run would get; it is not made."""
        parent = Path(run.log.folder)
        if run.log.name is not None:
            return cls(parent / run.log.name)
        model = Path(run.model.source.partition(",")[0].removeprefix("hf:")).name
        words = re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-").lower()
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
        with system_errors(f"The folder {folder.path} of the run cannot be created"):
            folder.path.mkdir(parents=True, exist_ok=True)
        return folder

    @classmethod
    def of(cls, path: Path) -> "RunFolder":
        """The folder of a run that was begun."""
        folder = cls(path)
        if not path.is_dir():
            raise BiremeError(f"{path} is not a folder. Name the folder of a run.")
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
        run = load_run_file(self.run_file)
        if changed := [*settings_within(run, self.path), *sets]:
            run = load_run_file(self.run_file, changed)
        return self.completed(self.with_fetched(with_absolute_paths(run, Path.cwd())))

    def with_fetched(self, run: RunFile) -> RunFile:
        """The run with the files that this machine has fetched, in place of those that it does not have."""
        base, here = Path.cwd(), dict[str, str]()
        for there, own in self.fetched_paths().items():
            if not Path(there).exists() and Path(own).exists():
                path = Path(there)
                here |= {there: own} | (
                    {str(path.relative_to(base)): own} if path.is_relative_to(base) else {}
                )
        return with_paths_of_machine(run, here)

    def completed(self, run: RunFile) -> RunFile:
        """The run with what follows from its data, if this folder has begun it: steps of epochs, length."""
        if run.training.epochs is not None and self.data.is_file():
            run = run.counted(int(read_json_object(self.data)["num_samples"]))
        if "length" not in run.data.model_fields_set and self.run_file.is_file():
            length = load_run_file(self.run_file).data.length
            run = run.with_keys("data", length=length)
        return run

    def fetched_paths(self) -> dict[str, str]:
        """Where this machine has the files that it fetched from another one, by their paths there."""
        found = read_json_object(self.fetched) if self.fetched.is_file() else {}
        return {there: str(here) for there, here in found.items()}

    def write_run(self, run: RunFile) -> None:
        """Write the run file, all keys and their values; it can be read when the folder has been moved."""
        write_text_atomically(self.run_file, to_toml(with_paths_within(run, self.path)))

    def record(self) -> None:
        """Write the record of the files that a resume reads, as they are now."""
        files = {name: found.decode() for name in RECORDED if (found := self._found(name)) is not None}
        write_bytes_atomically(self.path / RECORD, sealed({"format": 1, "files": files}, _RECORD_KEY))

    def recorded(self) -> bytes | None:
        """The content of the record, for the checkpoints of the run; None if there is no intact one."""
        with suppress(OSError, BiremeError):
            content = (self.path / RECORD).read_bytes()
            unsealed(content, _RECORD_KEY, self.path / RECORD)
            return content
        return None

    def restore(self, tell: Tell) -> None:
        """Put back the files that a resume reads as the run recorded them. Only one process may do so.

        `tell` gets a sentence for each file that differs: damaged files, and files that were changed by hand.
        If the record itself is lost, the copy of it in the newest checkpoint counts.
        """
        if not self.path.is_dir():
            return
        source = self.path / RECORD
        try:
            files = _files_in(source)
        except (OSError, BiremeError) as error:
            what = str(error) if isinstance(error, BiremeError) else f"{source} is missing."
            copy = self._copy_of_record()
            if copy is None:
                if self.run_file.exists():
                    tell(f"{what} No checkpoint has a copy, so the files of the run are used unchecked.")
                return
            source, files = copy, _files_in(copy)
            tell(
                f"{what} The copy in {copy.parent.name} is used. Settings that were changed after that "
                "checkpoint are lost: give them again with --set."
            )
        for name in RECORDED:
            if (found := self._found(name)) != files.get(name):
                self._put_back(name, found, files.get(name), source, tell)
        if source != self.path / RECORD:
            self.record()

    def put_back(self) -> None:
        """Make the files that a resume reads as they are in the record, which another machine wrote."""
        files = _files_in(self.path / RECORD)
        for name in RECORDED:
            kept = files.get(name)
            if kept is None:
                (self.path / name).unlink(missing_ok=True)
            elif self._found(name) != kept:
                write_bytes_atomically(self.path / name, kept)

    def check_recorded(self) -> None:
        """Refuse files that differ from the record, for a process that starts in the middle of a run."""
        files = {} if self.recorded() is None else _files_in(self.path / RECORD)
        for name in RECORDED if files else ():
            if self._found(name) != files.get(name):
                raise BiremeError(
                    f"{self.path / name} is not as this run wrote it. Stop the run; `bireme resume "
                    f"{shlex.quote(str(self.path))}` puts the recorded copy back."
                )

    def _found(self, name: str) -> bytes | None:
        """The content of a file in this folder; None if there is no such file."""
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise BiremeError(f"{self.path / name} cannot be read: {error.strerror or error}.") from error

    def _copy_of_record(self) -> Path | None:
        """The record in the newest checkpoint that has an intact one."""
        from bireme.train.checkpoint.checkpoint import find_checkpoints  # imports torch

        folders = [path for path in self.path.iterdir() if path.is_dir()]
        found = [path for folder in folders for path in find_checkpoints(folder)]
        for path in sorted(found, key=lambda path: path.name, reverse=True):
            with suppress(BiremeError, OSError):
                if read_manifest(path).record is not None:
                    _files_in(path / RECORD)
                    return path / RECORD
        return None

    def _put_back(self, name: str, found: bytes | None, kept: bytes | None, source: Path, tell: Tell) -> None:
        path, where = self.path / name, source.relative_to(self.path)
        if found is not None:
            path.replace(path.with_name(f"{name}.found"))
        if kept is not None:
            write_bytes_atomically(path, kept)
        if found is None:
            tell(f"{path} is missing. The copy in {where} is used and put back.")
            return
        is_kept = f"what was found is kept as {name}.found"
        if kept is None:
            tell(f"{path} is not a file of this run: it is not used, and {is_kept}.")
            return
        changes = _changes(found, kept) if path == self.run_file else []
        what = f"damaged, or changed by hand: {', '.join(changes)}" if changes else "damaged"
        how = " To change settings of a run, use `bireme resume --set`." if changes else ""
        tell(f"{path} is {what}. The copy in {where} is used and put back; {is_kept}.{how}")

    def checkpoints(self, run: RunFile) -> Path:
        """Where its checkpoints are."""
        return self.path / run.checkpoint.folder


def load_asked(path: Path | None, sets: Sequence[str]) -> RunFile:
    """The run that a run file asks for, or the usual one without a file; its paths are absolute.

    They are relative to where the command is called. The run file of a run that was begun is one too.
    """
    if path is not None and (folder := RunFolder(path.parent)).is_begun and path.name == folder.run_file.name:
        return folder.load_run(sets)
    return with_absolute_paths(load_run_file(path, sets), Path.cwd())


def tell_defaults(run: RunFile, path: Path | None) -> None:
    """Say what is trained, if a run file names neither a model nor data."""
    if path is not None and not {"source"} & (run.model.model_fields_set | run.data.model_fields_set):
        tell(
            f"{path} names no model.source and no data.source: this trains the demonstration, "
            f"{run.model.source} on {run.data.source}."
        )


def _files_in(record: Path) -> dict[str, bytes]:
    """The content of each file in a record; a `BiremeError` if the record is damaged."""
    files = unsealed(record.read_bytes(), _RECORD_KEY, record)["files"]
    return {str(name): str(text).encode() for name, text in files.items()}


def _changes(found: bytes, kept: bytes) -> list[str]:
    """Which settings of a run file differ from those in another one, in words; none if it cannot be read."""
    try:
        now, before = (dict(_settings(tomllib.loads(text.decode()))) for text in (found, kept))
    except ValueError:
        return []
    differing = [name for name in {**before, **now} if now.get(name) != before.get(name)]
    told = [
        f"{name} is {now[name]!r} instead of {before.get(name)!r}" if name in now else f"{name} is missing"
        for name in differing[:_MOST_CHANGES]
    ]
    more = [f"{len(differing) - _MOST_CHANGES} more settings differ"] if differing[_MOST_CHANGES:] else []
    return told + more


def _settings(table: Mapping[str, Any], beginning: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a run file with their tables, and the values."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{beginning}{name}.")
        else:
            yield f"{beginning}{name}", value


# A folder with an exported model.


def exported_step(folder: Path) -> int | None:
    """The step of the checkpoint whose model is in a folder; None where there is none."""
    return _number_of(folder, "step")


def exported_length(folder: Path) -> int | None:
    """The tokens of the samples that the model in a folder was trained on, if the folder has the number."""
    return _number_of(folder, "length")


def _number_of(folder: Path, key: str) -> int | None:
    try:
        return int(json.loads((folder / ABOUT).read_text(encoding="utf-8"))[key])
    except (OSError, ValueError, TypeError, KeyError):
        return None
