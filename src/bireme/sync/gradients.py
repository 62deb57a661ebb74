"""A batch's gradients on one rank, as they are summed: flat memory for most, tensors by name for the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["BatchGradients"]


@dataclass(frozen=True, slots=True)
class BatchGradients:
    """What is summed in place when a batch ends.

    `views` are the gradients by name, and `held` those that there are; nothing is said of what the others
    hold. `flats` are the arenas that replicas sum, the same ones in the same order on each.
    """

    views: Mapping[str, Tensor]
    held: set[str]
    flats: Sequence[Tensor] = ()
