"""Gaps: the times between two accesses of a chunk, in which it is held or evicted.

Every copy between tiers costs the same: an evicted gap costs a copy out where no valid copy is below, and a
copy in where its content is read at its end.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bireme.schedule.accesses import ChunkAccess
from bireme.schedule.instruction import Item
from bireme.schedule.tiers import Chunk

__all__ = ["Choice", "Gap", "gaps_of", "num_copies", "settle"]


@dataclass(slots=True)
class Gap:
    """The time of a chunk between two accesses: from the begin of the window where `before` is None, and to
    its end where `after` is None.
    """

    chunk: Chunk
    before: ChunkAccess | None
    after: ChunkAccess | None
    chain: int
    """The same for gaps of a chunk between which nothing was written: a copy below stays valid."""
    start: int
    """The step of the access before."""
    is_read: bool
    """Whether its content is read at its end, or outlives the window."""
    group: Hashable
    """What it has in common with its repetitions in other batches."""
    is_evicted: bool = False
    is_copied: bool = False
    """Whether a valid copy must be made below when it is evicted."""
    lead: int = 0
    """How many steps before its end the chunk is to have a slot again."""

    @property
    def must_be_below(self) -> bool:
        """Whether the chunk is evicted in any case: what is before or after the gap happens in the tier
        below, or there is always a copy there, with which the window begins.
        """
        if self.before is None:
            return self.after is not None and self.after.is_kept_below
        return self.before.is_below or (self.after is not None and self.after.is_below)

    @property
    def is_fetched(self) -> bool:
        """Whether an eviction costs a copy back."""
        return self.is_read and self.after is not None and not self.after.is_below

    @property
    def may_be_copied(self) -> bool:
        """Whether its eviction costs a copy out, unless a valid copy is below.

        What begins the window in the tier below has one there, so has what is written there, and frozen
        weights that are ever evicted do: `settle` lets them.
        """
        if self.before is None or self.before.is_kept_below:
            return False
        return self.is_read and self.chunk.item is not Item.FROZEN

    def end(self, num_steps: int) -> int:
        """The step of the access after."""
        return num_steps if self.after is None else self.after.at


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of a group that is evicted: `lead` as in its gaps."""

    lead: int


def gaps_of(accesses: Iterable[ChunkAccess]) -> list[Gap]:
    """All gaps in the order of their ends, from accesses in the order of time."""
    gaps: list[Gap] = []
    last: dict[Chunk, ChunkAccess] = {}
    chains: dict[Chunk, int] = {}
    seen: set[Chunk] = set()
    for access in accesses:
        chunk = access.chunk
        before = last.pop(chunk, None)
        if before is not None or (access.reads and chunk not in seen):
            # A chain has the number of its first gap.
            chain = None if before is None or before.writes else chains.get(chunk)
            chain = chains[chunk] = len(gaps) if chain is None else chain
            gaps.append(_gap(chunk, before, access, chain))
        seen.add(chunk)
        if access.ends:
            chains.pop(chunk, None)
        else:
            # At the end, so that what is left is in the order of time.
            last[chunk] = access
    for chunk, before in last.items():
        chain = None if before.writes else chains.get(chunk)
        gaps.append(_gap(chunk, before, None, len(gaps) if chain is None else chain))
    return gaps


def _gap(chunk: Chunk, before: ChunkAccess | None, after: ChunkAccess | None, chain: int) -> Gap:
    item, stage, _, number = chunk
    if before is None:
        assert after is not None, "a gap has an access before or after it"
        group: Hashable = item, stage, number, None, after.label, None
        return Gap(chunk, None, after, chain, -1, after.reads, group)
    if after is None:
        return Gap(chunk, before, None, chain, before.at, True, (item, stage, number, before.label))
    group = item, stage, number, before.label, after.label, after.batch - before.batch
    return Gap(chunk, before, after, chain, before.at, after.reads, group)


def num_copies(gaps: Iterable[Gap]) -> int:
    """The copies, in both directions, of a plan that is settled."""
    return sum(gap.is_fetched + gap.is_copied for gap in gaps if gap.is_evicted)


def settle(gaps: Sequence[Gap], choices: Mapping[Hashable, Choice], num_steps: int) -> None:
    """Write down in each gap what becomes of it.

    Frozen weights that are ever evicted begin below: there is a valid copy from then on.
    """
    below = {gap.chunk for gap in gaps if gap.chunk.item is Item.FROZEN and gap.group in choices}
    clean: set[int] = set()
    for gap in gaps:
        choice = choices.get(gap.group)
        gap.lead = choice.lead if choice is not None and gap.is_fetched else 0
        is_away = gap.end(num_steps) - gap.start - 1 > gap.lead
        gap.is_evicted = choice is not None and (is_away or gap.must_be_below)
        if gap.before is None and gap.chunk in below and not gap.is_evicted:
            gap.is_evicted, gap.lead = True, gap.end(num_steps)
        gap.is_copied = gap.is_evicted and gap.may_be_copied and gap.chain not in clean
        if gap.is_evicted:
            clean.add(gap.chain)
