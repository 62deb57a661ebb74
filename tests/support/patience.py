"""How long tests wait for what must happen.

Nothing is asserted about time: who waits in vain would fail anyway, so patience costs a good run nothing.
What takes seconds on an idle machine takes minutes where ten others compute, so patience grows with what else
runs. It stays below pytest's limit of a slow test, so that who waits says for what.
"""

import os

__all__ = ["patience_s"]

IDLE_S = float(os.environ.get("BIREME_TEST_PATIENCE_S", "100"))
MOST_S = 480.0


def patience_s() -> float:
    """Of a wait that begins now."""
    running = os.getloadavg()[0] / (os.cpu_count() or 1)
    return max(IDLE_S, min(IDLE_S * running, MOST_S))
