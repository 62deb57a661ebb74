"""The end of a batch: gradients summed over the replicas, their norm, the loss and the verdict.

Where gradients are summed, a thread of its own does the work while the next batch runs, batch by batch in the
order they are started; the groups that a reducer is given belong to it alone then. Where only a few numbers
are, a thread would cost more than that, and the rank's own does it.
"""

import math
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bireme.codec.sum_description import DENSE
from bireme.errors import BiremeError
from bireme.sync.arrivals import Arrivals, Bucket, Parts, buckets_in_parts, buckets_of
from bireme.sync.coded import GradientSummation
from bireme.sync.components import merge_components
from bireme.sync.exchange import (
    BatchGradients,
    FlatViews,
    PieceNorms,
    SentBytes,
    piece_norms,
    squared_norm,
    squared_norm_of,
    sum_in_slices,
)
from bireme.sync.feedback import Feedback
from bireme.sync.group import Group, Pending, SingleRankGroup, Sums
from bireme.sync.slices import SLICE_BYTES, bucket_bytes
from bireme.wire.connection import Bell

# What the ranks tell each other about a batch, and what comes of it.

NUMBERS_BYTES = 5 * 8
"""What a rank keeps of a batch until all ranks' numbers are added."""

_STAMP_LIMIT = 2**20
"""Squares of stamps, summed over thousands of ranks, are exact in float64."""


@dataclass(frozen=True, slots=True)
class OwnPart:
    """What a replica has of a batch: so much `weight` in that many samples. Its gradients and its loss are
    means of `nominal` in weight, which is that of the whole batch where it knows it.
    """

    weight: float
    nominal: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a batch came to, of the whole model, and the same on every rank.

    `votes` is the sum of the numbers that ranks gave along, for whoever wants them to agree on something;
    `more` are the sums of further ones, if there are any.
    """

    loss: float
    grad_norm: float
    is_finite: bool
    votes: float = 0.0
    more: tuple[float, ...] = ()


def numbers_of(
    *, loss_sum: float | Tensor, squared_norm: float, stamp: int, votes: float, more: Sequence[float] = ()
) -> Tensor:
    """One rank's part of what is summed over all: its loss, the square of its norm, its stamp, its votes, and
    what else there is.
    """
    stamp %= _STAMP_LIMIT
    numbers = [float(loss_sum), squared_norm, float(stamp), float(stamp**2), votes, *more]
    return torch.tensor(numbers, dtype=torch.float64)


def reduced_of(total: Tensor, batch: int, *, num_ranks: int) -> Reduced:
    """The outcome of a batch from the sum of all ranks' numbers; raises where their stamps differ."""
    loss, norm, stamps, squares, votes, *more = total.tolist()
    if int(stamps) ** 2 != num_ranks * int(squares):
        # The square of a sum is so large only where all of its parts are equal.
        raise BiremeError(
            f"Batch {batch} is not the same on all ranks, so its result is useless. Give "
            "every rank the same batches in the same order: shuffle with one seed, and do not split the data "
            "between ranks, because the pipeline does that."
        )
    # One element that is not finite anywhere makes every sum that it enters so.
    return Reduced(loss, math.sqrt(norm), math.isfinite(norm), votes, tuple(more))


More = Callable[[], Sequence[float]]
"""Gives further numbers to be summed over all ranks. It is asked when the batch's gradients are there, by
whatever thread sums them up.
"""


ArrivalsOf = Callable[[Mapping[str, Tensor], Sequence[Tensor], Sequence[Parts], set[str]], Arrivals]
"""Makes the arrivals of a batch from its gradients, the flats that they lie in and the parts of these, if
replicas own parts, and the names held so far.
"""


@dataclass(slots=True, eq=False)
class Reduction:
    """A batch that is to be summed up, and how far that has come.

    `loss_sum` is this rank's part of the batch's loss; all ranks' parts are added, as are their `votes` and
    what `more` gives, which is as many numbers on every rank. `stamp` tells batches apart. `own` is what this
    replica has of the batch; without it, it has no part where replicas may be missing.
    """

    batch: int
    gradients: BatchGradients
    loss_sum: float | Tensor = 0.0
    stamp: int = 0
    votes: float = 0.0
    more: More = lambda: ()
    own: OwnPart | None = None
    numbers: Tensor | None = None
    pending: Pending | None = None
    begin: torch.Event | None = None
    end: torch.Event | None = None
    is_done: threading.Event = field(default_factory=threading.Event)
    reduced: Reduced | None = None
    error: BaseException | None = None


class Reducer(ABC):
    """Brings the batches of one rank's stages together, and the numbers that all ranks must agree on.

    * `control`: all ranks there are. It takes tensors on the CPU, wherever the gradients are.
    * `counted`: the names whose gradients this rank adds to the norm; all if None. Over all ranks each
      parameter must be counted once, though several hold it.
    * `device`: where the gradients are, if that is an accelerator.
    """

    sums_gradients: bool
    """Whether gradients are summed with other ranks, and so change."""
    summed_apart: Set[str]
    """The parameters that are summed over other ranks than the rest."""
    weighs: bool
    """Whether it finds out by itself if anything in a batch counts."""
    arrivals: ArrivalsOf | None = None
    """Makes the arrivals of a batch, if sums may begin before its last backward ends."""

    def __init__(self, control: Sums, counted: Collection[str] | None, device: torch.device | None) -> None:
        self._control, self._counted, self._device = control, counted, device
        self.feedback: Feedback | None = None
        """What a codec has not sent yet, if it keeps that."""
        self.sent = SentBytes()
        """What this rank has sent for sums of gradients so far."""

    @abstractmethod
    def start(self, reduction: Reduction) -> None:
        """Begin to sum up a batch; returns at once.

        Nothing given may be read or written before `finish`, but by the reducer. Where the stamp is not the
        same on all ranks, `finish` raises a `BiremeError` on all of them. Raises what went wrong in a batch
        before.
        """

    @abstractmethod
    def finish(self, reduction: Reduction) -> Reduced:
        """Wait for a batch that was started; its gradients are sums over all samples of all replicas then.

        Raises what went wrong.
        """

    @abstractmethod
    def close(self, timeout_s: float | None = None) -> None:
        """End what runs in the background, within that time."""

    def _event(self) -> torch.Event | None:
        """What the rank's stream has had to do by now, on an accelerator."""
        if self._device is None:
            return None
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def _counted_of(self, held: Mapping[str, Tensor]) -> list[Tensor]:
        """The gradients that this rank adds to the norm."""
        return [view for name, view in held.items() if self._counted is None or name in self._counted]

    def _squared_norm(self, gradients: BatchGradients) -> float:
        """This rank's part of the square of the norm of a batch's whole gradients."""
        # Their values alone have the norm of components.
        values = {name: one.values for name, one in gradients.components.items()}
        if gradients.norms:
            return squared_norm_of([*gradients.norms, piece_norms(self._counted_of(values))])
        held = {name: view for name, view in gradients.views.items() if name in gradients.held}
        if gradients.parts or gradients.owned:
            held = {name: view for name, view in held.items() if name in self.summed_apart}
        owned = [view for name, view in gradients.owned.items() if name in gradients.held]
        return squared_norm([*owned, *self._counted_of(held | values)])


class GroupReducer(Reducer):
    """Sums up batches over fixed groups of ranks; see also `Reducer`.

    * `replicas`: the ranks with the same stages, and so the same gradients.
    * `tied`: parameters that other ranks use in other stages, each with the group of all ranks of all
      replicas that hold it. They are summed over that instead, as they are. One group may serve several.
    * `sums`: how gradients are summed over the replicas. If each gets its own parts of them, it adds these to
      the norm.
    * `overlaps`: the same on all replicas. Then the gradients of a batch have arrivals, and a reduction may
      start before its last backward ends. The rest of the reduction is read after the end of the arrivals.

    Every rank must start the same batches in the same order.
    """

    weighs = False

    def __init__(
        self,
        control: Sums,
        *,
        replicas: Group | None = None,
        tied: Mapping[str, Group] | None = None,
        counted: Collection[str] | None = None,
        in_background: bool = True,
        device: torch.device | None = None,
        sums: GradientSummation | None = None,
        slice_bytes: int = SLICE_BYTES,
        overlaps: bool = False,
    ) -> None:
        super().__init__(control, counted, device)
        self._bell = Bell() if overlaps else None
        self.arrivals = self._arrivals if overlaps else None
        self._buckets: dict[tuple[int, ...], Sequence[Bucket]] = {}
        """By the addresses of flats, which later batches use again. Buckets have views of these, so no
        other memory gets these addresses.
        """
        self._replicas: Group = replicas or SingleRankGroup()
        self._tied = dict(tied or {})
        self.summed_apart = self._tied.keys()
        self.sums_gradients = any(group.size > 1 for group in (self._replicas, *self._tied.values()))
        self._sums = sums or GradientSummation()
        self.feedback = self._sums.feedback
        self._slice_bytes = slice_bytes
        self._queue: queue.SimpleQueue[Reduction | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if in_background:
            self._thread = threading.Thread(target=self._work, name="bireme-reducer", daemon=True)
            self._thread.start()

    def start(self, reduction: Reduction) -> None:
        """Begin to sum up a batch; returns at once. All replicas take part, whatever this one has."""
        self._check_usable(reduction.batch)
        if self._thread is None:
            self._begin(reduction)
        else:
            reduction.begin = self._event()
            self._queue.put(reduction)

    def finish(self, reduction: Reduction) -> Reduced:
        """Wait for a batch that was started."""
        if self._thread is None:
            self._end(reduction)
        else:
            reduction.is_done.wait()
        if reduction.error is not None:
            raise reduction.error
        assert reduction.reduced is not None, "what is done has a result or an error"
        if reduction.end is not None:
            torch.accelerator.current_stream(self._device).wait_event(reduction.end)
        return reduction.reduced

    @torch.no_grad()
    def norms_of(self, held: Mapping[str, Tensor]) -> PieceNorms:
        """The norms of some gradients of a batch that nobody else adds to, for its `BatchGradients`."""
        return piece_norms(self._counted_of(held))

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread. The batch it is at is worked through, or given up when the groups' timeout is over.

        Batches it has not begun are dropped. Returns after `timeout_s` in any case; the thread does not keep
        the process alive.
        """
        self._is_closed = True
        if self._thread is not None:
            self._queue.put(None)
            if self._bell is not None:
                self._bell.ring()
            self._thread.join(timeout_s)
        if self._bell is not None:
            self._bell.close()

    def _arrivals(
        self,
        views: Mapping[str, Tensor],
        flats: Sequence[Tensor],
        parts: Sequence[Parts],
        held: set[str],
    ) -> Arrivals:
        def check() -> None:
            if self._is_closed:
                raise RuntimeError("the reducer was closed before a batch was over")

        assert self._bell is not None, "it overlaps"
        key = tuple(flat.data_ptr() for flat in flats)
        if key not in self._buckets:
            num_coders = 0 if self._sums.codec == DENSE else self._replicas.size
            least_bytes = bucket_bytes(sum(flat.nbytes for flat in flats), num_coders)
            in_flats = {name: view for name, view in views.items() if name not in self.summed_apart}
            places = FlatViews.of(in_flats, flats).slots
            self._buckets[key] = (
                buckets_in_parts(places, flats, parts, least_bytes)
                if parts
                else buckets_of(places, flats, least_bytes)
            )
        return Arrivals(self._buckets[key], held, self._bell, check)

    def _check_usable(self, batch: int) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise RuntimeError(f"the reducer was closed before it began batch {batch}")

    def _work(self) -> None:
        stream = None if self._device is None else torch.Stream(self._device)
        while (reduction := self._queue.get()) is not None:
            self._do(reduction, stream)
            del reduction  # or its gradients would live until the next batch comes

    def _do(self, reduction: Reduction, stream: torch.Stream | None) -> None:
        try:
            self._check_usable(reduction.batch)
            if stream is None:
                self._begin(reduction)
            else:
                self._begin_on(stream, reduction)
            self._end(reduction)
        except BaseException as error:
            self._error = reduction.error = error
        finally:
            reduction.is_done.set()

    def _begin_on(self, stream: torch.Stream, reduction: Reduction) -> None:
        """On a stream of the thread's own, after what the rank's stream had to do before `start`."""
        assert reduction.begin is not None, "on an accelerator start leaves an event"
        with stream:
            stream.wait_event(reduction.begin)
            self._begin(reduction)
            reduction.end = torch.Event(self._device)
            reduction.end.record(stream)

    @torch.no_grad()
    def _begin(self, reduction: Reduction) -> None:
        gradients = reduction.gradients
        own = [name for name in gradients.views if name not in self._tied]
        size, sent = self._slice_bytes, self.sent
        self._sums.sum(self._replicas, own, gradients, size, sent, batch=reduction.batch)
        if gradients.arrivals is not None:
            gradients.arrivals.wait(self._replicas)
        if gradients.streams:
            merge_components(self._replicas, gradients, sent)
        for group, names in self._tied_groups():
            views = [gradients.views[name] for name in names]
            sum_in_slices(group, names, gradients, views, size, sent)
        numbers = reduction.numbers = numbers_of(
            loss_sum=reduction.loss_sum,
            squared_norm=self._squared_norm(gradients),
            stamp=reduction.stamp,
            votes=reduction.votes,
            more=reduction.more(),
        )
        reduction.pending = self._control.all_reduce(numbers)

    def _end(self, reduction: Reduction) -> None:
        assert reduction.pending is not None, "what has begun is under way"
        assert reduction.numbers is not None, "what has begun has numbers"
        reduction.pending.wait()
        reduction.reduced = reduced_of(reduction.numbers, reduction.batch, num_ranks=self._control.size)
        self._sums.settle(counts=reduction.reduced.is_finite)

    def _tied_groups(self) -> list[tuple[Group, list[str]]]:
        """The groups of tied parameters, in an order that no two ranks can disagree about.

        Each comes by the first of its names, which all its members know it by. After the sums over replicas
        the collectives of all ranks so fit into one common order, and none waits in a circle.
        """
        shared: dict[int, list[str]] = {}
        for name in sorted(self._tied):
            shared.setdefault(id(self._tied[name]), []).append(name)
        return [(self._tied[names[0]], names) for names in shared.values()]
