"""The gradients of a stage's batches under way, each batch's apart from the others'.

Two batches may run on the same leaves at once (under 2BW the first two both run on the first version), so a
leaf's own `.grad` belongs to no batch. Here it is lent, for one backward at a time, the sum of the batch that
the backward is for. Autograd then adds in place; nothing is copied.
"""

from collections.abc import Iterable, Mapping
from types import TracebackType

import torch
from torch import Tensor

__all__ = ["GradientAccumulator", "Sum"]

Sum = int | tuple[int, int]
"""What gradients are summed over: a batch, or (batch, micro-batch) where each micro-batch is applied."""


class GradientAccumulator:
    """Sums the gradients of the parameters in `names`, by batch.

    A parameter that has had no gradient has None, not zero: an optimiser leaves it alone then, and does not
    even decay it.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._sums: dict[Sum, dict[str, Tensor | None]] = {}

    def into(self, batch: Sum, leaves: Mapping[str, Tensor]) -> "_Lending":
        """Within this context `torch.autograd.backward` adds the leaves' gradients to the batch's sums."""
        return _Lending(self._open(batch), leaves)

    @torch.no_grad()
    def add(self, batch: Sum, name: str, gradient: Tensor) -> None:
        """Add a gradient that was computed apart, as by the weight half of a split backward.

        It stays the caller's: autograd may have given out the same memory for two parameters.
        """
        sums = self._open(batch)
        total = sums[name]
        if total is None:
            sums[name] = gradient.detach().clone()
        else:
            total += gradient

    def gradients(self, batch: Sum) -> Mapping[str, Tensor | None]:
        """The sums themselves, not copies, in the order of the names; all None for a batch without any."""
        return self._open(batch)

    def release(self, batch: Sum) -> None:
        """Forget a batch's sums, once they have been applied."""
        self._sums.pop(batch, None)

    def memory_bytes(self) -> int:
        """The bytes of all sums."""
        totals = (total for sums in self._sums.values() for total in sums.values())
        return sum(total.nbytes for total in totals if total is not None)

    def _open(self, batch: Sum) -> dict[str, Tensor | None]:
        sums = self._sums.get(batch)
        if sums is None:
            sums = self._sums[batch] = dict.fromkeys(self._names)
        return sums


class _Lending:
    """Lends sums to leaves and takes them back; a generator would cost several times as much."""

    __slots__ = ("_leaves", "_sums")

    def __init__(self, sums: dict[str, Tensor | None], leaves: Mapping[str, Tensor]) -> None:
        self._sums = sums
        self._leaves = leaves

    def __enter__(self) -> None:
        leaves = self._leaves
        for name, total in self._sums.items():
            if total is not None:
                leaves[name].grad = total

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        leaves, sums = self._leaves, self._sums
        for name in sums:
            leaf = leaves[name]
            total = leaf.grad
            if total is not None:
                sums[name] = total
                leaf.grad = None
