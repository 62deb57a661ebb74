"""Checkpoints whose files are on the disks of several machines, and the tensors that are read from there.

Where machines share no folder, each has the files that its ranks wrote and copies of those of others, and the
manifest, which lists all files. `machines.json` in the folder of the run has the addresses at which the
machines of the present start serve their folders (`runtime/copies/folder_server.py`).
"""

import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from bireme.errors import BiremeError
from bireme.files import FileDigest, path_within, write_text_atomically
from bireme.runtime.copies.folder_server import (
    holders_of,
    read_file,
    read_range,
    steps_at,
)
from bireme.runtime.copies.keeper import KeeperAddress
from bireme.train.checkpoint import disk
from bireme.train.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    manifest_in,
    read_manifest,
    write_new,
)
from bireme.train.checkpoint.shard import SavedTensors, places_in, tensor_digest

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


@dataclass(frozen=True, slots=True)
class Holders:
    """The machines that have the files of one checkpoint. Names are relative to the folder of the run."""

    files: Mapping[str, tuple[KeeperAddress, ...]] = field(default_factory=dict)


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
    return Holders(found)


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
        draft.mkdir(parents=True)
        write_new(draft / MANIFEST, text)
        disk.rename(draft, path)
    except OSError as error:
        raise BiremeError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _is_minor(path: Path, versions: Mapping[FileDigest, Sequence[KeeperAddress]]) -> bool:
    """Whether fewer than half of the machines of a checkpoint have its manifest."""
    with suppress(OSError, BiremeError):
        manifest, sha256 = read_manifest(path), disk.digest_of(path / MANIFEST).sha256
        num = 1 + sum(len(holding) for served, holding in versions.items() if served.sha256 == sha256)
        return 2 * num < len(manifest.machines)
    return False


class SpreadTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint on several machines: each is read from this machine if it is here as it was
    written, else from machines that have it, and has the digest in the manifest.
    """

    def __init__(self, folder: Path, run: Path, manifest: Manifest, holders: Holders) -> None:
        self._folder, self._holders = folder, holders
        self._where = folder.relative_to(run).as_posix()
        self._local = SavedTensors(folder, manifest.files)
        self._places = {
            place.entry.name: (file, place) for file in manifest.files for place in places_in(file)
        }

    def __getitem__(self, name: str) -> Tensor:
        file, place = self._places[name]
        if (self._folder / file.name).is_file():
            with suppress(BiremeError):
                found = self._local[name]
                if tensor_digest(found) == place.digest:
                    return found
        addresses = self._holders.files.get(f"{self._where}/{file.name}", ())
        path = f"{self._where}/{file.name}"
        for own in (addresses, *((one,) for one in addresses)):
            data = read_range(own, path, place.begin, place.num_bytes, _STEP_S)
            found = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            tensor = found.view(getattr(torch, place.entry.dtype)).reshape(place.entry.shape)
            if tensor_digest(tensor) == place.digest:
                return tensor
        raise BiremeError(f"{name} in {path} is damaged on all machines that have it.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places
