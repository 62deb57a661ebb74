"""Replicas that sum gradients through a codec, in one process.

Every replica has the same weights and an equal part of each batch. The sums are those of the engine
(`bireme.sync.coded`), with its words for chance, so a test compares them to the last bit.
"""

from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

from benchmarks.delay_study.simulation import Simulation
from bireme.codec.above import Threshold, new_memory
from bireme.codec.blocks import BlockCodec
from bireme.codec.lowrank import as_matrix, first_basis, next_basis, orthonormal, product
from bireme.codec.sum_description import SumCodec, SumKind

__all__ = ["CodedSum", "Summed"]


class CodedSum:
    """The sums of one parameter's gradients over the replicas, batch after batch."""

    def __init__(self, codec: SumCodec, name: str, like: Tensor, num_replicas: int) -> None:
        self.codec = codec
        self.name = name
        self.residuals = [torch.zeros_like(like) for _ in range(num_replicas)]
        """What each replica has not sent yet."""
        self.thresholds = [new_memory() for _ in range(num_replicas)]
        self.basis: Tensor | None = None

    @torch.no_grad()
    def of(self, batch: int, parts: Sequence[Tensor]) -> Tensor:
        """The sum of the replicas' gradients of a batch, as it arrives on each of them."""
        if not self.codec.codes(parts[0].shape) or batch < self.codec.whole_steps:
            return sum(parts[1:], parts[0])
        if self.codec.has_feedback:
            parts = [part + kept for part, kept in zip(parts, self.residuals, strict=True)]
        if self.codec.kind is SumKind.LOWRANK:
            return self._of_low_rank(parts)
        arrived = [self._through(batch, replica, part) for replica, part in enumerate(parts)]
        if self.codec.has_feedback:
            self.residuals = [part - one for part, one in zip(parts, arrived, strict=True)]
        return sum(arrived[1:], arrived[0])

    def _through(self, batch: int, replica: int, wanted: Tensor) -> Tensor:
        """What arrives of one replica's gradient."""
        shape, dtype = tuple(wanted.shape), wanted.dtype
        if self.codec.kind is SumKind.THRESHOLD:
            largest = Threshold(self.codec.share, self.codec.life)
            message = torch.empty(largest.most_bytes(shape, dtype), dtype=torch.uint8)
            used = largest.encode(wanted, message, self.thresholds[replica])
            return largest.decode(message[:used], shape, dtype)
        bits = self.codec.bits
        blocks = BlockCodec(bits, is_rotated=bits < 8, is_stochastic=not self.codec.has_feedback)
        message = torch.empty(blocks.most_bytes(shape, dtype), dtype=torch.uint8)
        blocks.encode(wanted, message, seed=crc32(f"{batch} {replica} {self.name}".encode()))
        return blocks.decode(message, shape, dtype)

    def _of_low_rank(self, parts: Sequence[Tensor]) -> Tensor:
        matrices = [as_matrix(part) for part in parts]
        seed = crc32(self.name.encode())
        if self.basis is None:
            self.basis = first_basis(matrices[0].shape[1], self.codec.rank, seed=seed)
        basis = self.basis.to(matrices[0])
        lefts = [matrix @ basis for matrix in matrices]
        left = orthonormal(sum(lefts[1:], lefts[0]))
        rights = [matrix.T @ left for matrix in matrices]
        right = sum(rights[1:], rights[0])
        self.residuals = [
            matrix.addmm(left, own.T, alpha=-1).view_as(part)
            for matrix, own, part in zip(matrices, rights, parts, strict=True)
        ]
        self.basis = next_basis(right, seed=seed)
        return product(left, right).view_as(parts[0])


class Summed(Simulation):
    """A simulation whose batches are trained by so many replicas, which sum gradients through a codec."""

    def share_among(self, num_replicas: int, codec: SumCodec) -> None:
        """Let this be done from the first batch on."""
        assert not self.rule.depends_on_stages, "a trial step sees gradients that no codec has touched"
        self.num_replicas = num_replicas
        self.sums = [CodedSum(codec, name, part, num_replicas) for name, part in self.gradient.parts.items()]

    def _run(self, input_ids: Tensor) -> float:
        loss, parts = 0.0, []
        for own in input_ids.chunk(self.num_replicas):
            loss += super()._run(own) / self.num_replicas
            parts.append(self.layout.vector(self.gradient.whole / self.num_replicas).parts)
        for one in self.sums:
            self.gradient.parts[one.name].copy_(one.of(self.batch, [part[one.name] for part in parts]))
        return loss
