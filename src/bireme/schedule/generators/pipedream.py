"""PipeDream with weight stashing: an update after every micro-batch, stage s keeps d−s versions.

Kept for comparison: it never drains either, but the first stage holds as many weight versions as there are
stages, the delay differs from stage to stage, and gradients are not accumulated (m only groups micro-batches
into batches for the eye).

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019.
"""

from bireme.schedule.generators.shape import Schedule
from bireme.schedule.generators.two_buffer import never_drain
from bireme.schedule.rule import Rule

__all__ = ["PIPEDREAM"]

PICTURE = """
"""

PIPEDREAM = Schedule(
    name="pipedream",
    summary="weight stashing: updates after every micro-batch, up to one version per stage",
    rule=Rule.STASHED,
    orders=never_drain,
)
