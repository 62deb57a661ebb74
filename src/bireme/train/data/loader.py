"""Batches of a run in its order, made a little ahead of when they are needed.

What a batch holds depends on its number alone: not on how many are made ahead, by how many processes, or on
where the run began. So the state of a loader is one number.
"""

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from bireme.errors import BiremeError
from bireme.train.data.order import Order
from bireme.train.data.samples import Batch, Samples, only
from bireme.train.data.workers import Task, batches_of_workers

__all__ = ["Batches"]

JOIN_S = 5.0
SEED_FACTOR = 1_000_003
SEED_LIMIT = 1 << 62


class Batches:
    """The batches `first_batch` up to but without `first_batch + num_batches`; without end if that is None.

    A background thread keeps up to `prefetch` of them ready; with 0, and no workers, each is made when it is
    asked for. Samples that are not quick are made by `num_workers` processes, if there are to be some: a
    batch by each, in turns. With `names` a batch has these tensors alone, and as many samples.

    It can be iterated more than once, one iteration at a time: each begins where the last one was left. The
    end of an iteration, `close` and the end of a `with` block end threads and processes.
    """

    def __init__(
        self,
        samples: Samples,
        order: Order,
        batch_size: int,
        first_batch: int = 0,
        num_batches: int | None = None,
        *,
        prefetch: int = 2,
        num_workers: int = 0,
        names: Sequence[str] | None = None,
    ) -> None:
        for what, number, least in (
            ("batch size", batch_size, 1),
            ("first batch", first_batch, 0),
            ("number of batches", num_batches or 0, 0),
            ("prefetch", prefetch, 0),
            ("num_workers", num_workers, 0),
        ):
            if number < least:
                raise BiremeError(f"The {what} is {number}; it must be at least {least}.")
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
        self._num_workers = 0 if samples.is_quick else num_workers
        self._names = None if names is None else tuple(names)
        self._ahead: _Ahead | None = None

    def state(self) -> int:
        """The number of the next batch that is given."""
        return self._next

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        if not self._num_workers and not self._prefetch:
            yield from self._counted(map(self._made, self._tasks()))
            return
        ahead = self._ahead = _Ahead(self._source, max(self._prefetch, 1))
        try:
            yield from self._counted(ahead)
        finally:
            ahead.close()

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what works ahead. The next iteration goes on with the batch that would have come."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _counted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._next += 1
            yield batch

    def _source(self, is_wanted: Callable[[], bool]) -> Iterator[Batch]:
        if self._num_workers:
            return batches_of_workers(self._samples, self._tasks(), self._num_workers, is_wanted)
        return map(self._made, self._tasks())

    def _tasks(self) -> Iterator[Task]:
        numbers = count(self._next) if self._end is None else range(self._next, self._end)
        for number in numbers:
            chosen = tuple(map(int, self._order.batch(number, self._batch_size)))
            seed = (self._order.seed * SEED_FACTOR + number) % SEED_LIMIT
            yield Task(number, chosen, seed, self._names)

    def _made(self, task: Task) -> Batch:
        return only(self._samples.take(task.numbers), task.names)


class _Ahead:
    """A thread that runs ahead of who iterates. Its errors are raised where its result was due."""

    def __init__(self, source: Callable[[Callable[[], bool]], Iterator[Batch]], most_ready: int) -> None:
        self._source = source
        self._most_ready = most_ready
        self._ready: deque[Batch] = deque()
        self._error: BaseException | None = None
        self._has_ended = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="bireme data", daemon=True)
        # Ahead of what multiprocessing does at exit, which is to wait for processes that wait for this.
        atexit.register(self.close)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
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
        self._thread.join(JOIN_S)

    def _is_wanted(self) -> bool:
        return not self._is_closed

    def _run(self) -> None:
        batches: Iterator[Batch] | None = None
        try:
            batches = self._source(self._is_wanted)
            for batch in batches:
                if not self._keep(batch):
                    break
        except BaseException as error:  # whatever it is, it belongs to who waits for the batch
            self._error = error
        finally:
            end = getattr(batches, "close", None)
            if end is not None:
                end()
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _keep(self, batch: Batch) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) < self._most_ready or self._is_closed)
            self._ready.append(batch)
            self._changed.notify_all()
            return not self._is_closed
