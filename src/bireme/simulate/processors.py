"""Processors: the cores that ranks of one machine share, and what each gets while several compute.

A rank computes on as many cores as it has threads, as long as they are free. Where the ranks that are busy at
a moment want more cores than their machine has, they share them max-min fairly, as the operating system does:
a rank never gets more than it can use, and what one leaves is for the others. That is how messages share
wires, and the same code works it out: a rank's threads are a wire of its own, the cores of its machine one
that it shares, and seconds of work on one core are the bytes.
"""

from collections import Counter
from dataclasses import dataclass

from bireme.errors import BiremeError
from bireme.simulate.network import Network, Path, Traffic, Wire

__all__ = ["Processors"]


@dataclass(frozen=True, slots=True)
class Processors:
    """The cores of each machine, and for each rank its machine and its threads.

    Where others compute on a machine too, its cores may be a share and no whole number.
    """

    cores: tuple[float, ...]
    machine_of_rank: tuple[int, ...]
    threads_of_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.cores) <= 0 or min(self.threads_of_rank) < 1:
            raise BiremeError(
                f"Machines of {', '.join(map(str, self.cores))} cores cannot run ranks of "
                f"{', '.join(map(str, self.threads_of_rank))} threads."
            )
        if len(self.machine_of_rank) != len(self.threads_of_rank) or not all(
            0 <= machine < len(self.cores) for machine in self.machine_of_rank
        ):
            raise BiremeError("Give each rank its threads, and a machine that there is.")

    def is_shared(self) -> bool:
        """Whether the ranks of a machine can want more cores than it has."""
        wanted: Counter[int] = Counter()
        for machine, threads in zip(self.machine_of_rank, self.threads_of_rank, strict=True):
            wanted[machine] += threads
        return any(wanted[machine] > cores for machine, cores in enumerate(self.cores))

    def traffic(self) -> Traffic:
        """The work under way, rank by rank, with nothing begun."""
        threads = (Wire(f"threads of rank {r}", float(n)) for r, n in enumerate(self.threads_of_rank))
        cores = (Wire(f"cores of machine {m}", float(n)) for m, n in enumerate(self.cores))
        return Traffic(Network((*threads, *cores), {}))

    def path(self, rank: int) -> Path:
        """What the work of a rank goes over in it."""
        return Path((rank, len(self.threads_of_rank) + self.machine_of_rank[rank]))

    def work(self, rank: int, seconds: float) -> float:
        """The seconds on one core in what takes a rank so long on cores of its own."""
        return seconds * self.threads_of_rank[rank]
