"""A batch's gradients on one rank, as they are summed: flat memory for most, tensors by name for the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bireme.codec.principal import Components, PrincipalStream
from bireme.sync.norm import PieceNorms

__all__ = ["BatchGradients", "Parts"]

Parts = tuple[int, ...]
"""Where a flat tensor is cut: member i owns its elements from the i-th number up to the next."""


@dataclass(frozen=True, slots=True)
class BatchGradients:
    """What is summed in place when a batch ends.

    `views` are the gradients by name, and `held` those that there are; nothing is said of what the others
    hold. `flats` are the arenas that replicas sum, the same ones in the same order on each. `norms` are
    those of the gradients where they were taken before; then nothing is summed, and no view is looked at.
    `streams` are the gradients that are kept as principal components, and `components` what those of all
    replicas come to. Where replicas share the optimiser, `parts` are those of each of `flats`, and `owned`
    the piece of each gradient there that this replica owns and sums.
    """

    views: Mapping[str, Tensor]
    held: set[str]
    flats: Sequence[Tensor] = ()
    norms: Sequence[PieceNorms] = ()
    streams: Mapping[str, PrincipalStream] = field(default_factory=dict)
    components: dict[str, Components] = field(default_factory=dict)
    parts: Sequence[Parts] = ()
    owned: Mapping[str, Tensor] = field(default_factory=dict)
