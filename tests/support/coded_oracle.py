"""Sums over replicas through a codec, in one process and plain loops: what the engine's are judged by.

Messages are made and read by the codecs themselves. What is done with them, and all of low rank, is written
out here once more.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from zlib import crc32

import torch
from torch import Tensor

from bireme.codec.above import Threshold, new_memory
from bireme.codec.blocks import BlockCodec
from bireme.codec.lowrank import first_basis
from bireme.codec.sum_description import SumCodec, SumKind, parse_sum_codec

__all__ = ["CodedOracle"]

Gradients = Mapping[str, Tensor | None]


class CodedOracle:
    """Adds up the replicas' gradients of one batch after the other. With `cuts` each piece of a gradient goes
    through the codec by itself, but through low rank, and its owner adds its own as it is. With few bits, the
    sums of three and more replicas go through the codec once more, in even pieces.
    """

    def __init__(self, text: str, cuts: Mapping[str, Sequence[slice]] | None = None) -> None:
        self._codec = parse_sum_codec(text)
        self._cuts = {} if cuts is None or self._codec.kind is SumKind.LOWRANK else cuts
        self._residuals: dict[tuple[int, str], Tensor] = {}
        self._thresholds: dict[tuple[int, str], Tensor] = {}
        self._bases: dict[str, Tensor] = {}
        self._even: Mapping[str, Sequence[slice]] = {}
        self._before = self._kept()

    def sum(self, batch: int, of_replicas: Mapping[int, Gradients]) -> dict[str, Tensor | None]:
        """What the replicas' gradients of a batch come to."""
        self._before = self._kept()
        names = list(next(iter(of_replicas.values())))
        self._even = _even_cuts(self._codec, of_replicas) if not self._cuts else {}
        return {
            name: self._sum(batch, name, {replica: own[name] for replica, own in of_replicas.items()})
            for name in names
        }

    def settle(self, *, counts: bool) -> None:
        """A batch that does not count leaves all as it was."""
        if not counts:
            self._residuals, self._thresholds, self._bases = self._before

    def _kept(
        self,
    ) -> tuple[dict[tuple[int, str], Tensor], dict[tuple[int, str], Tensor], dict[str, Tensor]]:
        thresholds = {key: value.clone() for key, value in self._thresholds.items()}
        return dict(self._residuals), thresholds, dict(self._bases)

    def _sum(self, batch: int, name: str, given: Mapping[int, Tensor | None]) -> Tensor | None:
        some = next((one for one in given.values() if one is not None), None)
        if some is None:
            return None
        own = {replica: torch.zeros_like(some) if one is None else one for replica, one in given.items()}
        if not self._codec.codes(some.shape) or batch < self._codec.whole_steps:
            return sum(list(own.values())[1:], next(iter(own.values())))
        if cuts := self._cuts.get(name) or self._even.get(name):
            pieces = [
                self._coded(
                    batch, f"{name} {owner}", {at: one.reshape(-1)[piece] for at, one in own.items()}, owner
                )
                for owner, piece in enumerate(cuts)
                if piece.start < piece.stop
            ]
            return torch.cat(pieces).view(some.shape)
        return self._coded(batch, name, own)

    def _coded(self, batch: int, name: str, own: Mapping[int, Tensor], owner: int | None = None) -> Tensor:
        if self._codec.has_feedback:
            own = {key: one + self._residuals.get((key, name), 0.0) for key, one in own.items()}
        if self._codec.kind is SumKind.LOWRANK:
            return self._of_low_rank(name, own)
        sums = None
        for replica, wanted in own.items():
            part = wanted
            if replica != owner:
                part = self._through(wanted, replica, name, f"{batch} {replica} {name}")
            if self._codec.has_feedback:
                self._residuals[replica, name] = wanted - part
            sums = part if sums is None else sums + part
        assert sums is not None
        if owner is None or not self._even:
            return sums
        found = self._through(sums, owner, name, f"{batch} {owner} {name} sum", least_bits=4)
        if self._codec.has_feedback:
            self._residuals[owner, name] = sums - found
        return found

    def _through(self, wanted: Tensor, replica: int, name: str, word: str, *, least_bits: int = 1) -> Tensor:
        codec = self._codec
        if codec.kind is SumKind.THRESHOLD:
            largest = Threshold(codec.share, codec.life)
            message = torch.zeros(largest.most_bytes(wanted.shape, wanted.dtype), dtype=torch.uint8)
            memory = self._thresholds.setdefault((replica, name), new_memory())
            return largest.decode(
                message[: largest.encode(wanted, message, memory)], wanted.shape, wanted.dtype
            )
        bits = max(codec.bits, least_bits)
        blocks = BlockCodec(bits, is_rotated=bits < 8, is_stochastic=not codec.has_feedback)
        message = torch.zeros(blocks.most_bytes(tuple(wanted.shape), wanted.dtype), dtype=torch.uint8)
        used = blocks.encode(wanted, message, seed=crc32(word.encode()))
        return blocks.decode(message[:used], tuple(wanted.shape), wanted.dtype)

    def _of_low_rank(self, name: str, own: Mapping[int, Tensor]) -> Tensor:
        """The sum projected on the span of P: no other basis of it gives another projection."""
        matrices = {replica: one.reshape(one.shape[0], -1) for replica, one in own.items()}
        whole = sum(list(matrices.values())[1:], next(iter(matrices.values())))
        basis = self._bases.get(name)
        if basis is None:
            basis = first_basis(whole.shape[1], self._codec.rank, seed=crc32(name.encode())).to(whole)
        left = torch.linalg.qr(whole @ basis).Q if bool(whole.isfinite().all()) else whole[:, :1] * basis[:1]
        self._bases[name] = whole.T @ left
        for replica, matrix in matrices.items():
            lost = matrix - left @ (left.T @ matrix)
            self._residuals[replica, name] = lost.view(own[replica].shape)
        return (left @ (left.T @ whole)).view(next(iter(own.values())).shape)


def _even_cuts(codec: SumCodec, of_replicas: Mapping[int, Gradients]) -> dict[str, list[slice]]:
    """Equal pieces of all that is coded, one after the other; blocks of 32 stay whole."""
    num = len(of_replicas)
    if codec.kind is not SumKind.BITS or num < 3:
        return {}
    some = {name: one for own in of_replicas.values() for name, one in own.items() if one is not None}
    order = [
        name for name in next(iter(of_replicas.values())) if name in some and codec.codes(some[name].shape)
    ]
    begins = dict(zip(order, accumulate((some[name].numel() for name in order), initial=0), strict=False))
    total, found = sum(some[name].numel() for name in order), {}
    for name in order:
        ends = [32 * math.ceil((total * place // num - begins[name]) / 32) for place in range(num + 1)]
        ends = [min(max(end, 0), some[name].numel()) for end in ends]
        found[name] = [slice(*both) for both in pairwise(ends)]
    return found
