"""The lifeline: a process that ends when its parent ends, whatever ended that."""

import ctypes
import os
import signal
import sys
import threading
import time

__all__ = ["die_with_parent"]

PR_SET_PDEATHSIG = 1
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


def _look(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(LOOK_S)
    os._exit(1)
