"""Sums of many gradients over a group, in a few large messages.

Gradients of one dtype are laid one after the other into buckets, and several buckets are on their way at
once. The layout depends on the names and shapes alone, so that it is the same on every member whatever
gradients it has.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.sync.group import Group, Pending

__all__ = ["Bucket", "GradientSum", "plan_buckets"]

NUM_IN_FLIGHT = 3
"""How many buckets may be on their way at once."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are summed together: their names, and where each begins and ends in the message."""

    names: tuple[str, ...]
    bounds: tuple[int, ...]
    dtype: torch.dtype
    """The dtype of the message: that of the gradients, or float32 where they have half of it or less."""

    @property
    def num_elements(self) -> int:
        """How long the message is."""
        return self.bounds[-1]


def plan_buckets(templates: Mapping[str, Tensor], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Lay gradients like these into buckets of at most so many bytes; a larger gradient has its own."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name in sorted(templates):
        by_dtype.setdefault(_message_dtype(name, templates[name]), []).append(name)
    return tuple(
        bucket
        for dtype, names in by_dtype.items()
        for bucket in _filled(dtype, names, templates, bucket_bytes // dtype.itemsize)
    )


@dataclass(frozen=True, slots=True)
class _Flight:
    """A bucket on its way. Without a room of its own, the message is the bucket's one gradient itself."""

    bucket: Bucket
    room: Tensor | None
    message: Tensor
    pending: Pending


class GradientSum:
    """Sums gradients like `templates` over a group.

    A gradient that no member has stays None; where only some have it, the others count as zeros. With `keep`
    the given tensors are left as they are, otherwise the sums are written into them.
    """

    def __init__(
        self, templates: Mapping[str, Tensor], group: Group, *, bucket_bytes: int, keep: bool
    ) -> None:
        self._templates = {name: templates[name] for name in sorted(templates)}
        self._group = group
        self._keep = keep
        self._buckets = plan_buckets(templates, bucket_bytes)
        self._spare: dict[torch.dtype, list[Tensor]] = {}
        self._spare_elements: dict[torch.dtype, int] = {}
        for bucket in self._buckets:
            if len(bucket.names) > 1:
                longest = self._spare_elements.get(bucket.dtype, 0)
                self._spare_elements[bucket.dtype] = max(bucket.num_elements, longest)

    def run(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The sums. Every member must call this at the same point of the order of its collectives."""
        results: dict[str, Tensor | None] = {}
        if not self._buckets:
            return results
        device = next(iter(self._templates.values())).device
        holds = [gradients[name] is not None for name in self._templates]
        holders = torch.tensor(holds, dtype=torch.int32, device=device)
        holders_pending = self._group.all_reduce(holders)
        flights: deque[_Flight] = deque()
        somewhere: frozenset[str] | None = None
        waiting = deque(self._buckets)
        while waiting or flights:
            if waiting and len(flights) < NUM_IN_FLIGHT:
                flights.append(self._depart(waiting.popleft(), gradients))
                continue
            if somewhere is None:
                holders_pending.wait()
                somewhere = frozenset(
                    n for n, num in zip(self._templates, holders.tolist(), strict=True) if num
                )
            self._land(flights.popleft(), gradients, somewhere, results)
        return results

    def _depart(self, bucket: Bucket, gradients: Mapping[str, Tensor | None]) -> _Flight:
        if not self._keep and len(bucket.names) == 1:
            gradient = gradients[bucket.names[0]]
            if gradient is not None and gradient.is_contiguous() and gradient.dtype == bucket.dtype:
                return _Flight(bucket, None, gradient, self._group.all_reduce(gradient))
        room = self._room(bucket)
        message = room[: bucket.num_elements]
        for name, place in _places(bucket, message, self._templates):
            gradient = gradients[name]
            if gradient is None:
                place.zero_()
            else:
                place.copy_(gradient)
        return _Flight(bucket, room, message, self._group.all_reduce(message))

    def _land(
        self,
        flight: _Flight,
        gradients: Mapping[str, Tensor | None],
        somewhere: frozenset[str],
        results: dict[str, Tensor | None],
    ) -> None:
        flight.pending.wait()
        if flight.room is None:
            results[flight.bucket.names[0]] = gradients[flight.bucket.names[0]]
            return
        for name, total in _places(flight.bucket, flight.message, self._templates):
            given, dtype = gradients[name], self._templates[name].dtype
            if name not in somewhere:
                results[name] = None
            elif self._keep:
                results[name] = total.to(dtype)
            else:
                target = torch.empty_like(total, dtype=dtype) if given is None else given
                results[name] = target.copy_(total)
        if not self._keep and len(flight.bucket.names) > 1:
            self._spare.setdefault(flight.bucket.dtype, []).append(flight.room)

    def _room(self, bucket: Bucket) -> Tensor:
        """Room for a message. Where the sums do not stay in it, the same few are used batch after batch."""
        device = self._templates[bucket.names[0]].device
        if self._keep or len(bucket.names) == 1:
            return torch.empty(bucket.num_elements, dtype=bucket.dtype, device=device)
        if spare := self._spare.get(bucket.dtype):
            return spare.pop()
        return torch.empty(self._spare_elements[bucket.dtype], dtype=bucket.dtype, device=device)


def _message_dtype(name: str, template: Tensor) -> torch.dtype:
    dtype = template.dtype
    if not dtype.is_floating_point:
        raise BiremeError(
            f"The gradient of {name} is of {dtype}. Replicas can sum gradients of real floating-point "
            "numbers only. Split the parameter into real ones, or train with one replica."
        )
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


def _filled(
    dtype: torch.dtype, names: Iterable[str], templates: Mapping[str, Tensor], limit_elements: int
) -> Iterable[Bucket]:
    inside: list[str] = []
    bounds = [0]
    for name in names:
        elements = templates[name].numel()
        if inside and bounds[-1] + elements > limit_elements:
            yield Bucket(tuple(inside), tuple(bounds), dtype)
            inside, bounds = [], [0]
        inside.append(name)
        bounds.append(bounds[-1] + elements)
    if inside:
        yield Bucket(tuple(inside), tuple(bounds), dtype)


def _places(bucket: Bucket, message: Tensor, templates: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    """Each gradient's part of a message, in its shape."""
    for name, begin, end in zip(bucket.names, bucket.bounds, bucket.bounds[1:], strict=False):
        yield name, message[begin:end].view(templates[name].shape)
