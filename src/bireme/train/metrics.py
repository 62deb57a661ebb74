"""What a run writes down while it goes: a line of JSON for everything that happens, and trackers if asked.

Lines are appended one by one, so that whoever reads them sees whole ones, but for the last one of a run that
was killed. A disk that takes none does not end a run: its lines wait until it does.
"""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

from bireme.documents import read_json_lines
from bireme.train.tracker import Tracker

__all__ = ["MetricsLog"]

LINE_ENDS = {ord(letter): f"\\u{ord(letter):04x}" for letter in "\x85\u2028\u2029"}
"""What some readers take for the end of a line. JSON leaves these as they are, but for others it escapes."""


class MetricsLog:
    """Appends to the log of a run, whose clock goes on where it stopped before; from any thread."""

    def __init__(self, path: Path, *, trackers: Sequence[Tracker] = ()) -> None:
        self._offset_s = _last_time_s(path) if path.exists() else 0.0
        self._begin_s = perf_counter()
        self._lock = Lock()
        self._file = FileIO(path, "ab")
        self._waiting = b""
        self.failure: str | None = None
        """Why lines could not be written, since the last one that was."""
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            _cut_half_line(path)
        self._trackers = trackers

    @property
    def tracker_failures(self) -> dict[str, str]:
        """Why trackers get no more curves, by their titles."""
        return {one.title: one.failure for one in self._trackers if one.failure is not None}

    @property
    def time_s(self) -> float:
        """Seconds of this run, resumes counted on."""
        return self._offset_s + perf_counter() - self._begin_s

    def note(self, kind: str, step: int, **values: Any) -> None:
        """One line. A number that is not finite becomes null."""
        line = {"kind": kind, "step": step, "time_s": round(self.time_s, 4), **values}
        text = json.dumps(_plain(line), ensure_ascii=False, allow_nan=False) + "\n"
        with self._lock:
            self._waiting += text.translate(LINE_ENDS).encode()
            self._write()
        for tracker in self._trackers:
            tracker.note(kind, step, values)

    def close(self) -> None:
        """End the files."""
        with suppress(OSError):
            self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def _write(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self.failure = None
        except OSError as error:
            self.failure = str(error.strerror or error)


def _last_time_s(path: Path) -> float:
    """When the last line was written, as far as the log can be read: no log keeps a run from going on."""
    times = (one.get("time_s") for one in read_json_lines(path, start="start").records.values())
    return max((float(one) for one in times if isinstance(one, int | float)), default=0.0)


def _cut_half_line(path: Path) -> None:
    """Take away what a killed run has left of its last line, for the next would go on in it."""
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
