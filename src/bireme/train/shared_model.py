"""A model for processes that torchrun or `bireme join` has started on several machines. Each machine fetches
the files that it lacks from the others.

    rank 0                                     the first rank of each other machine
    which checkpoint, who has its files ◀───── the address at which it serves its folder of the run
    the work, with the paths on this machine ▶ manifest of the checkpoint, files that are not at these paths
    begins when all are ready ◀─────────────── the paths on that machine

Tensors of a checkpoint are read when they are needed, by name, from any machine that has them.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Self, TypeVar

import torch
from pydantic import TypeAdapter

from bireme.cluster.machine import host_name
from bireme.devices import ACCELERATOR, device_of_process, num_accelerators, use
from bireme.errors import Tell, system_errors, tell
from bireme.pieces import partial_files
from bireme.runtime.copies.keeper import KeeperAddress
from bireme.runtime.launch import Result, launch
from bireme.runtime.world import World
from bireme.train.checkpoint.checkpoint import (
    MachinesNote,
    fetch_manifests,
    note_machines,
    noted_machines,
    open_checkpoint,
)
from bireme.train.fetched import FetchProgress
from bireme.train.folder import RunFolder
from bireme.train.joined_processes import own_runs
from bireme.train.machines import Machines
from bireme.train.rendezvous import Announcements
from bireme.train.run_file import RunFile, paths_for_all, with_absolute_paths, with_paths_of_machine
from bireme.train.run_machines import MachineFolders, take_checkpoint
from bireme.train.subject import Subject, subject_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """Work with the model of `run` and the weights of `subject`, for all processes. `graph` is a file with
    the captured model; None if each process captures the model, or needs no graph. Work that `reads_data`
    needs the files of `run` with data too; other machines fetch instead the folders with their `tokens`, by
    the resolved paths of these files.
    """

    reads_data: ClassVar = True

    subject: Subject
    run: RunFile
    graph: Path | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def files(self) -> tuple[str, ...]:
        """All files and folders that every process reads, but the checkpoint."""
        more = (self.subject.folder, self.subject.graph, self.graph)
        run = self.run
        if not self.reads_data:
            run = run.with_keys("data", source="stdlib", mixture=None, evaluation_source=None)
        return (*paths_for_all(run), *(str(one) for one in more if one is not None))

    def placed(self, here: Mapping[str, str]) -> Self:
        """The same on a machine that has these files elsewhere."""

        def place(path: Path | None) -> Path | None:
            return None if path is None else Path(here.get(str(path), path))

        subject = self.subject
        moved = replace(
            subject,
            checkpoint=place(subject.checkpoint),
            folder=place(subject.folder),
            graph=place(subject.graph),
        )
        run = with_paths_of_machine(self.run, here)
        return replace(self, subject=moved, run=run, graph=place(self.graph))


Work = TypeVar("Work", bound=ModelWork)


class ModelFiles:
    """The model that `text` names, for the ranks of a world, each of which makes one."""

    def __init__(self, world: World, text: str) -> None:
        self._world, self._text = world, text
        self._talk, self._folders = Announcements(world.store), MachineFolders()
        node = os.environ.get("GROUP_RANK") or host_name()
        nodes = self._talk.gather("node", node, world.rank, world.size)
        self._first, self._firsts = nodes.index(node), sorted({nodes.index(one) for one in nodes})
        path = Path(text).expanduser()
        self._own = RunFolder(path if RunFolder(path).is_begun else own_runs() / path.name)
        """The folder of the run on this machine, if there is one."""
        if self._is_spread and world.rank == self._first:
            self._talk.say(f"folder/{world.rank}", asdict(self._folders.served(self._own.path)))

    def close(self) -> None:
        """Stop serving folders."""
        self._folders.close()

    def find(self, sets: Sequence[str], tell: Tell) -> Subject:
        """The model, on rank 0. The files of its checkpoint may be on several machines."""
        if self._is_spread and noted_machines(self._own.path) is not None:
            note_machines(self._own.path, MachinesNote(tuple(map(self._address, self._firsts)), 0))
            fetch_manifests(self._own.path, self._own.load_run().checkpoint.folder)
        return subject_of(self._text, sets, tell)

    def share(self, work: Work | None, form: TypeAdapter[Work]) -> Work:
        """The work of rank 0, which alone gives it, for each rank: with the paths of its machine. Returns on
        rank 0 once all machines have the files.
        """
        talk, rank = self._talk, self._world.rank
        if work is not None:
            if self._is_spread:
                work = self._served(work)
            talk.say("work", [work.files, form.dump_python(work, mode="json")])
        files, told = talk.hear("work")
        found = work or form.validate_python(told)
        if rank == self._first > 0:
            talk.say(f"here/{rank}", self._fetched(found.subject.checkpoint, files))
        for first in self._firsts[1:]:
            here = talk.hear(f"here/{first}")
            found = found.placed(here) if first == self._first else found
        return found

    # Between machines.

    @property
    def _is_spread(self) -> bool:
        return len(self._firsts) > 1

    def _address(self, first: int) -> KeeperAddress:
        return KeeperAddress(**self._talk.hear(f"folder/{first}"))

    def _served(self, work: Work) -> Work:
        """The work with absolute paths, of files that this machine serves from now on."""
        work = replace(work, run=with_absolute_paths(work.run, Path.cwd()))
        path, holders = work.subject.checkpoint, work.subject.holders
        roots = [work.tokens.get(str(Path(one).resolve()), one) for one in work.files]
        own = self._folders.served(None if path is None else path.parents[1], roots)
        if path is not None and not holders:
            names = (one.name for one in open_checkpoint(path).manifest.files)
            holders = {f"{_name_in_run(path)}/{name}": (own,) for name in names}
        return replace(work, subject=replace(work.subject, holders=holders))

    def _fetched(self, checkpoint: Path | None, files: Sequence[str]) -> dict[str, str]:
        """Where this machine has the files that it lacks at their paths; they are kept for the next time."""
        digest = hashlib.sha256(self._text.encode()).hexdigest()[:8]
        to, first = own_runs() / f"{Path(self._text).name}-{digest}", self._address(0)
        with system_errors(f"{to} cannot be written"):
            to.mkdir(parents=True, exist_ok=True)
            note = MachinesNote(tuple(map(self._address, self._firsts)), self._firsts.index(self._first))
            progress = FetchProgress(tell, {})
            here = self._folders.take_files(RunFolder(to), to, files, note, progress)
            progress.finish(partial_files(to / "files"))
            if checkpoint is not None:
                name = _name_in_run(checkpoint)
                here[str(checkpoint)] = str(take_checkpoint(self._own.path, to, name, first))
        return here


def is_on_machines(text: str) -> bool:
    """Whether the last start of the run of that name was on machines that share no folder."""
    return noted_machines(Path(text).expanduser()) is not None


def _name_in_run(checkpoint: Path) -> str:
    return checkpoint.relative_to(checkpoint.parents[1]).as_posix()


@contextmanager
def shared_world(text: str) -> Iterator[tuple[World, ModelFiles]]:
    """The world that this process was started for by torchrun or `bireme join`, and the model there."""
    with World.from_environment() as world, closing(ModelFiles(world, text)) as files:
        yield world, files


def device_for(run: RunFile, place: int) -> torch.device:
    """The device of a process by its number on its machine."""
    is_on_gpu = num_accelerators() > 0 and run.cluster.device != "cpu"
    return device_of_process(ACCELERATOR if is_on_gpu else "cpu", place)


def use_device(world: World, run: RunFile) -> None:
    """Have this process compute on its GPU, if it has one and the run may use it, and wait for the others as
    long as the run allows.
    """
    world.timeout_s = run.cluster.timeout_s
    world.device = device_for(run, int(os.environ.get("LOCAL_RANK", world.rank)))
    use(world.device)


def launched(
    function: Callable[..., Result], machines: Machines, count: int, run: RunFile, *args: object
) -> list[Result]:
    """The results of a function in new processes of this machine."""
    return launch(
        function,
        count,
        *args,
        timeout_s=run.cluster.timeout_s,
        threads_per_process=machines.threads,
        backend=machines.backend,
        device=machines.device,
    )
