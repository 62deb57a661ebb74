"""Files of another machine of which this machine has the pieces that it has needed so far.

    model.safetensors            as long as the whole file, with holes
    .model.safetensors.pieces    which file it is, and the SHA-256 of each piece that is here

The record is removed once all pieces are here. A hole reads as zeros: a reader of a file that may be partial
calls `check_here` before.
"""

import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from bireme.errors import BiremeError

PIECE_BYTES = 1 << 16
"""The last piece of a file may be shorter. A batch of shuffled samples needs a piece for each sample."""
_HEAD_BYTES, _DIGEST_BYTES = 1 << 12, 32
_NONE = bytes(_DIGEST_BYTES)
RECORD = re.compile(r"\..+\.pieces(\..*)?")
"""The name of a record, and of its drafts."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What distinguishes the content of a file from earlier and later ones: its length and time of change."""

    num_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """The identity of a file. Of a partial file that is the identity of the whole file elsewhere."""
        if (partial := PieceFile.at(path)) is not None:
            return cls(partial.identity.num_bytes, partial.identity.changed_ns)
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
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise BiremeError(f"{_record(path)} cannot be read ({error}). Delete it and {path}.") from error
        return cls(path, head.pop("name"), FileIdentity(**head))

    @classmethod
    def begun(cls, path: Path, name: str, identity: FileIdentity) -> Self | None:
        """The partial file of this identity at a path, with the pieces that are there already. None if the
        whole file is there.
        """
        before = cls.at(path)
        if before is None and path.is_file() and FileIdentity.of(path) == identity:
            return None
        found = cls(path, name, identity)
        if before is not None and before.identity != identity:
            _record(path).unlink()
            before = None
        if before is None:
            found._create()
        elif before != found:
            found._write_head(_record(path))
        return found

    def _create(self) -> None:
        """Make the record, and then the file, which never has holes without a record. Another process may do
        the same.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        record, mark = _record(self.path), secrets.token_hex(4)
        draft, empty = (
            record.with_name(f"{record.name}.{mark}"),
            record.with_name(f"{record.name}.{mark}.new"),
        )
        try:
            with draft.open("wb") as file:
                file.truncate(_HEAD_BYTES + _DIGEST_BYTES * self.num_pieces)
            self._write_head(draft)
            with empty.open("wb") as file:
                file.truncate(self.identity.num_bytes)
            try:
                os.link(draft, record)
            except FileExistsError:
                return
            except OSError:  # a file system without links
                draft.replace(record)
            empty.replace(self.path)
        finally:
            draft.unlink(missing_ok=True)
            empty.unlink(missing_ok=True)

    def _write_head(self, record: Path) -> None:
        head = json.dumps({"name": self.name, **asdict(self.identity)}).encode()
        if len(head) > _HEAD_BYTES:
            raise BiremeError(f"{self.name} of another machine has a name that is too long.")
        with record.open("r+b") as file:
            file.write(head.ljust(_HEAD_BYTES))

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
                place, num_bytes = _HEAD_BYTES + _DIGEST_BYTES * first, _DIGEST_BYTES * (end - first)
                found = os.pread(record.fileno(), max(num_bytes, 0), place)
                for piece in range(first, end):
                    begin = _DIGEST_BYTES * (piece - first)
                    own = found[begin : begin + _DIGEST_BYTES]
                    yield piece, None if own == _NONE else own

    def missing(self, ranges: Iterable[tuple[int, int]] | None = None) -> list[int]:
        """The pieces that are not here and have bytes of these ranges, or of the file, in their order."""
        whole = [(0, self.identity.num_bytes)] if ranges is None else ranges
        places = ((begin // PIECE_BYTES, -(-end // PIECE_BYTES)) for begin, end in whole if begin < end)
        return sorted({piece for piece, digest in self.digests(places) if digest is None})

    def put(self, pieces: Mapping[int, bytes], digests: Mapping[int, bytes]) -> None:
        """Write pieces, and once they are on the disk the SHA-256 of each."""
        with self.path.open("r+b") as file:
            for piece, data in pieces.items():
                os.pwrite(file.fileno(), data, piece * PIECE_BYTES)
            os.fsync(file.fileno())
        with _record(self.path).open("r+b") as record:
            for piece in pieces:
                os.pwrite(record.fileno(), digests[piece], _HEAD_BYTES + _DIGEST_BYTES * piece)

    def finish(self) -> None:
        """Remove the record if all pieces are here."""
        with suppress(FileNotFoundError):
            if _NONE not in _record(self.path).read_bytes()[_HEAD_BYTES:]:
                os.utime(self.path, ns=(self.identity.changed_ns, self.identity.changed_ns))
                _record(self.path).unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from fetching the same pieces meanwhile, if the file system has locks."""
        try:
            record = _record(self.path).open("r+b")
        except FileNotFoundError:
            yield
            return
        with record:
            with suppress(OSError, ImportError):
                import fcntl  # There is none on Windows.

                fcntl.flock(record, fcntl.LOCK_EX)
            yield


def _record(path: Path) -> Path:
    return path.with_name(f".{path.name}.pieces")


def file_of_record(record: Path) -> Path:
    """The partial file that a record is of."""
    return record.with_name(record.name.removeprefix(".").removesuffix(".pieces"))


def check_here(path: Path, begin: int, end: int) -> None:
    """Refuse to read bytes of a file that are not on this machine."""
    partial = PieceFile.at(path)
    if partial is not None and partial.missing([(begin, end)]):
        raise BiremeError(
            f"This machine has only some pieces of {path}, and not those that are read. Start the work with "
            "a machine that has the file: the pieces are fetched from there."
        )


def as_ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Sorted numbers as ranges, each without its end."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found


Came = Callable[[str, int], None]
"""Gets the address that bytes of a file came from, and how many."""
