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

PIPEDREAM_PICTURE = """
rank 0: F0 F1 F2 F3 .  .  .  .  .  .  B0===|F4 B1===|F5 B2===|F6 B3===|F7 B4=== .  B5=== .  B6=== .  B7===|
rank 1: .  F0 F1 F2 .  .  .  .  B0===|F3 B1===|F4 B2===|F5 B3===|F6 B4===|F7 B5=== .  B6=== .  B7===|.  .
rank 2: .  .  F0 F1 .  .  B0===|F2 B1===|F3 B2===|F4 B3===|F5 B4===|F6 B5===|F7 B6=== .  B7===|.  .  .  .
rank 3: .  .  .  F0 B0===|F1 B1===|F2 B2===|F3 B3===|F4 B4===|F5 B5===|F6 B6===|F7 B7===|.  .  .  .  .  .
F forward   B backward   . idle   | update
"""
"""4 stages, 4 micro-batches, 2 batches."""

PIPEDREAM = Schedule(
    name="pipedream",
    summary="weight stashing: updates after every micro-batch, up to one version per stage",
    rule=Rule.STASHED,
    picture=PIPEDREAM_PICTURE,
    orders=never_drain,
)
