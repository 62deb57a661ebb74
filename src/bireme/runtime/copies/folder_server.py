"""Files of a run on the disks of its machines: a machine serves its folder of the run, and others read there.

    steps folder ───▶ names of the checkpoints there, with length and SHA-256 of each manifest
    tree root ─────▶ the names of all files there
    digests names ─▶ length and SHA-256 of each file, none if it is not there
    read name, range ▶ these bytes, in frames

All names are relative to the folder of the run, so the machines may have it at different paths. A file is
believed by its SHA-256, which the reader knows from elsewhere or compares between machines. Neither end takes
a name that leads out of its folder.
"""

import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from bireme.bounds import bytes_text
from bireme.errors import BiremeError
from bireme.files import FileDigest, path_within
from bireme.runtime.copies.keeper import KeeperAddress, RateLimit, RequestConnection, RequestServer, talk_to
from bireme.runtime.copies.versions import CHUNK_BYTES

_PIECE_BYTES = 4 << 20
"""Asked of one machine at a time, if several have a file."""
_OPEN_S, _MOST_OPEN = 60.0, 64
"""How long files stay open for others to read them piece by piece, and how many."""
_MOST_AT_ONCE_BYTES = 1 << 28
"""Of a file that is read into memory whole."""
STEP_FOLDER = re.compile(r"step-([0-9]{8,})")
"""The name of the folder of a checkpoint, with its step."""
_WRONG = "{} of another machine does not have the SHA-256 that it should have."
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST_S = 3600.0
"""How long a machine may take to read its files for their digests."""
_Answer = TypeVar("_Answer")


class FolderServer(RequestServer):
    """Serves the files of a folder. There are none while `folder` is None, or if it does not exist. The other
    `roots`, which are files or folders, are served too, under the names `root-0`, `root-1` …
    """

    def __init__(self, timeout_s: float) -> None:
        self.folder: Path | None = None
        self.roots: tuple[Path, ...] = ()
        self._digests: dict[tuple[str, int, int, int], FileDigest] = {}
        """By name, inode, length and time of change."""
        self._files: dict[str, tuple[BinaryIO, float]] = {}
        """The files that were read last, the newest at the end, and when."""
        self._lock = threading.Lock()
        self.acts = {
            "steps": self._steps,
            "tree": self._tree,
            "digests": self._list_digests,
            "read": self._read,
        }
        super().__init__("bireme folder", timeout_s)

    def _path(self, name: str) -> Path:
        folder, rest = self.folder, name
        first, _, below = name.partition("/")
        for number, root in enumerate(self.roots):
            if first == root_name(number):
                folder, rest = root, below
        if folder is None:
            raise BiremeError(f"{name} is not served.")
        path = path_within(folder, rest)
        # Files of a root may be links, as in the folders of downloaded models.
        real = path if folder == self.folder or path == folder else path.parent
        if not real.resolve().is_relative_to(folder.resolve()):
            raise BiremeError(f"{name} is not served.")
        return path

    def _tree(self, talk: RequestConnection, asked: dict[str, Any]) -> None:
        root = self._path(asked["root"])
        paths = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
        found = [(path.relative_to(root).as_posix(), path) for path in paths]
        talk.say({"files": [name if path != root else "" for name, path in found]})

    def _steps(self, talk: RequestConnection, asked: dict[str, Any]) -> None:
        folder, names = str(asked["folder"]), list[str]()
        with suppress(OSError, BiremeError):
            names = sorted(path.name for path in self._path(folder).glob("step-*"))
        served = ((name, self._digest(f"{folder}/{name}/{asked['manifest']}")) for name in names)
        talk.say({"steps": {name: [one.num_bytes, one.sha256] for name, one in served if one is not None}})

    def _list_digests(self, talk: RequestConnection, asked: dict[str, Any]) -> None:
        found: list[list[Any] | None] = []
        for name in asked["names"]:
            one = self._digest(name)
            found.append(None if one is None else [one.num_bytes, one.sha256])
        talk.say({"digests": found})

    def _digest(self, name: str) -> FileDigest | None:
        try:
            with self._path(name).open("rb") as file:
                about = os.fstat(file.fileno())
                key = name, about.st_ino, about.st_size, about.st_mtime_ns
                if key not in self._digests:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                    self._digests[key] = FileDigest(about.st_size, digest)
                return self._digests[key]
        except (OSError, BiremeError):
            return None

    def _read(self, talk: RequestConnection, asked: dict[str, Any]) -> None:
        name, first, end = asked["name"], int(asked["first"]), int(asked["end"])
        try:
            file = self._opened(name)
        except OSError as error:
            raise BiremeError(f"{name} cannot be read: {error.strerror or error}.") from error
        talk.say({})
        for begin in range(first, end, CHUNK_BYTES):
            chunk = os.pread(file.fileno(), min(CHUNK_BYTES, end - begin), begin)
            talk.send(chunk)
            if len(chunk) < min(CHUNK_BYTES, end - begin):
                return

    def _opened(self, name: str) -> BinaryIO:
        """A file, which stays open while others read it piece by piece: it may be deleted meanwhile."""
        path, now_s = self._path(name), time.monotonic()
        with self._lock:
            found, _ = self._files.pop(name, (None, 0.0))
            file = found if found is not None and _is_at(found, path) else path.open("rb")
            self._files[name] = file, now_s
            for number, (one, (_, used_s)) in enumerate(tuple(self._files.items())[::-1]):
                if used_s + _OPEN_S < now_s or number >= _MOST_OPEN:
                    del self._files[one]
            return file


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is the one at a path, or nothing is there any more."""
    try:
        there = path.stat()
    except OSError:
        return True
    return there.st_ino == os.fstat(file.fileno()).st_ino


# The reader's side: nothing is believed that does not look as this version of Bireme writes it.


def _answer(talk: RequestConnection, key: str, kind: type[_Answer], limit_s: float | None = None) -> _Answer:
    """The value of a key in the next text."""
    found = talk.hear(limit_s=limit_s).get(key)
    if not isinstance(found, kind):
        raise BiremeError(f"Another machine answers without {key}.")
    return found


def _served(found: object) -> FileDigest | None:
    match found:
        case None:
            return None
        case [int() as num_bytes, str() as sha256] if num_bytes >= 0 and _SHA256.fullmatch(sha256):
            return FileDigest(num_bytes, sha256)
    raise BiremeError(f"Another machine announces a file with {found!r} instead of its length and SHA-256.")


def steps_at(address: KeeperAddress, folder: str, manifest: str, timeout_s: float) -> dict[str, FileDigest]:
    """The checkpoints in a folder of another machine, with the file `manifest` of each; none if the machine
    does not answer.
    """
    with suppress(OSError, BiremeError), talk_to(address, timeout_s) as talk:
        talk.say({"do": "steps", "folder": folder, "manifest": manifest})
        steps = {name: _served(one) for name, one in _answer(talk, "steps", dict).items()}
        return {name: one for name, one in steps.items() if one is not None and STEP_FOLDER.fullmatch(name)}
    return {}


def root_name(number: int) -> str:
    """The name of a root that a machine serves beside its folder."""
    return f"root-{number}"


def files_at(address: KeeperAddress, root: str, timeout_s: float) -> list[str]:
    """The names of all files in a root of another machine, relative to it; one empty name if it is a file."""
    with talk_to(address, timeout_s) as talk:
        talk.say({"do": "tree", "root": root})
        return [str(name) for name in _answer(talk, "files", list, _DIGEST_S)]


def digests_at(
    address: KeeperAddress, names: Sequence[str], timeout_s: float
) -> tuple[FileDigest | None, ...]:
    """What another machine has at these names; nothing if it does not answer."""
    with suppress(OSError, BiremeError), talk_to(address, timeout_s) as talk:
        talk.say({"do": "digests", "names": [*names]})
        found = tuple(map(_served, _answer(talk, "digests", list, _DIGEST_S)))
        if len(found) == len(names):
            return found
    return (None,) * len(names)


def holders_of(
    files: Mapping[str, str], addresses: Sequence[KeeperAddress], timeout_s: float
) -> dict[str, tuple[KeeperAddress, ...]]:
    """The machines that have each file, given by its name and its SHA-256. All are asked at the same time."""
    names = [*files]
    if not names or not addresses:
        return dict.fromkeys(names, ())
    with ThreadPoolExecutor(len(addresses)) as threads:
        told = [*threads.map(lambda one: digests_at(one, names, timeout_s), addresses)]
    return {
        name: tuple(
            address
            for address, own in zip(addresses, told, strict=True)
            if (one := own[place]) is not None and one.sha256 == files[name]
        )
        for place, name in enumerate(names)
    }


def ranges(
    address: KeeperAddress, name: str, first: int, end: int, timeout_s: float, limit: RateLimit | None = None
) -> Iterator[bytes]:
    """The bytes of another machine's file from `first` on, without `end` itself; less if the file ends
    before. With a `limit` they are read in the background.
    """
    with talk_to(address, timeout_s, is_background=limit is not None) as talk:
        talk.say({"do": "read", "name": name, "first": first, "end": end})
        talk.hear()
        for begin in range(first, end, CHUNK_BYTES):
            began_s, expected = time.monotonic(), min(CHUNK_BYTES, end - begin)
            chunk = talk.chunk()
            if len(chunk) > expected:
                raise BiremeError(f"{len(chunk)} bytes of {name} came instead of {expected}.")
            if limit is not None:
                limit.wait(len(chunk), time.monotonic() - began_s)
            yield chunk
            if len(chunk) < expected:
                return


def read_range(
    addresses: Sequence[KeeperAddress],
    name: str,
    first: int,
    num_bytes: int,
    timeout_s: float,
    limit: RateLimit | None = None,
) -> bytearray:
    """Bytes of a file, from several machines at once if several have it. Raises a `BiremeError` if none of
    them gives a piece.
    """
    found = bytearray(num_bytes)

    def read(place: int) -> None:
        begin = place * _PIECE_BYTES
        end = min(begin + _PIECE_BYTES, num_bytes)
        failure: Exception | None = None
        turn = place % len(addresses)
        for address in (*addresses[turn:], *addresses[:turn]):
            at = begin
            try:
                for chunk in ranges(address, name, first + begin, first + end, timeout_s, limit):
                    found[at : at + len(chunk)] = chunk
                    at += len(chunk)
            except (OSError, BiremeError) as error:
                failure = error
            if at == end:
                return
        raise BiremeError(f"{name} cannot be read on another machine: {failure or 'it is too short'}.")

    if not addresses:
        raise BiremeError(f"{name} is on no machine that answers.")
    places = range(-(-num_bytes // _PIECE_BYTES))
    with ThreadPoolExecutor(min(len(addresses), max(len(places), 1))) as threads:
        [*threads.map(read, places)]
    return found


def read_file(addresses: Sequence[KeeperAddress], name: str, expected: FileDigest, timeout_s: float) -> bytes:
    """A small file of other machines. Raises a `BiremeError` if it cannot be read or has another SHA-256."""
    if expected.num_bytes > _MOST_AT_ONCE_BYTES:
        raise BiremeError(f"{name} has {bytes_text(expected.num_bytes)} on another machine: too many.")
    found = bytes(read_range(addresses, name, 0, expected.num_bytes, timeout_s))
    if hashlib.sha256(found).hexdigest() != expected.sha256:
        raise BiremeError(_WRONG.format(name))
    return found


def fetch_file(
    addresses: Sequence[KeeperAddress],
    name: str,
    to: Path,
    expected: FileDigest,
    timeout_s: float,
    limit: RateLimit | None = None,
) -> None:
    """Put another machine's file at a path: whole, with that SHA-256, or not at all. Raises a `BiremeError`
    if it cannot be had or written.
    """
    draft = to.with_name(f".{to.name}.{secrets.token_hex(4)}.tmp")
    digest, step = hashlib.sha256(), _PIECE_BYTES * max(len(addresses), 1)
    try:
        with draft.open("xb") as file:
            for begin in range(0, expected.num_bytes, step):
                length = min(step, expected.num_bytes - begin)
                piece = read_range(addresses, name, begin, length, timeout_s, limit)
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != expected.sha256:
            raise BiremeError(_WRONG.format(name))
        draft.replace(to)
    except OSError as error:
        raise BiremeError(f"{to} cannot be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
