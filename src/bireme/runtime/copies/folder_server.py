"""Files of a run on the disks of its machines: a machine serves its folder of the run, and others read there.

    steps folder ───▶ names of the checkpoints there, with length and SHA-256 of each manifest
    tree root ─────▶ the names of all files there, with length and time of change
    digests names ─▶ length and SHA-256 of each file, none if it is not there
    read name, range ▶ these bytes, in frames
    pieces name ───▶ which pieces of a file it has, and these, each with its SHA-256

All names are relative to the folder of the run, so the machines may have it at different paths. A file is
believed by its SHA-256, which the reader knows from elsewhere or compares between machines. A piece has the
SHA-256 that it had on the machine with the whole file. Neither end takes a name that leads out of its folder.
"""

import hashlib
import os
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from bireme.bounds import bytes_text
from bireme.errors import BiremeError, system_errors
from bireme.files import FileDigest, path_within, write_chunks_atomically
from bireme.pieces import PIECE_BYTES, Came, FileIdentity, PieceFile, as_ranges, check_here, is_record
from bireme.runtime.copies.keeper import KeeperAddress, RateLimit, RequestConnection, RequestServer, talk_to
from bireme.runtime.copies.versions import CHUNK_BYTES

_PIECE_BYTES = 4 << 20
"""Asked of one machine at a time, if several have a file."""
_OPEN_S, _MOST_OPEN = 60.0, 64
"""How long files stay open for others to read them piece by piece, and how many."""
_GROUP_PIECES, _WINDOW_PIECES = 64, 1024
"""Pieces asked of one machine at a time, and between two questions which machine has which pieces."""
_AGAIN_S, _SHA256_BYTES = 1.0, 32
_SILENT_S = 60.0
_silent = dict[KeeperAddress, float]()
"""Until when a machine that did not answer is not asked for pieces that others may have. It takes seconds to
give up one that is off the network, and each batch asks.
"""
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
            "pieces": self._pieces,
        }
        super().__init__("bireme folder", timeout_s)

    def _path(self, name: str) -> Path:
        first, _, below = name.partition("/")
        roots = {root_name(number): root for number, root in enumerate(self.roots)}
        folder, rest = (roots[first], below) if first in roots else (self.folder, name)
        if folder is None:
            raise BiremeError(f"{name} is not served.")
        path = path_within(folder, rest)
        # Files of a root may be links, as in the folders of downloaded models.
        real = path if folder == self.folder or path == folder else path.parent
        if not real.resolve().is_relative_to(folder.resolve()):
            raise BiremeError(f"{name} is not served.")
        return path

    def _tree(self, talk: RequestConnection, asked: dict[str, Any]) -> None:
        files = files_in(self._path(asked["root"]))
        talk.say({"files": [[name, one.num_bytes, one.changed_ns] for name, one in files.items()]})

    def _steps(self, talk: RequestConnection, asked: dict[str, Any]) -> None:
        folder, names = str(asked["folder"]), list[str]()
        with suppress(OSError, BiremeError):
            names = sorted(path.name for path in self._path(folder).glob("step-*"))
        served = ((name, self._digest(f"{folder}/{name}/{asked['manifest']}")) for name in names)
        talk.say({"steps": {name: [one.num_bytes, one.sha256] for name, one in served if one is not None}})

    def _list_digests(self, talk: RequestConnection, asked: dict[str, Any]) -> None:
        found = map(self._digest, asked["names"])
        talk.say({"digests": [None if one is None else [one.num_bytes, one.sha256] for one in found]})

    def _digest(self, name: str) -> FileDigest | None:
        try:
            if PieceFile.at(self._path(name)) is not None:
                return None
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
        with system_errors(f"{name} cannot be read"):
            check_here(self._path(name), first, end)
            file = self._opened(name)
        talk.say({})
        for begin in range(first, end, CHUNK_BYTES):
            chunk = os.pread(file.fileno(), min(CHUNK_BYTES, end - begin), begin)
            talk.send(chunk)
            if len(chunk) < min(CHUNK_BYTES, end - begin):
                return

    def _pieces(self, talk: RequestConnection, asked: dict[str, Any]) -> None:
        """List the pieces that are here, and send each with its SHA-256 if the reader wants them."""
        name, ranges = str(asked["name"]), [(int(first), int(end)) for first, end in asked["pieces"]]
        with system_errors(f"{name} cannot be read"):
            path, file = self._path(name), self._opened(name)
            # In this order: a file that is begun anew after it was opened is not taken for the whole one.
            partial, about = PieceFile.at(path), os.fstat(file.fileno())
        own = FileIdentity(about.st_size, about.st_mtime_ns) if partial is None else partial.identity
        if [own.num_bytes, own.changed_ns] != asked["identity"]:
            raise BiremeError(f"{name} has changed on its machine. Start the run again.")
        whole = PieceFile(path, name, own)
        ranges = [(max(first, 0), min(end, whole.num_pieces)) for first, end in ranges]
        found: Iterable[tuple[int, bytes | None]]
        found = ((piece, None) for first, end in ranges for piece in range(first, end))
        if partial is not None:
            found = [(piece, digest) for piece, digest in partial.digests(ranges) if digest is not None]
        talk.say({"pieces": ranges if partial is None else as_ranges(piece for piece, _ in found)})
        for piece, digest in found if asked["wants"] else ():
            data = os.pread(file.fileno(), whole.size_of(piece), piece * PIECE_BYTES)
            talk.send(digest or hashlib.sha256(data).digest(), data)

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


def files_in(root: Path) -> dict[str, FileIdentity]:
    """The files in a root, by their names relative to it; the empty name of a root that is a file."""
    if not root.is_dir():
        return {"": FileIdentity.of(root)}
    paths = sorted(path for path in root.rglob("*") if path.is_file() and not is_record(path))
    return {path.relative_to(root).as_posix(): FileIdentity.of(path) for path in paths}


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is the one at a path, or nothing is there any more."""
    try:
        there = path.stat()
    except OSError:
        return True
    return os.path.samestat(there, os.fstat(file.fileno()))


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


def files_at(address: KeeperAddress, root: str, timeout_s: float) -> dict[str, FileIdentity]:
    """The files in a root of another machine, by their names relative to it; the empty name of a root that is
    a file.
    """
    with talk_to(address, timeout_s) as talk:
        talk.say({"do": "tree", "root": root})
        found = _answer(talk, "files", list, _DIGEST_S)
    files: dict[str, FileIdentity] = {}
    for one in found:
        match one:
            case [str() as name, int() as num_bytes, int() as changed_ns] if num_bytes >= 0:
                files[name] = FileIdentity(num_bytes, changed_ns)
            case _:
                raise BiremeError("Another machine lists files without names, lengths and times of change.")
    return files


class _PieceFetch:
    """Pieces of one file on their way from several machines, each of which has a thread here. With a `limit`
    they come in the background, and other fetches in the folder need not wait.
    """

    def __init__(self, file: PieceFile, timeout_s: float, limit: RateLimit | None, came: Came) -> None:
        self._file, self._timeout_s, self._limit, self._came = file, timeout_s, limit, came
        self._lock = threading.Lock()
        self.locked = nullcontext if limit is None else file.locked
        """Held while pieces are written, unless the whole fetch holds it."""
        self.failure: Exception | None = None

    def fetch(self, pieces: Sequence[int], addresses: Sequence[KeeperAddress]) -> None:
        """Fetch these pieces as far as the machines have them. Raises a `BiremeError` if they cannot be
        written.
        """
        ranges = as_ranges(pieces)
        with ThreadPoolExecutor(max(len(addresses), 1)) as threads:
            held = [set(pieces)]
            if len(addresses) > 1:
                held = [*threads.map(lambda one: self._held(one, ranges), addresses)]
            parts: dict[frozenset[int], list[int]] = {}
            for piece in pieces:
                having = frozenset(place for place, own in enumerate(held) if piece in own)
                if having:
                    parts.setdefault(having, []).append(piece)
            # What few machines have comes first, so that each has work until the end.
            groups = [
                (having, own[begin : begin + _GROUP_PIECES])
                for having, own in sorted(parts.items(), key=lambda one: len(one[0]))
                for begin in range(0, len(own), _GROUP_PIECES)
            ]
            places = range(len(addresses))
            [*threads.map(lambda place: self._work(place, addresses[place], groups), places)]

    def _held(self, address: KeeperAddress, ranges: Sequence[tuple[int, int]]) -> set[int]:
        if time.monotonic() < _silent.get(address, 0.0):
            return set()
        try:
            with self._asked(address, ranges, wants=False) as (_, held):
                return held
        except (OSError, BiremeError) as error:
            self.failure = error
            if isinstance(error, OSError):
                _silent[address] = time.monotonic() + _SILENT_S
            return set()

    @contextmanager
    def _asked(
        self, address: KeeperAddress, ranges: Sequence[tuple[int, int]], *, wants: bool
    ) -> Iterator[tuple[RequestConnection, set[int]]]:
        """A connection on which pieces have been asked for, and those of them that the machine has."""
        identity = [self._file.identity.num_bytes, self._file.identity.changed_ns]
        with talk_to(address, self._timeout_s, self._limit) as talk:
            asked = {"name": self._file.name, "identity": identity, "pieces": ranges, "wants": wants}
            talk.say({"do": "pieces", **asked})
            wanted = [piece for first, end in ranges for piece in range(first, end)]
            told = _answer(talk, "pieces", list)
            if not all(isinstance(one, list) and [*map(type, one)] == [int, int] for one in told):
                raise BiremeError(f"Another machine lists pieces of {self._file.name} that are no numbers.")
            places = ((bisect_left(wanted, first), bisect_left(wanted, end)) for first, end in told)
            yield talk, {piece for begin, end in places for piece in wanted[begin:end]}

    def _work(
        self, place: int, address: KeeperAddress, groups: list[tuple[frozenset[int], list[int]]]
    ) -> None:
        """Fetch one group after the other from a machine, as long as there are any that it has."""
        while True:
            with self._lock:
                own = next((one for one in groups if place in one[0]), None)
                if own is None:
                    return
                groups.remove(own)
            came, failure = dict[int, tuple[bytes, bytes]](), None
            try:
                for piece, found in self._sent(address, own[1]):
                    came[piece] = found
            except (OSError, BiremeError) as error:
                failure = error
            if came:
                self._put(address, came)
            if failure is not None:
                left = [piece for piece in own[1] if piece not in came]
                with self._lock:
                    self.failure = failure
                    if left and (others := own[0] - {place}):
                        groups.append((others, left))
                return

    def _sent(
        self, address: KeeperAddress, pieces: Sequence[int]
    ) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
        """Pieces that a machine sends, each with its SHA-256, which is right."""
        with self._asked(address, as_ranges(pieces), wants=True) as (talk, held):
            for piece in sorted(held):
                came = talk.chunk()
                digest, data = came[:_SHA256_BYTES], came[_SHA256_BYTES:]
                if len(data) != self._file.size_of(piece) or hashlib.sha256(data).digest() != digest:
                    raise BiremeError(f"A piece of {_WRONG.format(self._file.name)}")
                yield piece, (digest, data)

    def _put(self, address: KeeperAddress, came: Mapping[int, tuple[bytes, bytes]]) -> None:
        what = f"{self._file.path} cannot be written"
        with self._lock:
            with self.locked(), system_errors(what, "What has come of it stays: free space there."):
                self._file.put(came)
            self._came(address.address, sum(len(data) for _, data in came.values()))


def fetch_pieces(
    file: PieceFile,
    pieces: Sequence[int],
    addresses: Callable[[], Sequence[KeeperAddress]],
    timeout_s: float,
    *,
    limit: RateLimit | None = None,
    came: Came = lambda _host, _num_bytes: None,
) -> None:
    """Fetch those of these pieces of a partial file that are not here. Machines are asked again if none gives
    a piece. Raises a `BiremeError` after `timeout_s` without a piece, or if the disk is full. `came` is
    called in other threads, one at a time.
    """
    talk, end_s = _PieceFetch(file, timeout_s, limit, came), time.monotonic() + timeout_s

    def absent(own: Sequence[int]) -> list[int]:
        places = as_ranges(sorted(own))
        there = {*file.missing((PIECE_BYTES * first, PIECE_BYTES * end) for first, end in places)}
        return [piece for piece in own if piece in there]

    with file.locked() if limit is None else nullcontext():
        left = absent(pieces)
        while left:
            window = left[:_WINDOW_PIECES]
            talk.fetch(sorted(window), addresses())
            again = absent(window)
            if len(again) < len(window):
                end_s = time.monotonic() + timeout_s
            elif time.monotonic() > end_s:
                why = talk.failure or "no machine of the run that answers has it"
                raise BiremeError(f"{file.path} cannot be fetched from the other machines: {why}")
            else:
                _silent.clear()
                time.sleep(_AGAIN_S)
            left = [*again, *left[_WINDOW_PIECES:]]
        with talk.locked():
            file.finish()


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
    with talk_to(address, timeout_s, limit) as talk:
        talk.say({"do": "read", "name": name, "first": first, "end": end})
        talk.hear()
        for begin in range(first, end, CHUNK_BYTES):
            expected, chunk = min(CHUNK_BYTES, end - begin), talk.chunk()
            if len(chunk) > expected:
                raise BiremeError(f"{len(chunk)} bytes of {name} came instead of {expected}.")
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
    digest, step = hashlib.sha256(), _PIECE_BYTES * max(len(addresses), 1)

    def pieces() -> Iterator[bytes]:
        for begin in range(0, expected.num_bytes, step):
            length = min(step, expected.num_bytes - begin)
            piece = bytes(read_range(addresses, name, begin, length, timeout_s, limit))
            digest.update(piece)
            yield piece
        if digest.hexdigest() != expected.sha256:
            raise BiremeError(_WRONG.format(name))

    write_chunks_atomically(to, pieces())
