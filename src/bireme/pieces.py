"""Files of another machine of which this machine has the pieces that it has needed so far.

    model.safetensors            as long as the whole file, with holes
    .model.safetensors.pieces    which file it is, and the SHA-256 of each piece that is here

The record is removed once all pieces are here. A hole reads as zeros, so a reader of a file that may be
partial calls `check_here` before it reads. Pieces are written under the lock of their folder.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from bireme.errors import BiremeError

PIECE_BYTES = 1 << 16
"""The last piece of a file may be shorter. A batch of shuffled samples needs a piece for each sample."""
_HEAD_BYTES, _DIGEST_BYTES = 1 << 12, 32
_NONE = bytes(_DIGEST_BYTES)
Came = Callable[[str, int], None]
"""Gets the address that bytes of a file came from, and how many."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What distinguishes the content of a file from earlier and later ones: its length and time of change."""

    num_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileIdentity":
        """The identity of a file. Of a partial file that is the identity of the whole file elsewhere."""
        if (partial := PieceFile.at(path)) is not None:
            return partial.identity
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class PieceFile:
    """A partial file at `path`; machines that have the file serve it under `name`."""

    path: Path
    name: str
    identity: FileIdentity

    @classmethod
    def at(cls, path: Path) -> Self | None:
        """The partial file at a path; None if the file there is whole, or there is none."""
        try:
            with _record(path).open("rb") as record:
                head = json.loads(record.read(_HEAD_BYTES))
            return cls(path, head.pop("name"), FileIdentity(**head))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise BiremeError(f"{_record(path)} cannot be read ({error}). Delete it and {path}.") from error

    @classmethod
    def begun(cls, path: Path, name: str, identity: FileIdentity) -> Self | None:
        """The partial file of this identity at a path, with the pieces that are there already. None if the
        whole file is there.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        found = cls(path, name, identity)
        head = json.dumps({"name": name, **asdict(identity)}).encode().ljust(_HEAD_BYTES)
        if len(head) > _HEAD_BYTES:
            raise BiremeError(f"{name} of another machine has a name that is too long.")
        with found.locked():
            is_begun = False
            with suppress(OSError, BiremeError):  # no file, or a record that a crash has damaged
                is_begun = path.stat().st_size == identity.num_bytes and FileIdentity.of(path) == identity
            if is_begun and not _record(path).exists():
                return None
            if not is_begun:
                remove(path)
            with _record(path).open("r+b" if is_begun else "xb") as record:
                record.write(head)
            if not is_begun:
                with path.open("xb") as file:  # no file without a record has holes
                    file.truncate(identity.num_bytes)
            return None if found.finish() else found

    @property
    def num_pieces(self) -> int:
        """The pieces of the whole file."""
        return -(-self.identity.num_bytes // PIECE_BYTES)

    def size_of(self, piece: int) -> int:
        """The bytes of a piece."""
        return min(PIECE_BYTES, self.identity.num_bytes - piece * PIECE_BYTES)

    def digests(self, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, bytes | None]]:
        """The pieces in ranges of pieces, each with its SHA-256, None if the piece is not here. If the file
        has become whole there are none.
        """
        with suppress(FileNotFoundError), _record(self.path).open("rb") as record:
            for asked_first, asked_end in ranges:
                first, end = max(asked_first, 0), min(asked_end, self.num_pieces)
                num_bytes = _DIGEST_BYTES * max(end - first, 0)
                found = os.pread(record.fileno(), num_bytes, _HEAD_BYTES + _DIGEST_BYTES * first)
                for place, begin in enumerate(range(0, num_bytes, _DIGEST_BYTES)):
                    own = found[begin : begin + _DIGEST_BYTES]
                    yield first + place, None if own in (_NONE, b"") else own

    def missing(self, ranges: Iterable[tuple[int, int]] | None = None) -> list[int]:
        """The pieces that are not here and have bytes of these ranges, or of the file, in their order."""
        whole = [(0, self.identity.num_bytes)] if ranges is None else ranges
        places = ((begin // PIECE_BYTES, -(-end // PIECE_BYTES)) for begin, end in whole if begin < end)
        return sorted({piece for piece, digest in self.digests(places) if digest is None})

    def num_missing_bytes(self, ranges: Iterable[tuple[int, int]] | None = None) -> int:
        """The bytes of these pieces."""
        return sum(map(self.size_of, self.missing(ranges)))

    def put(self, pieces: Mapping[int, tuple[bytes, bytes]]) -> None:
        """Write pieces, each given after its SHA-256, and record these once the pieces are on the disk. Into
        a file that has become whole, or was begun anew, nothing is written.
        """
        if not self._is_there():
            return
        with self.path.open("r+b") as file, _record(self.path).open("r+b") as record:
            for piece, (_, data) in pieces.items():
                file.seek(piece * PIECE_BYTES)
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            for piece, (digest, _) in pieces.items():
                record.seek(_HEAD_BYTES + _DIGEST_BYTES * piece)
                record.write(digest)

    def finish(self) -> bool:
        """Remove the record if all pieces are here. Returns whether the file is whole."""
        if not self._is_there():
            return False
        found = _record(self.path).read_bytes()[_HEAD_BYTES:]
        if len(found) < _DIGEST_BYTES * self.num_pieces or _NONE in found:
            return False
        os.utime(self.path, ns=(self.identity.changed_ns, self.identity.changed_ns))
        _record(self.path).unlink()
        return True

    def _is_there(self) -> bool:
        now = PieceFile.at(self.path)
        return now is not None and now.identity == self.identity

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from fetching in the same folder meanwhile, if the file system has locks."""
        with ExitStack() as stack:
            with suppress(OSError, ImportError):
                import fcntl  # There is none on Windows.

                folder = os.open(self.path.parent, os.O_RDONLY)
                stack.callback(os.close, folder)
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield


def _record(path: Path) -> Path:
    return path.with_name(f".{path.name}.pieces")


def is_record(path: Path) -> bool:
    """Whether the name of a file is that of a record."""
    return re.fullmatch(r"\..+\.pieces", path.name) is not None


def remove(path: Path) -> None:
    """Remove a file, and its record if it is partial."""
    path.unlink(missing_ok=True)
    _record(path).unlink(missing_ok=True)


def partial_files(path: Path) -> Iterator[PieceFile]:
    """The partial files in a folder and its folders, or the one at a path."""
    records = path.rglob(".*.pieces") if path.is_dir() else [_record(path)]
    names = (one.with_name(one.name.removeprefix(".").removesuffix(".pieces")) for one in records)
    return filter(None, map(PieceFile.at, names))


def check_here(path: Path, begin: int, end: int) -> None:
    """Refuse to read bytes of a file that are not on this machine."""
    partial = PieceFile.at(path)
    if partial is not None and partial.missing([(begin, end)]):
        raise BiremeError(
            f"This machine has only some pieces of {path}, and not those that are read. Start the work with "
            "a machine that has the file: the pieces are fetched from there."
        )


def as_ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as ranges of consecutive ones, each without its end."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found
