"""For how long this thread has waited for a core while others had it: what is no part of its own work."""

from pathlib import Path

__all__ = ["waited_s"]

SCHEDULER = Path("/proc/thread-self/schedstat")
"""Where Linux says for how long this thread has run and has waited, in nanoseconds."""


def waited_s() -> float:
    """All its waits so far; 0 where nobody says it."""
    try:
        return int(SCHEDULER.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
