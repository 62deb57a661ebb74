"""The live view of a run in a terminal: the newest figures at the bottom, all other output above them.

While the view is open, standard output and standard error of this process, and of all processes that it
starts, are a pipe. One thread reads the pipe: events of the run change the view, and text is printed above
it. So no process needs to know where the view is on the screen.
"""

import os
import select
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from bireme.report.live_run import LiveRun
from bireme.report.run_lines import EVENTS, MARK, event_in

_END = MARK.encode()
"""The last line of the pipe. Processes that outlive the view may still have it open."""

_BETWEEN_S = 0.25
"""Least time between two pictures: drawing takes time from the ranks."""

_CLOCK_S = 1.0
"""Draw this often if nothing happens, for the clock."""

_MOST_BYTES = 1 << 16


@contextmanager
def live_view() -> Iterator[None]:
    """Show the run that trains in the block; plain lines if standard error is not a terminal."""
    errors, out = sys.__stderr__, sys.__stdout__
    if errors is None or errors is not sys.stderr or not errors.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    files = [2, 1] if out is not None and out is sys.stdout and out.isatty() else [2]
    _flush()
    kept = [os.dup(file) for file in files]
    reader, writer = os.pipe()
    screen = _Screen(reader, kept[0], errors.encoding)
    try:
        for file in files:
            os.dup2(writer, file)
        os.environ[EVENTS] = "1"
        yield
    finally:
        os.environ.pop(EVENTS, None)
        _flush()
        for file, before in zip(files, kept, strict=True):
            os.dup2(before, file)
        os.write(writer, _END + b"\n")
        os.close(writer)
        screen.close()
        for before in kept:
            os.close(before)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


class _Screen:
    """Reads the pipe to its end, and draws on the terminal."""

    def __init__(self, reader: int, terminal: int, encoding: str) -> None:
        self._reader, self._terminal = reader, terminal
        file = os.fdopen(os.dup(terminal), "w", encoding=encoding, errors="replace")
        self._console = Console(file=file, force_terminal=True, highlight=False)
        self._run = LiveRun(is_ascii="utf" not in encoding.lower())
        self._live = Live(
            console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._drawn_s, self._rest, self._is_open = 0.0, b"", True
        self._lines: list[str] = []
        """Those that were read and are not shown yet."""
        self._thread = threading.Thread(target=self._work, name="bireme view", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Draw the last picture, and leave the cursor below it."""
        self._thread.join()
        os.close(self._reader)
        with suppress(OSError):
            self._console.file.close()

    def _work(self) -> None:
        try:
            with suppress(OSError):  # the terminal is gone
                self._show()
        finally:  # after an error too, which is printed at the end: the writers of the pipe must not wait
            with suppress(OSError):
                self._live.stop()
            while self._lines or self._is_open:
                texts = (line.partition(MARK)[0] for line in self._lines if not line.startswith(MARK))
                with suppress(OSError):
                    os.write(self._terminal, "".join(f"{text}\n" for text in texts).encode())
                self._lines = self._read() if self._is_open else []

    def _show(self) -> None:
        is_new = False
        while self._is_open:
            wait_s = max(self._drawn_s + _BETWEEN_S - monotonic(), 0.0) if is_new else _CLOCK_S
            if select.select([self._reader], [], [], wait_s)[0]:
                self._lines = self._read()
                if texts := list(self._texts(self._lines)):
                    self._console.print(Text.from_ansi("\n".join(texts)), soft_wrap=True)
                self._lines, is_new = [], True
            if not is_new or monotonic() - self._drawn_s >= _BETWEEN_S:
                self._draw()
                is_new = False
        self._draw()

    def _read(self) -> list[str]:
        """The next lines of the pipe, which is open until its last line."""
        found = os.read(self._reader, _MOST_BYTES)
        *lines, self._rest = (self._rest + found).split(b"\n")
        self._is_open = bool(found) and not any(line.endswith(_END) for line in lines)
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def _texts(self, lines: Iterable[str]) -> Iterator[str]:
        """The text of some lines of output. Events change the view, and few of them have a text."""
        for line in lines:
            text, *marked = line.split(MARK)  # a process may have left a line without an end
            if text or not marked:
                yield text
            for one in filter(None, marked):
                event = event_in(MARK + one)
                own = one if event is None else self._run.take(event, monotonic())
                if own is not None:
                    yield own

    def _draw(self) -> None:
        """Draw the newest figures, if the run has begun."""
        self._drawn_s = monotonic()
        if not self._run.has_begun:
            return
        size = os.get_terminal_size(self._terminal)
        if size.columns and size.lines:
            self._console.size = size
        if not self._live.is_started:
            self._live.start()
        lines = self._run.lines(self._console.width - 1, monotonic())
        self._live.update(Group(*lines), refresh=True)
