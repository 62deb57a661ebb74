"""Memory as chunks in tiers: how a rank's memory is cut where not all of it stays on the device.

Tier 0 is the device's memory, tier 1 the one below it (host or disk), tier 2 the disk below the host. Items
are cut into chunks of one size, so that any chunk fits any slot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bireme.schedule.instruction import Item

__all__ = ["Chunk", "RankTiers", "Tier"]


class Chunk(NamedTuple):
    """A chunk by the memory that it is in.

    `number` is the bank of weights, the batch of gradients (or micro-batch, counted through all batches) and
    the micro-batch of a stash, counted so; of an optimiser and of frozen weights it is 0.
    """

    item: Item
    stage: int
    number: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier of a rank: its name, its budget, and the chunks that it can hold. None is without a limit."""

    name: str
    budget_bytes: int | None
    capacity: int | None


@dataclass(frozen=True, slots=True)
class RankTiers:
    """How one rank's memory is cut.

    `chunks` says how many chunks an item of a stage has, `begin` on which tier each chunk lies that there is
    when the window begins. `master` says that weights are made from the optimiser's own master copy, and not
    from the version before. `unpaged_bytes` have their place on the device in addition to the chunks. The
    stages in `host_updates` are updated on the host, which is then tier 1: what an UPDATE of them uses is
    there.
    """

    chunk_bytes: int
    tiers: tuple[Tier, ...]
    chunks: Mapping[tuple[Item, int], int]
    begin: Mapping[Chunk, int]
    master: bool
    unpaged_bytes: float = 0.0
    host_updates: frozenset[int] = frozenset()

    def later(self, versions: int, banks: Sequence[int]) -> "RankTiers":
        """The same for a window that begins so many versions later, whose weights may be in other banks."""
        if not versions or not self.begin:
            return self
        return replace(
            self,
            begin={
                chunk._replace(number=(chunk.number + versions) % banks[chunk.stage])
                if chunk.item is Item.WEIGHTS
                else chunk: tier
                for chunk, tier in self.begin.items()
            },
        )
