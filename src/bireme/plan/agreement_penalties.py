"""What averaging weights costs in steps: how many it takes for one where all replicas sum gradients.

Measured by the study (`python benchmarks/convergence.py replicas`, docs/agreement.md) with a small GPT and
AdamW in runs of 300 steps, four replicas with a quarter of each batch, no delay; a test holds these numbers
to it. Short runs from random weights are the worst case for outer steps, which are made for long ones.
"""

from dataclasses import dataclass

__all__ = ["STUDIED", "AgreementSteps"]


@dataclass(frozen=True, slots=True)
class AgreementSteps:
    """Steps for one with an agreement: every so many batches all are connected, or step outside.

    `is_at_least` where the loss was above that of the shortest run that it was compared with.
    """

    mode: str
    every: int
    steps: float
    is_at_least: bool = False


STUDIED = (
    AgreementSteps("groups", 1, 1.17),
    AgreementSteps("groups", 10, 1.15),
    AgreementSteps("outer", 50, 1.97),
)
