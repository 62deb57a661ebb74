"""Starting processes: on Linux as copies of a fork server, elsewhere as new processes of Python.

A process that is started here has the environment, the folder, the import path and the main module of its
starter, as they are at that time. It ends when its starter ends.
"""

import atexit
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context, spawn
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from bireme.runtime.board import die_with_parent
from bireme.runtime.fork_server import (
    FORK,
    HELD,
    IMPORT,
    Preparation,
    inherited,
    kept_for_good,
    next_report,
    serve,
    take_environment,
)

CAN_FORK = sys.platform == "linux"
"""On other systems a copy of a process that has loaded much does not work well, or there is no fork."""

_READ_AT_LOAD = (
    "GOMP_",
    "KMP_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "TORCH",
)
"""Variables that begin so are read when a library is loaded: a server with other values cannot be used."""

_SET_BY_LIBRARIES = ("KMP_DUPLICATE_LIB_OK", "TORCHINDUCTOR_CACHE_DIR")
"""But not these: scikit-learn sets the first when it is imported, in case that OpenMP is loaded twice. Torch
sets the second when it imports its compiler, and reads it whenever it needs it.
"""

SERVER = (
    "import sys; sys.path[:] = {path!r}; "
    "from bireme.runtime.processes import be_server; be_server({file}, {pid})"
)

_THREADS = Path("/proc/self/task")
THREADS_OF_NUMPY = "OPENBLAS_NUM_THREADS"

UNREPORTED = 256
"""The status of a process that ended after its server, which therefore did not report one."""

_TRIES = 2
"""How many servers are tried for a copy: each may end before it has made the copy."""

_ALWAYS = "bireme.runtime.pipeline"
"""The module that a new server imports: nearly all copies need it."""


def start_process(
    name: str,
    function: Callable[..., None],
    *arguments: object,
    output: tuple[Connection, Connection] | None = None,
) -> tuple["Process", Connection]:
    """A process that calls `function(talk, *arguments)`, and the other end of what it talks through.

    Signals that the calling thread holds back are held back from it too. The arguments go through pickle.
    Its standard output and standard error go to `output`, by default to those of this process.
    """
    start = _copied if CAN_FORK else _spawned
    return start(name, function, arguments, output)


def has_server() -> bool:
    """Whether there is a server already that can make a copy."""
    if _server is None:
        return inherited() is not None
    return _server.owner_pid == os.getpid() and _server.is_of_use


def preload(*modules: str) -> None:
    """Have the server import these modules, for all processes that it will start, without waiting for it."""
    if CAN_FORK:
        for module in modules:
            _ask(IMPORT + module.encode())


def serve_from_here(*modules: str) -> None:
    """Import these modules, and then make a copy of this process the server, with all that it has imported.

    It is for a process that has only just begun. If there is a server already, or a thread that a copy would
    lack, it only imports.
    """
    global _server  # noqa: PLW0603 (a process has one)
    # So numpy starts no threads for matrices: they are not used here.
    with environment({THREADS_OF_NUMPY: "1"}), kept_for_good():
        for module in modules:
            importlib.import_module(module)
    if not CAN_FORK or _server is not None or len(list(_THREADS.iterdir())) > 1:
        return
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own = os.getpid()
    sys.stdout.flush()  # or each copy would print the rest of the buffer
    sys.stderr.flush()
    with signals_held():
        pid = os.fork()
        if pid == 0:
            try:
                here.close()
                serve(there, own)
            finally:
                os._exit(1)
    there.close()
    _server = _Server(here, _at_load(), pid)


def be_server(file: int, owner_pid: int) -> None:
    """Serve, in a new Python process that was started for this, once it has imported everything."""
    with kept_for_good():
        importlib.import_module(_ALWAYS)
    serve(socket.socket(fileno=file), owner_pid)


_Output = tuple[Connection, Connection] | None


def _copied(
    name: str, function: Callable[..., None], arguments: tuple[object, ...], output: _Output
) -> tuple["_Copy", Connection]:
    out, err = (1, 2) if output is None else (one.fileno() for one in output)
    for _ in range(_TRIES):
        near, far = connection.Pipe()
        here, there = socket.socketpair()
        far_lifeline, lifeline = connection.Pipe(duplex=False)
        with far, there, far_lifeline:
            _ask(FORK, there.fileno(), far.fileno(), far_lifeline.fileno(), out, err)
        if (pid := next_report(here)) is not None:
            break
        for end in (near, here, lifeline):
            end.close()
    else:
        raise RuntimeError("The fork server, which starts processes, has ended; its output may say why.")
    held = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    main = spawn.get_preparation_data(name)
    del main["authkey"]  # it is not used here, and cannot be pickled
    near.send(Preparation(name, main, dict(os.environ), held))
    near.send((function, arguments))
    return _Copy(pid, here, lifeline), near


class _Copy:
    """A copy of the server. It ends when this object is deleted."""

    def __init__(self, pid: int, holder: socket.socket, lifeline: Connection) -> None:
        holder.setblocking(False)
        self.pid = pid
        self.sentinel = holder
        self._lifeline = lifeline
        self._status: int | None = None

    @property
    def status(self) -> int | None:
        """How it ended."""
        self.join(0.0)
        return self._status

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal. No other process gets its id before this object is closed."""
        if self.status is None:
            os.kill(self.pid, number)

    def join(self, limit_s: float | None = None) -> None:
        """Wait for its end."""
        if self._status is None and connection.wait([self.sentinel], limit_s):
            found = next_report(self.sentinel)
            if self._status is None:  # a handler of signals may have asked meanwhile
                self._status = UNREPORTED if found is None else found

    def close(self) -> None:
        """End it, if it lives, and free its process id."""
        self.send_signal(signal.SIGKILL)
        self.join()
        self.sentinel.close()
        self._lifeline.close()


class _Server:
    """This process's connection to the server; `pid` is None if the server was there before this process."""

    def __init__(self, way: socket.socket, loaded_with: "_Surroundings | None", pid: int | None) -> None:
        self.owner_pid = os.getpid()
        self._way, self._loaded_with, self._pid = way, loaded_with, pid
        if pid is not None:
            atexit.register(self.end)

    @property
    def is_of_use(self) -> bool:
        """Whether libraries would be loaded now as they were there."""
        return self._loaded_with is None or self._loaded_with.serves(_at_load())

    def ask(self, what: bytes, files: tuple[int, ...]) -> bool:
        """Send a request; False if the server is gone."""
        try:
            socket.send_fds(self._way, [what], files)
        except ConnectionError:
            return False
        return True

    def end(self) -> None:
        """End the server, if it is this process's own."""
        self._way.close()
        if self._pid is not None and self.owner_pid == os.getpid():
            atexit.unregister(self.end)
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


_server: _Server | None = None
_lock = threading.Lock()


def _ask(what: bytes, *files: int) -> None:
    """Send a request to the server. If there is none, start it."""
    global _server  # noqa: PLW0603 (a process has one)
    with _lock:
        if _server is None and (way := inherited()) is not None:
            _server = _Server(way, None, None)
        if _server is not None and _server.owner_pid == os.getpid():
            if _server.is_of_use and _server.ask(what, files):
                return
            _server.end()
        _server = _started()
        _server.ask(what, files)


def _started() -> _Server:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = SERVER.format(path=sys.path, file=there.fileno(), pid=os.getpid())
    words = [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code]  # type: ignore[attr-defined]
    with there, signals_held():
        # With one thread a library starts none when it is imported. A copy has as many as it asks for.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        started = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()], env=environment
        )
        started.returncode = 0  # it is waited for below, and not by this object
    return _Server(here, _at_load(), started.pid)


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What the libraries that a process loads depend on. A folder counts where it is first in the path."""

    path: tuple[str, ...]
    variables: Mapping[str, str]

    def serves(self, now: "_Surroundings") -> bool:
        """Whether what was loaded here is what would be loaded now. Folders that were appended to the path,
        as for a function of the user's, hide nothing.
        """
        return self.variables == now.variables and self.path == now.path[: len(self.path)]


def _at_load() -> _Surroundings:
    own = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_READ_AT_LOAD) and name not in _SET_BY_LIBRARIES
    }
    return _Surroundings(tuple(dict.fromkeys(sys.path)), own)


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Let the processes that are started inside have these variables, and not have those that are None."""
    before = dict(os.environ)
    changed = {**before, **changes}
    take_environment({name: value for name, value in changed.items() if value is not None})
    try:
        yield
    finally:
        take_environment(before)


@contextmanager
def signals_held() -> Iterator[None]:
    """Processes that are started in the block have signals to the whole group blocked at first."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawned(
    name: str, function: Callable[..., None], arguments: tuple[object, ...], output: _Output
) -> tuple["_Spawned", Connection]:
    near, far = connection.Pipe()
    words = (os.getpid(), far, output or (), function, arguments)
    process = get_context("spawn").Process(target=_live, args=words, name=name)
    process.start()
    far.close()
    return _Spawned(process), near


def _live(
    parent_pid: int,
    talk: Connection,
    output: Sequence[Connection],
    function: Callable[..., None],
    arguments: tuple[object, ...],
) -> None:
    die_with_parent(parent_pid)
    for own, number in zip(output, (1, 2), strict=False):
        os.dup2(own.fileno(), number)
    function(talk, *arguments)


class _Spawned:
    """A process that Python's own `multiprocessing` starts."""

    def __init__(self, process: SpawnProcess) -> None:
        assert process.pid is not None, "it was started"
        self._process = process
        self.pid, self.sentinel = process.pid, process.sentinel

    @property
    def status(self) -> int | None:
        """How it ended."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it lives."""
        if self.status is None:
            os.kill(self.pid, number)

    def join(self, limit_s: float | None = None) -> None:
        """Wait for its end."""
        self._process.join(limit_s)

    def close(self) -> None:
        """End it, if it lives."""
        self._process.kill()
        self._process.join()


Process = _Copy | _Spawned
"""A process that was started. It ends when this object is deleted."""
