"""Ranks for tests: as threads of this process, or as processes that torch.distributed joins over a file."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.patience import patience_s

__all__ = ["run_processes", "run_threads"]


def run_threads(num_ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """What each rank's work returns; the first error of any."""
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
            raise errors[0]
    return results


def run_processes(
    num_ranks: int, work: Callable[..., Any], folder: Path, *args: Any, dying: Sequence[int] = ()
) -> list[Any]:
    """What `work(rank, *args)` returns in each process; None for those that must not live to its end."""
    context = get_context("spawn")
    processes = [
        context.Process(target=_run, args=(rank, num_ranks, work, folder, args), daemon=True)
        for rank in range(num_ranks)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(patience_s())
    finally:
        for process in processes:
            process.kill()
            process.join()
    results: list[Any] = []
    for rank, process in enumerate(processes):
        path = folder / f"result of {rank}"
        if rank in dying:
            assert process.exitcode != 0
            results.append(None)
        else:
            assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}"
            results.append(torch.load(path, weights_only=False))
    return results


def _run(rank: int, num_ranks: int, work: Callable[..., Any], folder: Path, args: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'join'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=patience_s()),
    )
    result = work(rank, *args)
    half = folder / f"half of {rank}"
    torch.save(result, half)
    half.rename(folder / f"result of {rank}")
    if dist.is_initialized():
        dist.destroy_process_group()
