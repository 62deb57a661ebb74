"""Writing files so that nobody ever sees half of one."""

import contextlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from bireme.errors import BiremeError

__all__ = ["write_bytes_atomically", "write_chunks_atomically", "write_text_atomically"]


def write_text_atomically(path: Path, text: str) -> None:
    """Put `text` at `path`, in UTF-8: whole, or not at all, whatever happens meanwhile."""
    write_chunks_atomically(path, (text.encode(),))


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """Put `data` at `path`: whole, or not at all, whatever happens meanwhile."""
    write_chunks_atomically(path, (data,))


def write_chunks_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Put the chunks at `path`, one behind the other: all, or nothing, whatever happens meanwhile.

    They are written to a file of another name in the same folder, which is renamed once it is on the disk.
    A file that was there before keeps its permissions.
    """
    path = path.resolve()
    draft = path.parent / f".bireme-{secrets.token_hex(8)}.tmp"
    try:
        if not path.parent.is_dir():
            raise BiremeError(f"{path} cannot be written: there is no folder {path.parent}. Make it first.")
        if path.is_dir():
            raise BiremeError(f"{path} cannot be written: it is a folder. Name a file in it.")
        if path.exists() and not path.is_file():
            raise BiremeError(f"{path} cannot be written: it is no ordinary file. Name another one.")
        with draft.open("xb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            draft.chmod(path.stat().st_mode & 0o777)
        draft.replace(path)
    except OSError as error:
        raise BiremeError(
            f"{path} cannot be written: {error.strerror or error}. What was there before is untouched."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename last through a power cut, where the system lets a folder be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
