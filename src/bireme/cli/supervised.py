"""What `bireme train` and `bireme resume` are on one host: a small process, and the launcher, a copy of it.

The launcher imports torch, plans, starts ranks and watches over them, and all of these end with it. If it is
killed, as by the system for lack of memory, this process starts another launcher, which resumes the run.
Everything else passes through: signals go to the launcher, and this process ends as the launcher ends. Where
other launchers such as torchrun, Slurm or Kubernetes start `bireme train`, they do this themselves.

    shell ── bireme train ─┬─ launcher ─┬─ ranks
             (this one)    │            └─ coordinator
                           └─ launcher of the resumed run, if the first is killed
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import typer

from bireme.errors import tell

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_ENDS = (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a launcher to end, so that it is not started again."""
_WATCHED = (*PASSED_ON, signal.SIGCHLD, signal.SIGTSTP)
_MOST_BYTES = 1 << 16
LAUNCHER = "bireme launcher"
"""How the system lists the process."""

_report: int | None = None
"""In a launcher, the end of a pipe that takes the run's folder."""


def supervised(resume: Callable[[Path], None]) -> None:
    """Return in a copy of this process, the launcher. If that is killed, `resume` is called in another copy.

    This process itself ends here. It returns at once if this process is not only the command: its output is
    taken by other code, or it has several threads, of which a copy would lack all but one. On other systems
    than Linux it returns at once, too.
    """
    if sys.platform != "linux" or sys.stdout is not sys.__stdout__:
        return
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    folder: Path | None = None
    while True:
        reader, writer = os.pipe()
        for stream in (sys.__stdout__, sys.__stderr__):  # or each copy would print what is left there
            if stream is not None:
                stream.flush()
        own_pid, pid = os.getpid(), os.fork()
        if pid == 0:
            os.close(reader)
            _become_launcher(own_pid, writer)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if folder is None:
                return
            resume(folder)
            raise typer.Exit
        os.close(writer)
        with suppress(OSError):
            os.setpgid(pid, pid)
        is_asked, status = _wait(pid)
        folder = _reported(reader) or folder
        if is_asked or folder is None or not _is_killed(status):
            _end_like(status)
        number = os.WTERMSIG(status)
        _show_cursor()
        tell(
            f"the launcher, which starts the ranks, was killed by signal {number} ({_name(number)}), and its "
            "ranks with it. Another launcher resumes the run."
        )


def report_folder(folder: Path) -> None:
    """In a launcher: from now on the run can be resumed from its folder."""
    if _report is not None:
        os.write(_report, os.fsencode(folder))


def _become_launcher(parent_pid: int, writer: int) -> None:
    """In the copy. It has a group of its own, so that each signal of a terminal comes once, passed on."""
    global _report  # noqa: PLW0603 (a process is one launcher)
    from bireme.runtime.board import die_with_parent

    _report = writer
    os.setpgid(0, 0)
    die_with_parent(parent_pid)
    Path("/proc/self/comm").write_text(LAUNCHER, encoding="utf-8")


def _wait(pid: int) -> tuple[bool, int]:
    """Pass signals on until the launcher has ended: whether one of them asked for its end, and its status."""
    is_asked = False
    while True:
        number = signal.sigwait(_WATCHED)
        if number == signal.SIGCHLD:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return is_asked, status
        elif number == signal.SIGTSTP:  # of a terminal: all stop, and go on together
            os.killpg(pid, signal.SIGSTOP)
            _show_cursor()
            os.kill(os.getpid(), signal.SIGSTOP)
            os.killpg(pid, signal.SIGCONT)
        else:
            is_asked = True
            if number == signal.SIGINT:  # as a terminal does: to the ranks too
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


def _reported(reader: int) -> Path | None:
    """The folder of the run that the launcher began, if it did."""
    os.set_blocking(reader, False)
    try:
        found = os.read(reader, _MOST_BYTES)
    except BlockingIOError:  # another process that it started has the other end
        found = b""
    finally:
        os.close(reader)
    return Path(os.fsdecode(found)) if found else None


def _is_killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) not in _ENDS


def _end_like(status: int) -> None:
    """End as the launcher has ended."""
    if not os.WIFSIGNALED(status):
        raise typer.Exit(os.WEXITSTATUS(status))
    _show_cursor()
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


def _show_cursor() -> None:
    """The live view of a launcher that was stopped or killed has left the terminal without a cursor."""
    if sys.stderr.isatty():
        typer.echo("\x1b[?25h", err=True, nl=False)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "no name"
