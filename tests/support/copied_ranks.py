"""torchrun's ranks as copies of its agent, in place of new Pythons: the agent itself is torch's own.

Ranks are the agent's children and lead their sessions, as they do under torchrun. A copy has none of the
agent's open files, handlers of signals or duties at its end.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from bireme.runtime.fork_server import inherited
from bireme.runtime.processes import serve_from_here
from tests.support.copies import run_python

__all__ = ["copy_ranks"]

HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Of these the agent has handlers."""

LOOK_S = 0.01


def copy_ranks() -> None:
    """From now on the agent that runs in this process starts its ranks so."""
    SubprocessHandler._popen = lambda self, words, variables: _Rank(words[1:], variables)  # type: ignore[method-assign,assignment,return-value]


class _Rank:
    """A rank, as the agent knows it from `subprocess.Popen`."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        ready, leads = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _live(leads, words, variables)
        os.close(leads)
        os.read(ready, 1)
        os.close(ready)

    def poll(self) -> int | None:
        """How it ended, or None."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for its end."""
        end_s = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(LOOK_S)
        return status


def _live(leads: int, words: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """The life of a copy, from the fork to its end."""
    status = 1
    try:
        os.setsid()
        os.write(leads, b"1")
        server = inherited()
        assert server is not None, "torchrun is a copy itself"
        os.closerange(3, server.fileno())
        os.closerange(server.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        os.environ.clear()
        os.environ.update(variables)
        serve_from_here()  # what a rank starts is on its machine, and of its session
        status = _status(words)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _status(words: Sequence[str]) -> int:
    try:
        run_python(words)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    return 0
