"""For how long this thread has waited for a core while others had it: what is no part of its own work.

It is asked around everything that is timed, so the file is read in the quickest way there is.
"""

import os

__all__ = ["waited_s"]

SCHEDULER = "/proc/thread-self/schedstat"
"""Where Linux says for how long this thread has run and has waited, in nanoseconds."""

MOST_BYTES = 128


def waited_s() -> float:
    """All its waits so far; 0 where nobody says it."""
    try:
        file = os.open(SCHEDULER, os.O_RDONLY)
        try:
            return int(os.read(file, MOST_BYTES).split()[1]) / 1e9
        finally:
            os.close(file)
    except (OSError, ValueError, IndexError):
        return 0.0
