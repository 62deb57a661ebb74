"""For how long this thread has waited for a core while others had it: what is no part of its own work.

Others are threads of this machine, or other machines whose host lends them its cores. It is asked around
everything that is timed, so the files are read in the quickest way there is.
"""

import os
from dataclasses import dataclass
from time import thread_time

__all__ = ["CoreTime", "core_time", "waited_s"]

SCHEDULER = "/proc/thread-self/schedstat"
"""Where Linux says for how long this thread has run and has waited, in nanoseconds."""

PROCESSORS = "/proc/stat"
"""Where it says what all cores did, in hundredths of a second."""

IDLE, STOLEN, NUM_STATES = (3, 4), 7, 8
"""Of the numbers there, which are of cores with nothing to do, and which of cores that the host took away."""

MOST_BYTES = 1024


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Seconds so far: of this thread on a core and waiting for one; of all cores at work and taken away."""

    computed_s: float
    waited_s: float
    busy_s: float
    stolen_s: float

    def slowdown_since(self, before: "CoreTime", *, counts_waits: bool) -> float:
        """How much longer this thread's work took than it needed a core, 1 if it always had one; without
        `counts_waits` only because cores were taken away.
        """
        computed_s, busy_s = self.computed_s - before.computed_s, self.busy_s - before.busy_s
        waited_s = self.waited_s - before.waited_s if counts_waits else 0.0
        longer = waited_s / computed_s if computed_s > 0 else 0.0
        return 1.0 + longer + ((self.stolen_s - before.stolen_s) / busy_s if busy_s > 0 else 0.0)


def waited_s() -> float:
    """All waits of this thread so far; 0 where nobody says it."""
    try:
        return int(_read(SCHEDULER).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def core_time() -> CoreTime | None:
    """What there is by now; None where nobody says it."""
    try:
        waits, cores = _read(SCHEDULER).split(), _read(PROCESSORS).split(b"\n", 1)[0].split()
        states = [int(one) / 100 for one in cores[1 : 1 + NUM_STATES]]
        busy_s = sum(s for place, s in enumerate(states) if place not in (*IDLE, STOLEN))
        return CoreTime(thread_time(), int(waits[1]) / 1e9, busy_s, states[STOLEN])
    except (OSError, ValueError, IndexError):
        return None


def _read(path: str) -> bytes:
    """The begin of a file."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, MOST_BYTES)
    finally:
        os.close(file)
