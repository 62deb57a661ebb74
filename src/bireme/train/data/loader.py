"""Batches of a run in its order, made a little ahead of when they are needed.

What a batch holds depends on its number alone: not on how many are made ahead, by how many processes, or on
where the run began. So the state of a loader is one number.
"""

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Self
from zlib import crc32

import numpy as np
import torch

from bireme.errors import BiremeError
from bireme.runtime.microbatches import Rows
from bireme.train.data.mixture import ELSEWHERE
from bireme.train.data.placing import SampleOrder
from bireme.train.data.samples import Batch, Samples
from bireme.train.data.workers import Made, Task, Workers, made

_JOIN_S = 5.0
SEED_FACTOR = 1_000_003
SEED_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class PartlyRead:
    """A batch of which there is what the rank wants, and nothing else. Ranks that are given the same batches
    have equal stamps, whatever they have read of them.
    """

    num_samples: int
    stamp: int
    parts: Mapping[Rows | None, Batch]

    def rows(self, wanted: Rows) -> Batch:
        """What was wanted in these words."""
        if wanted not in self.parts:
            raise RuntimeError(
                f"{wanted} is asked for, and what was read is {', '.join(map(str, self.parts))}."
            )
        return self.parts[wanted]


class RankBatches:
    """The batches `first_batch` up to but without `first_batch + num_batches`; without end if that is None.

    A background thread keeps up to `prefetch` of them ready; with 0, and no workers, each is made when it is
    asked for. Samples that are not quick are made by `num_workers` processes, if there are to be some: a
    batch by each, in turns. `wanted` says what to read of a batch, by its number and how many samples it has;
    without it that is all. `data` is what errors call the data. With `timeout_s`, that for which ranks wait
    for each other, a worker that hangs is started again.

    It can be iterated more than once, one iteration at a time: each begins where the last one was left, and
    makes batches ahead from then on. The end of an iteration, `close` and the end of a `with` block end
    threads and processes; where it `keeps_workers` an iteration that has come to its end leaves them to the
    next one.
    """

    keeps_workers = False

    def __init__(
        self,
        samples: Samples,
        order: SampleOrder,
        batch_size: int,
        first_batch: int = 0,
        num_batches: int | None = None,
        *,
        prefetch: int = 2,
        num_workers: int = 0,
        wanted: Callable[[int, int], tuple[Rows, ...]] | None = None,
        data: str = "training",
        timeout_s: float | None = None,
    ) -> None:
        if order.num_samples != len(samples):
            raise BiremeError(
                f"The order is for {order.num_samples} samples, and there are {len(samples)}. Make it "
                "for those."
            )
        self._samples = samples
        self._order = order
        self._batch_size = batch_size
        self._next = first_batch
        self._end = None if num_batches is None else first_batch + num_batches
        self._prefetch = prefetch
        self._wants = wanted
        self._has_workers = num_workers > 0 and not samples.is_quick
        # A rank that reads nothing of a batch needs no workers.
        self._num_workers = num_workers if self._has_workers and self._wanted(first_batch) != () else 0
        self._data = data
        self._workers = Workers(samples, self._num_workers, data, timeout_s)
        self._ahead: _Ahead | None = None

    def state(self) -> int:
        """The number of the next batch that is given."""
        return self._next

    def __iter__(self) -> Iterator[PartlyRead]:
        self._end_ahead()
        if not self._num_workers and not self._prefetch:
            return self._counted(self._source(lambda: True))
        self._ahead = _Ahead(self._source, max(self._prefetch, 1))
        return self._until_closed(self._ahead)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what works ahead. The next iteration goes on with the batch that would have come."""
        self._end_ahead()
        self._workers.close()

    def _end_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _wanted(self, number: int) -> tuple[Rows, ...] | None:
        """What is read of a batch; None is all of it."""
        return None if self._wants is None else self._wants(number, self._batch_size)

    def _given(self, done: Made) -> PartlyRead:
        """A batch that was made, with its stamp."""
        # Private samples count alike: a rank knows the numbers of its own server's alone.
        numbers = np.maximum(np.asarray(done.task.numbers, np.int64), ELSEWHERE)
        return PartlyRead(len(numbers), crc32(numbers.tobytes(), self._identity), done.parts)

    @cached_property
    def _identity(self) -> int:
        """What ranks would have differently whose samples are others, or in another order.

        Not with workers: what samples draw is the same on all ranks in them alone. Computed once, for a
        stream goes back for it.
        """
        identity = crc32(f"{self._order} {self._batch_size}".encode())
        if self._has_workers:
            return identity
        for place in self._order.probes:
            with suppress(BiremeError):  # which is raised where a batch needs the sample, if one does
                for name, tensor in self._samples.take([place]).items():
                    plain = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                    identity = crc32(plain.data, crc32(name.encode(), identity))
        return identity

    def _until_closed(self, ahead: "_Ahead") -> Iterator[PartlyRead]:
        try:
            yield from self._counted(ahead)
        finally:
            ahead.close()

    def _counted(self, batches: Iterator[PartlyRead]) -> Iterator[PartlyRead]:
        for batch in batches:
            self._next += 1
            yield batch

    def _source(self, is_wanted: Callable[[], bool]) -> Iterator[PartlyRead]:
        if not self._num_workers:
            yield from (self._given(made(self._samples, task, self._data)) for task in self._tasks())
            return
        try:
            with closing(self._workers.batches(self._tasks(), is_wanted)) as batches:
                yield from map(self._given, batches)
        finally:
            if not self.keeps_workers:
                self._workers.close()

    def _tasks(self) -> Iterator[Task]:
        numbers = count(self._next) if self._end is None else range(self._next, self._end)
        for number in numbers:
            chosen = tuple(map(int, self._order.numbers(number * self._batch_size, self._batch_size)))
            seed = (self._order.seed * SEED_FACTOR + number * self._batch_size) % SEED_LIMIT
            yield Task(number, chosen, seed, self._wanted(number))


class _Ahead:
    """A thread that makes results ahead. Its errors are raised where their result was due."""

    def __init__(self, source: Callable[[Callable[[], bool]], Iterator[PartlyRead]], most_ready: int) -> None:
        self._source = source
        self._most_ready = most_ready
        self._ready: deque[PartlyRead] = deque()
        self._error: BaseException | None = None
        self._has_ended = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="bireme data", daemon=True)
        # Ahead of what multiprocessing does at exit, which is to wait for processes that wait for this.
        atexit.register(self.close)
        self._thread.start()

    def __iter__(self) -> Iterator[PartlyRead]:
        return self

    def __next__(self) -> PartlyRead:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._has_ended or self._is_closed)
            if self._ready and not self._is_closed:
                self._changed.notify_all()
                return self._ready.popleft()
            error, self._error = self._error, None
        if error is not None and not self._is_closed:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Make no more, and wait until nothing is being made, unless that takes long."""
        atexit.unregister(self.close)
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        batches: Iterator[PartlyRead] | None = None
        try:
            batches = self._source(lambda: not self._is_closed)
            while self._has_room() and (batch := next(batches, None)) is not None:
                self._keep(batch)
        except BaseException as error:  # raised in the thread that waits for the batch
            self._error = error
        finally:
            end = getattr(batches, "close", None)
            if end is not None:
                end()
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until another result is to be made; False after `close`. Made earlier it would hold memory,
        and a replica that joins would get none of its samples.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) < self._most_ready or self._is_closed)
            return not self._is_closed

    def _keep(self, batch: PartlyRead) -> None:
        with self._changed:
            self._ready.append(batch)
            self._changed.notify_all()
