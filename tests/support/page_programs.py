"""Programs that page within budgets that are those of every rank."""

from typing import Any

from bireme.schedule.accesses import Sizes
from bireme.schedule.budgets import Budgets, cut_memory
from bireme.schedule.paging import PagedPrograms
from bireme.schedule.program import Program


def paged_programs(
    program: Program,
    sizes: Sizes,
    budgets: Budgets,
    *,
    chunk_bytes: int | None = None,
    is_summed: bool = False,
    host_updates: bool = False,
    **how: Any,
) -> PagedPrograms:
    """The program within the budgets, for any lead of the copies; `how` is as for `PagedPrograms`."""
    cut = cut_memory(
        program,
        sizes,
        (budgets,) * program.num_ranks,
        chunk_bytes=chunk_bytes,
        host_updates=host_updates and not is_summed,
    )
    return PagedPrograms(program, cut, is_summed=is_summed, **how)


def page(program: Program, sizes: Sizes, budgets: Budgets, *, ahead: int = 1, **how: Any) -> Program:
    """The same with one lead of the copies; the program itself where every rank fits."""
    return paged_programs(program, sizes, budgets, **how).fetched(ahead)
