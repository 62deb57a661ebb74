"""Workers of the suite as copies of one process, the template, which has imported what they need.

Otherwise each worker of pytest-xdist imports torch and all tests, whose assertions pytest rewrites, and so
does the fork server of each worker. That server is a copy of the worker at its very beginning here: what the
template has imported is there for the processes of tests too.

pytest-xdist starts `worker_client.py` in place of Python. It asks the template for a worker that has the
client's input and output, and lives as long as that worker.

The process that starts the template imports this file too and runs no test, so functions of the template
import what imports torch.
"""

import importlib
import os
import pkgutil
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

import bireme

__all__ = ["LARGE", "Template", "be_template"]

CLIENT = Path(__file__).with_name("worker_client.py")
CODE = """\
import sys
sys.path[:] = {path!r}
from tests.support.workers import be_template
be_template({file}, {owner}, {modules!r}, {words!r})
exec(eval(sys.stdin.readline()))
"""
"""The last line is all that pytest-xdist asks of a Python."""

FIRST = "torch._dynamo", "torch.export._trace"
"""What optimizers import at their first step, and torch when it first captures a model."""

LARGE = (
    "datasets",
    "peft",
    "tests.support.copies",
    "torch.distributed.run",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)
"""What slow tests, and the processes that they start, import when they need it."""

STREAMS = 3
NUMBER_BYTES = 8


class Template:
    """The process that workers are copies of, for the one that starts them; it ends with that one.

    It imports these modules, and the tests that pytest finds by these words.
    """

    def __init__(self, folder: Path, modules: Sequence[str], words: Sequence[str]) -> None:
        self._address = folder / "template"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(self._address))
            listening.listen()
            file = listening.fileno()
            code = CODE.format(path=sys.path, file=file, owner=os.getpid(), modules=modules, words=words)
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[file],
            )

    @property
    def client(self) -> str:
        """The command that becomes a worker."""
        return shlex.join([sys.executable, "-I", "-S", str(CLIENT), str(self._address)])

    def end(self) -> None:
        """End it; no worker is left by now."""
        self._process.terminate()
        self._process.wait()


def be_template(file: int, owner_pid: int, modules: Sequence[str], words: Sequence[str]) -> None:
    """Import all of the package, these modules and the tests that these words name, and wait for clients at
    the open file of that number. It returns in each worker.
    """
    from bireme.profile import control
    from bireme.runtime.board import die_with_parent
    from bireme.runtime.fork_server import kept_for_good
    from bireme.train import captured_run

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the workers to act on
    die_with_parent(owner_pid)
    with kept_for_good():
        for name in (*_own(), *FIRST, *modules):
            with suppress(ImportError):  # a test that cannot do without it says so
                importlib.import_module(name)
        _import_tests(words)
    # No machine is quiet while it runs the suite: what the engine takes is measured once all the same, with
    # messages of one size, and without a ring of processes that keeps all cores busy for half a second.
    vars(captured_run).update(
        waited_s=lambda: 0.0, _rounded=lambda _: 1 << 16, wake_costs=lambda _: (0.0, 0.0)
    )
    vars(control).update(control_now_s=lambda _: 1e-3)  # machines that join are equally fast
    signal.signal(signal.SIGCHLD, _reap)
    signal.signal(signal.SIGTERM, _end)
    listening = socket.socket(fileno=file)
    while True:
        client, _ = listening.accept()
        with client:
            if os.fork() == 0:
                listening.close()
                _be_worker(client)
                return


class _NoItems:
    """Has pytest import the files of tests, and make nothing of their functions."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self) -> list[pytest.Item]:
        return []


def _import_tests(words: Sequence[str]) -> None:
    path = [*sys.path]
    without = [word for name in ("xdist", "cacheprovider", "faulthandler") for word in ("-p", f"no:{name}")]
    pytest.main(["--collect-only", "--capture=no", *without, *words], [_NoItems()])
    sys.path[:] = path
    with suppress(ImportError):  # its plugin of pytest does so too, in each worker that has a test of it
        from hypothesis.internal.conjecture.providers import _get_local_constants

        _get_local_constants()


def _own() -> Iterator[str]:
    for module in pkgutil.walk_packages(bireme.__path__, "bireme."):
        if not module.name.endswith("__main__"):
            yield module.name


def _reap(_number: int, _frame: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end(_number: int, _frame: object) -> NoReturn:
    """What workers have taken counts for who waits for this process."""
    _reap(_number, _frame)
    os._exit(0)


def _be_worker(client: socket.socket) -> None:
    from bireme.runtime.board import die_with_parent
    from bireme.runtime.processes import serve_from_here

    die_with_parent(os.getppid())
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve_from_here()  # before there are the worker's threads, and its pipes
    _, files, _, _ = socket.recv_fds(client, NUMBER_BYTES, STREAMS)
    for stream, file in enumerate(files):
        os.dup2(file, stream)
        os.close(file)
    client.send(os.getpid().to_bytes(NUMBER_BYTES, "little"))
