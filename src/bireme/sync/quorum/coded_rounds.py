"""Sums of a round, if its flats do not go as they are: through a codec, or as principal components.

Whoever contributes, and to what, is the same for all of them: gradients, weights, or drifts of weights.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.codec.lowrank import Components
from bireme.codec.sum_description import DENSE
from bireme.sync.coded import CodedSums
from bireme.sync.exchange import BatchGradients, FactorStream, FlatViews, SentBytes
from bireme.sync.group import Group
from bireme.sync.quorum.ring import Contribution
from bireme.sync.reducer import merge_components
from bireme.sync.slices import SLICE_BYTES

_BASIS, _COMPONENTS = "basis", "components"
_PARTS = ("left", "values", "right")


@dataclass(frozen=True, slots=True)
class HostStream:
    """The factors of a gradient that is kept as principal components, on the host, times a factor."""

    own: FactorStream
    left: Tensor
    right: Tensor
    factor: float = 1.0

    @classmethod
    def of(cls, own: FactorStream) -> "HostStream":
        """A copy of a stream's factors, or these if they are on the host."""
        left, right = own.factors()
        return cls(own, left.to("cpu"), right.to("cpu"))

    @property
    def num_pairs(self) -> int:
        """The pairs that the stream was fed."""
        return self.own.num_pairs

    @property
    def rank(self) -> int:
        """The number of components."""
        return self.own.rank

    @property
    def shape(self) -> tuple[int, int]:
        """Of the gradient as a matrix."""
        return self.own.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the factors."""
        return self.own.dtype

    def factors(self) -> tuple[Tensor, Tensor]:
        """Two matrices whose product is this member's part of the sum."""
        return self.left if self.factor == 1.0 else self.left * self.factor, self.right


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
        streams = {
            name: HostStream(one.own, one.left, one.right, factors[group.rank])
            for name, one in self.streams.items()
        }
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
        for name, found in gradients.components.items():
            more |= {f"{_COMPONENTS}/{name}/{part}": getattr(found, part) for part in _PARTS}
        return bytes(name in gradients.held for name in names) if own.holds else b"", more


def bases_in(more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The bases of low rank that belong to a sum, by the name of the tensor."""
    return {key.partition("/")[2]: one for key, one in more.items() if key.startswith(f"{_BASIS}/")}


def components_in(more: Mapping[str, Tensor], device: torch.device | None) -> dict[str, Components]:
    """The components that belong to a sum, by the name of the weight."""
    names = {key.split("/", 1)[1].rpartition("/")[0] for key in more if key.startswith(f"{_COMPONENTS}/")}
    return {
        name: Components(*(more[f"{_COMPONENTS}/{name}/{part}"].to(device or "cpu") for part in _PARTS))
        for name in sorted(names)
    }
