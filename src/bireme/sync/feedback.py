"""What codecs of sums keep from batch to batch: residuals, thresholds, bases. In two copies.

A residual is what a replica has not sent yet of a gradient. A batch writes to one copy while the other stays
as the batch before left it; only a batch that counts makes its copy the settled one, so a skipped batch
leaves all as it was. While the next batch is summed up in the background, what the one before left can still
be copied for a checkpoint.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bireme.sync.exchange import are_finite

RESIDUAL, THRESHOLD, BASIS = "residual", "threshold", "basis"

_Kept = dict[str, dict[str, Tensor]]
"""By the name of a parameter, what is kept of it by what it is."""


class Feedback:
    """Both copies, for one rank. Residuals lie in flat memory, which is taken when the first batch ends."""

    def __init__(self) -> None:
        self._copies: tuple[_Kept, _Kept] = ({}, {})
        self._given: _Kept = {}
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
    def before(self) -> _Kept:
        """What the last batch that counted has left."""
        return self._copies[self._settled]

    def open(self, views: Mapping[str, Tensor]) -> _Kept:
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

    def staged(self, key: str) -> dict[str, Tensor]:
        """What the batch under way has left under a key, by parameter."""
        copy = self._copies[1 - self._settled] if self._is_open else {}
        return {name: kept[key] for name, kept in copy.items() if key in kept}

    def clear_residuals(self) -> None:
        """All that was not sent has been sent by other means."""
        for kept in (*self._given.values(), *self.before.values()):
            if RESIDUAL in kept:
                kept[RESIDUAL].zero_()

    def put(self, name: str, key: str, value: Tensor) -> None:
        """Have this settled for a parameter."""
        kept = self.before.get(name)
        if kept is None:
            kept = self._given.setdefault(name, {})
        kept[key] = value

    def after(self, num_batches: int) -> _Kept:
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
                # What was saved may be of a piece, where replicas of a site shared the optimizer.
                if RESIDUAL in given and given[RESIDUAL].shape == residual.shape:
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


# What codecs keep, where the gradients of a batch are opened some at a time, and a batch may begin before it
# is known whether the one before counts, as stages that share weights do.
#
# Batches write to the two copies in turn. Once a batch is known not to count, the next one goes on from what
# there was before it. A batch that begins earlier goes on from all that is finite.


class PartFeedback(Feedback):
    """The residuals, thresholds and bases of one rank, by the numbers of batches."""

    def __init__(self) -> None:
        super().__init__()
        self._skipped: set[int] = set()
        self._last: dict[str, int] = {}
        """The last batch that opened each gradient."""

    def open_some(self, batch: int, views: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """What the batch keeps of these gradients, which are added to their residuals."""
        own, before = self._copies[batch % 2], self._copies[(batch - 1) % 2]
        for name, view in views.items():
            if name not in before:
                self._take_memory(name, view, batch)
            if self._last[name] == batch:
                own[name][RESIDUAL].add_(view)
                continue
            if batch - 1 in self._skipped:
                before[name] = _copied(own[name], before[name][RESIDUAL])
            residual, known = own[name][RESIDUAL], before[name][RESIDUAL]
            if not are_finite([known]):
                torch.where(known.isfinite(), known, residual, out=known)
            own[name] = _copied(before[name], residual)
            residual.add_(view)
            self._last[name] = batch
        return {name: own[name] for name in views}

    def settle(self, *, counts: bool) -> None:
        """The next batch, by its number, is known to count or not."""
        if not counts:
            self._skipped = {one for one in self._skipped if one >= self._num_batches - 2}
            self._skipped.add(self._num_batches)
        self._num_batches += 1

    def after(self, num_batches: int) -> dict[str, dict[str, Tensor]]:
        """What there was after so many batches: those settled, or one fewer. Not copies."""
        found = dict(self._given)
        for name, last in self._last.items():
            goes_back = num_batches - 1 in self._skipped and last < num_batches
            found[name] = self._copies[(num_batches if goes_back else num_batches - 1) % 2][name]
        return found

    def load(self, kept: Mapping[str, Mapping[str, Tensor]], *, num_batches: int) -> None:
        """Go on from what was settled after so many batches."""
        super().load(kept, num_batches=num_batches)
        self._skipped, self._last = set(), {}

    def _take_memory(self, name: str, view: Tensor, batch: int) -> None:
        """Have both copies of what is kept of a gradient, as they are before its first batch."""
        given = self._given.pop(name, {})
        for copy in self._copies:
            copy[name] = {**given, RESIDUAL: torch.zeros_like(view)}
            if RESIDUAL in given:
                copy[name][RESIDUAL].copy_(given[RESIDUAL])
        self._last[name] = batch - 1


def _copied(kept: Mapping[str, Tensor], residual: Tensor) -> dict[str, Tensor]:
    """Copies of what is kept of a gradient, with the residual in this memory."""
    copies = {key: value.clone() for key, value in kept.items() if key != RESIDUAL}
    return {**copies, RESIDUAL: residual.copy_(kept[RESIDUAL])}
