"""What tests in several workers look at is made by the first of them that needs it; the others wait."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ["made_once"]


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """The folder of that name, which `make` has filled once for this run of the suite."""
    folder = Path(os.environ["BIREME_TESTS_FOLDER"], "once", name)
    folder.parent.mkdir(exist_ok=True)
    done = folder.with_suffix(".done")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of somebody who failed
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
