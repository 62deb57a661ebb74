"""What codecs of sums keep from batch to batch: residuals, thresholds, bases. In two copies.

A residual is the part of a gradient that a replica has not sent yet. A batch writes to one copy, and the
other copy stays as it was before. If the batch does not count, the next batch goes on from there. While the
next batch is summed in the background, a checkpoint can still copy the state after the batch before.
"""

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.sync.exchange import are_finite

RESIDUAL, THRESHOLD, BASIS = "residual", "threshold", "basis"

_Values = dict[str, Tensor]
"""What is kept of a parameter, by one of these keys."""


@dataclass(slots=True, eq=False)
class _Pair:
    """What is kept of a parameter: the `newest` of the copies is as the `batch` left it that wrote last."""

    copies: list[_Values]
    batch: int
    newest: int = 0

    def after(self, num_batches: int) -> _Values:
        """The copy as it was after that number of batches."""
        return self.copies[self.newest if self.batch < num_batches else 1 - self.newest]


class Feedback:
    """The residuals, thresholds and bases of one rank. Memory is taken when a gradient comes first."""

    def __init__(self) -> None:
        self._pairs: dict[str, _Pair] = {}
        self._loaded: dict[str, _Values] = {}
        """Loaded values of parameters whose gradients have not come yet."""
        self.num_batches = 0
        """How many batches have been settled."""
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """The bytes of both copies."""
        copies = (copy for pair in self._pairs.values() for copy in pair.copies)
        return sum(one.nbytes for copy in copies for one in copy.values())

    def open(self, views: Mapping[str, Tensor], batch: int | None = None) -> dict[str, _Values]:
        """The copies that a batch writes to, with these gradients added to the residuals.

        By default it is the batch after the last one that was settled. To open it again starts it again. With
        `batch` some gradients are opened at a time: to open one again adds to it, and the batch may begin
        before the one before is settled. Then it goes on from all residuals that are finite.
        """
        now = self.num_batches if batch is None else batch
        with self._lock:
            return {
                name: self._opened(name, view, now, adds=batch is not None) for name, view in views.items()
            }

    def take_back(self, names: Collection[str]) -> None:
        """Have what is kept of these as before the batch under way: no member has a gradient of them."""
        with self._lock:
            for pair in (self._pairs[name] for name in names):
                before, newest = pair.copies[1 - pair.newest], pair.copies[pair.newest]
                newest[RESIDUAL].copy_(before[RESIDUAL])
                rest = {key: value.clone() for key, value in before.items() if key != RESIDUAL}
                pair.copies[pair.newest] = {RESIDUAL: newest[RESIDUAL], **rest}

    def settle(self, *, counts: bool) -> None:
        """The next batch is done; the batch after it goes on from its copies if it counts."""
        with self._lock:
            for pair in self._pairs.values() if not counts else ():
                if pair.batch == self.num_batches:
                    pair.newest, pair.batch = 1 - pair.newest, pair.batch - 1
            self.num_batches += 1

    def staged(self, key: str) -> dict[str, Tensor]:
        """The values of a key that the batch under way has left, by parameter."""
        under_way = {name: one for name, one in self._pairs.items() if one.batch == self.num_batches}
        newest = {name: pair.copies[pair.newest] for name, pair in under_way.items()}
        return {name: kept[key] for name, kept in newest.items() if key in kept}

    def clear_residuals(self) -> None:
        """All that was not sent has been sent by other means."""
        for kept in self.after(self.num_batches).values():
            if RESIDUAL in kept:
                kept[RESIDUAL].zero_()

    def put(self, name: str, key: str, value: Tensor) -> None:
        """Set a value of a parameter, as if the last batch had left it."""
        pair = self._pairs.get(name)
        kept = self._loaded.setdefault(name, {}) if pair is None else pair.after(self.num_batches)
        kept[key] = value

    def after(self, num_batches: int) -> dict[str, _Values]:
        """The state after that number of batches: those settled, or one fewer. Not copies."""
        with self._lock:  # the batch under way may be the first with a gradient
            return self._loaded | {name: pair.after(num_batches) for name, pair in self._pairs.items()}

    def load(self, kept: Mapping[str, Mapping[str, Tensor]], *, num_batches: int) -> None:
        """Go on from the state after that number of batches."""
        self._pairs, self.num_batches = {}, num_batches
        self._loaded = {name: dict(values) for name, values in kept.items()}

    def _opened(self, name: str, view: Tensor, now: int, *, adds: bool) -> _Values:
        pair = self._pairs.get(name)
        if pair is None:
            pair = self._pairs[name] = self._made(name, view, now)
        newest = pair.copies[pair.newest]
        if pair.batch == now and adds:
            newest[RESIDUAL].add_(view)
            return newest
        if pair.batch != now:
            if pair.batch >= self.num_batches and not are_finite([known := newest[RESIDUAL]]):
                torch.where(known.isfinite(), known, pair.copies[1 - pair.newest][RESIDUAL], out=known)
            pair.newest, pair.batch = 1 - pair.newest, now
        before, residual = pair.copies[1 - pair.newest], pair.copies[pair.newest][RESIDUAL]
        torch.add(view, before[RESIDUAL], out=residual)
        own = {key: value.clone() for key, value in before.items() if key != RESIDUAL} | {RESIDUAL: residual}
        pair.copies[pair.newest] = own
        return own

    def _made(self, name: str, view: Tensor, now: int) -> _Pair:
        """Memory for what is kept of a parameter, as it is before its first batch."""
        loaded = self._loaded.pop(name, {})
        copies = []
        for _ in range(2):
            residual = torch.zeros_like(view)
            # The file may have a piece only, if replicas of a site shared the optimizer.
            if RESIDUAL in loaded and loaded[RESIDUAL].shape == residual.shape:
                residual.copy_(loaded[RESIDUAL])
            copies.append({**loaded, RESIDUAL: residual})
        return _Pair(copies, now - 1)
