"""The rounds that an averaging agent has under way, line by line."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.runtime.quorum.results import Buffers, RoundSum
from bireme.sync.coordinator.messages import Commit, Grant, RoundAt
from bireme.sync.quorum.ring import Contribution

__all__ = ["Offer", "RankRounds", "SettledRound"]


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What a rank brings to a round: `make` is called in the agent's thread, once. It is of so many samples,
    and the first `trained` batches of the replica are in it or in earlier ones.
    """

    make: Callable[[], Contribution]
    num_samples: int = 0
    trained: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SettledRound:
    """A round that counts, and whether this rank's own offer is in it. Whoever takes it gives it back."""

    result: RoundSum
    is_own: bool
    commit: Commit

    @property
    def parts(self) -> tuple[int, ...]:
        """The replicas that had a part in it."""
        return self.result.parts


class RankRounds:
    """A line of rounds as one rank sees it; a sum lies in flats `like` these.

    `at` is what it reports: there the rounds that it has used are committed. `next` is the first one whose
    sum the agent does not have, or has not heard to count.
    """

    def __init__(self, number: int, like: Sequence[Tensor], device: torch.device | None) -> None:
        self.number = number
        self.like = like
        self.at = RoundAt()
        self.next = 0
        self.offer: Offer | None = None
        self.contribution: Contribution | None = None
        self.made: RoundSum | None = None
        """The sum that was made and is not yet committed, in the attempt that the report says."""
        self.was_offered = False
        """Whether the sum that was made has samples of this rank in it. A later offer may be waiting."""
        self.failed: Grant | None = None
        self.kept: dict[int, RoundSum] = {}
        self.settled: deque[SettledRound] = deque()
        self._buffers = Buffers(device)

    def begin(self, committed: int) -> None:
        """The rank has used so many rounds."""
        self.at, self.next = RoundAt(committed=committed), committed

    def room(self) -> RoundSum:
        """Memory for a sum."""
        return self._buffers.take(self.like)

    def give_back(self, result: RoundSum) -> None:
        """A sum is used."""
        self._buffers.give_back(result)

    def nothing(self, num_numbers: int) -> Contribution:
        """What a rank contributes that has nothing to add, and yet holds what others do."""
        flats = [torch.zeros(one.shape, dtype=one.dtype) for one in self.like]
        return Contribution(flats, b"", 0.0, 0.0, (), (0.0,) * num_numbers)
