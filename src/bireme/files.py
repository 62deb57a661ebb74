"""Files: read as text, and written in one step, so that no reader finds a part; checked by their digests."""

import contextlib
import ctypes
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory

from bireme.errors import BiremeError, system_errors

SCRATCH = "BIREME_SCRATCH"
"""The variable with a folder that another process removes after this one has ended, even if it was killed."""
_UNCHANGED = "The old content is unchanged."


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What tells a file's content from every other: its length and its SHA-256 in hexadecimal digits."""

    num_bytes: int
    sha256: str


def scratch_folder() -> TemporaryDirectory[str]:
    """A temporary folder: where `SCRATCH` names a folder within that, so that it goes even after a kill."""
    return TemporaryDirectory(dir=os.environ.get(SCRATCH))


def path_within(folder: Path, name: str) -> Path:
    """The path of a name from another machine. Raises a `BiremeError` if it leads out of the folder."""
    pure = PurePath(name)
    if pure.anchor or ".." in pure.parts or "\0" in name:
        raise BiremeError(f"{name!r} comes from another machine and leads out of {folder}: it is not used.")
    return folder / pure


def read_text(path: Path, what: str = "file") -> str:
    """The text of a file in UTF-8; `what` is what to call a file that is not there."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise BiremeError(f"There is no {what} {path}.") from None
    except OSError as error:
        raise BiremeError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1:,} is 0x{error.object[error.start]:02x}"
        raise BiremeError(
            f"{path} is not a text in UTF-8: {byte}. Name another file, or save this one as UTF-8."
        ) from error


def write_text_atomically(path: Path, text: str, *, is_private: bool = False) -> None:
    """Put `text` at `path`, in UTF-8: whole, or not at all, whatever happens meanwhile."""
    write_chunks_atomically(path, (text.encode(),), is_private=is_private)


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """Put `data` at `path`: whole, or not at all, whatever happens meanwhile."""
    write_chunks_atomically(path, (data,))


def write_chunks_atomically(path: Path, chunks: Iterable[bytes], *, is_private: bool = False) -> None:
    """Write the chunks to `path`, one after the other: all or nothing, whatever happens meanwhile.

    They are written to a file of another name in the same folder, which is renamed once it is on the disk.
    A file that was there before keeps its permissions. With `is_private` no other user can ever read the new
    one.
    """
    path = path.resolve()
    draft = path.parent / f".bireme-{secrets.token_hex(8)}.tmp"
    try:
        with system_errors(f"{path} cannot be written", _UNCHANGED):
            if not path.parent.is_dir():
                raise BiremeError(
                    f"{path} cannot be written: there is no folder {path.parent}. Make it first."
                )
            if path.is_dir():
                raise BiremeError(f"{path} cannot be written: it is a folder. Name a file in it.")
            if path.exists() and not path.is_file():
                raise BiremeError(f"{path} cannot be written: it is not an ordinary file. Name another one.")
            draft.touch(0o600 if is_private else 0o666, exist_ok=False)
            with draft.open("wb") as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
            if path.exists() and not is_private:
                draft.chmod(path.stat().st_mode & 0o777)
            draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    _sync_folder(path.parent)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill, which takes the place of `path` at the end: whole, or not at all.

    All of it is on the disk before. Where the system can swap two folders in one step, there is at every
    moment either the old one or the new one; elsewhere, after a power cut between two steps, the old one may
    be found next to it as `.NAME.before-…`, and the next call puts it back. An error leaves the old one.
    """
    path = path.resolve()
    beginning, mark = f".{path.name}", secrets.token_hex(8)
    draft, before = (path.with_name(f"{beginning}.{what}-{mark}") for what in ("draft", "before"))
    try:
        with system_errors(f"{path} cannot be written", _UNCHANGED):
            path.parent.mkdir(parents=True, exist_ok=True)
            _tidy_up(path)
            draft.mkdir()
            yield draft
            _sync_tree(draft)
            if not path.exists():
                draft.replace(path)
            elif not _swapped(draft, path):
                path.replace(before)
                draft.replace(path)
            _sync_folder(path.parent)
    finally:
        if before.exists() and not path.exists():
            before.replace(path)
        for leftover in (draft, before):
            shutil.rmtree(leftover, ignore_errors=True)


def cut_half_line(path: Path) -> None:
    """Take away what a process that was killed has left of the last line of a file, for the next would go on
    in it.
    """
    with path.open("r+b") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


def free_bytes(path: Path) -> int | None:
    """The bytes that this user may write at a path, which need not exist; None if that is not known."""
    there = next((one for one in (path, *path.absolute().parents) if one.is_dir()), None)
    try:
        usage = None if there is None else shutil.disk_usage(there)
    except OSError:
        return None
    return usage.free if usage is not None and usage.total else None  # some file systems count nothing


def _tidy_up(path: Path) -> None:
    """Put back or remove what a call that was killed has left next to a folder."""
    for before in path.parent.glob(f".{path.name}.before-*"):
        if path.exists():
            shutil.rmtree(before, ignore_errors=True)
        else:
            before.replace(path)
    for draft in path.parent.glob(f".{path.name}.draft-*"):
        shutil.rmtree(draft, ignore_errors=True)


_EXCHANGE = 2
"""RENAME_EXCHANGE of Linux: two names change places in one step."""


def _swapped(one: Path, other: Path) -> bool:
    """Let two folders change their names in one step. Returns whether the system can."""
    try:
        call = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here = -100  # AT_FDCWD, though the paths are absolute
    return int(call(here, os.fsencode(one), here, os.fsencode(other), _EXCHANGE)) == 0


def _sync_tree(folder: Path) -> None:
    """Return when all files of a folder, and their names, are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Make the rename last through a power cut, where the system lets a folder be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
