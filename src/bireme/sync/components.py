"""Sums of gradients that are kept as principal components: stacked over the replicas, and cut to their rank.

Every replica gathers all factors. Each merges a share of the weights and gives what it found to the others,
so all have the same bits, though products of matrices may differ in the last one from processor to
processor.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.codec.lowrank import Components, merged
from bireme.sync.exchange import BatchGradients, FactorStream, SentBytes
from bireme.sync.group import Group


def merge_components(group: Group, gradients: BatchGradients, sent: SentBytes) -> None:
    """Find the components of the whole batch, of each weight that any member has pairs of."""
    streams = gradients.streams
    if group.size == 1:
        fed = {name: stream for name, stream in streams.items() if stream.num_pairs}
        found = {name: merged([stream.factors()], stream.rank) for name, stream in fed.items()}
        gradients.components.update(found)
        return
    for dtype in dict.fromkeys(stream.dtype for stream in streams.values()):
        alike = {name: stream for name, stream in streams.items() if stream.dtype == dtype}
        gradients.components.update(_merged_over(group, alike, sent))


def _merged_over(group: Group, streams: Mapping[str, FactorStream], sent: SentBytes) -> dict[str, Components]:
    of_all = _gathered(group, streams, sent)
    found: dict[str, Components] = {}
    for member in range(group.size):
        names = list(of_all)[member :: group.size]
        if not names:
            continue
        shapes = [shape for name in names for shape in _shapes(streams[name], values=True)]
        if member == group.rank:
            own = [merged(of_all[name], streams[name].rank) for name in names]
            flat = torch.cat([part.reshape(-1) for one in own for part in (one.left, one.right, one.values)])
            sent.sent += (group.size - 1) * flat.nbytes
        else:
            flat = of_all[names[0]][0][0].new_empty(sum(map(math.prod, shapes)))
        group.copy_from(flat, member).wait()
        parts = iter(_cut(flat, shapes))
        for name in names:
            left, right, values = next(parts), next(parts), next(parts)
            found[name] = Components(left, values, right)
    return found


def _gathered(
    group: Group, streams: Mapping[str, FactorStream], sent: SentBytes
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """For each weight that a member has pairs of, the factors of all that have, in the members' order."""
    parts = [part.reshape(-1) for stream in streams.values() for part in stream.factors()]
    has_pairs = torch.tensor([float(stream.num_pairs > 0) for stream in streams.values()]).to(parts[0])
    message = torch.cat([has_pairs, *parts])
    messages = [torch.empty_like(message) for _ in range(group.size)]
    pending = group.gather(message, messages)
    whole_bytes = message.itemsize * sum(math.prod(stream.shape) for stream in streams.values())
    sent.note(group.size, raw=whole_bytes + has_pairs.nbytes)
    sent.sent += (group.size - 1) * message.nbytes
    pending.wait()
    shapes = [shape for stream in streams.values() for shape in _shapes(stream)]
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for one in messages:
        holds = one[: len(streams)].tolist()
        rest = iter(_cut(one[len(streams) :], shapes))
        for name, has in zip(streams, holds, strict=True):
            factors = next(rest), next(rest)
            if has:
                found.setdefault(name, []).append(factors)
    return found


def _shapes(stream: FactorStream, *, values: bool = False) -> list[tuple[int, ...]]:
    rows, columns = stream.shape
    both: list[tuple[int, ...]] = [(rows, stream.rank), (columns, stream.rank)]
    return [*both, (stream.rank,)] if values else both


def _cut(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    pieces = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


# Components of rounds: what the streams of a batch were on the host, and what belongs to a sum.

_COMPONENTS = "components"
_PARTS = ("left", "values", "right")


@dataclass(frozen=True, slots=True)
class HostStream:
    """The factors of a gradient that is kept as principal components, on the host, times a factor."""

    num_pairs: int
    rank: int
    shape: tuple[int, int]
    left: Tensor
    right: Tensor
    factor: float = 1.0

    @classmethod
    def of(cls, own: FactorStream) -> "HostStream":
        """A copy of a stream's factors, or these if they are on the host."""
        left, right = own.factors()
        return cls(own.num_pairs, own.rank, own.shape, left.to("cpu"), right.to("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """Of the factors."""
        return self.left.dtype

    def factors(self) -> tuple[Tensor, Tensor]:
        """Two matrices whose product is this member's part of the sum."""
        return self.left if self.factor == 1.0 else self.left * self.factor, self.right


def labelled(components: Mapping[str, Components]) -> dict[str, Tensor]:
    """The tensors of components as they belong to a sum."""
    return {
        f"{_COMPONENTS}/{name}/{part}": getattr(found, part)
        for name, found in components.items()
        for part in _PARTS
    }


def components_in(more: Mapping[str, Tensor], device: torch.device | None) -> dict[str, Components]:
    """The components that belong to a sum, by the name of the weight."""
    names = {key.split("/", 1)[1].rpartition("/")[0] for key in more if key.startswith(f"{_COMPONENTS}/")}
    return {
        name: Components(*(more[f"{_COMPONENTS}/{name}/{part}"].to(device or "cpu") for part in _PARTS))
        for name in sorted(names)
    }
