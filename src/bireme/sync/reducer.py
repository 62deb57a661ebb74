"""The end of a batch: gradients summed over the replicas, their norm, the loss and the verdict.

Where gradients are summed, a thread of its own does the work while the next batch runs, batch by batch in the
order they are started; the groups that a reducer is given belong to it alone then. Where only a few numbers
are, a thread would cost more than that, and the rank's own does it.
"""

import math
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from bireme.codec.lowrank import Components, merged
from bireme.errors import BiremeError
from bireme.sync.coded import CodedSums, PartSums
from bireme.sync.exchange import (
    BatchGradients,
    FactorStream,
    PieceNorms,
    SentBytes,
    piece_norms,
    squared_norm,
    squared_norm_of,
    sum_in_slices,
    sum_parts,
)
from bireme.sync.feedback import Feedback
from bireme.sync.group import Group, Pending, SharingGroup, SingleRankGroup, Sums
from bireme.sync.slices import PART_SLICE_BYTES, SLICE_BYTES

# What the ranks tell each other about a batch, and what comes of it.

NUMBERS_BYTES = 5 * 8
"""What a rank keeps of a batch until all ranks' numbers are added."""

_STAMP_LIMIT = 2**20
"""Squares of stamps, summed over thousands of ranks, are exact in float64."""


@dataclass(frozen=True, slots=True)
class OwnPart:
    """What a replica has of a batch: so much `weight` in so many samples. Its gradients and its loss are
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


# Sums of gradients that are kept as principal components: stacked over the replicas, and cut to their rank.
#
# Every replica gathers all factors. Each merges a share of the weights and gives what it found to the others,
# so all have the same bits, though products of matrices may differ in the last one from processor to
# processor.


def merge_components(group: Group, gradients: BatchGradients, sent: SentBytes) -> None:
    """Find the components of the whole batch, of each weight that any member has pairs of."""
    streams = gradients.streams
    if group.size == 1:
        fed = {name: stream for name, stream in streams.items() if stream.num_pairs}
        found = {name: merged([stream.factors()], stream.rank) for name, stream in fed.items()}
        gradients.components.update(found)
        return
    for dtype in dict.fromkeys(stream.dtype for stream in streams.values()):
        alike = {name: stream for name, stream in streams.items() if stream.dtype == dtype}
        gradients.components.update(_merged_over(group, alike, sent))


def _merged_over(group: Group, streams: Mapping[str, FactorStream], sent: SentBytes) -> dict[str, Components]:
    of_all = _gathered(group, streams, sent)
    found: dict[str, Components] = {}
    for member in range(group.size):
        names = list(of_all)[member :: group.size]
        if not names:
            continue
        shapes = [shape for name in names for shape in _shapes(streams[name], values=True)]
        if member == group.rank:
            own = [merged(of_all[name], streams[name].rank) for name in names]
            flat = torch.cat([part.reshape(-1) for one in own for part in (one.left, one.right, one.values)])
            sent.sent += (group.size - 1) * flat.nbytes
        else:
            flat = of_all[names[0]][0][0].new_empty(sum(map(math.prod, shapes)))
        group.broadcast(flat, member)
        parts = iter(_cut(flat, shapes))
        for name in names:
            left, right, values = next(parts), next(parts), next(parts)
            found[name] = Components(left, values, right)
    return found


def _gathered(
    group: Group, streams: Mapping[str, FactorStream], sent: SentBytes
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """For each weight that a member has pairs of, the factors of all that have, in the members' order."""
    parts = [part.reshape(-1) for stream in streams.values() for part in stream.factors()]
    has_pairs = torch.tensor([float(stream.num_pairs > 0) for stream in streams.values()]).to(parts[0])
    message = torch.cat([has_pairs, *parts])
    messages = [torch.empty_like(message) for _ in range(group.size)]
    pending = group.gather(message, messages)
    whole_bytes = message.itemsize * sum(math.prod(stream.shape) for stream in streams.values())
    sent.note(group.size, raw=whole_bytes + has_pairs.nbytes)
    sent.sent += (group.size - 1) * message.nbytes
    pending.wait()
    shapes = [shape for stream in streams.values() for shape in _shapes(stream)]
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for one in messages:
        holds = one[: len(streams)].tolist()
        rest = iter(_cut(one[len(streams) :], shapes))
        for name, has in zip(streams, holds, strict=True):
            factors = next(rest), next(rest)
            if has:
                found.setdefault(name, []).append(factors)
    return found


def _shapes(stream: FactorStream, *, values: bool = False) -> list[tuple[int, ...]]:
    rows, columns = stream.shape
    both: list[tuple[int, ...]] = [(rows, stream.rank), (columns, stream.rank)]
    return [*both, (stream.rank,)] if values else both


def _cut(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    pieces = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


More = Callable[[], Sequence[float]]
"""Gives further numbers to be summed over all ranks. It is asked when the batch's gradients are there, by
whatever thread sums them up.
"""


def nothing_more() -> Sequence[float]:
    """No further numbers."""
    return ()


@dataclass(slots=True, eq=False)
class Reduction:
    """A batch that is being summed up."""

    batch: int
    gradients: BatchGradients
    loss_sum: float | Tensor
    stamp: int
    votes: float
    more: "More"
    numbers: Tensor | None = None
    pending: Pending | None = None
    begin: torch.Event | None = None
    end: torch.Event | None = None
    is_done: threading.Event = field(default_factory=threading.Event)
    reduced: Reduced | None = None
    error: BaseException | None = None


class SumsBatches(Protocol):
    """What brings a batch's gradients together, and the numbers that all ranks must agree on.

    It `weighs` where it finds out by itself if anything in a batch counts.
    """

    weighs: bool
    sent: SentBytes

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed with other ranks, and so change."""

    @property
    def summed_apart(self) -> Set[str]:
        """The parameters that are summed over other ranks than the rest."""

    @property
    def feedback(self) -> Feedback | None:
        """What a codec has not sent yet, where it keeps that."""

    def start(
        self,
        batch: int,
        gradients: BatchGradients,
        *,
        loss_sum: float | Tensor,
        stamp: int = 0,
        votes: float = 0.0,
        more: More = nothing_more,
        own: OwnPart | None = None,
    ) -> Reduction:
        """Begin with a batch; returns at once."""

    def finish(self, reduction: Reduction) -> Reduced:
        """Wait for a batch that was started; raises what went wrong."""

    def close(self, timeout_s: float | None = None) -> None:
        """End what runs in the background."""


class Reducer:
    """Sums up the batches of one rank's stages.

    * `control`: all ranks there are. It takes tensors on the CPU, wherever the gradients are.
    * `replicas`: the ranks with the same stages, and so the same gradients.
    * `tied`: parameters that other ranks use in other stages, each with the group of all ranks of all
      replicas that hold it. They are summed over that instead. One group may serve several.
    * `counted`: the names whose gradients this rank adds to the norm; all if None. Over all ranks each
      parameter must be counted once, though several hold it.
    * `device`: where the gradients are, if that is an accelerator.
    * `coded`: what sums over the replicas go through, if they do not go as they are. Those of tied parameters
      always do.
    * `sharers`: the same ranks as `replicas`, where they share the optimizer: each gets the sums of its own
      parts of the gradients only, and adds these to the norm.
    * `coded_parts`: what the sums of these go through, if they do not go as they are.

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
        coded: CodedSums | None = None,
        sharers: SharingGroup | None = None,
        coded_parts: PartSums | None = None,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        self._control = control
        self._sharers = sharers
        self._replicas: Group = sharers or replicas or SingleRankGroup()
        self._tied = dict(tied or {})
        self._counted = counted
        self._device = device
        self._coded = coded
        self._coded_parts = coded_parts
        self._slice_bytes = slice_bytes
        self.sent = SentBytes()
        """What this rank has sent for sums of gradients so far."""
        self._queue: queue.SimpleQueue[Reduction | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if in_background:
            self._thread = threading.Thread(target=self._work, name="bireme-reducer", daemon=True)
            self._thread.start()

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed with other ranks, and so change."""
        return self._replicas.size > 1 or any(group.size > 1 for group in self._tied.values())

    @property
    def feedback(self) -> Feedback | None:
        """What a codec has not sent yet, where it keeps that."""
        coded = self._coded or self._coded_parts
        return None if coded is None else coded.feedback

    @property
    def summed_apart(self) -> Set[str]:
        """The parameters that are summed over other ranks than the rest."""
        return self._tied.keys()

    def start(
        self,
        batch: int,
        gradients: BatchGradients,
        *,
        loss_sum: float | Tensor,
        stamp: int = 0,
        votes: float = 0.0,
        more: More = nothing_more,
        own: OwnPart | None = None,
    ) -> Reduction:
        """Begin to sum up a batch; returns at once.

        `loss_sum` is this rank's part of the batch's loss; all ranks' parts are added, as are their `votes`
        and what `more` gives, which is as many numbers on every rank.
        Nothing given may be read or written before `finish`, but by the reducer. `stamp` tells batches apart:
        where it is not the same on all ranks, `finish` raises a `BiremeError` on all of them. All replicas
        take part, so what this one has of its `own` changes nothing. Raises what went wrong in a batch
        before.
        """
        self._check_usable(batch)
        reduction = Reduction(batch, gradients, loss_sum, stamp, votes, more)
        if self._thread is None:
            self._begin(reduction)
        else:
            if self._device is not None:
                reduction.begin = torch.Event(self._device)
                reduction.begin.record(torch.accelerator.current_stream(self._device))
            self._queue.put(reduction)
        return reduction

    def finish(self, reduction: Reduction) -> Reduced:
        """Wait for a batch that was started; its gradients are sums over all samples of all replicas then.

        Raises what went wrong.
        """
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

    def _counted_of(self, held: Mapping[str, Tensor]) -> list[Tensor]:
        """The gradients that this rank adds to the norm."""
        return [view for name, view in held.items() if self._counted is None or name in self._counted]

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread. The batch it is at is worked through, or given up when the groups' timeout is over.

        Batches it has not begun are dropped. Returns after `timeout_s` in any case; the thread does not keep
        the process alive.
        """
        self._is_closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)

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
        if self._sharers is not None and self._coded_parts is not None:
            assert isinstance(reduction.batch, int), "batches of a run are numbered"
            part_bytes = min(size, PART_SLICE_BYTES)
            self._coded_parts.sum(self._sharers, own, gradients, part_bytes, sent, batch=reduction.batch)
        elif self._sharers is not None:
            sum_parts(self._sharers, own, gradients, min(size, PART_SLICE_BYTES), sent)
        elif self._coded is None:
            sum_in_slices(self._replicas, own, gradients, gradients.flats, size, sent)
        else:
            self._coded.sum(self._replicas, own, gradients, size, sent, batch=reduction.batch)
        if gradients.streams:
            merge_components(self._replicas, gradients, sent)
        for group, names in self._tied_groups():
            views = [gradients.views[name] for name in names]
            sum_in_slices(group, names, gradients, views, size, sent)
        if gradients.norms:
            squared = squared_norm_of(gradients.norms)
        else:
            held = {name: view for name, view in gradients.views.items() if name in gradients.held}
            # Their values alone have the norm of components.
            values = {name: one.values for name, one in gradients.components.items()}
            if self._sharers is not None:
                held = {name: view for name, view in held.items() if name in self._tied}
            owned = [view for name, view in gradients.owned.items() if name in gradients.held]
            squared = squared_norm([*owned, *self._counted_of(held | values)])
        numbers = reduction.numbers = numbers_of(
            loss_sum=reduction.loss_sum,
            squared_norm=squared,
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
        for coded in (self._coded, self._coded_parts):
            if coded is not None:
                coded.settle(counts=reduction.reduced.is_finite)

    def _tied_groups(self) -> list[tuple[Group, list[str]]]:
        """The groups of tied parameters, in an order that no two ranks can disagree about.

        Each comes by the first of its names, which all its members know it by. After the sums over replicas
        the collectives of all ranks so fit into one common order, and none waits in a circle.
        """
        shared: dict[int, list[str]] = {}
        for name in sorted(self._tied):
            shared.setdefault(id(self._tied[name]), []).append(name)
        return [(self._tied[names[0]], names) for names in shared.values()]
