"""Batches, cut into the micro-batches of every replica, with what each weighs in the batch's loss.

Every rank is given the same batches, and reads the parts that its stages need of its own micro-batches. The
sizes of all micro-batches follow from the number of samples alone. So do their weights, unless the loss
leaves out some targets: then every rank reads the inputs that the targets are made of, the labels, of the
whole batch. If ranks may not read each other's rows, the weights go around as numbers instead.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, groupby, pairwise
from typing import Protocol, runtime_checkable
from zlib import crc32

import torch
from torch import Tensor

from bireme.balance import split
from bireme.errors import BiremeError
from bireme.model.counting import Count
from bireme.model.graph import Value, evaluate
from bireme.sync.group import Pending

# Batches as a rank reads them: not whole, but some inputs of some samples.
#
# A dict of tensors by the names of the model's inputs is a batch, with samples along the first axis. So is
# anything that can be asked for `Rows`, as a loader that reads on every rank only what the rank's stages
# need.


@dataclass(frozen=True, slots=True)
class Rows:
    """Some inputs of a batch, of the samples `begin` up to but without `end`."""

    names: tuple[str, ...]
    begin: int
    end: int

    @property
    def num_samples(self) -> int:
        """How many samples they are of."""
        return self.end - self.begin


@runtime_checkable
class LazyBatch(Protocol):
    """A batch that is read where it is needed.

    `stamp` is equal on all ranks where they are given the same batch, and most probably not where they are
    not.
    """

    @property
    def num_samples(self) -> int:
        """How many samples there are."""

    @property
    def stamp(self) -> int:
        """What tells the batch apart from others, without its tensors."""

    def rows(self, wanted: Rows) -> Mapping[str, Tensor]:
        """The tensors of these names; the first axis is these samples."""


Batch = Mapping[str, Tensor] | LazyBatch


def _lazy(given: Batch, number: int, required: Sequence[Value]) -> LazyBatch:
    """A batch to be read; a dict must hold all inputs of the model. `number` is what to call it."""
    if isinstance(given, Mapping):
        return _Whole(_checked(given, number, required))
    if isinstance(given, LazyBatch):
        return given
    raise BiremeError(
        f"Batch {number} is a {type(given).__name__}. A batch is a dict of tensors, named like the "
        "model's inputs, or has num_samples, stamp and rows as bireme.runtime.microbatches.LazyBatch says."
    )


def read(batch: LazyBatch, wanted: Rows, number: int, required: Sequence[Value]) -> Mapping[str, Tensor]:
    """Rows of a batch, if they are like what the model was captured with."""
    found = batch.rows(wanted)
    for value in required:
        if value.name not in wanted.names:
            continue
        if value.name not in found:
            raise _lacks(number, [value.name], found)
        tensor = found[value.name]
        _check_like(tensor, value, number)
        if tensor.ndim and len(tensor) != wanted.num_samples:
            raise BiremeError(
                f"Batch {number} was asked for {wanted.num_samples} samples of {value.name} and gave "
                f"{len(tensor)}. Its rows() must give the samples from begin up to but without end."
            )
    return found


class _Whole:
    """A dict of tensors, read like any other batch.

    Its stamp is made from shapes and from the ends of tensors, so it tells apart those that a loader gives,
    but not two that differ in the middle of a tensor alone.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.num_samples = _num_samples_of(tensors)

    @property
    def stamp(self) -> int:
        """From shapes, dtypes, and the ends of the tensors, which cost nothing to read."""
        stamp = 0
        for name, tensor in self._tensors.items():
            stamp = crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), stamp)
            flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
            for end in (flat[:_STAMPED_ELEMENTS], flat[-_STAMPED_ELEMENTS:]):
                stamp = crc32(end.cpu().view(torch.uint8).numpy().data, stamp)
        return stamp

    def rows(self, wanted: Rows) -> Mapping[str, Tensor]:
        return {name: _rows_of(self._tensors[name], wanted.begin, wanted.end) for name in wanted.names}


_STAMPED_ELEMENTS = 1 << 10


def _rows_of(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Some samples of an input; one without axes is the same for all."""
    return tensor[begin:end] if tensor.ndim else tensor


def _checked(batch: Mapping[str, Tensor], number: int, required: Sequence[Value]) -> Mapping[str, Tensor]:
    """The model's inputs in a batch, if they are there and like those that it was captured with."""
    missing = [value.name for value in required if not isinstance(batch.get(value.name), Tensor)]
    if missing:
        raise _lacks(number, missing, batch)
    for value in required:
        _check_like(batch[value.name], value, number)
    return {value.name: batch[value.name] for value in required}


def _lacks(number: int, missing: Sequence[str], batch: Mapping[str, Tensor]) -> BiremeError:
    return BiremeError(
        f"Batch {number} lacks {', '.join(missing)}: its tensors are "
        f"{', '.join(name for name, one in batch.items() if isinstance(one, Tensor)) or 'none'}. A batch "
        "holds every input that the model was captured with."
    )


def _check_like(tensor: Tensor, value: Value, number: int) -> None:
    """The first axis is the batch, and of any length."""
    inner = tuple(evaluate(length, len(tensor) if tensor.ndim else 1) for length in value.shape[1:])
    found = str(tensor.dtype).removeprefix("torch.")
    if tensor.ndim != len(value.shape) or tuple(tensor.shape[1:]) != inner:
        captured = ", ".join(map(str, value.shape))
        raise BiremeError(
            f"In batch {number}, {value.name} is of shape {list(tensor.shape)}, but the model was captured "
            f"for [{captured}], where b is the number of samples. Capture it with inputs like those it "
            "is trained on, or cut or pad these."
        )
    if found != value.dtype:
        raise BiremeError(
            f"In batch {number}, {value.name} is {found}, but the model was captured with {value.dtype}. "
            f"Convert it: {value.name}.to(torch.{value.dtype})."
        )


def _num_samples_of(batch: Mapping[str, Tensor]) -> int:
    sizes = {len(value) for value in batch.values() if value.ndim}
    if len(sizes) != 1:
        raise BiremeError(
            f"A batch has first axes of lengths {sorted(sizes)}. The first axis of every tensor must be the "
            "batch, with the same length."
        )
    return sizes.pop()


class Weights:
    """What the micro-batches of a whole batch weigh in its mean, and halves of own ones after them.

    Where a rank knows its own alone, `sums` are those of all ranks under way, and `pending` tells when they
    are there. Whoever asks first waits; nobody has to before a loss is computed. Where the batch is a part of
    a larger one, that one has `times` the weight, as far as can be told from here.
    """

    __slots__ = ("_known", "_nominal", "_pending", "_sums", "_times", "_total")

    def __init__(
        self,
        known: list[float],
        sums: Tensor | None = None,
        pending: Pending | None = None,
        times: Fraction | None = None,
    ) -> None:
        self._known, self._sums, self._pending = known, sums, pending
        self._times = times
        self._total = sum(known)
        self._nominal: float | None = None

    @property
    def total(self) -> float:
        """That of the whole batch."""
        if self._sums is not None and self._pending is not None:
            self._pending.wait()
            found: list[float] = self._sums.tolist()
            self._known[: len(found)] = found
            self._total, self._pending = sum(found), None
        return self._total

    def add(self, weight: float) -> int:
        """The place of a half, which the total has counted in its whole."""
        self._known.append(weight)
        return len(self._known) - 1

    @property
    def nominal(self) -> float:
        """What shares are parts of."""
        if self._nominal is None:
            total = self.total
            self._nominal = total if self._times is None else float(Fraction(total) * self._times)
        return self._nominal

    def share(self, place: int) -> float:
        """A weight as a part of the whole batch's; 0 where nothing in that counts."""
        nominal = self.nominal
        return self._known[place] / nominal if nominal else 0.0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of this replica, or half of one: what the model is given of it.

    Its weight has a `place` in `weights`; `seed` is its own, the same whatever the pipeline's shape.
    `halves` are there where it goes forward in two.
    """

    num_samples: int
    weights: Weights
    place: int
    seed: int
    inputs: dict[str, Tensor]
    halves: tuple["MicroBatch", ...] = ()

    @property
    def share(self) -> float:
        """Its weight in the batch's mean."""
        return self.weights.share(self.place)


@dataclass(frozen=True, slots=True)
class Portion:
    """What one rank has of a batch: its micro-batches by their numbers in its replica, which has
    `num_microbatches`. `stamp` is equal where batches are (see `LazyBatch`). `shares` are the samples of each
    replica.
    """

    micro_batches: Mapping[int, MicroBatch]
    num_microbatches: int
    weights: Weights
    num_samples: int
    stamp: int
    shares: tuple[int, ...] = ()

    @property
    def weight(self) -> float:
        """That of the whole batch; 0 where nothing in it counts for the loss, and then all shares are 0."""
        return self.weights.total


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where a batch is cut: micro-batch i has the samples from `bounds[i]` up to but without the next bound.

    `replica` are those of this replica, one after the other, of which this rank takes its `own`.
    """

    bounds: tuple[int, ...]
    replica: range
    own: tuple[int, ...]

    @property
    def num_samples(self) -> int:
        return self.bounds[-1]

    def shares(self, width: int) -> tuple[int, ...]:
        """The samples of each of so many replicas, which have equally many micro-batches."""
        ends = self.bounds[:: (len(self.bounds) - 1) // width]
        return tuple(end - begin for begin, end in pairwise(ends))

    @property
    def pieces(self) -> Iterator[tuple[int, int]]:
        return pairwise(self.bounds)

    def own_runs(self) -> Iterator[tuple[int, int]]:
        """The samples of this rank, as few runs."""
        for _, run in groupby(enumerate(self.own), key=lambda one: one[1] - one[0]):
            numbers = [number for _, number in run]
            yield self.bounds[numbers[0]], self.bounds[numbers[-1] + 1]


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts batches for one replica of some.

    `required` are all inputs of the model, `needed` those that this rank's stages take. The first
    `num_sliced` micro-batches are cut in halves. `sizes` says in what proportion the replicas' micro-batches
    are large; they are equal if it is empty. With `shares`, which gives the samples of each replica in the
    batch of a number, batches of just so many samples are cut by these instead. With `add_up`, which begins a
    sum over all ranks, a rank reads rows of its own replica alone, and those that `weighs` give their
    weights. With `num_samples` its batches are this replica's parts of batches of so many samples, and their
    first micro-batch is number `first_piece` of these. A rank takes the micro-batches of its replica that
    `own` names; all if it is empty.
    """

    width: int
    replica: int
    num_microbatches: int
    num_sliced: int
    count: Count
    required: tuple[Value, ...]
    needed: tuple[str, ...]
    device: torch.device
    seed: int
    sizes: tuple[int, ...] = ()
    shares: Callable[[int], Sequence[int]] | None = None
    add_up: Callable[[Tensor], Pending] | None = None
    weighs: bool = True
    num_samples: int = 0
    first_piece: int = 0
    own: tuple[int, ...] = ()

    def rows_of_replicas(self, number: int, num_samples: int) -> tuple[int, ...]:
        """How many rows of the batch of that number each replica has, one replica after the other."""
        return self._to_train(number, num_samples).shares(self.width)

    def wanted(self, number: int, num_samples: int) -> tuple[Rows, ...]:
        """What this rank reads of the batch of that number, to train on it."""
        return self._wanted(self._to_train(number, num_samples), is_apart=self._is_apart)

    def cut(self, given: Batch, number: int) -> Portion:
        """This replica's portion of a batch, which is the one of that number."""
        batch = _lazy(given, number, self.required)
        cut = self._to_train(number, batch.num_samples)
        portion = self._portion(batch, number, cut, self.num_sliced, batch.stamp, is_apart=self._is_apart)
        return replace(portion, shares=cut.shares(self.width))

    def wanted_to_evaluate(self, number: int, num_samples: int) -> tuple[Rows, ...]:
        """What this rank reads of a batch to evaluate with."""
        return self._wanted(self._to_evaluate(num_samples), is_apart=False)

    def cut_to_evaluate(self, given: Batch, number: int) -> Portion:
        """This replica's portion of a batch of any size to evaluate with, in which it may have no part."""
        batch = _lazy(given, number, self.required)
        whole = replace(self, num_samples=0)
        return whole._portion(batch, number, self._to_evaluate(batch.num_samples), 0, 0, is_apart=False)

    @property
    def _is_apart(self) -> bool:
        """Whether weights go around, because labels may not be read and would have to be."""
        return self.add_up is not None and bool(self.count.reads)

    def _to_train(self, number: int, num_samples: int) -> _Cut:
        pieces = self.width * self.num_microbatches
        if num_samples < (2 * pieces if self.num_sliced else pieces):
            raise BiremeError(
                f"Batch {number} has {num_samples} samples, and the plan cuts it into {pieces} "
                f"micro-batches ({self.num_microbatches} for each of {self.width} replicas). Skip such a "
                "batch, or plan for fewer micro-batches."
            )
        shares = () if self.shares is None else self.shares(number)
        if shares and sum(shares) == num_samples:
            sizes = [size for share in shares for size in split(share, self.num_microbatches)]
        else:
            of_replicas = shares or self.sizes or (1,) * self.width
            sizes = apportioned(
                num_samples, [one for one in of_replicas for _ in range(self.num_microbatches)]
            )
        first = self.replica * self.num_microbatches
        return self._cut(accumulate(sizes, initial=0), range(first, first + self.num_microbatches))

    def _cut(self, bounds: Iterable[int], replica: range) -> _Cut:
        """The cut with this rank's share of its replica's micro-batches."""
        own = (replica.start + number for number in self.own) if self.own else replica
        return _Cut(tuple(bounds), replica, tuple(index for index in own if index in replica))

    def _to_evaluate(self, num_samples: int) -> _Cut:
        pieces = min(num_samples, self.width * self.num_microbatches)
        first, end = (pieces * replica // self.width for replica in (self.replica, self.replica + 1))
        bounds = (num_samples * piece // max(pieces, 1) for piece in range(pieces + 1))
        return self._cut(bounds, range(first, end))

    def _wanted(self, cut: _Cut, *, is_apart: bool) -> tuple[Rows, ...]:
        found, own = [], self.needed
        if is_apart and self.weighs:
            own = tuple(dict.fromkeys((*own, *self.count.reads)))
        elif self.count.reads and not is_apart:
            found.append(Rows(self.count.reads, 0, cut.num_samples))
            own = tuple(name for name in own if name not in self.count.reads)
        if own:
            found += [Rows(own, *run) for run in cut.own_runs()]
        return tuple(found)

    def _portion(
        self, batch: LazyBatch, number: int, cut: _Cut, num_sliced: int, stamp: int, *, is_apart: bool
    ) -> Portion:
        columns: dict[str, list[_Column]] = {}
        for wanted in self._wanted(cut, is_apart=is_apart):
            for name, tensor in read(batch, wanted, number, self.required).items():
                columns.setdefault(name, []).append(_Column(tensor, wanted))

        def rows(name: str, begin: int, end: int) -> Tensor:
            return next(one for one in columns[name] if one.has(begin, end)).rows(begin, end)

        def weight(begin: int, end: int) -> float:
            if not self.count.reads:
                return float(end - begin)
            if is_apart and not self.weighs:
                return 0.0
            return self.count({name: rows(name, begin, end) for name in self.count.reads})

        is_known = [not is_apart or index in cut.own for index in range(len(cut.bounds) - 1)]
        found = [weight(*one) if known else 0.0 for one, known in zip(cut.pieces, is_known, strict=True)]
        times = Fraction(self.num_samples, cut.num_samples) if self.num_samples else None
        weights = self._added_up(found) if is_apart else Weights(found, times=times)

        def piece(begin: int, end: int, place: int, seed: int) -> MicroBatch:
            inputs = {name: rows(name, begin, end).to(self.device) for name in self.needed}
            return MicroBatch(end - begin, weights, place, seed, inputs)

        def micro_batch(place: int, index: int) -> MicroBatch:
            begin, end = cut.bounds[index], cut.bounds[index + 1]
            seed = micro_batch_seed(self.seed, number, self.first_piece + index)
            whole = piece(begin, end, index, seed)
            if place >= num_sliced:
                return whole
            middle = (begin + end + 1) // 2
            halves = (
                piece(*part, weights.add(weight(*part)), seed + _SECOND_HALF * half)
                for half, part in enumerate(((begin, middle), (middle, end)))
            )
            return replace(whole, halves=tuple(halves))

        first = cut.replica.start
        own = {index - first: micro_batch(index - first, index) for index in cut.own}
        return Portion(own, len(cut.replica), weights, cut.num_samples, stamp)

    def _added_up(self, own: Sequence[float]) -> Weights:
        """The weights of all micro-batches, from those that each rank has counted."""
        assert self.add_up is not None, "weights go around only then"
        sums = torch.tensor(own, dtype=torch.float64)
        return Weights([*own], sums, self.add_up(sums))


@dataclass(frozen=True, slots=True)
class _Column:
    """Rows of an input that were read."""

    tensor: Tensor
    of: Rows

    def has(self, begin: int, end: int) -> bool:
        return self.of.begin <= begin and end <= self.of.end

    def rows(self, begin: int, end: int) -> Tensor:
        return _rows_of(self.tensor, begin - self.of.begin, end - self.of.begin)


_SECOND_HALF = 1 << 62
"""Added to a micro-batch's seed for its second half."""


def micro_batch_seed(seed: int, batch: int, index: int) -> int:
    """The seed of one micro-batch, `index` of all that the batch is cut into."""
    return ((seed * 1_000_003 + batch) * 1_000_003 + index) % _SECOND_HALF


class Feed:
    """The batches of a stream: read no further than asked, and forgotten when they are done with."""

    def __init__(self, batches: Iterable[Batch], cutter: Cutter, first_batch: int) -> None:
        self._source: Iterator[Batch] = iter(batches)
        self._cutter = cutter
        self._first = first_batch
        self._portions: dict[int, Portion] = {}
        self._num_read = 0
        self._has_ended = False

    def has(self, number: int) -> bool:
        """Whether the stream has at least so many batches; reads them if it must."""
        while self._num_read < number and not self._has_ended:
            batch = next(self._source, None)
            if batch is None:
                self._has_ended = True
                break
            index = self._first + self._num_read
            self._portions[index] = self._cutter.cut(batch, index)
            self._num_read += 1
        return self._num_read >= number

    def portion(self, batch: int) -> Portion:
        """This replica's portion of a batch."""
        return self._portions[batch]

    def hold(self, batch: int, portion: Portion) -> None:
        """Have a portion that was not read here."""
        self._portions[batch] = portion

    def drop(self, batch: int) -> None:
        """Forget a batch."""
        del self._portions[batch]


def apportioned(num_samples: int, shares: Sequence[float]) -> list[int]:
    """So many samples in these proportions, as nearly as can be, and at least one each."""
    exact = [num_samples * share / sum(shares) for share in shares]
    sizes = [max(int(part), 1) for part in exact]
    while (missing := num_samples - sum(sizes)) != 0:
        step = 1 if missing > 0 else -1
        able = (place for place, size in enumerate(sizes) if size + step >= 1)
        sizes[max(able, key=lambda place: step * (exact[place] - sizes[place]))] += step
    return sizes
