"""What the optimiser of a stage remembers of each weight, as flats that are averaged along with the weights.

For each arena of weights there is a flat for each key of the optimiser's state, with elements at the same
places, so a fragment of the weights is one of them too. What an optimiser has not made yet counts as zeros,
with which it would begin, and is not written to.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bireme.memory.slots import Slots
from bireme.runtime.banks import WeightBanks

__all__ = ["Moments"]


@dataclass(frozen=True, slots=True)
class _Row:
    """What is remembered under a key of the weights in an arena."""

    arena: int
    slots: Slots
    key: str
    dtype: torch.dtype


class Moments:
    """The flats of one stage; `places` are those of its elements in each arena of weights."""

    def __init__(self, banks: WeightBanks) -> None:
        self._banks = banks
        kinds = banks.state_kinds()
        self._rows: list[_Row] = []
        for number, arena in enumerate(banks.newest_arenas):
            keys = dict(kind for name in arena.slots for kind in kinds.get(name, {}).items())
            self._rows += [_Row(number, arena.slots, key, keys[key]) for key in sorted(keys)]

    def like(self, places: Sequence[slice]) -> list[Tensor]:
        """Flats of the same lengths and kinds, without memory."""
        return [torch.empty(_length(row, places), dtype=row.dtype, device="meta") for row in self._rows]

    def taken(self, places: Sequence[slice]) -> list[Tensor]:
        """Copies on the host."""
        state = self._banks.optimizer_state()
        found = []
        for row in self._rows:
            flat = torch.zeros(_length(row, places), dtype=row.dtype)
            for own, place in _held(row, state, places[row.arena]):
                flat[place].copy_(own)
            found.append(flat)
        return found

    def put(self, flats: Sequence[Tensor], places: Sequence[slice]) -> None:
        """Have the optimiser remember this from now on."""
        state = self._banks.optimizer_state()
        for row, flat in zip(self._rows, flats, strict=True):
            for own, place in _held(row, state, places[row.arena]):
                own.copy_(flat[place])


def _length(row: _Row, places: Sequence[slice]) -> int:
    place = places[row.arena]
    return int(place.stop - place.start)


def _held(row: _Row, state: Mapping[str, Mapping[str, Any]], whole: slice) -> Iterator[tuple[Tensor, slice]]:
    """The parts of an optimiser's tensors within a place, and where each of them is in its flat."""
    for name, slot in row.slots.items():
        own = state.get(name, {}).get(row.key)
        begin, end = max(slot.begin, whole.start), min(slot.end, whole.stop)
        if begin < end and isinstance(own, Tensor) and tuple(own.shape) == slot.shape:
            part = own.view(-1)[begin - slot.begin : end - slot.begin]
            yield part, slice(begin - whole.start, end - whole.start)
