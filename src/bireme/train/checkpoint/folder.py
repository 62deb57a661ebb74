"""The folder of a run's checkpoints: who may write into it, and what is in it besides checkpoints.

Hidden names are nobody's checkpoints: `.in-use` is locked by the one run that writes, `.draft-…` is being
written, `.gone-…` is being deleted. The last two are leftovers when no run holds the lock.
"""

import errno
import json
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from bireme.errors import BiremeError
from bireme.train.checkpoint import disk

__all__ = ["Hold", "draft_folder", "remove_leftovers", "retire", "wait_for_token"]

LOCK = ".in-use"
DRAFT, GONE = ".draft-", ".gone-"
GRACE_S = 5.0
"""How long a run that was killed may hold the lock on, and another machine may not see what was written."""
POLL_S = 0.05
HAS_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)


class Hold:
    """The right to write checkpoints into a folder, which one run has at a time; it ends with the process.

    The folder is made if it is not there. `token` is new for each hold and can be read in the folder: a
    rank that finds it there looks into the same one. `on_doubt` is told where the file system has no locks.
    """

    def __init__(self, folder: Path, on_doubt: Callable[[str], None]) -> None:
        self.token = secrets.token_hex(8)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(folder / LOCK, "a+b")
            try:
                self._lock(folder, on_doubt)
                self._sign()
            except BaseException:
                self._file.close()
                raise
        except OSError as error:
            raise BiremeError(
                f"Checkpoints cannot be written to {folder}: {error.strerror or error}. Name a writable "
                "folder."
            ) from error

    def release(self) -> None:
        """Let other runs write there."""
        self._file.close()

    def _lock(self, folder: Path, on_doubt: Callable[[str], None]) -> None:
        deadline_s = time.monotonic() + GRACE_S
        try:
            while not _try_to_lock(self._file):
                if time.monotonic() > deadline_s:
                    raise BiremeError(
                        f"{folder} is in use: {_holder(folder)} writes checkpoints there, and two runs would "
                        "delete each other's. Stop that run first, or name another folder."
                    )
                time.sleep(POLL_S)
        except OSError as error:
            if error.errno not in HAS_NO_LOCKS:
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
        time.sleep(POLL_S)


def draft_folder(folder: Path, name: str) -> Path:
    """Where a checkpoint is written before it is one; `name` is its own."""
    return folder / f"{DRAFT}{name}"


def retire(path: Path) -> None:
    """Delete a checkpoint. Its name goes first, so that half of one is never found."""
    disk.rename(path, path.parent / f"{GONE}{path.name}-{secrets.token_hex(4)}")
    _remove(path.parent, GONE)  # others too that could not be deleted when it was their turn


def remove_leftovers(folder: Path) -> None:
    """Delete what an earlier run left half written or half deleted. Only for who holds the folder."""
    _remove(folder, DRAFT)
    _remove(folder, GONE)


def _remove(folder: Path, prefix: str) -> None:
    for path in folder.glob(f"{prefix}*"):
        shutil.rmtree(path, ignore_errors=True)


def _try_to_lock(file: FileIO) -> bool:
    """Whether the lock is this process's now. An `OSError` where there are no locks."""
    try:
        import fcntl
    except ImportError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
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
        note = json.loads((folder / LOCK).read_bytes())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}
