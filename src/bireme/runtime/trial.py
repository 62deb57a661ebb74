"""Trial steps: what a step would make of the weights, while the optimiser's state and the gradients stay.

Stand-ins are stepped with copies of the state, a chunk at a time, so the copies are few and stay in a
processor's cache; they lie in the same memory at every trial.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from bireme.runtime.stepper import Home, Stepped, Stepper

__all__ = ["Trials"]

Tensors = Mapping[str, Tensor]

CHUNK_ELEMENTS = 2**18
"""How much of the weights is tried at a time: 1 MiB in float32, and as much for each copy. It is more where
an optimiser, as Muon, needs a parameter whole, and everything where it is not known to treat parameters
apart."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of a parameter, or all of it."""

    home: Home
    rows: slice | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor of the parameter's shape, as a view."""
        return tensor if self.rows is None else tensor[self.rows]


class Trials:
    """Makes trial steps with a stepper's optimisers."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._workspace = _Workspace()

    @torch.no_grad()
    def make(
        self, source: Tensors, target: Tensors, gradients: Tensors, *, lr_factor: float, factor: float
    ) -> None:
        """Write into `target` what a step would make of `source` with the gradients times `factor`.

        `target` may be of another dtype. Parameters without a gradient are copied.
        """
        with self._stepper.unchanged_groups():
            for chunk in _chunks(self._stepper):
                self._workspace.clear()
                self._try(chunk, source, target, gradients, lr_factor, factor)

    @property
    def num_bytes(self) -> int:
        """The bytes of the copies, which are kept from one trial to the next."""
        return self._workspace.num_bytes

    def _try(
        self,
        chunk: list[_Piece],
        source: Tensors,
        target: Tensors,
        gradients: Tensors,
        lr_factor: float,
        factor: float,
    ) -> None:
        copies: list[Tensor] = []
        originals: list[Tensor] = []

        def copied(original: Tensor, dtype: torch.dtype) -> Tensor:
            copy = self._workspace.take(original, dtype)
            copies.append(copy)
            originals.append(original)
            return copy

        stand_ins: list[Stepped] = []
        written: list[tuple[Tensor, Tensor]] = []
        for piece in chunk:
            name, shape = piece.home.name, piece.home.shape
            start, goal = piece.of(source[name]), piece.of(target[name].detach())
            if goal.dtype == start.dtype:
                copies.append(goal)
                originals.append(start)
                tensor = goal
            elif name in gradients:
                tensor = copied(start, start.dtype)
                written.append((goal, tensor))
            else:
                written.append((goal, start))
            if name not in gradients:
                continue
            state = {
                key: value
                if not isinstance(value, Tensor)
                else copied(piece.of(value), value.dtype)
                if value.ndim and value.shape == shape
                else value.clone()
                for key, value in self._stepper.state(name).items()
            }
            gradient = copied(piece.of(gradients[name]), start.dtype)
            stand_ins.append(Stepped(piece.home, tensor, gradient, state))
        if copies:
            torch._foreach_copy_(copies, originals)
        if factor != 1.0 and stand_ins:
            torch._foreach_mul_([one.gradient for one in stand_ins], factor)
        self._stepper.run(stand_ins, lr_factor)
        for goal, tensor in written:
            goal.copy_(tensor)


class _Workspace:
    """Memory for the copies of one chunk at a time, one piece for each dtype and device."""

    def __init__(self) -> None:
        self._flat: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._used: dict[tuple[torch.dtype, torch.device], int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(flat.nbytes for flat in self._flat.values())

    def clear(self) -> None:
        """Everything taken is given back; what did not fit will fit from now on."""
        for kind, used in self._used.items():
            flat = self._flat.get(kind)
            if flat is None or flat.numel() < used:
                self._flat[kind] = torch.empty(used, dtype=kind[0], device=kind[1])
            self._used[kind] = 0

    def take(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for a tensor of this shape; apart from the rest where that is too short for it."""
        kind = dtype, like.device
        begin = self._used.get(kind, 0)
        end = self._used[kind] = begin + like.numel()
        flat = self._flat.get(kind)
        if flat is None or flat.numel() < end:
            return torch.empty(like.shape, dtype=dtype, device=like.device)
        return flat[begin:end].view(like.shape)


def _chunks(stepper: Stepper) -> Iterator[list[_Piece]]:
    """All parameters, in chunks of bounded size as far as they may be apart and in slices."""
    together = [_Piece(home) for home in stepper.homes if not home.may_be_apart]
    if together:
        yield together
    chunk: list[_Piece] = []
    size = 0
    for home in stepper.homes:
        for piece, elements in _pieces(home) if home.may_be_apart else ():
            if chunk and size + elements > CHUNK_ELEMENTS:
                yield chunk
                chunk, size = [], 0
            chunk.append(piece)
            size += elements
    if chunk:
        yield chunk


def _pieces(home: Home) -> Iterator[tuple[_Piece, int]]:
    """The pieces of a parameter with their lengths in elements."""
    num_elements = prod(home.shape)
    if num_elements <= CHUNK_ELEMENTS or not home.may_be_sliced:
        yield _Piece(home), num_elements
        return
    row_elements = num_elements // home.shape[0]
    rows = max(CHUNK_ELEMENTS // row_elements, 1)
    for begin in range(0, home.shape[0], rows):
        end = min(begin + rows, home.shape[0])
        yield _Piece(home, slice(begin, end)), (end - begin) * row_elements
