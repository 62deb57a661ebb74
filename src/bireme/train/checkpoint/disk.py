"""The few things checkpoints ask of a disk, each in one place, so that a disk's failures can be rehearsed.

Errors come as the system's own `OSError`: who knows what the file was for makes a sentence of it.
"""

import contextlib
import errno
import hashlib
import os
from io import FileIO
from pathlib import Path

from bireme.files import FileDigest

CHUNK_BYTES = 4 << 20
"""Read and written at once: much for a disk, and little compared with what a rank holds."""
_REFUSALS = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EBADF)
"""What file systems say that have no syncing of folders."""


def create(path: Path) -> FileIO:
    """A new file, open for writing; one that is there already is an error."""
    return FileIO(path, "xb")


def write(file: FileIO, data: memoryview) -> None:
    """Append all of the bytes to an open file."""
    while data:
        data = data[file.write(data) :]


def sync(file: FileIO) -> None:
    """Return when everything written to an open file is on the disk."""
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk, where the file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Give a file or folder another name, at which nothing may be but an empty folder."""
    old.rename(new)


def read(file: FileIO, into: memoryview) -> int:
    """Fill a buffer with the next bytes of an open file; how many there were, fewer only at its end."""
    num_read = 0
    while num_read < len(into) and (more := file.readinto(into[num_read:])):
        num_read += more
    return num_read


def digest_of(path: Path, *, from_disk: bool = False) -> FileDigest:
    """The digest of a whole file. With `from_disk` the system is asked to forget what it has of it."""
    digest, num_bytes = hashlib.sha256(), 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with FileIO(path, "rb") as file:
        if from_disk:
            _forget(file)
        while num_read := read(file, buffer):
            digest.update(buffer[:num_read])
            num_bytes += num_read
    return FileDigest(num_bytes, digest.hexdigest())


def _forget(file: FileIO) -> None:
    """Let the next read come from the disk, where the system can be asked for that."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
