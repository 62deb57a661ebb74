"""The page of a run, served on this machine alone and made again whenever the run has come further.

Other machines cannot reach it. Pages of other sites in the same browser cannot read it: its address has a
token, and requests that name another host are refused, as when a site's name is made to lead here.
"""

import hashlib
import secrets
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import Lock
from time import monotonic, time

from bireme.errors import BiremeError
from bireme.report.page.page import page, waiting_page
from bireme.report.page.run import read_run
from bireme.wire.text_server import HttpServer

HOST = "127.0.0.1"
_NAMES = frozenset({HOST, "localhost"})
_PLAIN = "text/plain; charset=utf-8"

_FILES = (
    "metrics.jsonl",
    "run.toml",
    "plan.json",
    "cluster.toml",
    "summary.json",
    "data.json",
    "graph.json",
    "timeline-predicted.json",
    "timeline-measured.json",
)
"""The files that the page is made of."""

_LEAST_S = 1.5
_PACE = 10.0
"""A page that takes a second to make is made every ten seconds at most: the run needs the processor."""

_AGE_S = 60.0
"""So often a page is made again for the clock alone: a run may have ended without notice."""


class LivePage:
    """The newest page of a run. `version` is the program's own."""

    def __init__(self, folder: Path, version: str) -> None:
        self._folder, self._program = folder, version
        self._lock = Lock()
        self._made, self._next_s = "", 0.0
        self._text = ""

    def newest(self) -> tuple[str, str]:
        """A word that differs whenever the page does, and the page."""
        with self._lock:
            found = self._state()
            if found != self._made and monotonic() >= self._next_s:
                begin_s = monotonic()
                self._text, self._made = self._page(found), found
                end_s = monotonic()
                self._next_s = end_s + max(_LEAST_S, _PACE * (end_s - begin_s))
            return self._made, self._text

    def _state(self) -> str:
        words = [str(int(time() // _AGE_S))]
        for name in _FILES:
            with suppress(OSError):
                found = (self._folder / name).stat()
                words.append(f"{name} {found.st_mtime_ns} {found.st_size}")
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]

    def _page(self, state: str) -> str:
        if not (self._folder / _FILES[0]).is_file():
            sentence = f"The run has not begun: there is no {self._folder / _FILES[0]} yet."
            return waiting_page(self._folder.resolve().name, sentence, self._program, state)
        try:
            return page([read_run(self._folder)], datetime.now().astimezone(), self._program, live=state)
        except BiremeError as error:
            return waiting_page(self._folder.resolve().name, str(error), self._program, state)


class PageServer(HttpServer):
    """Serves the newest page at `address`. Port 0 is a free one."""

    def __init__(self, newest: Callable[[], tuple[str, str]], port: int) -> None:
        self._newest = newest
        self._token = secrets.token_urlsafe(16)
        try:
            super().__init__(HOST, port, self._answered)
        except OSError as error:
            why = error.strerror or error
            raise BiremeError(
                f"Port {port} of {HOST} cannot be used: {why}. Leave out --port, which takes a free one."
            ) from None

    @property
    def address(self) -> str:
        """The page's address for a browser."""
        return f"http://{HOST}:{self.port}/{self._token}/"

    def _answered(self, host: str, path: str) -> tuple[int, str, str]:
        token, _, rest = path.removeprefix("/").partition("/")
        if host not in _NAMES:
            return 403, "This address is for a browser on the same machine.\n", _PLAIN
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            return 404, "Open the address that bireme watch has printed.\n", _PLAIN
        if rest not in ("", "version"):
            return 404, "There is only the page.\n", _PLAIN
        version, text = self._newest()
        return (200, version, _PLAIN) if rest else (200, text, "text/html; charset=utf-8")
