"""Movers: they make the copies between tiers while the rank's own thread goes on.

A copy is a `CopyJob`. It begins when the jobs that it needs are done, which all were posted before it; so
jobs of one wire can be made in the order in which they were posted, and nobody waits in a circle.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import torch

from bireme.devices import is_accelerator, use

Wire = tuple[int, bool]
"""The tier above, and whether copies go up; a wire for both ways goes by False."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class CopyJob:
    """A copy of so many bytes, or what else must be done in the order of copies. `mark` is where the
    device's stream was when it was posted; `note` is told how long the copy took, once it is complete.
    """

    wire: Wire
    num_bytes: int
    run: Callable[[], None]
    needs: tuple["CopyJob", ...] = ()
    mark: torch.Event | None = None
    is_done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    note: Callable[[float], None] | None = None

    @property
    def is_through(self) -> bool:
        """Whether the copy is made."""
        return self.is_done.is_set() and self.error is None

    def do(self, complete: Callable[[], None] = lambda: None) -> None:
        """Make the copy, unless one that it needs has failed; `complete` waits for what goes on then."""
        self.error = next((one.error for one in self.needs if one.error is not None), None)
        try:
            if self.error is None:
                begin_s = perf_counter()
                self.run()
                complete()
                if self.note is not None:
                    self.note(perf_counter() - begin_s)
        except BaseException as error:
            self.error = error
        finally:
            self.needs = ()
            self.is_done.set()


class ThreadMover:
    """Makes jobs in a thread for each wire. On an accelerator each has a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queues: dict[Wire, queue.SimpleQueue[CopyJob | None]] = {}
        self._threads: list[threading.Thread] = []

    def post(self, job: CopyJob) -> None:
        """Have a job made. Returns at once."""
        own = self._queues.get(job.wire)
        if own is None:
            own = self._queues[job.wire] = queue.SimpleQueue()
            name = f"bireme-mover-{len(self._threads)}"
            thread = threading.Thread(target=self._work, args=(own,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        if is_accelerator(self._device):
            job.mark = torch.Event(self._device)
            job.mark.record(torch.accelerator.current_stream(self._device))
        own.put(job)

    def wait(self, job: CopyJob) -> None:
        """Return when a job is done. Raises what went wrong."""
        job.is_done.wait()
        if job.error is not None:
            raise job.error

    def close(self) -> None:
        """Make what was posted, and end."""
        for own in self._queues.values():
            own.put(None)
        for thread in self._threads:
            thread.join()
        self._queues.clear()
        self._threads.clear()

    def _work(self, jobs: "queue.SimpleQueue[CopyJob | None]") -> None:
        stream: torch.Stream | None = None
        while (job := jobs.get()) is not None:
            for other in job.needs:
                other.is_done.wait()
            try:
                if is_accelerator(self._device):
                    if stream is None:
                        use(self._device)
                        stream = torch.Stream(self._device)
                    if job.mark is not None:
                        job.mark.synchronize()  # here, so that the copy's time is its own
                    with stream:
                        job.do(stream.synchronize)
                else:
                    job.do()
            except BaseException as error:  # of the stream: nobody may wait for ever
                job.error = error
                job.is_done.set()
            del job  # or what it holds would live until the next comes
