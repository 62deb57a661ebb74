"""How long tests wait for what must happen.

Nothing is asserted about time: who waits in vain would fail anyway, so patience costs a good run nothing. It
is what a slow machine may take that does other things too, and less than pytest's limit of a test, so that
who waits says for what.
"""

import os

__all__ = ["PATIENCE_S"]

PATIENCE_S = float(os.environ.get("BIREME_TEST_PATIENCE_S", "150"))
