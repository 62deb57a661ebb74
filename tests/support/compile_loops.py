"""Have numba compile the loops of `bireme place` and of codecs, once for all processes that will need them.

Numba keeps what it compiles next to the source. What is searched for and what is sent does not matter here.
"""

import os
from pathlib import Path

import torch

from benchmarks.codec_speed import DTYPES, WITH_NUMBA, cases
from benchmarks.placers.local_search import local_search
from bireme.placement.contraction import Weightless, items_of
from bireme.placement.solve import improve, solve
from bireme.placement.workload import Method, Objective, Request
from bireme.placement.workload_file import read_workload

__all__ = ["compile_codecs", "compile_placement"]

WORKLOAD = Path("examples/placement/training.json")

LIMIT_S = 600.0
"""Of a search, which has to last until the last of its loops is compiled."""

SHAPE = (8, 8, 768)
"""Of a tensor just large enough for compiled loops to pay off."""


def compile_placement() -> None:
    """The loops of every search for a placement."""
    workload = read_workload(WORKLOAD).workload
    for request in (
        Request(Objective.FLUSH, Method.DP),
        Request(Objective.LATENCY, Method.ANNEAL, time_limit_s=LIMIT_S),
    ):
        solve(workload, request)
    items = items_of(workload, contiguous=False, weightless=Weightless.JOIN)
    local_search(items, Objective.THROUGHPUT, restarts=1)
    improve(items, Objective.THROUGHPUT, start=None, time_limit_s=LIMIT_S, num_moves=2)


def compile_codecs() -> None:
    """The loops of every codec, in both types that they take."""
    tensor = torch.ones(SHAPE)
    for dtype in DTYPES.values():
        for case in cases(tensor.to(dtype), WITH_NUMBA):
            case.go()


if __name__ == "__main__":
    if os.fork() == 0:  # both at once, after one import of what compiles
        compile_codecs()
    else:
        try:
            compile_placement()
        finally:
            os.wait()
