"""The end of a batch: gradients summed over the replicas, their norm, the loss, all while the next one runs.

A thread of its own does the work, batch by batch in the order they are started, so that none of it waits for
the rank's instructions, nor they for it. The groups that a reducer is given belong to it alone.
"""

import queue
import threading
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bireme.sync.buckets import GradientSum
from bireme.sync.group import Group, Sums
from bireme.sync.reduced import Reduced, numbers_of, reduced_of

__all__ = ["Reducer"]

Gradients = Mapping[str, Tensor | None]

BUCKET_BYTES = 25 * 2**20


@dataclass(slots=True, eq=False)
class _Job:
    """A batch to be summed, and what came of it."""

    batch: Hashable
    gradients: Gradients
    loss_sum: float | Tensor
    stamp: int
    votes: float
    begin: torch.Event | None
    end: torch.Event | None = None
    is_done: threading.Event = field(default_factory=threading.Event)
    reduced: Reduced | None = None
    error: BaseException | None = None


class Reducer:
    """Sums the gradients of one rank's stages.

    * `templates`: a tensor like the gradient of each parameter, whose numbers do not matter: a parameter that
      has no gradient here may have one on another replica.
    * `replicas`: the ranks with the same stages, and so the same templates.
    * `control`: all ranks there are. It takes tensors on the CPU, wherever the gradients are.
    * `tied`: parameters that other ranks use in other stages, each with the group of all ranks of all
      replicas that hold it. They are summed over that instead. One group may serve several.
    * `counted`: the names whose gradients this rank adds to the norm; all if None. Over all ranks each
      parameter must be counted once, though several hold it.
    * `keep_gradients`: whether the given gradients stay as they are, for others may be reading them.
      Otherwise the sums are written into them, which takes no more memory than a few buckets.

    Sums are in float32 where gradients have half of that, and in the gradients' dtype otherwise. Every rank
    must start the same batches in the same order.
    """

    def __init__(
        self,
        templates: Mapping[str, Tensor],
        replicas: Group,
        control: Sums,
        *,
        keep_gradients: bool,
        tied: Mapping[str, Group] | None = None,
        counted: Collection[str] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._templates = dict(templates)
        self._control = control
        self._counted = [name for name in templates if counted is None or name in counted]
        self._sums = _sums(self._templates, replicas, tied or {}, bucket_bytes, keep=keep_gradients)
        devices = {template.device for template in templates.values() if template.is_cuda}
        self._device = devices.pop() if devices else None
        self._jobs: dict[Hashable, _Job] = {}
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="bireme-reducer", daemon=True)
        self._thread.start()

    def start(
        self,
        batch: Hashable,
        gradients: Gradients,
        *,
        loss_sum: float | Tensor,
        stamp: int = 0,
        votes: float = 0.0,
    ) -> None:
        """Begin to sum up a batch; returns at once.

        `gradients` has an entry for every template, None where the parameter got no gradient. `loss_sum` is
        this rank's part of the batch's loss; all ranks' parts are added, as are their `votes`. Neither may
        be written to before `finish`, but through the reducer. `stamp` tells batches apart: where it is not
        the same on all ranks, `finish` raises a `BiremeError` on all of them. Raises what went wrong in a
        batch before.
        """
        self._check_usable(batch)
        self._check(gradients)
        if batch in self._jobs:
            raise RuntimeError(f"batch {batch} is started twice")
        begin = None
        if self._device is not None:
            begin = torch.Event(self._device)
            begin.record(torch.accelerator.current_stream(self._device))
        job = _Job(batch, dict(gradients), loss_sum, stamp, votes, begin)
        self._jobs[batch] = job
        self._queue.put(job)

    def finish(self, batch: Hashable) -> Reduced:
        """Wait for a batch that was started, and forget it.

        The gradients are sums over all samples of all replicas. They may be the tensors that were given, or
        parts of larger ones, which live as long as any of them does. Raises what went wrong.
        """
        job = self._jobs.pop(batch)
        job.is_done.wait()
        if job.error is not None:
            raise job.error
        assert job.reduced is not None, "a job that is done has a result or an error"
        if job.end is not None:
            stream = torch.accelerator.current_stream(self._device)
            stream.wait_event(job.end)
            for gradient in job.reduced.gradients.values():
                if gradient is not None:
                    gradient.record_stream(stream)
        return job.reduced

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread. The batch it is at is worked through, or given up when the groups' timeout is over.

        Batches it has not begun are dropped. Returns after `timeout_s` in any case; the thread does not keep
        the process alive.
        """
        self._is_closed = True
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _check_usable(self, batch: Hashable) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise RuntimeError(f"the reducer was closed before it began batch {batch}")

    def _check(self, gradients: Gradients) -> None:
        if gradients.keys() != self._templates.keys():
            different = sorted(gradients.keys() ^ self._templates.keys())
            raise ValueError(f"gradients and templates differ in the names {', '.join(different)}")
        for name, template in self._templates.items():
            given = gradients[name]
            if given is not None and (given.shape != template.shape or given.dtype != template.dtype):
                raise ValueError(
                    f"the gradient of {name} is {given.dtype} {tuple(given.shape)}, but its template is "
                    f"{template.dtype} {tuple(template.shape)}"
                )

    def _work(self) -> None:
        stream = None if self._device is None else torch.Stream(self._device)
        while (job := self._queue.get()) is not None:
            self._do(job, stream)
            del job  # or its gradients would live until the next batch comes

    def _do(self, job: _Job, stream: torch.Stream | None) -> None:
        try:
            self._check_usable(job.batch)
            if stream is None:
                job.reduced = self._reduce(job)
            else:
                self._reduce_on(stream, job)
        except BaseException as error:
            self._error = job.error = error
        finally:
            job.is_done.set()

    def _reduce_on(self, stream: torch.Stream, job: _Job) -> None:
        """On a stream of the thread's own, behind what the rank's stream had to do before `start`."""
        assert job.begin is not None, "on a CUDA device start leaves an event"
        with stream:
            stream.wait_event(job.begin)
            job.reduced = self._reduce(job)
            job.end = torch.Event(self._device)
            job.end.record(stream)

    @torch.no_grad()
    def _reduce(self, job: _Job) -> Reduced:
        results = dict(job.gradients)
        for part in self._sums:
            results |= part.run(job.gradients)
        counted = (results[name] for name in self._counted)
        numbers = numbers_of(counted, loss_sum=job.loss_sum, stamp=job.stamp, votes=job.votes)
        self._control.all_reduce(numbers).wait()
        return reduced_of(numbers, job.batch, results, num_ranks=self._control.size)


def _sums(
    templates: Mapping[str, Tensor],
    replicas: Group,
    tied: Mapping[str, Group],
    bucket_bytes: int,
    *,
    keep: bool,
) -> list[GradientSum]:
    """The sums to make, in an order that no two ranks can disagree about.

    First those over replicas, then each group of tied parameters by the first of its names, which all its
    members know it by. So the collectives of all ranks fit into one common order, and none waits in a circle.
    """
    own = {name: template for name, template in templates.items() if name not in tied}
    shared: dict[int, list[str]] = {}
    for name in sorted(tied):
        shared.setdefault(id(tied[name]), []).append(name)
    parts = [(replicas, own)]
    parts += [(tied[names[0]], {name: templates[name] for name in names}) for names in shared.values()]
    return [
        GradientSum(part, group, bucket_bytes=bucket_bytes, keep=keep)
        for group, part in parts
        if group.size > 1
    ]
