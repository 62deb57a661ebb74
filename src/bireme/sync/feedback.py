"""What codecs of sums keep from batch to batch: residuals, thresholds, bases. In two copies.

A residual is what a replica has not sent yet of a gradient. A batch writes to one copy while the other stays
as the batch before left it; only a batch that counts makes its copy the settled one, so a skipped batch
leaves all as it was. While the next batch is summed up in the background, what the one before left can still
be copied for a checkpoint.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["BASIS", "RESIDUAL", "THRESHOLD", "Feedback"]

RESIDUAL, THRESHOLD, BASIS = "residual", "threshold", "basis"

Kept = dict[str, dict[str, Tensor]]
"""By the name of a parameter, what is kept of it by what it is."""


class Feedback:
    """Both copies, for one rank. Residuals lie in flat memory, which is taken when the first batch ends."""

    def __init__(self) -> None:
        self._copies: tuple[Kept, Kept] = ({}, {})
        self._given: Kept = {}
        self._settled = 0
        self._num_batches = 0
        self._is_open = False
        self._after = {0: 0}
        """Which copy there was after so many batches; of the last two."""

    @property
    def num_batches(self) -> int:
        """How many batches have been settled."""
        return self._num_batches

    @property
    def num_bytes(self) -> int:
        """The bytes of both copies."""
        return sum(one.nbytes for copy in self._copies for kept in copy.values() for one in kept.values())

    @property
    def before(self) -> Kept:
        """What the last batch that counted has left."""
        return self._copies[self._settled]

    def open(self, views: Mapping[str, Tensor]) -> Kept:
        """The copy for a batch with these gradients: residuals are gradients and settled residuals, added.

        What the batch has no gradient of is as it was.
        """
        self._make(views)
        self._is_open = True
        settled, staged = self.before, self._copies[1 - self._settled]
        for name, kept in settled.items():
            residual = staged[name][RESIDUAL]
            if name in views:
                torch.add(views[name], kept[RESIDUAL], out=residual)
            else:
                residual.copy_(kept[RESIDUAL])
            rest = {key: value.clone() for key, value in kept.items() if key != RESIDUAL}
            staged[name] = {**rest, RESIDUAL: residual}
        return staged

    def settle(self, *, counts: bool) -> None:
        """The batch is done; what it left is settled if it counts."""
        if counts and self._is_open:
            self._settled = 1 - self._settled
        self._is_open = False
        self._num_batches += 1
        self._after = {
            self._num_batches - 1: self._after[self._num_batches - 1],
            self._num_batches: self._settled,
        }

    def after(self, num_batches: int) -> Kept:
        """What was settled after so many batches: those done, or one fewer. Not copies."""
        return {**self._given, **self._copies[self._after[num_batches]]}

    def load(self, kept: Mapping[str, Mapping[str, Tensor]], *, num_batches: int) -> None:
        """Go on from what was settled after so many batches."""
        self._copies = ({}, {})
        self._given = {name: dict(values) for name, values in kept.items()}
        self._settled, self._num_batches, self._after = 0, num_batches, {num_batches: 0}

    def _make(self, views: Mapping[str, Tensor]) -> None:
        """Take memory for gradients that were not there before."""
        new = {name: view for name, view in views.items() if name not in self._copies[0]}
        for copy in self._copies if new else ():
            for name, residual in _zeros_like(new).items():
                given = self._given.get(name, {})
                if RESIDUAL in given:
                    residual.copy_(given[RESIDUAL])
                copy[name] = {**given, RESIDUAL: residual}
        for name in new:
            self._given.pop(name, None)


def _zeros_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros in these shapes, those of one dtype and device in one piece of memory."""
    alike: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.dtype, tensor.device), []).append(name)
    made: dict[str, Tensor] = {}
    for (dtype, device), names in alike.items():
        lengths: Sequence[int] = [tensors[name].numel() for name in names]
        flat = torch.zeros(sum(lengths), dtype=dtype, device=device)
        for name, piece in zip(names, torch.split(flat, list(lengths)), strict=True):
            made[name] = piece.view(tensors[name].shape)
    return made
