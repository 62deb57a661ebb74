"""A mover that is as late as it may be: who does not wait for a copy finds none, on any machine."""

import random

import torch

from bireme.runtime.paging.mover import CopyJob, ThreadMover

__all__ = ["StrictMover"]


class StrictMover(ThreadMover):
    """Makes copies when somebody waits for them, and others before them in any order that they allow."""

    def __init__(self, _device: torch.device | None = None, *, seed: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        self._random = random.Random(seed)
        self._waiting: list[CopyJob] = []

    def post(self, job: CopyJob) -> None:
        self._waiting.append(job)

    def wait(self, job: CopyJob) -> None:
        while not job.is_done.is_set():
            self._make_any()
        if job.error is not None:
            raise job.error

    def close(self) -> None:
        while self._waiting:
            self._make_any()

    def _make_any(self) -> None:
        ready = [job for job in self._waiting if all(one.is_done.is_set() for one in job.needs)]
        job = self._random.choice(ready)
        self._waiting.remove(job)
        job.do()
