"""The machines of a run that share no folder: each has a folder of its own, and serves it to the others.

    machine 0 (rank 0)                       machine 1
    run.toml, plan.json … ── at a start ──▶  the same
    step-40: manifest, its files             step-40: manifest, its files
       ▲ copies of the files of machine 1 ──────┘  in the background (`checkpoint.copies`)

At a start the machines find out whether they share a folder: rank 0 puts a file with a new name beside the
folder of the run, and the others look for it. If they see it, none of this is used.
"""

import json
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bireme.errors import BiremeError, system_errors
from bireme.files import FileDigest, new_folder, path_within, write_text_atomically
from bireme.model.graph_file import load_graph
from bireme.model.units import units_of
from bireme.model.weights import weight_files
from bireme.pieces import FileIdentity, PieceFile, is_record, partial_files, remove
from bireme.plan.plan_file import load_plan
from bireme.runtime.copies.folder_server import (
    FolderServer,
    digests_at,
    fetch_file,
    fetch_pieces,
    files_at,
    files_in,
    holders_of,
    ranges,
    root_name,
    steps_at,
)
from bireme.runtime.copies.keeper import KeeperAddress, RateLimit
from bireme.runtime.layout import layout_of
from bireme.sync.coordinator.samples import LEDGER
from bireme.train.checkpoint import disk
from bireme.train.checkpoint.checkpoint import (
    MachinesNote,
    fetch_manifest,
    find_checkpoints,
    note_machines,
    noted_machines,
    retire,
    step_of,
)
from bireme.train.checkpoint.manifest import MANIFEST, RECORD, FileEntry, Manifest, read_manifest
from bireme.train.fetched import FetchProgress, bring_copies, bring_first, is_by_need
from bireme.train.folder import RunFolder
from bireme.train.model import INITIAL_FILES, RunModel
from bireme.train.resume_checks import base_folder, data_files, load_base, names_in_base
from bireme.train.run_file import RunFile
from bireme.train.run_file.run import HERE

_TIMEOUT_S = 60.0
_LINES_S = 5.0
"""How long another machine may take for its next lines."""
_LOOK_S = 1.0
_GROWING = (LEDGER, "metrics.jsonl")
"""Files to which one machine adds lines while the run trains."""
_ADDING = threading.Lock()
"""Held by the thread of this process that adds lines: the mirror, or the end of a run."""
_OVERLAP_BYTES, _MOST_NEW_BYTES = 256, 4 << 20
"""Compared before lines are added to the own copy of a growing file, and read of it at a time."""


# Whether machines share a folder.


def put_mark(runs: Path) -> str:
    """Put a file with a new name into the folder of runs; returns the name. No machine has looked for it
    before, so none remembers that it was not there.
    """
    name = f".bireme-{secrets.token_hex(8)}"
    with system_errors(f"{runs} cannot be written", "Set log.folder."):
        runs.mkdir(parents=True, exist_ok=True)
        (runs / name).touch()
    return name


def sees_mark(runs: Path, name: str) -> bool:
    """Whether this machine sees the file."""
    with suppress(OSError):
        [*runs.iterdir()]  # which has a network file system ask its server
    return (runs / name).exists()


# What a machine fetches before it begins.


def bring_run(folder: Path, note: MachinesNote) -> None:
    """Have what other machines have of a run that was begun, if this machine's folder lacks it: the record of
    its files, and the lines of its ledger and its log.
    """
    if not (folder / RECORD).exists():
        told = [(digests_at(address, [RECORD], _TIMEOUT_S)[0], address) for address in note.others]
        there = [(one, address) for one, address in told if one is not None]
        if there:
            served, address = there[0]
            folder.mkdir(parents=True, exist_ok=True)
            fetch_file([address], RECORD, folder / RECORD, served, _TIMEOUT_S)
    if folder.is_dir():
        note_machines(folder, note)
        take_lines(folder, note)


def take_lines(folder: Path, note: MachinesNote) -> None:
    """Have the lines of the log and the ledger that other machines have after all of those here."""
    for name in _GROWING:
        for address in note.others:
            with suppress(OSError, BiremeError):
                while _add_lines(folder / name, name, address):
                    pass


def _add_lines(path: Path, name: str, address: KeeperAddress) -> bool:
    """Add the next whole lines of another machine's file, if it begins as the file here; whether there were
    any.
    """
    own = path.stat().st_size if path.exists() else 0
    first = max(own - _OVERLAP_BYTES, 0)
    came = b"".join(ranges(address, name, first, own + _MOST_NEW_BYTES, _LINES_S))
    lines = came[own - first : came.rfind(b"\n") + 1]
    if not lines:
        return False
    with _ADDING, path.open("a+b") as file:
        file.seek(first)
        is_same = file.read() == came[: own - first]
        if is_same:
            file.write(lines)
        return is_same


def take_run(folder: RunFolder, checkpoint: str | None, first: KeeperAddress) -> None:
    """Have the files of a run that ranks read, as the first machine has them; `checkpoint` is the name, in
    the folder of the run, of the checkpoint that the run goes on from.
    """
    names = [RECORD, *(f"{folder.initial.name}/{name}" for name in INITIAL_FILES)]
    if checkpoint is not None:
        names.append(f"{checkpoint}/{MANIFEST}")
    served = dict(zip(names, digests_at(first, names, _TIMEOUT_S), strict=True))
    record = served[RECORD]
    if record is None:
        raise BiremeError(
            f"The machine of rank 0 does not serve the files of the run {folder.path.name}. Check the line "
            "between the machines: bireme doctor"
        )
    folder.path.mkdir(parents=True, exist_ok=True)
    fetch_file([first], RECORD, folder.path / RECORD, record, _TIMEOUT_S)
    folder.put_back()
    for name in names[1:3]:
        if (one := served[name]) is not None:
            (folder.path / name).parent.mkdir(exist_ok=True)
            fetch_file([first], name, folder.path / name, one, _TIMEOUT_S)
    if checkpoint is not None:
        _take_manifest(folder.path, checkpoint, served[names[-1]], first)


def _begun(places: Mapping[str, tuple[Path, FileIdentity]]) -> list[PieceFile]:
    """The files of these names at these paths that are not whole there; they may have pieces already."""
    found = (PieceFile.begun(to, name, identity) for name, (to, identity) in places.items())
    return [one for one in found if one is not None]


def fetch_weights_of(
    folder: RunFolder, places: Sequence[int], progress: FetchProgress, *, resumes: bool
) -> None:
    """Fetch the weights of a folder that the ranks at these places of the plan begin with. If the run
    `resumes`, its state has all but those of its base.
    """
    run = folder.load_run()
    is_from_base = load_base(folder.base) is not None
    if not any(partial_files(folder.path)) or (resumes and not is_from_base):
        return
    model, graph, plan = RunModel.of(run, 1), load_graph(folder.graph), load_plan(folder.plan).plan.by_program
    units, names = units_of(graph), set[str]()
    for place in places:
        own = layout_of(graph, units, plan, place, plan.num_ranks).units.values()
        names.update(name for stage in own for unit in stage for name in (*unit.parameters, *unit.buffers))
    model.bring(graph, sorted(names & names_in_base(graph) if resumes else names), progress)


def _remove_others(folder: Path, names: Collection[str]) -> None:
    """Remove files of a folder but for those of these names. A file is replaced by a folder, and the other
    way round: the folder of the empty name is to be a file.
    """
    if "" in names and folder.is_dir():
        shutil.rmtree(folder)
    elif "" not in names and folder.is_file():
        remove(folder)
    for path in [*folder.rglob("*")]:
        if path.is_file() and not is_record(path) and path.relative_to(folder).as_posix() not in names:
            remove(path)


def _check_whole(files: Sequence[PieceFile], first: KeeperAddress, progress: FetchProgress) -> None:
    """Have whole files as the first machine has them. They may be code, and their pieces have come from any
    machine, with the SHA-256 that it names.
    """
    served = digests_at(first, [one.name for one in files], _TIMEOUT_S) if files else ()
    for file, known in zip(files, served, strict=True):
        if known is None:
            raise BiremeError(f"Rank 0's machine does not give the SHA-256 of {file.name}: bireme doctor")
        if disk.digest_of(file.path) == known:
            continue
        progress.tell(f"Another machine has other bytes of {file.path.name}. Rank 0's are taken.")
        remove(file.path)
        for again in _begun({file.name: (file.path, file.identity)}):
            fetch_pieces(again, again.missing(), lambda: [first], _TIMEOUT_S, came=progress)


def fetch_folder(address: KeeperAddress, to: Path) -> None:
    """Put the folder that another machine serves at a path, whole, or not at all."""
    files = files_at(address, ".", _TIMEOUT_S)
    with new_folder(to) as draft:
        for file in _begun({name: (path_within(draft, name), one) for name, one in files.items()}):
            fetch_pieces(file, file.missing(), lambda: [address], _TIMEOUT_S)


def _take_manifest(run: Path, name: str, served: FileDigest | None, first: KeeperAddress) -> None:
    if served is None:
        raise BiremeError(f"The machine of rank 0 does not serve {name}.")
    path = run / name
    if path.exists():
        if _has_manifest(path, served):
            return
        retire(path)
    fetch_manifest(run, name, served, [first])


def _has_manifest(path: Path, served: FileDigest) -> bool:
    with suppress(OSError):
        return disk.digest_of(path / MANIFEST).sha256 == served.sha256
    return False


def take_checkpoint(run: Path, to: Path, name: str, first: KeeperAddress) -> Path:
    """Where this machine has the manifest of a checkpoint of the first machine, by its name in the folder of
    the run: in its own folder of the run if it is there, else fetched into the folder `to`.
    """
    (served,) = digests_at(first, [f"{name}/{MANIFEST}"], _TIMEOUT_S)
    if served is not None and _has_manifest(run / name, served):
        return run / name
    _take_manifest(to, name, served, first)
    return to / name


# While the run trains: copies of what the machines before this one have written.


class Mirror:
    """Keeps copies of the checkpoint files of the `checkpoint.copies` machines before this one, the manifests
    of all checkpoints, the log and the ledger, and pieces of data and frozen weights, until it is stopped.
    Threads read in the background, so that large files do not keep lines waiting. Pieces leave `room_bytes`
    of the disk to checkpoints.
    """

    def __init__(self, folder: RunFolder, run: RunFile, note: MachinesNote, room_bytes: int = 0) -> None:
        self._folder, self._note, self._room_bytes = folder.path, note, room_bytes
        self._checkpoints = run.checkpoint.folder
        self._limit: RateLimit | None = RateLimit(run.memory.copy_bytes_per_s)
        self._has_rate = run.memory.copy_bytes_per_s is not None
        num = len(note.addresses)
        copies = min(run.checkpoint.copies, num - 1)
        self._makers = {(note.own - back) % num for back in range(copies + 1)}
        self._over, self._is_stopped = threading.Event(), False
        lasting = data_files(run)  # read after the begin of the run, as the weights of its base are
        if load_base(folder.base) is not None and (base := base_folder(run)) is not None:
            lasting += weight_files(base)
        self._threads = [
            threading.Thread(target=self._run, args=(turn,), name="bireme mirror", daemon=True)
            for turn in (
                self._turn,
                lambda: take_lines(folder.path, note),
                lambda: self._fetch_pieces(lasting, copies),
            )
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Return once this machine has all that it keeps copies of, or cannot have it now. Training is over,
        so only a rate that the user has set still holds.
        """
        if not self._has_rate and self._limit is not None:
            self._limit.lift()  # a piece that took long is waited for three times as long
            self._limit = None
        self._over.set()
        for thread in self._threads:
            thread.join()
        take_lines(self._folder, self._note)
        with suppress(OSError, BiremeError):
            self._turn()

    def stop(self) -> None:
        """Fetch no more after the present file."""
        self._is_stopped = True
        self._over.set()

    def _run(self, turn: Callable[[], None]) -> None:
        while not self._over.wait(_LOOK_S):
            # Machines that are gone and full disks: the next turn tries again.
            with suppress(OSError, BiremeError):
                turn()

    def _turn(self) -> None:
        there = {
            machine: steps_at(address, self._checkpoints, MANIFEST, _TIMEOUT_S)
            for machine, address in enumerate(self._note.addresses)
            if machine != self._note.own
        }
        self._fetch_manifests(there)
        has_later = False
        for path in reversed(find_checkpoints(self._folder / self._checkpoints)):
            with suppress(BiremeError):
                manifest = read_manifest(path)
                is_gone = self._is_gone(path, manifest, there)
                if not is_gone:
                    self._fetch_files(path, manifest, there)
                is_whole = all((path / one.name).exists() for one in self._kept(manifest))
                if is_gone and (has_later or not is_whole):
                    retire(path)
                has_later |= is_whole

    def _fetch_pieces(self, files: list[Path], copies: int) -> None:
        """Fetch this machine's part of these files, once."""
        for _ in bring_copies(files, copies, self._limit, room_bytes=self._room_bytes):
            if self._over.is_set():
                return
        files.clear()

    def _fetch_manifests(self, there: Mapping[int, Mapping[str, FileDigest]]) -> None:
        """The manifests of newer checkpoints that this machine has no part in: its ranks write the others."""
        own = find_checkpoints(self._folder / self._checkpoints)
        newest = step_of(own[-1]) if own else -1
        for machine, steps in there.items():
            for name, served in steps.items():
                path = self._folder / self._checkpoints / name
                if step_of(path) <= newest or path.exists():
                    continue
                where, address = f"{self._checkpoints}/{name}", self._note.addresses[machine]
                with suppress(BiremeError):  # as if the manifest is damaged there: others may have it too
                    fetch_manifest(self._folder, where, served, [address], but=self._note.own)

    def _is_gone(self, path: Path, manifest: Manifest, there: Mapping[int, Mapping[str, FileDigest]]) -> bool:
        """Whether the machines that wrote a checkpoint have deleted it, and have later ones."""
        makers = {one.machine for one in manifest.files}
        if self._note.own in makers or not manifest.machines:
            return False
        step = step_of(path)
        return all(
            path.name not in there.get(maker, {})
            and any(step_of(Path(name)) > step for name in there.get(maker, {}))
            for maker in makers
        )

    def _fetch_files(
        self, path: Path, manifest: Manifest, there: Mapping[int, Mapping[str, FileDigest]]
    ) -> None:
        for entry in self._kept(manifest):
            to = path / entry.name
            if not to.exists() and not self._is_stopped:
                having = [self._note.addresses[one] for one, steps in there.items() if path.name in steps]
                self._fetch(entry, to, having)

    def _kept(self, manifest: Manifest) -> list[FileEntry]:
        """The files of a checkpoint that this machine has or is to have."""
        return [one for one in manifest.files if manifest.machines and one.machine in self._makers]

    def _fetch(self, entry: FileEntry, to: Path, having: Sequence[KeeperAddress]) -> None:
        name = f"{self._checkpoints}/{to.parent.name}/{entry.name}"
        served = FileDigest(entry.num_bytes, entry.sha256)
        holders = holders_of({name: entry.sha256}, having, _TIMEOUT_S)[name]
        if holders:
            fetch_file(holders, name, to, served, _TIMEOUT_S, self._limit)


class MachineFolders:
    """This machine's folder of the run, which it serves to the others in all starts of the run."""

    def __init__(self) -> None:
        self._server: FolderServer | None = None
        self._mirror: Mirror | None = None
        self.note: MachinesNote | None = None
        """The machines of this start, if they share no folder."""

    def served(self, folder: Path | None, roots: Sequence[str] = ()) -> KeeperAddress:
        """The address at which this machine serves a folder, and other files and folders, from now on.
        Without `roots` these are those of the last start of the run: the machine that leads may need pieces
        of them before it can tell what this start needs.
        """
        if self._server is None:
            self._server = FolderServer(_TIMEOUT_S)
        if not roots and folder is not None:
            with suppress(OSError, ValueError):
                roots = json.loads(RunFolder(folder).served.read_text(encoding="utf-8"))
        self._server.folder, self._server.roots = folder, tuple(map(Path, roots))
        return self._server.address

    def serve_roots(self, folder: RunFolder, roots: Sequence[str]) -> None:
        """Serve these files and folders too, from the beginning of the next start of the run in `folder`."""
        if self._server is not None:
            self._server.roots = tuple(map(Path, roots))
        write_text_atomically(folder.served, json.dumps([*roots]) + "\n")

    def take_files(
        self,
        folder: RunFolder,
        there: Path,
        paths: Sequence[str],
        note: MachinesNote,
        progress: FetchProgress,
    ) -> dict[str, str]:
        """Have what the first machine reads at these paths, data, model and code, in `files` in the folder of
        the run, unless it is here at the same paths. Of large files the pieces come when they are needed.
        `there` is the folder of the run on the first machine. Returns where the files are, by these paths.
        """
        here, first = dict[str, str](), note.addresses[0]
        places = dict[str, tuple[Path, FileIdentity]]()
        note_machines(folder.path, note)
        for number, path in enumerate(paths):
            is_fetched = Path(path).is_relative_to(there)
            if Path(path).exists() and not is_fetched and not any(partial_files(Path(path))):
                continue
            within = Path(path).relative_to(there) if is_fetched else f"files/{number}-{Path(path).name}"
            root, to = root_name(number), path_within(folder.path, str(within))
            try:
                files = files_at(first, root, _TIMEOUT_S)
            except OSError as error:
                raise BiremeError(
                    f"{path} is not on this machine, and that of rank 0 does not answer: {error}."
                ) from error
            if self._has(number, files):
                here |= dict.fromkeys((path, f"{HERE}{within}"), str(self._roots[number]))
                continue
            places |= {f"{root}/{name}": (path_within(to, name), one) for name, one in files.items()}
            here[path] = str(to)
            if to.is_relative_to(folder.path / "files"):
                with system_errors(f"{to} cannot be written"):
                    _remove_others(to, files)
        with system_errors(f"{folder.path} cannot be written", "Set log.folder."):
            files_begun = _begun(places)
            self.serve_roots(folder, [here.get(path, path) for path in paths])
            bring_first(files_begun, progress)
            _check_whole([one for one in files_begun if not is_by_need(one)], first, progress)
        # Paths of earlier starts stay: this machine finds them in the run file if it becomes the first.
        before = folder.fetched_paths().items()
        known = {path: own for path, own in before if not Path(path).exists()} | here
        write_text_atomically(folder.fetched, json.dumps(known) + "\n")
        return here

    @property
    def _roots(self) -> tuple[Path, ...]:
        return () if self._server is None else self._server.roots

    def _has(self, number: int, files: Mapping[str, FileIdentity]) -> bool:
        """Whether this machine serves a root with the whole of these files, as one that has led before."""
        with suppress(OSError, IndexError, BiremeError):
            own = files_in(root := self._roots[number])
            is_same = own.keys() == files.keys()
            is_same = is_same and all(own[name] == one for name, one in files.items() if one.num_bytes)
            return is_same and not any(partial_files(root))
        return False

    def begin(self, folder: RunFolder, run: RunFile, note: MachinesNote, room_bytes: int) -> None:
        """Begin to copy what others write, as a `Mirror` does; this machine serves its folder."""
        if self._mirror is not None:
            self._mirror.stop()
        self.note = note
        note_machines(folder.path, note)
        self._mirror = Mirror(folder, run, note, room_bytes)

    def begin_again(self, folder: RunFolder, run: RunFile, roots: Sequence[str], room_bytes: int) -> None:
        """Copy what the others write in a run that they went on with, if they share no folder."""
        if (note := noted_machines(folder.path)) is not None:
            addresses = [*note.addresses]
            addresses[note.own] = self.served(folder.path, roots)
            self.begin(folder, run, MachinesNote(tuple(addresses), note.own), room_bytes)

    def finish(self) -> None:
        """Return once the copies that this machine keeps are whole, or cannot be had."""
        if self._mirror is not None:
            self._mirror.finish()
            self._mirror = None

    def close(self) -> None:
        """Serve and copy no more, as when the run has ended or the machines share a folder."""
        if self._mirror is not None:
            self._mirror.stop()
        if self._server is not None:
            self._server.close()
        self._server, self._mirror, self.note = None, None, None
