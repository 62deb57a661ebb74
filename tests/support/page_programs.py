"""Programs that page within budgets that are those of every rank."""

from typing import Any

from bireme.schedule.accesses import Sizes
from bireme.schedule.budgets import Budgets, cut_memory
from bireme.schedule.paging import PagedPrograms
from bireme.schedule.program import Program


def page(
    program: Program,
    sizes: Sizes,
    budgets: Budgets,
    *,
    chunk_bytes: int | None = None,
    is_summed: bool = False,
    host_updates: bool = False,
    ahead: int = 1,
    **how: Any,
) -> Program:
    """The program within the budgets, or itself where every rank fits; `how` is as for `PagedPrograms`."""
    cut = cut_memory(
        program,
        sizes,
        (budgets,) * program.num_ranks,
        chunk_bytes=chunk_bytes,
        host_updates=host_updates and not is_summed,
    )
    return PagedPrograms(program, cut, is_summed=is_summed, **how).fetched(ahead)
