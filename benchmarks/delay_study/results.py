"""The file of results, a line for each finished run, and going on with a study where it is.

One process writes the file, each line by one write at its end, so that a study may be stopped at any time
and two of them may run side by side.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import ParamSpec, TypeVar

from benchmarks.common.command import log
from benchmarks.delay_study.study import Known, Run, Setting, next_setting, run
from benchmarks.delay_study.sweeps import Study

__all__ = ["RESULTS", "go_on", "read"]

P = ParamSpec("P")
T = TypeVar("T")

RESULTS = Path(__file__).parents[2] / "docs" / "convergence.jsonl"


def read() -> Known:
    """All runs that are kept."""
    known = Known()
    if RESULTS.exists():
        for line in RESULTS.read_text().splitlines():
            known.add(Run.from_line(line))
    return known


def go_on(study: Study, *, until_s: float, num_workers: int = 1) -> None:
    """Run what is missing, so many runs at a time; none begins after so many seconds."""
    begin = time.monotonic()
    known, under_way = read(), dict[Future[Run], Setting]()
    with _executor(num_workers) as executor:
        while True:
            while len(under_way) < num_workers and time.monotonic() - begin < until_s:
                setting = waiting(known, study, [*under_way.values()])
                if setting is None:
                    break
                under_way[executor.submit(run, setting)] = setting
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                del under_way[future]
                _keep(future.result(), known)


def waiting(known: Known, study: Study, under_way: Collection[Setting] = ()) -> Setting | None:
    """What is to be run next. What comes next of a cell may hang on what is under way of it."""
    busy = {setting.cell for setting in under_way}
    for sweep in study():
        if sweep.cell in busy:
            continue
        found = next_setting(
            sweep.cell,
            known,
            first_rung=sweep.first_rung,
            num_seeds=sweep.num_seeds,
            is_searched=sweep.is_searched,
        )
        if found is not None:
            return found
    return None


def _keep(done: Run, known: Known) -> None:
    with RESULTS.open("ab", buffering=0) as file:
        file.write(f"{done.to_line()}\n".encode())
    known.add(done)
    setting = done.setting
    log(f"{setting.cell} rung {setting.rung} seed {setting.seed}: {done.loss}")


def _executor(num_workers: int) -> Executor:
    """Trains one run at a time in this process, or several in processes of their own, each with a thread."""
    if num_workers == 1:
        return _Here()
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(num_workers, spawn, initializer=_end_with, initargs=(os.getpid(),))


def _end_with(parent: int) -> None:
    """Let this process end soon after its parent, whatever ends that."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Here(Executor):
    """Does at once what it is given."""

    def submit(self, work: Callable[P, T], /, *values: P.args, **more: P.kwargs) -> Future[T]:
        """A future that is done."""
        done: Future[T] = Future()
        done.set_result(work(*values, **more))
        return done
