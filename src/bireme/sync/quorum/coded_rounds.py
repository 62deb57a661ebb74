"""Sums of a round, if its flats do not go as they are: through a codec, or as principal components.

Whoever contributes, and to what, is the same for all of them: gradients, weights, or drifts of weights.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from bireme.codec.sum_description import DENSE
from bireme.sync.coded import CodedSums
from bireme.sync.components import HostStream, labelled, merge_components
from bireme.sync.exchange import BatchGradients, FlatViews, SentBytes
from bireme.sync.group import Group
from bireme.sync.quorum.ring import Contribution
from bireme.sync.slices import SLICE_BYTES

_BASIS = "basis"


class CodedFlats:
    """How the contributions to a round of that `number` are added up; `coded` is what large tensors go
    through, but those in `plain`. `views` are the tensors in a contribution's flats. Members may hold those
    in `apart` in other flats too, so each of these is summed by itself.
    """

    def __init__(
        self,
        number: int,
        views: FlatViews,
        coded: CodedSums | None,
        sent: SentBytes,
        *,
        plain: Collection[str] = (),
        apart: Collection[str] = (),
    ) -> None:
        self._number, self._views, self._coded, self._sent = number, views, coded, sent
        self._plain, self._apart = plain, apart
        self.streams: Mapping[str, HostStream] = {}

    def sum(
        self, group: Group, own: Contribution, into: Sequence[Tensor], factors: Sequence[float], sender: int
    ) -> tuple[bytes, Mapping[str, Tensor]]:
        """Write the sum over a group; gives which tensors any member has, the bases and the components."""
        names = [*self._views.slots]
        # Contributions that do not say so have all of their tensors.
        holds = own.holds or bytes([1]) * len(names)
        held = {name for name, one in zip(names, holds, strict=True) if one}
        streams = {name: replace(one, factor=factors[group.rank]) for name, one in self.streams.items()}
        gradients = BatchGradients(self._views.in_(into), held, into, streams=streams)
        for flat, mine in zip(into, own.flats, strict=True):
            flat.copy_(mine)
        coded = self._coded or CodedSums(DENSE)
        coded.sum(
            group,
            names,
            gradients,
            SLICE_BYTES,
            self._sent,
            batch=self._number,
            factors=factors,
            sender=sender,
            plain=self._plain,
            apart=self._apart,
        )
        if streams:
            merge_components(group, gradients, self._sent)
        more = {f"{_BASIS}/{name}": one for name, one in coded.common.items()}
        more |= labelled(gradients.components)
        return bytes(name in gradients.held for name in names) if own.holds else b"", more


def bases_in(more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The bases of low rank that belong to a sum, by the name of the tensor."""
    return {key.partition("/")[2]: one for key, one in more.items() if key.startswith(f"{_BASIS}/")}
