"""Worker processes that make batches of a slow dataset, each a batch of its own, in turns.

A worker takes no notice of interrupts, which are its parent's to handle, and ends with its parent, whatever
ended that. What goes wrong in it is raised in the parent, with the number of the sample. A worker that is
killed or hangs is started again, and makes its batch anew; torch's DataLoader ends with an error instead.
"""

import contextlib
import math
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bireme.errors import BiremeError, SampleError, tell
from bireme.runtime.fork_server import HELD
from bireme.runtime.microbatches import Rows
from bireme.runtime.processes import UNREPORTED, signals_held, start_process
from bireme.train.data.samples import Batch, Samples, take_rows

_LOOK_S = 0.2
"""How long to wait for a worker before looking whether the batches are still wanted."""

_MOST_NAMED = 8
"""Samples that a message lists."""

_ENDS = "If memory ran out, lower data.num_workers; otherwise see the messages of the dataset above."
_HANGS = "If a sample does take that long, raise cluster.timeout_s."

_GRACE_S = 1.0
"""So long may a worker go on with what it is at before it is killed."""

_MOST_TIMEOUTS, _MOST_TIMES, _FIRST_TIMEOUTS = 1 / 3, 10, 10
"""A worker hangs if a batch takes longer than this part of the timeout, and longer than the slowest batch so
far times the second number. The first batch may take `_FIRST_TIMEOUTS` timeouts.
"""


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

    @property
    def singles(self) -> "list[Task]":
        """A task for each sample of which something is wanted."""
        rows = {row for one in self.wanted or () for row in range(one.begin, one.end)}
        places = range(len(self.numbers)) if self.wanted is None else sorted(rows)
        return [Task(self.batch, (self.numbers[place],), self.seed + place, None) for place in places]


Parts = Mapping[Rows | None, Batch]
"""What was made of a batch: what was wanted, or under None all of it."""


@dataclass(frozen=True, slots=True)
class Made:
    """A task that is done."""

    task: Task
    parts: Parts


def made(samples: Samples, task: Task, data: str, *, seeded: bool = False) -> Made:
    """Make a batch of the samples of that data. Draws begin with the task's seeds if that is asked for.

    Raises a `SampleError` with all samples of the batch that are wanted; its text names the one that fails.
    """
    seeds = task.seeds if seeded else None
    try:
        if task.wanted is None:
            return Made(task, {None: samples.take(task.numbers, seeds=seeds)})
        return Made(task, take_rows(samples, task.numbers, task.wanted, seeds))
    except BiremeError as error:
        raise SampleError(str(error), _names(task.singles, data)) from error
    except OSError as error:
        names = _names(task.singles, data)
        raise SampleError(f"Batch {task.batch} cannot be read ({_listed(names)}): {error}.", names) from error


def _names(singles: Sequence[Task], data: str) -> tuple[str, ...]:
    return tuple(f"{data} sample {one.numbers[0]}" for one in singles)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")


class Workers:
    """The worker processes of a loader. They start when the first batch is asked for, and stay until `close`.

    `data` is what errors call the data. With `timeout_s`, that for which ranks wait for each other, a worker
    that hangs is noticed.
    """

    def __init__(
        self, samples: Samples, num_workers: int, data: str = "training", timeout_s: float | None = None
    ) -> None:
        self._samples, self._num_workers = samples, num_workers
        self._data, self._patience = data, _Patience(timeout_s)
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
                name = f"data worker {place + 1} of {self._num_workers}"
                started.append(_Worker(name, pickled, self._data, self._patience))
        except BaseException:
            _end(started)
            raise
        return started


@dataclass(frozen=True, slots=True)
class _Failure:
    """What went wrong in a worker: a sentence for people, and the traceback."""

    sentence: str
    trace: str
    samples: tuple[str, ...] | None
    """Those that fail; None if the failure is a bug."""


@dataclass(slots=True)
class _Patience:
    """How long a worker may take for a batch: without end if there is no timeout."""

    timeout_s: float | None
    longest_s: float | None = None
    """Of the batches so far."""

    @property
    def limit_s(self) -> float:
        if self.timeout_s is None:
            return math.inf
        if self.longest_s is None:
            return _FIRST_TIMEOUTS * self.timeout_s
        return max(_MOST_TIMEOUTS * self.timeout_s, _MOST_TIMES * self.longest_s)

    def note(self, seconds: float) -> None:
        """A batch took so long."""
        self.longest_s = max(seconds, self.longest_s or 0.0)


class _LostError(Exception):
    """A worker has ended or hangs: `how`, and what a user can do about it."""

    def __init__(self, how: str, remedy: str) -> None:
        super().__init__(how)
        self.how, self.remedy = how, remedy


class _Worker:
    """The parent's side of one worker, in all of its processes."""

    def __init__(self, name: str, pickled: bytes, data: str, patience: _Patience) -> None:
        self._name, self._pickled, self._data, self._patience = name, pickled, data, patience
        self._task: Task | None = None
        self._began_s = 0.0
        self._start()

    def start_next(self, tasks: Iterator[Task], waiting: "list[_Worker]") -> None:
        """Give the worker the next task, if there is one, and put it with those whose results are due."""
        self._task = next(tasks, None)
        if self._task is not None:
            waiting.append(self)
            self._send(self._task)

    def result(self, is_wanted: Callable[[], bool]) -> Made | None:
        """The batch that the worker was to make; None when it is no longer wanted.

        If its process ends or hangs, another one makes the batch anew, but first each sample alone: if that
        one ends or hangs too, the sample is to blame.
        """
        task = self._task
        assert task is not None, "who has a result had a task"
        try:
            return self._receive(task, is_wanted)
        except _LostError as lost:
            at, first = task, f"The {self._name} {lost.how} while it made batch {task.batch}"
        tell(f"{first}; it is started again.")
        singles = task.singles
        try:
            self.close()
            self._start()
            for at in (*singles, task):
                self._send(at)
                if (found := self._receive(at, is_wanted)) is None:
                    return None
        except _LostError as lost:
            names = _names([at] if at in singles else singles, self._data)
            raise SampleError(
                f"{first}. Started again, it {lost.how} at {_listed(names)}. {lost.remedy}", names
            ) from None
        return found

    def close(self) -> None:
        """End the process, if it has not ended."""
        self.connection.close()
        self.process.close()

    def _start(self) -> None:
        with signals_held():
            self.process, self.connection = start_process(
                f"bireme {self._name}", _work, self._pickled, self._data
            )

    def _send(self, task: Task) -> None:
        self._began_s = time.monotonic()
        with contextlib.suppress(OSError):  # It is gone then; that shows when its result is due.
            self.connection.send(task)

    def _receive(self, task: Task, is_wanted: Callable[[], bool]) -> Made | None:
        """What the process makes of a task; None when it is no longer wanted."""
        try:
            while not self.connection.poll(_LOOK_S):
                if not is_wanted():
                    return None
                if (took_s := time.monotonic() - self._began_s) > self._patience.limit_s:
                    raise _LostError(f"took more than {took_s:.0f} s", _HANGS)
            answer, seconds = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise _LostError(self._ending(), _ENDS) from None
        if isinstance(answer, _Failure):
            error: Exception = RuntimeError(answer.sentence)
            if answer.samples is not None:
                error = SampleError(answer.sentence, answer.samples)
            error.add_note(f"In {self._name}:\n{answer.trace}")
            raise error
        if task is self._task:
            self._patience.note(seconds)
        parts = {
            rows: {name: _unpacked(tensor) for name, tensor in batch.items()}
            for rows, batch in answer.items()
        }
        return Made(task, parts)

    def _ending(self) -> str:
        """How the process has ended."""
        self.process.join(_GRACE_S)
        status = self.process.status
        if status is None or status == UNREPORTED:
            return "has ended"
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        worker.process.join(_GRACE_S / len(workers))
        worker.process.close()


def _work(connection: Connection, pickled: bytes, data: str) -> None:
    """What a worker does: the tasks that come, until no more can come."""
    for number in HELD:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    torch.set_num_threads(1)
    samples: Samples | None = None
    while True:
        try:
            task: Task = connection.recv()
        except (EOFError, OSError):
            return
        began_s = time.monotonic()
        try:
            if samples is None:
                samples = pickle.loads(pickled)
            # Draws are then the same in whichever worker a sample is made, and on all ranks.
            parts = made(samples, task, data, seeded=True).parts
            answer: Any = {
                rows: {name: _packed(tensor) for name, tensor in batch.items()}
                for rows, batch in parts.items()
            }
        except BiremeError as error:
            answer = _Failure(str(error), traceback.format_exc(), _names(task.singles, data))
        except Exception as error:  # whatever it is, it is the parent's to know
            sentence = f"Batch {task.batch}: {type(error).__name__}: {error}"
            answer = _Failure(sentence, traceback.format_exc(), None)
        try:
            answered = answer, time.monotonic() - began_s
            connection.send_bytes(pickle.dumps(answered, pickle.HIGHEST_PROTOCOL))
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
