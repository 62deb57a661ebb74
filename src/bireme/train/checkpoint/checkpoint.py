"""Reading checkpoints: which are in a folder, whether each is intact, and what they contain.

Never writes, and trusts only what it has checksummed: a run resumes from the newest checkpoint whose every
byte is as it was written.
"""

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bireme.errors import BiremeError
from bireme.runtime.piece_sections import joined
from bireme.runtime.snapshot import Snapshot
from bireme.train.checkpoint import disk
from bireme.train.checkpoint.manifest import SHARES, FileEntry, Manifest, RecordEntry, read_manifest
from bireme.train.checkpoint.shard import SavedTensors

__all__ = ["Checkpoint", "find_checkpoints", "newest_good", "open_checkpoint", "step_folder", "step_of"]

STEP_FOLDER = re.compile(r"step-(\d{8,})")
MOST_THREADS = 8
"""That read files at the same time: more only make a disk jump between them."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint, of which only the manifest was read.

    `passed_over` are newer ones that were found damaged on the way to it.
    """

    folder: Path
    manifest: Manifest
    passed_over: tuple[Path, ...] = ()

    def snapshot(self) -> Snapshot:
        """What all ranks held, by name; a tensor is read from its file whenever it is asked for."""
        tensors = joined(SavedTensors(self.folder, self.manifest.files))
        shares = self.manifest.extra.get(SHARES)
        known = shares if isinstance(shares, dict) else None
        return Snapshot(self.manifest.step, self.manifest.clip_scale, tensors, known)

    def damage(self) -> tuple[str, ...]:
        """Read all files; return a sentence for each that is not as written; none if all are intact."""
        files: list[FileEntry | RecordEntry] = [*self.manifest.files]
        if self.manifest.record is not None:
            files.append(self.manifest.record)
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1, len(files))) as threads:
            found = threads.map(lambda entry: _damage(self.folder / entry.name, entry), files)
            return tuple(sentence for sentence in found if sentence is not None)


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
    try:
        found = [path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name) and path.is_dir()]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise BiremeError(
            f"The checkpoint folder {folder} cannot be read: {error.strerror or error}."
        ) from error
    return tuple(sorted(found, key=step_of))


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`; its manifest is checked, its files are not read."""
    manifest = read_manifest(path)
    if STEP_FOLDER.fullmatch(path.name) and manifest.step != step_of(path):
        raise BiremeError(
            f"{path} holds the checkpoint of step {manifest.step}: it was renamed. Restore its name."
        )
    return Checkpoint(path, manifest)


def newest_good(folder: Path, on_bad: Callable[[str], None] | None = None) -> Checkpoint | None:
    """The newest checkpoint in `folder` of which every byte is as it was written; None if there is none.

    All files of each one tried are read. A damaged one is passed over, and `on_bad` told of each of its bad
    files in a sentence. If there are some and all of them are damaged, that is a `BiremeError`. One rank
    should ask, and the others `open_checkpoint` what it has found.
    """
    found = find_checkpoints(folder)
    newest = ""
    for index in reversed(range(len(found))):
        try:
            checkpoint = open_checkpoint(found[index])
            sentences = checkpoint.damage()
        except BiremeError as error:
            sentences = (str(error),)
        if not sentences:
            return Checkpoint(checkpoint.folder, checkpoint.manifest, found[index + 1 :])
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
