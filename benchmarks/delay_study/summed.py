"""Replicas that sum gradients through a codec, in one process.

Every replica has the same weights and an equal part of each batch, and a thread that sums as the engine does.
"""

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import torch
from torch import Tensor

from benchmarks.delay_study.rules import RunsOn
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
    """A simulation whose batches are trained by so many replicas, which sum gradients through a codec. If the
    rule has trial steps, each replica makes them from its own gradients, which no codec has touched.
    """

    def share_among(self, num_replicas: int, codec: SumCodec) -> None:
        """Let this be done from the first batch on."""
        self.sums = CodedSums(codec, num_replicas)
        self.tried = [self.used.whole.clone() for _ in range(num_replicas)]
        """The weights that each replica has made by a trial step."""
        self.seen_by = [self.seen.whole.clone() for _ in range(num_replicas)]

    def _run(self, input_ids: Tensor) -> float:
        loss, parts, num_replicas = 0.0, [], len(self.tried)
        is_tried = self.rule.runs_on is RunsOn.TRIED and not self._is_current(self.batch)
        for replica, own in enumerate(input_ids.chunk(num_replicas)):
            if is_tried:
                with torch.no_grad():
                    self.used.whole.copy_(self.tried[replica])
            loss += super()._run(own) / num_replicas
            self.seen_by[replica].copy_(self.seen.whole)
            parts.append(self.layout.vector(self.gradient.whole / num_replicas).parts)
        self.sums.add_up(self.batch, parts)
        for name, part in self.gradient.parts.items():
            part.copy_(parts[0][name])
        return loss

    @torch.no_grad()
    def _try(self) -> None:
        for seen, tried in zip(self.seen_by, self.tried, strict=True):
            self.seen.whole.copy_(seen)
            super()._try()
            tried.copy_(self.used.whole)
