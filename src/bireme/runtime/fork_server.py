"""The fork server: a process that imports torch once, and then starts others as copies of itself.

The server only waits: it runs no operator, starts no thread and touches no device, so a copy of it is as good
as a new process. Clients send requests over a socket; each copy has a socket to the server too, and may
request more copies.

A copy ends when its client closes the copy's lifeline, a pipe, or ends. The server ends with its owner, the
first client. So the end of the owner ends all processes. If the server is killed, its copies continue, and
their clients learn of the end of a copy by the socket that they share with it.

Python's own server (`multiprocessing`, forkserver with preload) is a new process, which imports torch and the
package a second time. On two busy cores four ranks were ready after 22 to 27 s with it and after 10 to 17 s
with this one, which is a copy of the process that has imported them. All of these processes had 520 MB with
it and 280 MB with this one. A server of either kind that is killed ends no copy and is started again.
"""

import atexit
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import current_process, spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from bireme.compiled import without_collector
from bireme.runtime.board import die_with_holder

FORK, IMPORT = b"fork", b"import "
"""Requests of a client: for a copy, sent with five files, and for the import of a module for all copies."""

_NUM_FILES = 5
_MESSAGE_BYTES = 4096
NUMBER_BYTES = 8

HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals to a whole group of processes, on which the server does not act."""

LOOK_S = 1.0
"""How often to check that the owner lives: another process may hold its socket, too."""

_CALLED_BYTES = 15
"""The longest name of a process that Linux keeps."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """The state that a copy takes on before it unpickles its task.

    `main` is the preparation of `multiprocessing` for new processes: the path to import from, the main
    module, the folder. `held` are the signals that are blocked in it.
    """

    name: str
    main: dict[str, Any]
    environment: dict[str, str]
    held: frozenset[int]


def serve(owner: socket.socket, owner_pid: int) -> NoReturn:
    """Serve that owner until it ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    _call_this_process("bireme server")
    server = _Server(owner)
    while os.getppid() == owner_pid:
        server.wait(LOOK_S)
    server.end()


@dataclass(slots=True)
class _Copy:
    """A process that was started. `holder` is the socket to its client, None after the client let it go."""

    holder: socket.socket | None
    has_ended: bool = False


class _Server:
    def __init__(self, owner: socket.socket) -> None:
        self._owner = owner
        self._copies: dict[int, _Copy] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._watch(self._woken, self._note_ends)
        self._watch(owner, lambda: self._hear(owner))

    def wait(self, limit_s: float) -> None:
        """Serve the next requests, and wait for them if there are none."""
        for key, _ in self._selector.select(limit_s):
            key.data()

    def end(self) -> NoReturn:
        """Kill all copies, and leave."""
        for pid, copy in self._copies.items():
            if not copy.has_ended:
                os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def _watch(self, end: socket.socket, act: Callable[[], None]) -> None:
        self._selector.register(end, selectors.EVENT_READ, act)

    def _hear(self, client: socket.socket) -> None:
        try:
            asked, files, _, _ = socket.recv_fds(client, _MESSAGE_BYTES, _NUM_FILES)
        except OSError:
            asked, files = b"", []
        if asked == FORK and len(files) == _NUM_FILES:
            self._fork(files)
        elif asked.startswith(IMPORT):
            # If the import fails, it fails again in the copy that needs the module.
            with suppress(Exception), kept_for_good():
                importlib.import_module(asked.removeprefix(IMPORT).decode())
        elif client is self._owner:
            self.end()
        else:
            self._selector.unregister(client)
            client.close()

    def _fork(self, files: list[int]) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        holder, *others = files
        pid = os.fork()
        if pid == 0:
            self._leave_to_the_server(here)
            _live(there, socket.socket(fileno=holder), *others)
        there.close()
        for file in others:
            os.close(file)
        copy = self._copies[pid] = _Copy(socket.socket(fileno=holder))
        self._tell(copy, pid)
        self._watch(here, lambda: self._hear(here))
        if copy.holder is not None:
            self._watch(copy.holder, lambda: self._let_go(pid))

    def _leave_to_the_server(self, here: socket.socket) -> None:
        """In a copy: close everything that belongs to the server alone."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._waker.close()
        self._selector.close()
        here.close()

    def _note_ends(self) -> None:
        """Report to clients which copies have ended. The system keeps their statuses until then."""
        with suppress(BlockingIOError):
            self._woken.recv(_MESSAGE_BYTES)
        for pid, copy in list(self._copies.items()):
            if copy.has_ended:
                continue
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                continue
            copy.has_ended = True
            self._tell(copy, found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)
            if copy.holder is None:
                self._forget(pid)

    def _tell(self, copy: _Copy, number: int) -> None:
        if copy.holder is not None:
            with suppress(OSError):  # the client is gone, which shows soon
                copy.holder.send(number.to_bytes(NUMBER_BYTES, "little", signed=True))

    def _let_go(self, pid: int) -> None:
        """The client of that copy has let it go: end the copy."""
        copy = self._copies[pid]
        assert copy.holder is not None, "it was let go before"
        self._selector.unregister(copy.holder)
        copy.holder.close()
        copy.holder = None
        if copy.has_ended:
            self._forget(pid)
        else:
            os.kill(pid, signal.SIGKILL)

    def _forget(self, pid: int) -> None:
        os.waitpid(pid, 0)
        del self._copies[pid]


@contextmanager
def kept_for_good() -> Iterator[None]:
    """Keep the objects that the block makes out of Python's collector of cycles, during the block and later.

    Otherwise the collector visits all of them again and again. That takes 20 % of the time to import torch,
    and in a copy it makes the system copy the memory of the modules.
    """
    with without_collector():
        try:
            yield
        finally:
            gc.freeze()


def next_report(holder: socket.socket) -> int | None:
    """The server's next report about a copy: first its pid, later its status. None if there is no more."""
    try:
        number = holder.recv(NUMBER_BYTES)
    except OSError:
        number = b""
    return int.from_bytes(number, "little", signed=True) if number else None


_inherited: socket.socket | None = None


def inherited() -> socket.socket | None:
    """The socket of this process to the server, if this process is a copy of one."""
    return _inherited


def _live(
    server: socket.socket, holder: socket.socket, talk: int, lifeline: int, output: int, errors: int
) -> NoReturn:
    """The life of a copy, from the fork to its end."""
    global _inherited  # noqa: PLW0603 (a process has one server)
    status = 1
    try:
        die_with_holder(lifeline)
        # It stays open as long as this process lives, and no process that this one forks holds it too.
        os.register_at_fork(after_in_child=holder.close)
        for file, number in ((output, 1), (errors, 2)):
            os.dup2(file, number)
            os.close(file)
        _inherited = server
        status = _status_of(lambda: _work(Connection(talk)))
        # As at the end of any Python process.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _call_this_process(name: str) -> None:
    """Have the system list this process under a name."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name[:_CALLED_BYTES], encoding="utf-8")


def take_environment(variables: Mapping[str, str]) -> None:
    """Have these variables, and no others."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _work(talk: Connection) -> None:
    """Take on the requested state, and do the task."""
    prepared = talk.recv()
    assert isinstance(prepared, Preparation)
    _call_this_process(prepared.name)
    take_environment(prepared.environment)
    if "numpy.random" in sys.modules:
        # All copies would draw the same numbers. Python's own generator is seeded after each fork.
        sys.modules["numpy.random"].seed()
    signal.pthread_sigmask(signal.SIG_SETMASK, prepared.held)
    this: Any = current_process()
    this._inheriting = True
    try:
        spawn.prepare(prepared.main)
        function, arguments = talk.recv()
    finally:
        del this._inheriting
    function(talk, *arguments)


def _status_of(work: Callable[[], None]) -> int:
    """The exit status of a process that does this work."""
    try:
        work()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)  # noqa: T201 (as Python does)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
