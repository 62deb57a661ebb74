"""Places for named tensors in flat memory, counted in elements.

Weights, gradient sums and an optimiser's state of the same parameters share one layout, so a range of one
kind is the same range of every other. Slots follow each other without gaps: memory is exactly what it holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["Slot", "Slots"]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies, from `begin` up to `end`."""

    shape: tuple[int, ...]
    begin: int
    end: int


class Slots:
    """The layout of tensors of these shapes, in their order."""

    __slots__ = ("_slots", "num_elements")

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self._slots: dict[str, Slot] = {}
        end = 0
        for name, shape in shapes.items():
            begin, end = end, end + prod(shape)
            self._slots[name] = Slot(tuple(shape), begin, end)
        self.num_elements = end
        """How many elements all slots have."""

    def __getitem__(self, name: str) -> Slot:
        """The slot of a name."""
        return self._slots[name]

    def __iter__(self) -> Iterator[str]:
        """The names, in the order in which they lie."""
        return iter(self._slots)

    def __len__(self) -> int:
        """How many slots there are."""
        return len(self._slots)

    def items(self) -> Iterator[tuple[str, Slot]]:
        """The names with their slots."""
        return iter(self._slots.items())
