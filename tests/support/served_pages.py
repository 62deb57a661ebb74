"""The page of a run, served from a thread of the test."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bireme.report.page.page import LivePage, PageServer

__all__ = ["served"]


@contextmanager
def served(folder: Path) -> Iterator[PageServer]:
    """The server of a folder's page, until the block ends."""
    with PageServer(LivePage(folder, "0.1.0").newest, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
