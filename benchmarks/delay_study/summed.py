"""Replicas that sum gradients through a codec, in one process.

Every replica has the same weights and an equal part of each batch, and a thread that sums as the engine does.
"""

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import torch
from torch import Tensor

from benchmarks.delay_study.simulation import Simulation
from bireme.codec.sum_description import SumCodec
from bireme.sync.coded import GradientSummation
from bireme.sync.exchange import BatchGradients, SentBytes
from bireme.sync.rounds.round_group import PeerLine, RoundGroup, Stamp
from bireme.sync.slices import SLICE_BYTES

__all__ = ["CodedSums", "Summed"]

_TIMEOUT_S = 600.0


class CodedSums:
    """The sums of the replicas' gradients, batch after batch."""

    def __init__(self, codec: SumCodec, num_replicas: int) -> None:
        self._summations = [GradientSummation(codec) for _ in range(num_replicas)]
        self._lines: dict[tuple[int, int], PeerLine] = {}
        for one, other in combinations(range(num_replicas), 2):
            here, there = socket.socketpair()
            self._lines[one, other], self._lines[other, one] = PeerLine(other, here), PeerLine(one, there)
        self._threads = ThreadPoolExecutor(num_replicas)

    @torch.no_grad()
    def add_up(self, batch: int, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Make each replica's gradients the sum, as it arrives there."""
        list(
            self._threads.map(lambda replica: self._add_up(replica, batch, parts[replica]), range(len(parts)))
        )

    def _add_up(self, replica: int, batch: int, own: Mapping[str, Tensor]) -> None:
        members, summation = range(len(self._summations)), self._summations[replica]
        group = RoundGroup(
            replica,
            members,
            lambda member: self._lines[replica, member],
            Stamp(0, batch, 0),
            timeout_s=_TIMEOUT_S,
            check=lambda: None,
        )
        gradients = BatchGradients(own, set(own), [*own.values()])
        summation.sum(group, [*own], gradients, SLICE_BYTES, SentBytes(), batch=batch)
        summation.settle(counts=True)


class Summed(Simulation):
    """A simulation whose batches are trained by so many replicas, which sum gradients through a codec."""

    def share_among(self, num_replicas: int, codec: SumCodec) -> None:
        """Let this be done from the first batch on."""
        assert not self.rule.depends_on_stages, "a trial step sees gradients that no codec has touched"
        self.num_replicas, self.sums = num_replicas, CodedSums(codec, num_replicas)

    def _run(self, input_ids: Tensor) -> float:
        loss, parts = 0.0, []
        for own in input_ids.chunk(self.num_replicas):
            loss += super()._run(own) / self.num_replicas
            parts.append(self.layout.vector(self.gradient.whole / self.num_replicas).parts)
        self.sums.add_up(self.batch, parts)
        for name, part in self.gradient.parts.items():
            part.copy_(parts[0][name])
        return loss
