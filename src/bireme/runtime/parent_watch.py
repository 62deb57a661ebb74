"""The lifeline: a process that ends when its parent, or who asked for it, ends, whatever ended that."""

import ctypes
import os
import select
import signal
import sys
import threading
import time

__all__ = ["die_with_holder", "die_with_parent"]

PR_SET_PDEATHSIG = 1
F_SETSIG = 10
"""Of Linux; Python's `fcntl` has no name for it."""
LOOK_S = 1.0


def die_with_parent(parent_pid: int) -> None:
    """From now on this process is killed when its parent, which had that number, is gone."""
    if sys.platform == "linux":
        # Says the kernel: when the *thread* ends that started this process.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_look, args=(parent_pid,), name="bireme lifeline", daemon=True).start()
    if os.getppid() != parent_pid:
        os._exit(1)  # It ended before this was set.


def die_with_holder(lifeline: int) -> None:
    """From now on Linux kills this process when the other end of a pipe, of which this is the end to read,
    is closed: by its holder or by the holder's death. It does so too if this process is stopped, or stuck.
    """
    import fcntl  # not on every system

    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_RDONLY | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        os._exit(1)  # It was closed before this was set.


def _look(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(LOOK_S)
    os._exit(1)
