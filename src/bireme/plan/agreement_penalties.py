"""What averaging weights costs in steps: how many it takes for one where all replicas sum gradients.

From a pilot with a small GPT and AdamW in runs of 300 steps, four replicas with a quarter of each batch, one
seed. The losses were 1.2 %, 2.6 % and 19 % above that of summed gradients; synchronous runs of other lengths
say how many steps that is. Short runs from random weights are the worst case for outer steps, which are made
for long ones.
"""

from dataclasses import dataclass

__all__ = ["PILOT", "AgreementSteps"]


@dataclass(frozen=True, slots=True)
class AgreementSteps:
    """Steps for one with an agreement: every so many batches all are connected, or step outside.

    `is_at_least` where the pilot's loss was above that of the shortest run that it was compared with.
    """

    mode: str
    every: int
    steps: float
    is_at_least: bool = False


PILOT = (
    AgreementSteps("groups", 1, 1.10),
    AgreementSteps("groups", 10, 1.21),
    AgreementSteps("outer", 50, 2.5, is_at_least=True),
)
