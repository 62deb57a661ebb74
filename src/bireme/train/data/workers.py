"""Worker processes that make batches of a slow dataset, each a batch of its own, in turns.

A worker takes no notice of interrupts, which are its parent's to handle, and ends with its parent, whatever
ended that. What goes wrong in it is raised in the parent, with the number of the sample.
"""

import contextlib
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.runtime.batches import Rows
from bireme.runtime.processes import start_process
from bireme.train.data.samples import Batch, Samples, take_rows

__all__ = ["Made", "Task", "Workers", "made"]

LOOK_S = 0.2
"""How long to wait for a worker before looking whether the batches are still wanted."""

GRACE_S = 1.0
"""So long may a worker go on with what it is at before it is killed."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Task:
    """A batch to make: of the samples of these numbers, all of it or what is wanted.

    `seed` is what the random draws of the first sample begin with; the next ones' seeds follow. So a draw
    depends on where its sample stands in the run, and not on which others a rank reads.
    """

    batch: int
    numbers: tuple[int, ...]
    seed: int
    wanted: tuple[Rows, ...] | None

    @property
    def seeds(self) -> range:
        """One for each sample."""
        return range(self.seed, self.seed + len(self.numbers))


Parts = Mapping[Rows | None, Batch]
"""What was made of a batch: what was wanted, or under None all of it."""


@dataclass(frozen=True, slots=True)
class Made:
    """A task that is done."""

    task: Task
    parts: Parts


def made(samples: Samples, task: Task, *, seeded: bool = False) -> Made:
    """Make a batch. Draws begin with the task's seeds where that is asked for."""
    seeds = task.seeds if seeded else None
    if task.wanted is None:
        return Made(task, {None: samples.take(task.numbers, seeds=seeds)})
    return Made(task, take_rows(samples, task.numbers, task.wanted, seeds))


class Workers:
    """So many worker processes. They start when batches are first asked for, and stay until `close`."""

    def __init__(self, samples: Samples, num_workers: int) -> None:
        self._samples, self._num_workers = samples, num_workers
        self._idle: list[_Worker] = []

    def batches(self, tasks: Iterator[Task], is_wanted: Callable[[], bool]) -> Generator[Made]:
        """The batches of the tasks, in their order; one for each worker is being made ahead.

        Ends early when they are no longer wanted. Workers that are still at something end then.
        """
        workers, self._idle = self._idle or self._started(), []
        are_idle = False
        try:
            waiting: list[_Worker] = []
            for worker in workers:
                worker.start_next(tasks, waiting)
            while waiting:
                worker = waiting.pop(0)
                batch = worker.result(is_wanted)
                if batch is None:
                    return
                worker.start_next(tasks, waiting)
                yield batch
            are_idle = True
        finally:
            if are_idle:
                self._idle = workers
            else:
                _end(workers)

    def close(self) -> None:
        """End those that are idle."""
        workers, self._idle = self._idle, []
        _end(workers)

    def _started(self) -> "list[_Worker]":
        try:
            pickled = pickle.dumps(self._samples)
        except Exception as error:
            raise BiremeError(
                f"The dataset cannot be sent to worker processes ({type(error).__name__}: {error}). Name it "
                "as file.py:function, or use num_workers = 0."
            ) from error
        started: list[_Worker] = []
        try:
            for place in range(self._num_workers):
                started.append(_Worker(place, self._num_workers, pickled))
        except BaseException:
            _end(started)
            raise
        return started


@dataclass(frozen=True, slots=True)
class _Failure:
    """What went wrong in a worker: a sentence for people, or where it comes from a bug, where that is."""

    sentence: str
    trace: str
    is_for_people: bool


class _Worker:
    """The parent's side of one worker."""

    def __init__(self, place: int, num_workers: int, pickled: bytes) -> None:
        self._name = f"data worker {place + 1} of {num_workers}"
        self._task: Task | None = None
        with _signals_waiting():
            self.process, self.connection = start_process(f"bireme {self._name}", _work, pickled)

    def start_next(self, tasks: Iterator[Task], waiting: "list[_Worker]") -> None:
        """Give the worker the next task, if there is one, and put it with those whose results are due."""
        task = next(tasks, None)
        if task is None:
            return
        self._task = task
        waiting.append(self)
        with contextlib.suppress(OSError):  # It is gone then; that shows when its result is due.
            self.connection.send(task)

    def result(self, is_wanted: Callable[[], bool]) -> Made | None:
        """The batch that the worker was to make; None when it is no longer wanted."""
        try:
            while not self.connection.poll(LOOK_S):
                if not is_wanted():
                    return None
            answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(answer, _Failure):
            error = (BiremeError if answer.is_for_people else RuntimeError)(answer.sentence)
            error.add_note(f"In {self._name}:\n{answer.trace}")
            raise error
        assert self._task is not None, "who has a result had a task"
        parts = {
            rows: {name: _unpacked(tensor) for name, tensor in batch.items()}
            for rows, batch in answer.items()
        }
        return Made(self._task, parts)

    def _death(self) -> BiremeError:
        self.process.join(GRACE_S)
        code = self.process.status
        number = None if self._task is None else self._task.batch
        how = (
            f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
        )
        return BiremeError(
            f"The {self._name} {how} while it made batch {number}. If memory ran out, lower "
            "data.num_workers; otherwise see its messages on standard error."
        )


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        worker.process.join(GRACE_S / len(workers))
        worker.process.close()


@contextlib.contextmanager
def _signals_waiting() -> Iterator[None]:
    """For a process that is started in the block, signals wait until it ignores them."""
    if sys.platform == "win32":
        yield  # It has neither.
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(connection: Connection, pickled: bytes) -> None:
    """What a worker does: the tasks that come, until no more can come."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    torch.set_num_threads(1)
    samples: Samples | None = None
    while True:
        try:
            task: Task = connection.recv()
        except (EOFError, OSError):
            return
        try:
            if samples is None:
                samples = pickle.loads(pickled)
            # Draws are then the same in whichever worker a sample is made, and on all ranks.
            parts = made(samples, task, seeded=True).parts
            answer: Any = {
                rows: {name: _packed(tensor) for name, tensor in batch.items()}
                for rows, batch in parts.items()
            }
        except Exception as error:  # whatever it is, it is the parent's to know
            is_for_people = isinstance(error, BiremeError)
            sentence = str(error) if is_for_people else f"Batch {task.batch}: {type(error).__name__}: {error}"
            answer = _Failure(sentence, traceback.format_exc(), is_for_people)
        try:
            connection.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
        except OSError:
            return


@dataclass(frozen=True, slots=True)
class _Packed:
    """A tensor as bytes: torch would use shared memory, which a kill does not free."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def _packed(tensor: Tensor) -> _Packed:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return _Packed(tensor.dtype, tuple(tensor.shape), plain.view(torch.uint8).numpy())


def _unpacked(packed: _Packed) -> Tensor:
    if not packed.data.size:
        return torch.empty(packed.shape, dtype=packed.dtype)
    return torch.from_numpy(packed.data).view(packed.dtype).reshape(packed.shape)
