"""Pieces in snapshots: what replicas that share an optimiser each save of it, and whole tensors made of them.

The name of a piece is `piece/BEGIN/SHAPE/` and the name of what it is a piece of, as
`piece/4096/128x64/optimizer/NAME/KEY`: its elements from that one on, of a tensor of that shape.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from bireme.errors import BiremeError

__all__ = ["PIECE", "joined", "piece_name"]

PIECE = "piece"


def piece_name(begin: int, shape: Iterable[int], name: str) -> str:
    """The name of a piece of a tensor of that name and shape."""
    return f"{PIECE}/{begin}/{'x'.join(map(str, shape))}/{name}"


def joined(saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Saved tensors with those whole of which there are pieces."""
    pieces: dict[str, dict[int, str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for key in saved:
        if not key.startswith(f"{PIECE}/"):
            continue
        _, begin, shape, name = key.split("/", 3)
        pieces.setdefault(name, {})[int(begin)] = key
        shapes[name] = tuple(map(int, filter(None, shape.split("x"))))
    return _Joined(saved, pieces, shapes) if pieces else saved


class _Joined(Mapping[str, Tensor]):
    """Reads the pieces of a tensor when it is asked for."""

    def __init__(
        self,
        saved: Mapping[str, Tensor],
        pieces: Mapping[str, Mapping[int, str]],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._saved = saved
        self._pieces = pieces
        self._shapes = shapes

    def __getitem__(self, name: str) -> Tensor:
        own = self._pieces.get(name)
        if own is None:
            return self._saved[name]
        shape = self._shapes[name]
        flat: Tensor | None = None
        end = 0
        for begin in sorted(own):
            piece = self._saved[own[begin]]
            if begin != end:
                break
            if flat is None:
                flat = torch.empty(prod(shape), dtype=piece.dtype)
            end = begin + len(piece)
            flat[begin:end] = piece
        if flat is None or end != len(flat):
            raise BiremeError(
                f"Of {name} there are only {end} of {prod(shape)} elements, without gaps. The file of a "
                "replica is missing: restore it."
            )
        return flat.view(shape)

    def __iter__(self) -> Iterator[str]:
        whole = (name for name in self._saved if not name.startswith(f"{PIECE}/"))
        return iter([*whole, *self._pieces])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: Any) -> bool:
        return name in self._pieces or (name in self._saved and not name.startswith(f"{PIECE}/"))
