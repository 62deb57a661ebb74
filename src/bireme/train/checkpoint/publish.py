"""What rank 0 does with a draft: see that its parts belong together, make it a checkpoint, delete old ones.

The name `step-…` is given last, when all of the draft is on the disk and was read back.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import bireme
from bireme.errors import BiremeError
from bireme.train.checkpoint import disk
from bireme.train.checkpoint.agreement import PartReport
from bireme.train.checkpoint.checkpoint import find_checkpoints, open_checkpoint, step_folder, step_of
from bireme.train.checkpoint.folder import retire
from bireme.train.checkpoint.manifest import (
    CheckpointMeta,
    FileEntry,
    Manifest,
    RecordEntry,
    read_manifest,
    write_manifest,
    write_new,
)

__all__ = ["CheckpointDraft", "delete_old", "keepable", "publish", "refuse_foreign"]


@dataclass(frozen=True, slots=True)
class CheckpointDraft:
    """A checkpoint on its way. `name` is its own among all of a run's, failed ones too; `record` is the
    content of the record of the run's files, of which it has a copy.
    """

    step: int
    clip_scale: float
    name: str
    folder: Path
    meta: CheckpointMeta
    record: bytes | None = None


def refuse_foreign(folder: Path, resumed_step: int | None, damaged: Collection[Path]) -> None:
    """Refuse a folder with checkpoints that a run does not go on from: two runs' would be mixed."""
    found = [path for path in find_checkpoints(folder) if path not in damaged]
    newest = step_of(found[-1]) if found else -1
    if resumed_step is None and found:
        raise BiremeError(
            f"{folder} holds {len(found)} checkpoints of another run, up to step {newest}. Resume from the "
            "newest, or name another folder."
        )
    if resumed_step is not None and newest > resumed_step:
        raise BiremeError(
            f"{folder} holds a checkpoint of step {newest}, newer than step {resumed_step} from which this "
            "run resumes. Resume from the newest, name another folder, or move the newer ones away."
        )


def publish(
    draft: CheckpointDraft, reports: Sequence[PartReport], folder: Path, damaged: Collection[Path]
) -> Manifest:
    """Make a checkpoint in `folder` of a draft whose parts were all written; its manifest.

    One of the same step is in the way, unless it is among the `damaged`. If anything fails, there is none.
    """
    manifest = _manifest(draft, _matching_files(draft, reports))
    if draft.record is not None and manifest.record is not None:
        write_new(draft.folder / manifest.record.name, draft.record)
    write_manifest(draft.folder, manifest)
    disk.sync_folder(draft.folder)
    if read_manifest(draft.folder) != manifest:
        raise BiremeError("its manifest differs from what was written")
    target = step_folder(folder, draft.step)
    if target in damaged and target.exists():
        retire(target)
    disk.rename(draft.folder, target)
    try:
        disk.sync_folder(folder)
    except OSError:
        retire(target)
        raise
    return manifest


def keepable(
    folder: Path, newest: int, keep: int, damaged: Collection[Path], is_over: Callable[[], bool]
) -> list[int]:
    """Steps of the `keep` most recent whole checkpoints up to `newest`, which is known to be whole, rising.

    Each of the others is read back. There are fewer than `keep` steps in the result if no more than `keep`
    checkpoints are there (then none is read), if too few of them are whole, or if `is_over` says so.
    """
    found = [path for path in find_checkpoints(folder) if path not in damaged]
    good = [newest]
    if len(found) <= keep:
        return good
    for path in reversed(found):
        if len(good) == keep or is_over():
            break
        if step_of(path) < newest and _is_whole(path):
            good.insert(0, step_of(path))
    return good


def _is_whole(path: Path) -> bool:
    try:
        return not open_checkpoint(path).damage()
    except BiremeError:
        return False


def delete_old(folder: Path, kept_steps: Sequence[int], damaged: Collection[Path]) -> None:
    """Delete damaged checkpoints and those older than the kept ones, which are verified and enough."""
    for path in find_checkpoints(folder):
        step = step_of(path)
        if step not in kept_steps and (step < kept_steps[0] or path in damaged):
            retire(path)


def _manifest(draft: CheckpointDraft, files: list[FileEntry]) -> Manifest:
    record = None
    if draft.record is not None:
        record = RecordEntry(num_bytes=len(draft.record), sha256=hashlib.sha256(draft.record).hexdigest())
    return Manifest(
        step=draft.step,
        next_batch=draft.meta.next_batch,
        clip_scale=draft.clip_scale,
        seed=draft.meta.seed,
        schedule=draft.meta.schedule,
        num_stages=draft.meta.num_stages,
        width=draft.meta.width,
        graph_hash=draft.meta.graph_hash,
        torch_version=str(torch.__version__),
        bireme_version=bireme.__version__,
        extra=draft.meta.extra,
        files=files,
        record=record,
    )


def _matching_files(draft: CheckpointDraft, reports: Sequence[PartReport]) -> list[FileEntry]:
    """The files of all ranks, which must be of one moment, lie in the draft, and hold every name once."""
    files = [report.file for report in reports if report.file is not None]
    for report, file in zip(reports, files, strict=True):
        if (report.step, report.clip_scale) != (draft.step, draft.clip_scale):
            raise BiremeError(
                f"rank {report.rank} holds step {report.step} with the clipping factor {report.clip_scale} "
                f"and rank 0 step {draft.step} with {draft.clip_scale}, so they are from different moments"
            )
        if (draft.folder / file.name).stat().st_size != file.num_bytes:
            raise BiremeError(f"rank 0 sees another {file.name} than rank {report.rank} wrote")
    seen: set[str] = set()
    for name in (entry.name for file in files for entry in file.tensors):
        if name in seen:
            raise BiremeError(f"two ranks have written {name}")
        seen.add(name)
    return files
