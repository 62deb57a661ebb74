"""Batches, cut into the micro-batches of every replica, with what each weighs in the batch's loss.

Every rank is given whole batches, the same ones, and takes from them what its stages and its replica need. So
each knows the sizes and weights of all micro-batches without a message.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from zlib import crc32

import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.model.counting import Count
from bireme.model.graph import Value
from bireme.model.length import evaluate

__all__ = [
    "Cutter",
    "Feed",
    "MicroBatch",
    "Portion",
    "apportioned",
    "checked",
    "micro_batch_seed",
    "num_samples_of",
]

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of this replica, or half of one: what the model is given of it.

    `share` is its weight in the batch's mean; `seed` is its own, the same whatever the pipeline's shape.
    `halves` are there where it goes forward in two.
    """

    num_samples: int
    share: float
    seed: int
    inputs: dict[str, Tensor]
    halves: tuple["MicroBatch", ...] = ()


@dataclass(frozen=True, slots=True)
class Portion:
    """What one replica has of a batch. `weight` is that of the whole batch; 0 where nothing in it counts for
    the loss, and then all shares are 0 too.

    `stamp` is equal where batches are. It is made from shapes and from the ends of tensors, so it tells
    apart those that a loader gives, but not two that differ in the middle of a tensor alone.
    """

    micro_batches: tuple[MicroBatch, ...]
    weight: float
    num_samples: int
    stamp: int


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts batches for one replica of some.

    `required` are all inputs of the model, `needed` those that this rank's stages take. The first
    `num_sliced` micro-batches are cut in halves. `shares` are in what proportion the replicas' micro-batches
    are large; they are equal if it is empty.
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
    shares: tuple[int, ...] = ()

    def cut(self, batch: Batch, number: int) -> Portion:
        """This replica's portion of a batch, which is the one of that number."""
        num_samples = num_samples_of(batch)
        pieces = self.width * self.num_microbatches
        if num_samples < (2 * pieces if self.num_sliced else pieces):
            raise BiremeError(
                f"Batch {number} has {num_samples} samples, and the plan cuts it into {pieces} "
                f"micro-batches ({self.num_microbatches} for each of {self.width} replicas). Leave such a "
                "batch out, or plan for fewer micro-batches."
            )
        bounds = list(accumulate(self._sizes(num_samples), initial=0))
        weights = [self.count(_rows(batch, begin, end)) for begin, end in pairwise(bounds)]
        total = sum(weights)

        def piece(begin: int, end: int, weight: float, seed: int) -> MicroBatch:
            rows = _rows(batch, begin, end)
            inputs = {name: rows[name].to(self.device) for name in self.needed}
            return MicroBatch(end - begin, weight / total if total else 0.0, seed, inputs)

        def micro_batch(place: int) -> MicroBatch:
            index = self.replica * self.num_microbatches + place
            begin, end = bounds[index], bounds[index + 1]
            seed = micro_batch_seed(self.seed, number, index)
            whole = piece(begin, end, weights[index], seed)
            if place >= self.num_sliced:
                return whole
            middle = (begin + end + 1) // 2
            parts = [(begin, middle), (middle, end)]
            counts = [self.count(_rows(batch, *part)) for part in parts]
            halves = (
                piece(*part, count, seed + SECOND_HALF * half)
                for half, (part, count) in enumerate(zip(parts, counts, strict=True))
            )
            return replace(whole, halves=tuple(halves))

        cut = tuple(map(micro_batch, range(self.num_microbatches)))
        return Portion(cut, total, num_samples, _stamp(batch))

    def _sizes(self, num_samples: int) -> list[int]:
        shares = self.shares or (1,) * self.width
        return apportioned(num_samples, [share for share in shares for _ in range(self.num_microbatches)])


SECOND_HALF = 1 << 62
"""Added to a micro-batch's seed for its second half."""


def micro_batch_seed(seed: int, batch: int, index: int) -> int:
    """The seed of one micro-batch, `index` of all that the batch is cut into."""
    return ((seed * 1_000_003 + batch) * 1_000_003 + index) % SECOND_HALF


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
            self._portions[index] = self._cutter.cut(checked(batch, index, self._cutter.required), index)
            self._num_read += 1
        return self._num_read >= number

    def portion(self, batch: int) -> Portion:
        """This replica's portion of a batch."""
        return self._portions[batch]

    def take(self, batch: int, places: Iterable[int]) -> None:
        """Keep of a batch only the micro-batches at these places."""
        portion = self._portions[batch]
        kept = tuple(portion.micro_batches[place] for place in places)
        self._portions[batch] = replace(portion, micro_batches=kept)

    def drop(self, batch: int) -> None:
        """Forget a batch."""
        del self._portions[batch]


def checked(batch: Batch, number: int, required: Sequence[Value]) -> Batch:
    """The model's inputs in a batch, if they are there and like those that it was captured with."""
    if not isinstance(batch, Mapping):
        raise BiremeError(
            f"Batch {number} is a {type(batch).__name__}. A batch is a dict of tensors by the names of the "
            "model's inputs."
        )
    missing = [value.name for value in required if not isinstance(batch.get(value.name), Tensor)]
    if missing:
        raise BiremeError(
            f"Batch {number} lacks {', '.join(missing)}: its tensors are "
            f"{', '.join(name for name, one in batch.items() if isinstance(one, Tensor)) or 'none'}. A batch "
            "holds every input that the model was captured with."
        )
    for value in required:
        _check_like(batch[value.name], value, number)
    return {value.name: batch[value.name] for value in required}


def _check_like(tensor: Tensor, value: Value, number: int) -> None:
    """The first axis is the batch, and of any length."""
    inner = tuple(evaluate(length, len(tensor) if tensor.ndim else 1) for length in value.shape[1:])
    found = str(tensor.dtype).removeprefix("torch.")
    if tensor.ndim != len(value.shape) or tuple(tensor.shape[1:]) != inner:
        captured = ", ".join(map(str, value.shape))
        raise BiremeError(
            f"In batch {number}, {value.name} is of shape {list(tensor.shape)}, and the model was captured "
            f"for [{captured}], where b is the number of samples. Capture it with inputs like those that it "
            "is trained on, or cut or pad these."
        )
    if found != value.dtype:
        raise BiremeError(
            f"In batch {number}, {value.name} is {found}, and the model was captured with {value.dtype} "
            f"there. Convert it: {value.name}.to(torch.{value.dtype})."
        )


def _stamp(batch: Batch) -> int:
    """From shapes, dtypes, and the ends of the tensors, which cost nothing to read."""
    stamp = 0
    for name, tensor in batch.items():
        stamp = crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), stamp)
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        for end in (flat[:STAMPED_ELEMENTS], flat[-STAMPED_ELEMENTS:]):
            stamp = crc32(end.cpu().view(torch.uint8).numpy().data, stamp)
    return stamp


STAMPED_ELEMENTS = 1 << 10


def num_samples_of(batch: Batch) -> int:
    """How many samples a batch has."""
    sizes = {len(value) for value in batch.values() if value.ndim}
    if len(sizes) != 1:
        raise BiremeError(
            f"A batch has first axes of lengths {sorted(sizes)}. The first axis of each tensor is the "
            "batch, and equally long."
        )
    return sizes.pop()


def _rows(batch: Batch, begin: int, end: int) -> dict[str, Tensor]:
    return {name: value[begin:end] if value.ndim else value for name, value in batch.items()}


def apportioned(num_samples: int, shares: Sequence[int]) -> list[int]:
    """So many samples in these proportions, as nearly as can be, and at least one each."""
    exact = [num_samples * share / sum(shares) for share in shares]
    sizes = [max(int(part), 1) for part in exact]
    while (missing := num_samples - sum(sizes)) != 0:
        step = 1 if missing > 0 else -1
        able = (place for place, size in enumerate(sizes) if size + step >= 1)
        sizes[max(able, key=lambda place: step * (exact[place] - sizes[place]))] += step
    return sizes
