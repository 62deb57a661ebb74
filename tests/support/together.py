"""Ranks for tests: as threads of this process, or as processes that torch.distributed joins over a file."""

import importlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bireme.runtime.board import PeerLost
from bireme.runtime.processes import start_process
from bireme.sync.group import AbortedError, CollectiveError
from tests.support.patience import patience_s

__all__ = ["run_processes", "run_threads"]


CONSEQUENCES = (AbortedError, CollectiveError, PeerLost)
"""What ranks raise because another one has failed."""


def run_threads(num_ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """What each rank's work returns; the first error of any, and rather a cause than what follows from it."""
    # Optimizers import it at their first use, and threads that do so at once may see it half made.
    importlib.import_module("torch._dynamo")
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience_s())
        if thread.is_alive() and not errors:
            raise TimeoutError("a rank does not end")
    if errors:
        raise next((one for one in errors if not isinstance(one, CONSEQUENCES)), errors[0])
    return results


def run_processes(
    num_ranks: int, work: Callable[..., Any], folder: Path, *args: Any, dying: Sequence[int] = ()
) -> list[Any]:
    """What `work(rank, *args)` returns in each process; None for those that must not live to its end."""
    started = [
        start_process(f"test rank {rank}", _run, rank, num_ranks, work, folder, args)
        for rank in range(num_ranks)
    ]
    try:
        for process, _ in started:
            process.join(patience_s())
        statuses = [process.status for process, _ in started]
    finally:
        for process, talk in started:
            process.close()
            talk.close()
    results: list[Any] = []
    for rank, status in enumerate(statuses):
        path = folder / f"result of {rank}"
        if rank in dying:
            assert status != 0
            results.append(None)
        else:
            assert status == 0, f"rank {rank} ended with {status}"
            results.append(torch.load(path, weights_only=False))
    return results


def _run(
    talk: Connection, rank: int, num_ranks: int, work: Callable[..., Any], folder: Path, args: Sequence[Any]
) -> None:
    del talk  # who started it hears of it by its result
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'join'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=patience_s()),
    )
    # Who leaves the group before all others are in it ends theirs.
    dist.barrier()
    result = work(rank, *args)
    half = folder / f"half of {rank}"
    torch.save(result, half)
    half.rename(folder / f"result of {rank}")
    if dist.is_initialized():
        dist.destroy_process_group()
