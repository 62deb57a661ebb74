"""Shared weights on a clock: when gathered weights are there, when sums of parts are, and who waits for them.

What a rank exchanges with its replicas goes over one wire, one thing after the other in the order of the
track. A GATHER sets out when it is posted and the wire is free; the first pass that uses the weights waits
for it. So does a SCATTER, and its COLLECT waits for it. Replicas count as in step.

Of w replicas each gets (w − 1)/w of what it gathers, and gives as much of what it sums: half of what a sum of
whole gradients takes, in half of its hops.
"""

from array import array
from collections.abc import Iterator

from bireme.schedule.instruction import COMPUTE, Instruction, Kind
from bireme.schedule.program import Program
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network, Path
from bireme.timeline.timeline import Copies, RankCopies

__all__ = ["REPLICAS", "RankGatherer"]

REPLICAS = "replicas"
"""The other end of the wire, in the words of copies."""


class RankGatherer:
    """What one rank exchanges. It is told of every instruction, in the order of the track."""

    def __init__(self, program: Program, rank: int, costs: Costs, network: Network) -> None:
        self._rank = rank
        self._costs = costs
        self._network = network
        self._path = network.sync_paths.get(rank, Path(()))
        self._latency_s = self._path.latency_s / 2
        self._share = (program.num_sharers - 1) / program.num_sharers
        self._steps: Iterator[Instruction] = iter(program.tracks[rank])
        self._index = -1
        self._ready_s = 0.0
        self._free_s = 0.0
        """When the wire is."""
        self._there_s: dict[tuple[int, int], float] = {}
        """When the weights of a stage and version are whole, of those that no pass has used since."""
        self._summed_s = 0.0
        """When the last SCATTER is through."""
        self._waited_s = 0.0
        self._copies = {
            Kind.GATHER: Copies(REPLICAS, "device", array("d"), array("d"), array("d"), array("q")),
            Kind.SCATTER: Copies("device", REPLICAS, array("d"), array("d"), array("d"), array("q")),
        }

    def start(self, index: int, now: float) -> float:
        """When the instruction of that index, which comes up now, can start."""
        if index > self._index:
            self._index = index
            step = next(self._steps)
            self._ready_s = self._starts(step, now)
            self._waited_s += self._ready_s - now
        return self._ready_s

    def end(self, _now: float) -> None:
        """That instruction has ended."""

    def taken_s(self, now: float, seconds: float) -> float:
        """What an exchange takes from work: nothing, as far as a network does it."""
        del now, seconds
        return 0.0

    def result(self) -> RankCopies:
        """All that was exchanged in the window."""
        return RankCopies(
            self._rank, self._waited_s, tuple(one for one in self._copies.values() if one.start_s)
        )

    def _starts(self, step: Instruction, now: float) -> float:
        weights = step.stage, step.version or 0
        if step.kind is Kind.GATHER:
            self._there_s[weights] = self._exchanged(step, self._costs.weight_bytes[step.stage], now)
        elif step.kind is Kind.SCATTER:
            self._summed_s = self._exchanged(step, self._costs.part_gradient_bytes[step.stage], now)
        elif step.kind is Kind.COLLECT:
            return max(now, self._summed_s)
        elif step.kind in COMPUTE:
            return max(now, self._there_s.pop(weights, 0.0))
        return now

    def _exchanged(self, step: Instruction, num_bytes: float, now: float) -> float:
        """When so many bytes have been exchanged."""
        moved = self._share * num_bytes
        start = max(now, self._free_s)
        end = self._free_s = start + self._latency_s + self._network.seconds(self._path, moved)
        copies = self._copies[step.kind]
        copies.start_s.append(start)
        copies.end_s.append(end)
        copies.num_bytes.append(moved)
        copies.posted_by.append(self._index)
        return end
