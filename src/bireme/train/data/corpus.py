"""Text made into tokens once, and kept in the cache, so that a second run starts at once.

What is kept lies in a folder of `tokens` in the cache, whose name is a hash of all that the tokens depend
on: the paths, sizes and times of change of the files, and the tokenizer. It is written piece by piece, so a
corpus may be larger than memory, and nobody ever sees half of it. Processes that want the same one wait for
the first.
"""

import contextlib
import sys
from array import array
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from bireme.documents import read_json
from bireme.errors import BiremeError
from bireme.files import write_bytes_atomically, write_chunks_atomically, write_text_atomically
from bireme.profile.cache import cache_folder
from bireme.train.data.encoding import Encoded, dtype_of, encoded, encoding_identity
from bireme.train.data.saved_rows import SavedRows
from bireme.train.data.text_files import TextFiles
from bireme.train.data.tokenizer import Tokenizer
from bireme.train.data.tokens import Tokens

__all__ = ["Progress", "tokenised"]

Progress = Callable[[float, str], None]
"""Is told what part is done, from 0 to 1, and what is being done."""

CORPUS_FORMAT = 2

MOST_NAMED = 3
"""Files or rows without text that are named in a warning."""


class _Record(BaseModel):
    """What the folder holds; it is written last, so without it there is nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = Field(ge=CORPUS_FORMAT, le=CORPUS_FORMAT)
    dtype: str
    num_tokens: int = Field(ge=1)
    num_documents: int = Field(ge=1)
    num_skipped: int = Field(ge=0)
    skipped: tuple[str, ...] = ()
    """The first few files or rows that were left out."""
    num_replaced: int = Field(ge=0)
    replaced: tuple[str, ...] = ()
    """The first few files of which bytes that are not UTF-8 were replaced."""


def tokenised(
    source: TextFiles | SavedRows, tokenizer: Tokenizer | None, progress: Progress | None = None
) -> Tokens:
    """The tokens of a source's documents, as `encoded` makes them, from the cache if they are there."""
    folder = _folder(source, tokenizer)
    kept = _kept(folder, source)
    if kept is not None:
        return kept
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise BiremeError(
            f"The tokens of {source.origin} cannot be cached in {folder}: {error.strerror or error}. Name "
            "a writable folder in BIREME_CACHE."
        ) from error
    with lock:
        _wait_for(lock)
        kept = _kept(folder, source)
        if kept is None:
            _write(folder, source, tokenizer, progress or _quietly)
            kept = _kept(folder, source)
    if kept is None:
        raise BiremeError(
            f"The tokens in {folder} were deleted while they were written. Run the command again, and let "
            "nothing else empty the cache meanwhile."
        )
    return kept


def _quietly(done: float, what: str) -> None:
    """Nobody watches."""


def _folder(source: TextFiles | SavedRows, tokenizer: Tokenizer | None) -> Path:
    words = f"{CORPUS_FORMAT} {encoding_identity(source, tokenizer)}"
    return cache_folder() / "tokens" / sha256(words.encode()).hexdigest()[:24]


TOKENS, ENDS, RECORD = "tokens.bin", "ends.bin", "corpus.json"


def _kept(folder: Path, source: TextFiles | SavedRows) -> Tokens | None:
    """The tokens in a folder of the cache, None where they are not all there."""
    try:
        record = read_json(folder / RECORD, _Record)
        ids = np.memmap(folder / TOKENS, record.dtype, mode="r")
        ends = np.memmap(folder / ENDS, np.int64, mode="r")
    except (BiremeError, OSError, TypeError, ValueError):
        return None
    if (len(ids), len(ends)) != (record.num_tokens, record.num_documents):
        return None
    num_skipped = record.num_skipped + (len(source.skipped) if isinstance(source, TextFiles) else 0)
    return Tokens(
        source.origin,
        ids,
        ends,
        has_uncounted=ids.dtype.kind == "i",
        num_skipped=num_skipped,
        num_unread=record.num_skipped,
        unread=record.skipped,
        num_replaced=record.num_replaced,
        replaced=record.replaced,
    )


def _wait_for(lock: TextIO) -> None:
    """Return when no other process holds the lock; it is held until the file is closed."""
    if sys.platform == "win32":
        return  # Two would do the same work, and the second replace what the first wrote by the same.
    import fcntl  # There is none on Windows.

    with contextlib.suppress(OSError):  # as on some network drives: then too both do the work
        fcntl.flock(lock, fcntl.LOCK_EX)


def _write(
    folder: Path, source: TextFiles | SavedRows, tokenizer: Tokenizer | None, progress: Progress
) -> None:
    skipped: list[str] = []
    replaced: list[str] = []
    dtype = dtype_of(source, tokenizer)
    writer = _Writer(source, dtype, progress)
    documents = encoded(source, tokenizer, skipped.append, replaced.append)
    write_chunks_atomically(folder / TOKENS, writer.chunks(documents, skipped))
    write_bytes_atomically(folder / ENDS, writer.ends.tobytes())
    record = _Record(
        format=CORPUS_FORMAT,
        dtype=dtype,
        num_tokens=writer.num_tokens,
        num_documents=len(writer.ends),
        num_skipped=len(skipped),
        skipped=tuple(skipped[:MOST_NAMED]),
        num_replaced=len(replaced),
        replaced=tuple(replaced[:MOST_NAMED]),
    )
    write_text_atomically(folder / RECORD, record.model_dump_json(indent=2) + "\n")


class _Writer:
    """Counts what it lets through."""

    def __init__(self, source: TextFiles | SavedRows, dtype: str, progress: Progress) -> None:
        self._source = source
        self._dtype = np.dtype(dtype)
        self._progress = progress
        self.num_tokens = 0
        self.ends: array[Any] = array("q")

    def chunks(self, documents: Iterator[Encoded], skipped: list[str]) -> Iterator[bytes]:
        """The ids as bytes. Raises where there are none at all."""
        done = 0
        for part in documents:
            self.num_tokens += len(part.ids)
            if part.ends_document and self.num_tokens > (self.ends[-1] if self.ends else 0):
                self.ends.append(self.num_tokens)
            done += part.size
            yield part.ids.astype(self._dtype).tobytes()
            self._progress(
                min(done / max(self._source.size or 1, 1), 1.0), f"tokenising {self._source.origin}"
            )
        if not self.num_tokens:
            named = (
                f" Skipped because they are not text: {len(skipped)}, such as {skipped[0]}."
                if skipped
                else ""
            )
            raise BiremeError(
                f"{self._source.origin} has no text in it, so there is nothing to train on.{named}"
            )
