"""Numba compiles each loop of the searches for a placement once, whatever search calls it."""

import pytest

from benchmarks.placers import local_search
from bireme.compiled import IS_COMPILED
from bireme.placement import annealing_loops, ideals, latency_search
from tests.support.compile_loops import compile_placement

pytestmark = [
    pytest.mark.slow,  # imports numba, and at the first time compiles
    pytest.mark.skipif(not IS_COMPILED, reason="needs numba"),
]


def test_each_loop_is_compiled_for_one_kind_of_arguments() -> None:
    compile_placement()
    loops = {
        loop.py_func: loop
        for module in (annealing_loops, local_search, ideals, latency_search)
        for loop in vars(module).values()
        if hasattr(loop, "signatures")
    }
    assert len(loops) >= 12
    # One that is read from disk has brought along the loops that it calls, which then have none.
    assert [name for name, loop in loops.items() if len(loop.signatures) > 1] == []
