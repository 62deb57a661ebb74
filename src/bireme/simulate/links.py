"""Links in a few numbers: the networks that a command line can describe."""

import math
from dataclasses import dataclass

from bireme.errors import BiremeError
from bireme.schedule.program import Program
from bireme.simulate.network import Network
from bireme.simulate.simulator import pairs_that_talk

__all__ = ["Links"]


SLOWEST = 1e-3
"""Bytes a second."""
LONGEST = 1e9
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Links:
    """Equal links: a cable for each two ranks that talk or, with `ranks_per_server`, a card per server.

    Servers hold consecutive ranks. All ranks of a server share its card to talk to other servers, and
    inside a server messages take no time.
    """

    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    full_duplex: bool = True
    ranks_per_server: int | None = None

    def __post_init__(self) -> None:
        if not self.bytes_per_s >= SLOWEST:
            raise BiremeError(f"link_bytes_per_s is {self.bytes_per_s}; it must be {SLOWEST} or more.")
        if not 0 <= self.latency_s <= LONGEST:
            raise BiremeError(f"link_latency_s is {self.latency_s}; it must be 0 to {LONGEST}.")
        if self.ranks_per_server is not None and self.ranks_per_server < 1:
            raise BiremeError(f"ranks_per_server is {self.ranks_per_server}; a server has at least one rank.")

    def network(self, program: Program) -> Network:
        """The network that joins a program's ranks."""
        pairs = pairs_that_talk(program)
        if self.ranks_per_server is None:
            return Network.dedicated(
                pairs, bytes_per_s=self.bytes_per_s, latency_s=self.latency_s, full_duplex=self.full_duplex
            )
        return Network.servers(
            [rank // self.ranks_per_server for rank in range(program.num_ranks)],
            pairs,
            card_bytes_per_s=self.bytes_per_s,
            card_latency_s=self.latency_s,
            full_duplex=self.full_duplex,
        )
