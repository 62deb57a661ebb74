"""Text in files, read piece by piece in an order that is always the same.

A file is a document. What cannot be read as text is left out and named; nothing is ever read whole into
memory. Text is UTF-8.
"""

import codecs
import fnmatch
import os
import stat
import sysconfig
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from zlib import crc32

from bireme.errors import BiremeError, system_errors

PIECE_BYTES = 1 << 17
"""A document longer than this is read, and tokenized, in passages that end with a line where they can."""

_STDLIB_BYTES = 20_000_000
"""Of Python's own sources no more than this is taken, so that the first run starts soon."""

_NO_SOURCES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""Folders of the standard library that hold what others wrote, or tests, which are mostly data."""


Named = Callable[[str], None]
"""Gets the name of a file or a row, such as that of a file that was left out."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Text of one document, the end of it if `ends_document`.

    `size` is its part of the size of all that it comes from.
    """

    text: str
    size: int
    ends_document: bool


@dataclass(frozen=True, slots=True)
class _TextFile:
    """A file as it was when it was listed; `path` is absolute."""

    path: Path
    num_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Files to be read as text, one document each, in this order.

    `skipped` names those that were left out when the files were listed. `origin` is what to call them all in
    a message. Where `must_read` is set, a file that is no text is an error and not left out.
    """

    origin: str
    files: tuple[_TextFile, ...]
    skipped: tuple[str, ...] = ()
    must_read: bool = False

    @property
    def size(self) -> int:
        """The bytes of all files together."""
        return sum(file.num_bytes for file in self.files)

    @property
    def identity(self) -> str:
        """Words that differ when the text may differ: from paths, sizes and times of change."""
        words = sha256()
        for file in self.files:
            words.update(f"{file.path}\0{file.num_bytes}\0{file.modified_ns}\n".encode(errors="replace"))
        return f"files {words.hexdigest()}"

    def passages(self, skip: Named, replaced: Named = lambda _path: None) -> Iterator[Passage]:
        """All text. Calls `skip` with each file that is no text, and `replaced` with each file of which bytes
        after the first `PIECE_BYTES` are not UTF-8 and were replaced.
        """
        for file in self.files:
            try:
                if (yield from _passages_of(file.path)):
                    replaced(str(file.path))
            except UnicodeDecodeError as error:
                if self.must_read:
                    raise BiremeError(
                        f"{file.path} cannot be read as UTF-8 text: {error}. Convert or unpack it."
                    ) from error
                skip(str(file.path))
            except OSError as error:
                # What is left out is remembered, and this may be well again tomorrow.
                raise BiremeError(f"{file.path} could not be read: {error.strerror or error}.") from error


def one_file(path: Path) -> TextFiles:
    """A single text file."""
    with system_errors(f"{path} cannot be read"):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise BiremeError(
            f"{path} is not an ordinary file, and every process of the run reads the data. Write the data to "
            "one."
        )
    file = _TextFile(path.resolve(), status.st_size, status.st_mtime_ns)
    return TextFiles(str(path), (file,), must_read=True)


def text_folder(folder: Path, pattern: str = "*") -> TextFiles:
    """The files in a folder and the folders in it, sorted, whose names match the pattern.

    A pattern with a slash is one for the whole path below the folder. Hidden files and folders, and what
    cannot be read, are skipped; links to folders are not followed.
    """
    if not folder.is_dir():
        raise BiremeError(f"There is no folder {folder} to read text from.")
    skipped: list[str] = []
    found = _walked(folder, skipped, frozenset())
    files = [_listed(found[name], skipped) for name in sorted(found) if _matches(name, pattern)]
    listed = tuple(file for file in files if file is not None)
    if not listed:
        hidden = f" {len(skipped)} hidden or unreadable ones were skipped." if skipped else ""
        raise BiremeError(
            f"The folder {folder} has no files that match {pattern!r}, so there is no text to train "
            f"on.{hidden} Give another folder or pattern."
        )
    return TextFiles(str(folder), listed, tuple(skipped))


def python_sources(most_bytes: int = _STDLIB_BYTES) -> TextFiles:
    """The sources of the running Python's standard library, without its tests, `most_bytes` at most.

    Their order mixes them: it depends on their names alone, and any part of it is like the whole.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    skipped: list[str] = []
    found = _walked(folder, skipped, _NO_SOURCES)
    mixed = sorted(
        (name for name in found if name.endswith(".py")), key=lambda name: (crc32(name.encode()), name)
    )
    files: list[_TextFile] = []
    total = 0
    for file in (_listed(found[name], skipped) for name in mixed):
        if file is not None and total + file.num_bytes <= most_bytes:
            files.append(file)
            total += file.num_bytes
    if not files:
        raise BiremeError(
            f"This Python has no sources of its standard library in {folder}. Give a source of data: a "
            "file or a folder of text."
        )
    return TextFiles("stdlib", tuple(files), tuple(skipped))


def _matches(name: str, pattern: str) -> bool:
    if "/" not in pattern:
        return fnmatch.fnmatchcase(name.rpartition("/")[2], pattern)
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, pattern.removeprefix("**/"))


def _walked(folder: Path, skipped: list[str], left_out: frozenset[str]) -> dict[str, Path]:
    """All files below a folder, by their paths within it; what is passed over is added to `skipped`."""
    found: dict[str, Path] = {}

    def failed(error: OSError) -> None:
        skipped.append(str(error.filename))

    for root, folders, names in os.walk(folder, onerror=failed):
        for name in [name for name in folders if name.startswith(".")]:
            folders.remove(name)
            skipped.append(str(Path(root, name)))
        folders[:] = sorted(name for name in folders if name not in left_out)
        for name in names:
            path = Path(root, name)
            if name.startswith("."):
                skipped.append(str(path))
            else:
                found[path.relative_to(folder).as_posix()] = path
    return found


def _listed(path: Path, skipped: list[str]) -> _TextFile | None:
    try:
        status = path.stat()
        if path.is_file() and os.access(path, os.R_OK):
            return _TextFile(path.resolve(), status.st_size, status.st_mtime_ns)
    except OSError:
        pass
    skipped.append(str(path))
    return None


def _passages_of(path: Path) -> Generator[Passage, None, bool]:
    """A file's text; returns whether bytes of the file were replaced.

    Raises if the first piece is not UTF-8. Later bytes that are not UTF-8 become U+FFFD, because text of the
    file has been yielded by then.
    """
    decoder, has_replaced = codecs.getincrementaldecoder("utf-8-sig")(), False

    def decoded(piece: bytes, *, final: bool = False) -> str:
        nonlocal has_replaced
        try:
            return decoder.decode(piece, final)
        except UnicodeDecodeError:  # the decoder has kept its state
            decoder.errors, has_replaced = "replace", True
            return decoder.decode(piece, final)

    with path.open("rb") as file:
        begun = file.read(PIECE_BYTES)
        if (zero := begun.find(0)) >= 0:
            raise UnicodeDecodeError("utf-8", begun, zero, zero + 1, "text has no bytes that are 0")
        kept = decoder.decode(begun, final=len(begun) < PIECE_BYTES)
        num_bytes = len(begun)
        while piece := file.read(PIECE_BYTES):
            ready, kept = _cut(kept)
            yield Passage(ready, num_bytes, ends_document=False)
            kept += decoded(piece)
            num_bytes = len(piece)
        yield Passage(kept + decoded(b"", final=True), num_bytes, ends_document=True)
    return has_replaced


def _cut(text: str) -> tuple[str, str]:
    """Text up to the end of its last line, or else of its last word, and the rest."""
    line = text.rfind("\n") + 1
    end = line if line else text.rfind(" ")
    return (text[:end], text[end:]) if end > 0 else (text, "")
