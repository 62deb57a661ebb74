"""The end of a batch where no gradients are summed: the norm and the loss, by the rank's own thread.

A pipeline without replicas and without shared parameters has nothing to add up but a few numbers. A thread
would cost more than that, and so would waking it.
"""

from collections.abc import Collection, Hashable, Mapping

import torch
from torch import Tensor

from bireme.sync.group import Pending, Sums
from bireme.sync.reduced import Reduced, numbers_of, reduced_of

__all__ = ["InlineReducer"]


class InlineReducer:
    """Does what a `Reducer` does. `sums` has all ranks; `counted` names what this rank's norm is of."""

    def __init__(self, sums: Sums, counted: Collection[str]) -> None:
        self._sums = sums
        self._counted = tuple(counted)
        self._under_way: dict[Hashable, tuple[Mapping[str, Tensor | None], Tensor, Pending]] = {}

    @torch.no_grad()
    def start(
        self,
        batch: Hashable,
        gradients: Mapping[str, Tensor | None],
        *,
        loss_sum: float,
        stamp: int = 0,
        votes: float = 0.0,
    ) -> None:
        """Begin to sum up a batch."""
        counted = (gradients[name] for name in self._counted)
        numbers = numbers_of(counted, loss_sum=loss_sum, stamp=stamp, votes=votes)
        self._under_way[batch] = gradients, numbers, self._sums.all_reduce(numbers)

    def finish(self, batch: Hashable) -> Reduced:
        """Wait for a batch that was started, and forget it. Raises where ranks were given different ones."""
        gradients, numbers, pending = self._under_way.pop(batch)
        pending.wait()
        return reduced_of(numbers, batch, gradients, num_ranks=self._sums.size)

    def close(self) -> None:
        """Nothing runs in the background."""
