"""Python processes as copies of one that has imported torch and the package: `python WORDS…` in no time.

A new Python imports for seconds before it does anything. A copy has its own words, folder, variables, output
and session, ends as Python ends, and is asked and told like `subprocess.Popen`. Tests that are about what a
new Python imports, or about the installed command, start those.

torchrun is a copy too; `tests/support/copied_ranks.py` makes its ranks copies of it.
"""

import importlib
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from bireme.runtime.processes import preload, serve_from_here, start_process
from tests.support.graphs import remember_captures

__all__ = ["TORCHRUN", "Copy", "run_python"]

TORCHRUN = "torch.distributed.run"
IMPORTED = ("bireme.cli.train", "bireme.train.launching", "torch._dynamo", "tests.support.copies", TORCHRUN)
"""By the server, and so by nobody else."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a copy is to do; `first` is called before all else, and its output goes into these files."""

    words: tuple[str, ...]
    folder: str
    variables: Mapping[str, str]
    out: str
    err: str
    first: Callable[[], None] | None


class Copy:
    """`python WORDS…` that was started here; it is killed when this object is closed or forgotten."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        *,
        variables: Mapping[str, str] | None = None,
        first: Callable[[], None] | None = None,
    ) -> None:
        preload(*IMPORTED)
        self._scratch = tempfile.TemporaryDirectory(dir=os.environ["BIREME_TESTS_FOLDER"])
        self.out, self.err = (Path(self._scratch.name, name) for name in ("out", "err"))
        for path in (self.out, self.err):
            path.touch()
        task = Task(tuple(words), str(folder), variables or {}, str(self.out), str(self.err), first)
        self._process, talk = start_process("python", _live, task)
        with talk, suppress(EOFError):
            talk.recv()  # it leads its session from here on
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended, negative for a signal; None while it lives."""
        return self._process.status

    def poll(self) -> int | None:
        """How it ended, or None."""
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; what it printed."""
        self.wait(timeout)
        return self.out.read_text(), self.err.read_text()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; its status."""
        self._process.join(timeout)
        if self._process.status is None:
            said = self.err.read_text()
            raise TimeoutError(f"it has not ended after {timeout} s, and said: {said}")
        return self._process.status

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it lives."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it, if it lives."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it and all of its session, and forget it."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.close()
        self._scratch.cleanup()


def _live(talk: Connection, task: Task) -> None:
    os.setsid()
    talk.send(None)
    talk.close()
    for path, number in ((task.out, 1), (task.err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(task.variables)
    remember_captures()
    os.chdir(task.folder)
    # Who runs tests in the background of a shell has them ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if task.first is not None:
        task.first()
    run_python(task.words)


def run_python(words: Sequence[str]) -> None:
    """Do what `python WORDS…` does, with words as torchrun gives them to a new Python; ends as it would."""
    try:
        _run([word for word in words if word != "-u"])
    except SystemExit:
        raise
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        raise SystemExit(1) from None


def _run(words: list[str]) -> None:
    match words:
        case ["-m", name, *rest] if name == TORCHRUN:
            from tests.support.copied_ranks import copy_ranks

            copy_ranks()
            sys.argv = [name, *rest]
            importlib.import_module(name).main()
        case ["-m", name, *rest]:
            sys.argv = [name, *rest]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case [script, *_]:
            serve_from_here()  # so that what the script starts is of its own session
            sys.argv = words
            runpy.run_path(script, run_name="__main__")
