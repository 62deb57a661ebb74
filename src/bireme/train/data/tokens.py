"""Tokens of a corpus in one long array, which lies on disk and is read where it is needed."""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bireme.errors import BiremeError, closest

__all__ = ["IGNORED", "IntArray", "Tokens", "load_tokens"]

IGNORED = -100
"""A label that does not count in the loss."""

IntArray = NDArray[np.integer[Any]]

RAW_TYPES = ("uint16", "uint32")

CHECKED_AT_ONCE = 1 << 20
MOST_CHECKED = 1 << 26
"""Ids of a longer array are looked at in places that are spread over it."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids of all documents, one after the other.

    `document_ends` are where documents end, where that is known: the number of tokens up to and with the last
    of each. Where `has_uncounted` is set, a negative number n stands for the id -1-n of a token that is read
    but does not count in the loss. `origin` is what to call it all in a message; `num_skipped` says how many
    files or rows were left out, of which `num_unread` hold no text; `unread` names the first few of these. Of
    `num_replaced` files bytes that are not UTF-8 were replaced; `replaced` names the first few of them.
    """

    origin: str
    ids: IntArray
    document_ends: NDArray[np.int64] | None = None
    has_uncounted: bool = False
    num_skipped: int = 0
    num_unread: int = 0
    unread: tuple[str, ...] = ()
    num_replaced: int = 0
    replaced: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def largest_id(self) -> int:
        """The largest id there is; of very long arrays, the largest in many places of it."""
        largest = -1
        for ids in _looked_at(self.ids):
            low = -1 - int(ids.min()) if self.has_uncounted else -1
            largest = max(largest, int(ids.max()), low)
        self.let_go()
        return largest

    def digest(self) -> str:
        """SHA-256 of the ids, whatever type they are kept in, and of where documents end.

        Of very long arrays the blocks are read that `largest_id` looks at: the first, the last and others
        between them, 64 million ids in all.
        """
        words = sha256(f"{len(self.ids)} {self.has_uncounted}".encode())
        for ids in _looked_at(self.ids):
            words.update(ids.astype("<i4").tobytes())
        if self.document_ends is not None:
            for ends in _looked_at(self.document_ends):
                words.update(ends.astype("<i8").tobytes())
        self.let_go()
        return words.hexdigest()

    def let_go(self) -> None:
        """Let the system have back the pages of the file that were read: they would count as this process's
        memory, more with every batch, until all of the file does.
        """
        mapped = getattr(self.ids, "_mmap", None)
        if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)


def _looked_at(ids: IntArray) -> Iterator[IntArray]:
    """All ids in blocks, or blocks spread over a very long array; its last one is always among them."""
    num_blocks = -(-len(ids) // CHECKED_AT_ONCE)
    step = max(num_blocks * CHECKED_AT_ONCE // MOST_CHECKED, 1)
    for block in {*range(0, num_blocks, step), num_blocks - 1} if num_blocks else ():
        yield ids[block * CHECKED_AT_ONCE : (block + 1) * CHECKED_AT_ONCE]


def load_tokens(path: Path, dtype: str = "uint16") -> Tokens:
    """The token ids in a .npy file, or the bare ones of this type in any other, mapped and not read."""
    try:
        has_header = path.suffix == ".npy"
        ids = np.load(path, mmap_mode="r", allow_pickle=False) if has_header else _raw(path, dtype)
    except (OSError, ValueError) as error:
        raise BiremeError(f"The tokens in {path} cannot be read: {str(error).rstrip('.')}.") from error
    if ids.dtype.kind not in "ui":
        raise BiremeError(
            f"{path} holds numbers of type {ids.dtype}; token ids must be whole numbers, such as uint16 or "
            "uint32."
        )
    if ids.ndim != 1:
        raise BiremeError(
            f"{path} holds an array of shape {list(ids.shape)}; tokens must be one-dimensional. Save it with "
            "array.reshape(-1)."
        )
    if not len(ids):
        raise BiremeError(f"{path} holds no tokens, so there is nothing to train on.")
    smallest = min(int(block.min()) for block in _looked_at(ids)) if ids.dtype.kind == "i" else 0
    if smallest < 0:
        raise BiremeError(f"{path} holds the negative id {smallest}; ids start at 0.")
    return Tokens(str(path), ids)


def _raw(path: Path, dtype: str) -> IntArray:
    if dtype not in RAW_TYPES:
        raise BiremeError(f"There is no type {dtype!r} for tokens in {path}. {closest(dtype, RAW_TYPES)}")
    num_bytes = path.stat().st_size
    if not num_bytes:
        return np.zeros(0, dtype)
    if num_bytes % np.dtype(dtype).itemsize:
        raise BiremeError(
            f"{path} has {num_bytes} bytes, not a whole number of {dtype} tokens. Set data.dtype to the type "
            "it was written with."
        )
    return np.memmap(path, dtype, mode="r")
