"""Reading checkpoints: which are in a folder, on this machine or others, and whether each is intact.

It trusts only what it has checksummed: a run resumes from the newest checkpoint whose every byte is as it was
written.
"""

import errno
import fcntl
import json
import os
import platform
import secrets
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from bireme.errors import BiremeError, Tell, system_errors
from bireme.files import FileDigest, path_within, write_text_atomically
from bireme.runtime.copies.copier import CopySource
from bireme.runtime.copies.folder_server import (
    STEP_FOLDER,
    holders_of,
    read_file,
    read_range,
    steps_at,
)
from bireme.runtime.copies.keeper import KeeperAddress
from bireme.runtime.snapshot import Snapshot, joined
from bireme.train.checkpoint import disk
from bireme.train.checkpoint.manifest import (
    MANIFEST,
    SHARES,
    FileEntry,
    Manifest,
    RecordEntry,
    manifest_in,
    read_manifest,
    write_new,
)
from bireme.train.checkpoint.shard import SavedTensors, tensor_digest

# Checkpoints whose files are on the disks of several machines, and the tensors that are read from there.
#
# Where machines share no folder, each has the files that its ranks wrote and copies of those of others, and
# the manifest, which lists all files. `machines.json` in the folder of the run has the addresses at which the
# machines of the present start serve their folders (`runtime/copies/folder_server.py`).

MACHINES = "machines.json"
_STEP_S, _ANSWER_S = 60.0, 5.0
"""How long a machine may be silent while it serves, and until it answers a question."""


@dataclass(frozen=True, slots=True)
class MachinesNote:
    """The machines of a start of the run: the address of each, and the index of this one."""

    addresses: tuple[KeeperAddress, ...]
    own: int

    @property
    def others(self) -> tuple[KeeperAddress, ...]:
        """The addresses of the other machines, from the next one on."""
        return (*self.addresses[self.own + 1 :], *self.addresses[: self.own])


_NOTE = TypeAdapter(MachinesNote)


def note_machines(folder: Path, note: MachinesNote) -> None:
    """Write into the folder of a run where its machines are. The key in it is for this user alone."""
    write_text_atomically(folder / MACHINES, _NOTE.dump_json(note).decode(), is_private=True)


def other_machines(folder: Path) -> tuple[KeeperAddress, ...]:
    """The other machines of the last start of the run in this folder; none if it has one machine."""
    note = noted_machines(folder)
    return () if note is None else note.others


def noted_machines(folder: Path) -> MachinesNote | None:
    """The machines of the last start of the run in this folder; None if they shared it."""
    with suppress(OSError, ValidationError):
        return _NOTE.validate_json((folder / MACHINES).read_bytes())
    return None


Holders = Mapping[str, tuple[KeeperAddress, ...]]
"""The machines that have the files of one checkpoint. Names are relative to the folder of the run."""


def find_holders(run: Path, checkpoint: Path, manifest: Manifest, lacking: Sequence[FileEntry]) -> Holders:
    """The machines that have each file, by its SHA-256: this one has all but those `lacking`. Raises a
    `BiremeError` if a file is nowhere.
    """
    where, note = checkpoint.relative_to(run).as_posix(), noted_machines(run)
    names = {one.name: f"{where}/{one.name}" for one in manifest.files}
    files = {names[one.name]: one.sha256 for one in manifest.files}
    found = holders_of(files, () if note is None else note.others, _STEP_S)
    missing = [one for one in lacking if not found[names[one.name]]]
    if missing:
        machine = manifest.machines[missing[0].machine]
        raise BiremeError(
            f"{checkpoint} lacks {', '.join(one.name for one in missing)}: {missing[0].name} was written on "
            f"{machine}, and no machine that answers has it. Start the run on {machine} too, or copy the "
            "file from there."
        )
    if note is not None:
        own = note.addresses[note.own]
        is_here = {names[one.name] for one in manifest.files if one not in lacking}
        found = {name: (*([own] if name in is_here else []), *having) for name, having in found.items()}
    return found


def is_elsewhere(path: Path) -> bool:
    """Whether another machine of the run has the checkpoint of that folder."""
    checkpoints = path.parent
    return any(
        path.name in steps_at(address, checkpoints.name, MANIFEST, _ANSWER_S)
        for address in other_machines(checkpoints.parent)
    )


def fetch_manifests(run: Path, checkpoints: str) -> frozenset[Path]:
    """Fetch the manifests of the newest checkpoints that other machines have and this one has not. Returns
    the folders of those here that fewer than half of their machines have: these were never complete.
    """
    own, have = run / checkpoints, dict[str, dict[FileDigest, list[KeeperAddress]]]()
    for address in other_machines(run):
        for name, served in steps_at(address, checkpoints, MANIFEST, _STEP_S).items():
            have.setdefault(name, {}).setdefault(served, []).append(address)
    for name, versions in have.items():
        if not (own / name).exists():
            served, holding = max(versions.items(), key=lambda one: len(one[1]))
            fetch_manifest(run, f"{checkpoints}/{name}", served, holding)
    return frozenset(path for path in own.glob("step-*") if _is_minor(path, have.get(path.name, {})))


def fetch_manifest(
    run: Path,
    name: str,
    served: FileDigest,
    holding: Sequence[KeeperAddress],
    *,
    but: int | None = None,
) -> None:
    """Make the folder of a checkpoint, by its name in the folder of the run, with its manifest in it, unless
    the machine `but` wrote a part of the checkpoint.
    """
    path = path_within(run, name)
    text = read_file(holding, f"{name}/{MANIFEST}", served, _STEP_S)
    manifest = manifest_in(text, path / MANIFEST)
    if path.name != f"step-{manifest.step:08d}":
        raise BiremeError(f"Another machine has the checkpoint of step {manifest.step} as {path.name}.")
    if any(one.machine == but for one in manifest.files):
        return
    draft = path.with_name(f".draft-{path.name}-{secrets.token_hex(4)}")
    try:
        with system_errors(f"{path} cannot be written"):
            draft.mkdir(parents=True)
            write_new(draft / MANIFEST, text)
            disk.rename(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _is_minor(path: Path, versions: Mapping[FileDigest, Sequence[KeeperAddress]]) -> bool:
    """Whether fewer than half of the machines of a checkpoint have its manifest."""
    with suppress(OSError, BiremeError):
        manifest, sha256 = read_manifest(path), disk.digest_of(path / MANIFEST).sha256
        num = 1 + sum(len(holding) for served, holding in versions.items() if served.sha256 == sha256)
        return 2 * num < len(manifest.machines)
    return False


class SpreadTensors(SavedTensors):
    """The tensors of a checkpoint on several machines: each is read from this machine if it is here as it was
    written, else from machines that have it, and has the digest in the manifest, if that has one.
    """

    def __init__(self, folder: Path, run: Path, manifest: Manifest, holders: Holders) -> None:
        super().__init__(folder, manifest.files)
        self._holders, self._where = holders, folder.relative_to(run).as_posix()

    def __getitem__(self, name: str) -> Tensor:
        file, place = self._places[name]
        if (self._folder / file.name).is_file():
            with suppress(BiremeError):
                found = super().__getitem__(name)
                if place.digest in ("", tensor_digest(found)):
                    return found
        path = f"{self._where}/{file.name}"
        addresses = self._holders.get(path, ())
        for own in (addresses, *((one,) for one in addresses)):
            data = read_range(own, path, place.begin, place.num_bytes, _STEP_S)
            found = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            tensor = place.tensor_of(found)
            if place.digest in ("", tensor_digest(tensor)):
                return tensor
        raise BiremeError(f"{name} in {path} is damaged on all machines that have it.")


# The folder of a run's checkpoints: who may write into it, and what is in it besides checkpoints.
#
# Hidden names are no checkpoints: `.in-use` is locked by the one run that writes, `.draft-…` is being
# written, `.gone-…` is being deleted. The last two are leftovers when no run holds the lock.

_LOCK = ".in-use"
_DRAFT, _GONE = ".draft-", ".gone-"
GRACE_S = 5.0
"""How long a run that was killed may hold the lock on, and another machine may not see what was written."""
_POLL_S = 0.05
_HAS_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)


class Hold:
    """The right to write checkpoints into a folder, which one run has at a time; it ends with the process.

    The folder is made if it is not there. `token` is new for each hold and can be read in the folder: a
    rank that finds it there looks into the same one. `on_doubt` is told where the file system has no locks.
    """

    def __init__(self, folder: Path, on_doubt: Tell) -> None:
        self.token = secrets.token_hex(8)
        with system_errors(f"Checkpoints cannot be written to {folder}", "Name a writable folder."):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(folder / _LOCK, "a+b")
            try:
                self._lock(folder, on_doubt)
                self._sign()
            except BaseException:
                self._file.close()
                raise

    def release(self) -> None:
        """Let other runs write there."""
        self._file.close()

    def _lock(self, folder: Path, on_doubt: Tell) -> None:
        deadline_s = time.monotonic() + GRACE_S
        try:
            while not _try_to_lock(self._file):
                if time.monotonic() > deadline_s:
                    raise BiremeError(
                        f"{folder} is in use: {_holder(folder)} writes checkpoints there, and two runs would "
                        "delete each other's. Stop that run first, or name another folder."
                    )
                time.sleep(_POLL_S)
        except OSError as error:
            if error.errno not in _HAS_NO_LOCKS:
                raise
            on_doubt(f"Files cannot be locked in {folder}: make sure that no other run writes there.")

    def _sign(self) -> None:
        note = {"process": os.getpid(), "machine": platform.node(), "token": self.token}
        self._file.truncate(0)
        disk.write(self._file, memoryview(json.dumps(note).encode()))
        disk.sync(self._file)


def wait_for_token(folder: Path, token: str) -> None:
    """Return when the run's token can be read in the folder; a `BiremeError` if it is another folder."""
    deadline_s = time.monotonic() + GRACE_S
    while _note(folder).get("token") != token:
        if time.monotonic() > deadline_s:
            raise BiremeError(
                f"{folder} on {platform.node()} is not the same folder as on rank 0, but a checkpoint is "
                "complete only if all ranks write into one folder. Name a folder that all machines share."
            )
        time.sleep(_POLL_S)


def draft_folder(folder: Path, name: str) -> Path:
    """Where a checkpoint is written before it is one; `name` is its own."""
    return folder / f"{_DRAFT}{name}"


def retire(path: Path) -> None:
    """Delete a checkpoint. Its name goes first, so that half of one is never found."""
    disk.rename(path, path.parent / f"{_GONE}{path.name}-{secrets.token_hex(4)}")
    _remove(path.parent, _GONE)  # others too that could not be deleted when it was their turn


def remove_leftovers(folder: Path) -> None:
    """Delete what an earlier run left half written or half deleted. Only for who holds the folder."""
    _remove(folder, _DRAFT)
    _remove(folder, _GONE)


def _remove(folder: Path, prefix: str) -> None:
    for path in folder.glob(f"{prefix}*"):
        shutil.rmtree(path, ignore_errors=True)


def _try_to_lock(file: FileIO) -> bool:
    """Whether the lock is this process's now. An `OSError` where there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(folder: Path) -> str:
    note = _note(folder)
    return (
        f"process {note['process']} on {note['machine']}"
        if note.keys() >= {"process", "machine"}
        else "a run"
    )


def _note(folder: Path) -> dict[str, object]:
    """What who holds the folder has written into the file that it locks."""
    try:
        note = json.loads((folder / _LOCK).read_bytes())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


_MOST_THREADS = 8
"""That read files at the same time: more only make a disk jump between them."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint, of which only the manifest was read.

    `passed_over` are newer ones that were found damaged on the way to it. One with `copies` has no files: it
    is in the memory of keepers. If machines share no folder, `holders` have the files that are not here.
    """

    folder: Path
    manifest: Manifest
    passed_over: tuple[Path, ...] = ()
    copies: CopySource | None = None
    holders: Holders = field(default_factory=dict)

    def snapshot(self) -> Snapshot:
        """The state of all ranks, by name. A tensor is read from its file or its keeper when it is used."""
        saved: Mapping[str, Tensor]
        if self.copies is not None:
            saved = self.copies.tensors()
        elif self.manifest.machines or self.holders:
            saved = SpreadTensors(self.folder, self.folder.parents[1], self.manifest, self.holders)
        else:
            saved = SavedTensors(self.folder, self.manifest.files)
        tensors = joined(saved)
        shares = self.manifest.extra.get(SHARES)
        known = shares if isinstance(shares, dict) else None
        return Snapshot(self.manifest.step, self.manifest.clip_scale, tensors, known)

    def damage(self) -> tuple[str, ...]:
        """Read all files; return a sentence for each that is not as written; none if all are intact. If
        machines share no folder, a file that is not here is no damage.
        """
        return tuple(self.bad_files(but=self.lacking()).values())

    def bad_files(self, *, but: Collection[FileEntry] = ()) -> dict[str, str]:
        """Read all files but these; return the name of each that is not as written, with a sentence."""
        files: list[FileEntry | RecordEntry] = [one for one in self.manifest.files if one not in but]
        if self.manifest.record is not None and not self.manifest.machines:
            files.append(self.manifest.record)
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1, len(files) or 1)) as threads:
            found = threads.map(lambda entry: _damage(self.folder / entry.name, entry), files)
            bad = zip((one.name for one in files), found, strict=True)
            return {name: sentence for name, sentence in bad if sentence is not None}

    def lacking(self) -> list[FileEntry]:
        """The files that are not here, because another machine wrote them."""
        if not self.manifest.machines:
            return []
        return [one for one in self.manifest.files if not (self.folder / one.name).exists()]

    def with_holders(self, tell: Tell | None) -> "Checkpoint":
        """This checkpoint of machines that share no folder, with those that have the files that are not here
        or damaged here, of which `tell` is told. Raises a `BiremeError` if a file is nowhere.
        """
        lacking = self.lacking()
        bad = self.bad_files(but=lacking)
        lacking += [one for one in self.manifest.files if one.name in bad]
        found = find_holders(self.folder.parents[1], self.folder, self.manifest, lacking)
        if tell is not None:
            for sentence in bad.values():
                tell(f"{sentence} Another machine has it.")
        return replace(self, holders=found)


def step_after(checkpoint: Checkpoint | None) -> int:
    """The batches trained before a checkpoint; 0 without one."""
    return 0 if checkpoint is None else checkpoint.manifest.step


def step_folder(folder: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` batches, existing or not."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The batches trained before a checkpoint, by the name of its folder."""
    return int(path.name.removeprefix("step-"))


def find_checkpoints(folder: Path) -> tuple[Path, ...]:
    """The folders of checkpoints in `folder`, oldest first, good or not; none if there is no such folder.

    What is being written, or was left half written, has another name and is not among them.
    """
    with system_errors(f"The checkpoint folder {folder} cannot be read"):
        try:
            found = [path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name) and path.is_dir()]
        except FileNotFoundError:
            return ()
    return tuple(sorted(found, key=step_of))


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`; its manifest is checked, its files are not read."""
    manifest = read_manifest(path)
    if STEP_FOLDER.fullmatch(path.name) and manifest.step != step_of(path):
        raise BiremeError(
            f"{path} holds the checkpoint of step {manifest.step}: it was renamed. Restore its name."
        )
    return Checkpoint(path, manifest)


def newest_good(folder: Path, on_bad: Tell | None = None, *, but: Collection[Path] = ()) -> Checkpoint | None:
    """The newest checkpoint in `folder` of which every byte is as it was written; None if there is none.

    All files of each one tried are read. A damaged one is passed over, and `on_bad` told of each of its bad
    files in a sentence. If there are some and all of them are damaged, that is a `BiremeError`. One rank
    should ask, and the others `open_checkpoint` what it has found. Those in `but` are passed over too. Files
    that are not here are looked for on the other machines of the run.
    """
    found = find_checkpoints(folder)
    newest = ""
    for index in reversed(range(len(found))):
        sentences: tuple[str, ...]
        try:
            checkpoint = open_checkpoint(found[index])
            if found[index] in but:
                sentences = (f"{found[index]} is not complete: fewer than half of its machines have it.",)
            elif checkpoint.manifest.machines:
                checkpoint, sentences = checkpoint.with_holders(on_bad), ()
            else:
                sentences = checkpoint.damage()
                if not sentences and noted_machines(folder.parent) is not None:
                    # One machine has written it, and others that do not see its folder may read it now.
                    holders = find_holders(folder.parent, found[index], checkpoint.manifest, ())
                    checkpoint = replace(checkpoint, holders=holders)
        except BiremeError as error:
            sentences = (str(error),)
        if not sentences:
            return replace(checkpoint, passed_over=found[index + 1 :])
        newest = newest or sentences[0]
        if on_bad is not None:
            for sentence in sentences:
                on_bad(sentence)
    if found:
        raise BiremeError(
            f"No checkpoint in {folder} is intact. The newest: {newest} Restore a copy of one, or start a "
            "new run in another folder."
        )
    return None


def _damage(path: Path, entry: FileEntry | RecordEntry) -> str | None:
    """What is wrong with a file, in a sentence."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes != entry.num_bytes:
            what = "truncated" if num_bytes < entry.num_bytes else "too long"
            return f"{path} is {what}: it has {num_bytes:,} bytes, and the manifest says {entry.num_bytes:,}."
        found = disk.digest_of(path)
    except FileNotFoundError:
        return f"{path} is missing, but the manifest lists it."
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}."
    if found.sha256 != entry.sha256:
        return (
            f"{path} is damaged: its SHA-256 begins with {found.sha256[:12]}, and the manifest says "
            f"{entry.sha256[:12]}."
        )
    return None
