"""How a plan pages: budgets, chunks and choices, from which its programs get their FETCH and EVICT.

A plan's source gives programs that are paged already. How memory is cut depends on the plan alone and not on
the length of a window, so all windows have the same chunks and capacities.
"""

from dataclasses import dataclass, replace

from bireme.bounds import Bytes, Place
from bireme.errors import BiremeError
from bireme.schedule.budgets import Budgets, Cut, cut_memory
from bireme.schedule.paging import page_cut
from bireme.schedule.program import Program
from bireme.schedule.sizes import Sizes

__all__ = ["Paging"]

MOST_CHUNKS = 256
"""Of a rank, where their size is searched: a plan tries many programs, and more chunks make them longer."""


@dataclass(frozen=True, slots=True)
class Paging:
    """The paging of one replica; all replicas page alike, within the least budgets of any.

    `budgets` and `chunk_bytes` are of each rank; a chunk size of 0 is searched, and unused where all of the
    rank's memory fits. `sizes` are the bytes of each stage that the chunks are counted from; what the engine
    keeps must not be larger. Fetched chunks are to be there `ahead` instructions before they are used. With
    `updates_together` a rank updates all its stages when it updates the first, and with `updates_apart` each
    stage as soon as it has its gradients. `is_summed` where gradients are summed over replicas, or over
    stages that share parameters. Without `stashes` activations stay on the device. With `host_updates` all
    stages that can are updated on the host.
    """

    budgets: tuple[Budgets, ...]
    sizes: Sizes
    chunk_bytes: tuple[Bytes, ...] = ()
    ahead: Place = 1
    updates_together: bool = False
    is_summed: bool = False
    stashes: bool = True
    host_updates: bool = False
    updates_apart: bool = False

    def check(self, num_ranks: int, num_stages: int) -> None:
        """Refuse paging that is not of so many ranks and stages."""
        if len(self.budgets) != num_ranks or len(self.chunk_bytes) not in (0, num_ranks):
            raise BiremeError(
                f"The plan pages on {len(self.budgets)} ranks with {len(self.chunk_bytes)} sizes of chunks, "
                f"but has {num_ranks} ranks. Give each rank its budgets."
            )
        if len(self.sizes.version) != num_stages:
            raise BiremeError(
                f"The plan pages {len(self.sizes.version)} stages, but has {num_stages}. Give the bytes of "
                "each."
            )

    def cut(self, settled: Program, page_bytes: int = 0) -> Cut:
        """How each rank's memory is cut, from a window that shows all that longer ones keep; in whole pages
        where they are known.
        """
        return cut_memory(
            settled,
            self.sizes,
            self.budgets,
            chunk_bytes=self.chunk_bytes or 0,
            stashes=self.stashes,
            most_chunks=MOST_CHUNKS,
            page_bytes=page_bytes,
            host_updates=self.host_updates and not self.is_summed,
        )

    def paged(self, program: Program, cut: Cut, *, is_brief: bool = False) -> Program:
        """The program with the copies in it; itself where nothing is cut. With `is_brief` a loop becomes a
        window of a few batches.
        """
        return page_cut(
            program,
            cut,
            ahead=self.ahead,
            is_summed=self.is_summed,
            updates_together=self.updates_together,
            updates_apart=self.updates_apart,
            is_brief=is_brief,
        )

    def with_chunks(self, cut: Cut) -> "Paging":
        """The same with the sizes of chunks that were found."""
        return replace(self, chunk_bytes=tuple(0 if one is None else one.chunk_bytes for one in cut))
