"""Writing checkpoints while training goes on: each rank its own part, in a thread of its own.

A folder `step-…` is there only once every part was written, synced and read back, and its manifest too: it
is a draft of another name until then. What goes wrong costs that checkpoint, never the run or an older one.
"""

import contextlib
import dataclasses
import hashlib
import math
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torch import Tensor

from bireme.errors import BiremeError, system_reason, tell
from bireme.runtime.snapshot import Snapshot
from bireme.runtime.stores import Store
from bireme.train.checkpoint import disk
from bireme.train.checkpoint.agreement import (
    CheckpointAgreement,
    CheckpointVerdict,
    NoWordError,
    Opening,
    PartReport,
)
from bireme.train.checkpoint.checkpoint import (
    Checkpoint,
    Hold,
    draft_folder,
    find_checkpoints,
    open_checkpoint,
    remove_leftovers,
    retire,
    step_folder,
    step_of,
    wait_for_token,
)
from bireme.train.checkpoint.manifest import (
    MANIFEST,
    CheckpointMeta,
    FileEntry,
    Manifest,
    RecordEntry,
    plain_extra,
    read_manifest,
    write_manifest,
    write_new,
)
from bireme.train.checkpoint.shard import write_shard
from bireme.user_code import reason_of

# What rank 0 does with a draft: see that its parts belong together, make it a checkpoint, delete old ones.
#
# The name `step-…` is given last, when all of the draft is on the disk and was read back.


@dataclass(frozen=True, slots=True)
class _CheckpointDraft:
    """A checkpoint on its way. `name` is its own among all of a run's, failed ones too; `record` is the
    content of the record of the run's files, of which it has a copy.
    """

    step: int
    clip_scale: float
    name: str
    folder: Path
    meta: CheckpointMeta
    record: bytes | None = None
    machines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SpreadPlace:
    """The place of a rank among machines that share no folder: their names, the index of its own, and whether
    it is the rank that takes care of the folder there.
    """

    machines: tuple[str, ...]
    own: int
    is_first: bool


def _refuse_foreign(folder: Path, resumed_step: int | None, damaged: Collection[Path]) -> None:
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
    draft: _CheckpointDraft, reports: Sequence[PartReport], folder: Path, damaged: Collection[Path]
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
    _name(draft, folder, damaged)
    return manifest


def _name(draft: _CheckpointDraft, folder: Path, damaged: Collection[Path]) -> None:
    """Give a draft that is whole the name of a checkpoint."""
    target = step_folder(folder, draft.step)
    if target in damaged and target.exists():
        retire(target)
    disk.rename(draft.folder, target)
    try:
        disk.sync_folder(folder)
    except OSError:
        retire(target)
        raise


def _keepable(
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


def _delete_old(folder: Path, kept_steps: Sequence[int], damaged: Collection[Path]) -> None:
    """Delete damaged checkpoints and those older than the kept ones, which are verified and enough."""
    for path in find_checkpoints(folder):
        step = step_of(path)
        if step not in kept_steps and (step < kept_steps[0] or path in damaged):
            retire(path)


def _manifest(draft: _CheckpointDraft, files: list[FileEntry]) -> Manifest:
    record = None
    if draft.record is not None:
        record = RecordEntry(num_bytes=len(draft.record), sha256=hashlib.sha256(draft.record).hexdigest())
    more = {"record": record, "machines": [*draft.machines]}
    return Manifest.of(draft.meta, draft.step, draft.clip_scale, files, **more)


def _matching_files(draft: _CheckpointDraft, reports: Sequence[PartReport]) -> list[FileEntry]:
    """The files of all ranks, which must be of one moment, lie in the draft, and hold every name once."""
    files = [report.file for report in reports if report.file is not None]
    for report, file in zip(reports, files, strict=True):
        if (report.step, report.clip_scale) != (draft.step, draft.clip_scale):
            raise BiremeError(
                f"rank {report.rank} holds step {report.step} with the clipping factor {report.clip_scale} "
                f"and rank 0 step {draft.step} with {draft.clip_scale}, so they are from different moments"
            )
        is_here = not draft.machines or file.machine == files[0].machine
        if is_here and (draft.folder / file.name).stat().st_size != file.num_bytes:
            raise BiremeError(f"rank 0 sees another {file.name} than rank {report.rank} wrote")
    seen: set[str] = set()
    for name in (entry.name for file in files for entry in file.tensors):
        if name in seen:
            raise BiremeError(f"two ranks have written {name}")
        seen.add(name)
    return files


# Events about checkpoints that a run receives.


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint was written and verified; `num_bytes` over all ranks.

    `stall_s` is how long this rank's training waited, `write_s` the time from then until it was complete.
    """

    step: int
    folder: Path
    num_bytes: int
    stall_s: float
    write_s: float


@dataclass(frozen=True, slots=True)
class CheckpointWarning:
    """Something the user should know, in one or two sentences; the run continues."""

    step: int
    text: str


CheckpointEvent = CheckpointSaved | CheckpointWarning


LEAST_KEPT = 2
"""Checkpoints: the newest one may turn out to be damaged when it is needed."""
_PARTING_S = 5.0
"""How long a thread that was told to give up may take to do so."""


class CheckpointWriter:
    """Writes this rank's part of every checkpoint into `folder`, which all ranks share, in the background. If
    machines share none, `place` is this rank's: then each machine gets the files of its ranks, and the
    manifest. A checkpoint is saved once more than half of the machines have the manifest.

    All ranks must make one, with a `store` that serves nothing else of this kind, and save the same steps.
    `resumed_from` is what the run goes on from, `record` the content of the record of the run's files, which
    each checkpoint gets a copy of: only rank 0 needs them. A folder that another run writes to,
    or that holds checkpoints this run does not go on from, is refused with a `BiremeError` on every rank.

    `on_event` is called in the writer's thread; an exception of it comes out of the next call of a method.
    At least the newest `keep` good checkpoints stay; older ones are deleted once that many newer ones were
    verified by this run, which begins with those that it finds. `timeout_s` is how long a rank waits for
    another's part.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        num_ranks: int,
        store: Store,
        *,
        keep: int = 2,
        on_event: Callable[[CheckpointEvent], None],
        resumed_from: Checkpoint | None = None,
        record: bytes | None = None,
        place: SpreadPlace | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.keep = keep
        self._on_event, self._record, self._place = on_event, record, place
        self._agreement = CheckpointAgreement(store, rank, num_ranks, timeout_s=timeout_s)
        self._damaged = () if resumed_from is None else resumed_from.passed_over
        self._good: list[int] = []
        """Steps of the newest checkpoints that this run knows to be whole, rising; no more than kept."""
        self._num_attempts: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._tensors: Mapping[str, Tensor] = {}
        """On their way to the thread, which lets go of them as soon as they are written."""
        self._event_error: BaseException | None = None
        self._hold: Hold | None = None
        self._is_closed = False
        self._token = self._open(resumed_from) if rank == 0 else self._follow()
        if self._good and self._cares:
            self._start(self._clean_up, "clean-up")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # Who leaves because of an error shall not wait for ranks that may be gone.
        self.close(None if error is None else 0.0)

    @property
    def _cares(self) -> bool:
        """Whether this rank names and deletes what is in its folder."""
        return self.rank == 0 if self._place is None else self._place.is_first

    @property
    def newest_step(self) -> int | None:
        """The step of the newest checkpoint that this run knows to be whole; at first its start."""
        return self._good[-1] if self._good else None

    def has(self, step: int) -> bool:
        """Whether this run knows of a whole checkpoint of that step."""
        return step in self._good

    def save(self, snapshot: Snapshot, meta: CheckpointMeta, *, copied_s: float = 0.0) -> None:
        """Start writing the checkpoint of this snapshot, and return at once.

        If the one before is still being written, this waits for that first. The snapshot's tensors must not
        change any more. `copied_s` is how long taking it took: it is told as stall. A step that is a good
        checkpoint already is not written again.
        """
        called_s = time.monotonic()
        self.wait()
        if self._is_closed:
            raise BiremeError(f"The checkpoint writer for {self.folder} is already closed.")
        step = snapshot.num_trained
        if step in self._good:
            return
        if self._good and step < self._good[-1]:
            raise BiremeError(
                f"The checkpoint of step {step} would be older than that of step {self._good[-1]}, which "
                "already exists. A run saves its steps in order."
            )
        meta = dataclasses.replace(meta, extra=plain_extra(meta.extra))
        attempt = self._num_attempts[step] = self._num_attempts.get(step, 0) + 1
        name = f"{step}-{attempt}"
        path = draft_folder(self.folder, f"{name}-{self._token}")
        machines = () if self._place is None else self._place.machines
        draft = _CheckpointDraft(step, snapshot.clip_scale, name, path, meta, self._record, machines)
        self._tensors = snapshot.tensors
        stall_s = copied_s + time.monotonic() - called_s
        self._start(lambda: self._work(draft, stall_s), "checkpoint")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being written any more; whether that is so."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                return False
            self._thread = None
        if self._event_error is not None:
            error, self._event_error = self._event_error, None
            raise error
        return True

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for what is being written, give up after `timeout_s`, and let others write to the folder."""
        self._is_closed = True
        try:
            if not self.wait(timeout_s):
                self._agreement.give_up()
                self.wait(_PARTING_S)
        finally:
            # With a thread that hangs in the disk the folder stays this process's, until that ends.
            if self._hold is not None and self._thread is None:
                self._hold.release()
                self._hold = None

    # Opening: rank 0 takes the folder, the others follow.

    def _open(self, resumed_from: Checkpoint | None) -> str:
        step = None if resumed_from is None else resumed_from.manifest.step
        try:
            hold = self._take_folder(step)
            self._good = [] if step is None else [step]
            self._agreement.open(Opening(token=hold.token, good_steps=self._good))
        except BaseException as error:
            if self._hold is not None:
                self._hold.release()
            with contextlib.suppress(NoWordError):
                self._agreement.open(Opening(error=str(error) or type(error).__name__))
            if isinstance(error, NoWordError | OSError):
                raise BiremeError(
                    f"No checkpoint can be written to {self.folder}: {_reason(error)}."
                ) from error
            raise
        return hold.token

    def _take_folder(self, step: int | None) -> Hold:
        """Have the folder for this run, which goes on from a `step` if it resumes. If machines share none,
        later checkpoints here were never complete, or are lost with a machine.
        """
        hold = self._hold = Hold(self.folder, self._doubt)
        if self._place is not None:
            known = -1 if step is None else step
            later = [path for path in find_checkpoints(self.folder) if step_of(path) > known]
            self._damaged = (*self._damaged, *later)
        _refuse_foreign(self.folder, step, self._damaged)
        remove_leftovers(self.folder)
        return hold

    def _follow(self) -> str:
        try:
            opening = self._agreement.opening()
        except NoWordError as error:
            raise BiremeError(f"No checkpoint can be written to {self.folder}: {error}.") from error
        if opening.error is not None:
            raise BiremeError(opening.error)
        self._good = list(opening.good_steps)
        if self._place is None:
            wait_for_token(self.folder, opening.token)
        elif self._cares:
            self._take_folder(self.newest_step)
        return opening.token

    def _doubt(self, text: str) -> None:
        self._on_event(CheckpointWarning(self.newest_step or 0, text))

    # In the writer's thread.

    def _start(self, work: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=work, name=name, daemon=True)
        self._thread.start()

    def _clean_up(self) -> None:
        """Delete what runs that were killed have left beyond `keep`.

        Older checkpoints go only once `keep` newer ones were read back, so those are read first. Where there
        are no more than that, nothing is read.
        """
        try:
            good = _keepable(self.folder, self._good[-1], self.keep, self._damaged, lambda: self._is_closed)
            if len(good) == self.keep:
                self._good = good
                self._delete_old(good[-1])
        except BiremeError as error:
            self._on_event(CheckpointWarning(self._good[-1], str(error)))
        except BaseException as error:
            self._event_error = error

    def _work(self, draft: _CheckpointDraft, stall_s: float) -> None:
        try:
            began_s = time.monotonic()
            verdict = self._agree(draft, self._write_own(draft))
            if verdict is not None and verdict.error is None:
                self._good = [*self._good, draft.step][-self.keep :]
                where, write_s = step_folder(self.folder, draft.step), time.monotonic() - began_s
                saved = CheckpointSaved(draft.step, where, verdict.num_bytes, stall_s, write_s)
                self._on_event(saved)
                if self._cares and len(self._good) == self.keep:
                    self._delete_old(draft.step)
            elif verdict is not None:
                shutil.rmtree(draft.folder, ignore_errors=True)
                kept = f"the newest is that of step {self._good[-1]}" if self._good else "there is none yet"
                text = f"The checkpoint of step {draft.step} failed; {kept}. {verdict.error}"
                self._on_event(CheckpointWarning(draft.step, text))
        except BaseException as error:
            self._event_error = error

    def _write_own(self, draft: _CheckpointDraft) -> PartReport:
        """Write and verify this rank's part. Whatever goes wrong is in the report, for all to know."""
        path = draft.folder / f"rank-{self.rank:04d}.safetensors"
        if not math.isfinite(draft.clip_scale):
            self._tensors = {}
            why = f"Rank {self.rank} clips by {draft.clip_scale}, which is nothing to go on from."
            return PartReport(rank=self.rank, step=draft.step, error=why)
        try:
            entry = self._write_verified(path)
        except Exception as error:
            where = "" if self._place is None else f" on {self._place.machines[self._place.own]}"
            why = f"Rank {self.rank}{where} could not write {path}: {_reason(error)}."
            if self._place is not None and self._place.own:
                tell(why)  # rank 0 reports it on another machine
            return PartReport(rank=self.rank, step=draft.step, error=why)
        return PartReport(rank=self.rank, step=draft.step, clip_scale=draft.clip_scale, file=entry)

    def _write_verified(self, path: Path) -> FileEntry:
        tensors, self._tensors = self._tensors, {}
        path.parent.mkdir(parents=True, exist_ok=True)
        entry = write_shard(path, tensors, None if self._place is None else self._place.own)
        del tensors
        disk.sync_folder(path.parent)
        found = disk.digest_of(path, from_disk=True)
        if (found.num_bytes, found.sha256) != (entry.num_bytes, entry.sha256):
            raise BiremeError(
                "what was read back differs from what was written; the disk or the memory is faulty"
            )
        return entry

    def _agree(self, draft: _CheckpointDraft, own: PartReport) -> CheckpointVerdict | None:
        """What became of a draft, for all ranks the same; None, and a warning, where there is no word."""
        if self.rank == 0:
            verdict = self._judge(draft, own)
            with contextlib.suppress(NoWordError):  # it is what it is, whether others can be told or not
                self._agreement.judge(draft.name, verdict)
            return verdict if self._place is None else self._held_by_most(draft, verdict, self._place)
        try:
            self._agreement.report(draft.name, own)
            verdict = self._agreement.verdict(draft.name)
            return verdict if self._place is None else self._named_here(draft, verdict)
        except NoWordError as error:
            known = f"Rank {self.rank} does not know whether the checkpoint of step {draft.step} succeeded"
            self._on_event(CheckpointWarning(draft.step, f"{known}: {error}."))
            return None

    def _judge(self, draft: _CheckpointDraft, own: PartReport) -> CheckpointVerdict:
        """Make a checkpoint of the draft if all parts are there."""
        others = self._agreement.reports(draft.name)
        reports = [own, *(report for report in others if isinstance(report, PartReport))]
        errors = [report.error for report in reports if report.error is not None]
        errors += [sentence for sentence in others if isinstance(sentence, str)]
        if errors:
            return CheckpointVerdict(error=" ".join(errors))
        try:
            manifest = publish(draft, reports, self.folder, self._damaged)
        except Exception as error:
            where = step_folder(self.folder, draft.step)
            return CheckpointVerdict(error=f"{where} could not be completed: {_reason(error)}.")
        text = "" if self._place is None else (step_folder(self.folder, draft.step) / MANIFEST).read_text()
        return CheckpointVerdict(num_bytes=manifest.num_bytes, manifest=text)

    # If machines share no folder: each writes the manifest into its own.

    def _named_here(self, draft: _CheckpointDraft, verdict: CheckpointVerdict) -> CheckpointVerdict:
        """Make this machine's part of a checkpoint one too, and report that to rank 0."""
        error = None
        if self._cares and verdict.error is None:
            try:
                draft.folder.mkdir(parents=True, exist_ok=True)
                write_new(draft.folder / MANIFEST, verdict.manifest.encode())
                read_manifest(draft.folder)
                _name(draft, self.folder, self._damaged)
            except (OSError, BiremeError) as failure:
                error = _reason(failure)
        if verdict.error is None:
            self._agreement.report(
                f"{draft.name}-named", PartReport(rank=self.rank, step=draft.step, error=error)
            )
        return verdict if error is None else CheckpointVerdict(error=error)

    def _held_by_most(
        self, draft: _CheckpointDraft, verdict: CheckpointVerdict, place: SpreadPlace
    ) -> CheckpointVerdict:
        """The verdict, once more than half of the machines of this world have the manifest."""
        if verdict.error is not None:
            return verdict
        others = self._agreement.reports(f"{draft.name}-named")
        self._agreement.forget_reports(f"{draft.name}-named")
        failed = [one.error if isinstance(one, PartReport) else one for one in others]
        errors = [error for error in failed if error is not None]
        if 2 * len(errors) >= len(place.machines):
            return CheckpointVerdict(
                error=f"Its manifest is not on more than half of the machines: {errors[0]}"
            )
        return verdict

    def _delete_old(self, step: int) -> None:
        try:
            _delete_old(self.folder, self._good, self._damaged)
        except (OSError, BiremeError) as error:
            text = f"Old checkpoints in {self.folder} could not be deleted: {_reason(error)}."
            self._on_event(CheckpointWarning(step, text))


def _reason(error: Exception) -> str:
    """Why something failed, as the end of a sentence without its full stop."""
    if isinstance(error, OSError | BiremeError | NoWordError):
        return system_reason(error).removesuffix(".")
    return reason_of(error)
