"""The ledger of a run: `ledger.jsonl` in its folder, a line for each committed round, written before any rank
hears of it.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from bireme.documents import read_json_lines
from bireme.errors import BiremeError
from bireme.sync.coordinator.ledger_line import Began, Committed, in_force
from bireme.sync.coordinator.messages import TERM

__all__ = ["Ledger"]


class Ledger:
    """Appends to the ledger at a path, which is made if there is none. A last line that was cut goes before
    the first one that is written here: until then another coordinator may be writing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_written = False
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, lines: Iterable[Began | Committed], *, is_lasting: bool = True) -> None:
        """Return once the lines are written; on the disk, with all before them, if they are `is_lasting`."""
        text = "".join(json.dumps(line.document(), separators=(",", ":")) + "\n" for line in lines)
        if not text:
            return
        left = text.encode()
        try:
            if not self._has_written:
                _cut_half_line(self._path)
                self._has_written = True
            while left:
                left = left[os.write(self._file, left) :]
            if is_lasting:
                os.fsync(self._file)
        except OSError as error:
            raise BiremeError(
                f"{self._path} cannot be written: {error.strerror or error}. A round counts only once it is "
                "written there, so the run cannot continue. Make room on the disk, and resume it."
            ) from error

    def close(self) -> None:
        """End the file."""
        os.close(self._file)

    @property
    def last_term(self) -> int:
        """The last term of a coordinator that wrote here; -1 if there was none."""
        epochs = (record.get("epoch") for record in self._records())
        return max((epoch // TERM for epoch in epochs if isinstance(epoch, int)), default=-1)

    @property
    def num_committed(self) -> int:
        """How many batches count, as far as it is written here."""
        found = 0
        for record in self._records():
            batch = record.get("batch")
            if isinstance(batch, int):
                found = batch + (record.get("kind") == "round")
        return found

    def _records(self) -> Iterable[dict[str, object]]:
        return in_force(read_json_lines(self._path, start="start").records).values()


def _cut_half_line(path: Path) -> None:
    with path.open("r+b") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
