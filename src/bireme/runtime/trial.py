"""Trial steps: what a step would make of the weights, while the optimizer's state and the gradients stay.

On a CPU a compiled loop makes those of Adam in one pass. For all else stand-ins are stepped with copies of
the state, a chunk at a time, so the copies are few and stay in a processor's cache; they lie in the same
memory at every trial.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Adam, AdamW

from bireme.codec.lowrank import Product
from bireme.compiled import IS_COMPILED, LEAST_COMPILED
from bireme.runtime.parameter_groups import ALIGNED_ELEMENTS
from bireme.runtime.stepper import Home, Stepped, Stepper

Tensors = Mapping[str, Tensor]
Gradients = Mapping[str, Tensor | Product]

CHUNK_ELEMENTS = 2**18
"""How much of the weights is tried at a time: 1 MiB in float32, and as much for each copy. It is more where
an optimizer, as Muon, needs a parameter whole, and everything where it is not known to treat parameters
apart."""


@dataclass(frozen=True, slots=True)
class ParameterRows:
    """Some rows of a parameter, or all of it."""

    home: Home
    rows: slice | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor of the parameter's shape, as a view."""
        return tensor if self.rows is None else tensor[self.rows]

    def of_gradient(self, gradient: Tensor | Product) -> Tensor:
        """This piece of a gradient."""
        return gradient.rows(self.rows) if isinstance(gradient, Product) else self.of(gradient)


@dataclass(frozen=True, slots=True)
class Tried:
    """A piece to be tried: from `start` into `goal`, with its gradient, or copied where it has none."""

    piece: ParameterRows
    start: Tensor
    goal: Tensor
    gradient: Tensor | None


class Trials:
    """Makes trial steps with a stepper's optimizers."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._workspace = _Workspace()
        num_elements = sum(prod(home.shape) for home in stepper.homes)
        self._is_compiled = IS_COMPILED and num_elements >= LEAST_COMPILED

    @torch.no_grad()
    def make(
        self, source: Tensors, target: Tensors, gradients: Gradients, *, lr_factor: float, factor: float
    ) -> None:
        """Write into `target` what a step would make of `source` with the gradients times `factor`.

        `target` may be of another dtype. Parameters without a gradient are copied.
        """
        with self._stepper.unchanged_groups():
            for chunk in _chunks(self._stepper):
                tried = [_tried(piece, source, target, gradients) for piece in chunk]
                self.try_chunk(tried, lr_factor=lr_factor, factor=factor)

    @property
    def num_bytes(self) -> int:
        """The bytes of the copies, which are kept from one trial to the next."""
        return self._workspace.num_bytes

    @torch.no_grad()
    def try_chunk(self, chunk: Sequence[Tried], *, lr_factor: float, factor: float) -> None:
        """Try some pieces at once, with their gradients times `factor`."""
        if self._is_compiled:
            chunk = [one for one in chunk if not self._is_looped(one, lr_factor, factor)]
        stepped = [one for one in chunk if one.gradient is not None]
        copies = iter(self._workspace.copies_of(self._to_copy(stepped)))
        for one in chunk:
            if one.gradient is None or one.goal.dtype == one.start.dtype:
                one.goal.copy_(one.start)
        stand_ins: list[Stepped] = []
        for one in stepped:
            tensor = one.goal if one.goal.dtype == one.start.dtype else next(copies)
            gradient = next(copies)
            state = {
                key: next(copies) if isinstance(value, Tensor) else value
                for key, value in self._stepper.state(one.piece.home.name).items()
            }
            stand_ins.append(Stepped(one.piece.home, tensor, gradient, state))
        if factor != 1.0 and stand_ins:
            torch._foreach_mul_([one.gradient for one in stand_ins], factor)
        self._stepper.run(stand_ins, lr_factor)
        for one, stand_in in zip(stepped, stand_ins, strict=True):
            if one.goal.dtype != stand_in.tensor.dtype:
                one.goal.copy_(stand_in.tensor)

    def _is_looped(self, one: Tried, lr_factor: float, factor: float) -> bool:
        """Have the loop try a piece, if it is one for the loop."""
        state = self._stepper.state(one.piece.home.name)
        if one.gradient is None or "exp_avg_sq" not in state or not _is_plain_adam(one.piece.home):
            return False
        moments = (one.piece.of(state[key]) for key in ("exp_avg", "exp_avg_sq"))
        tensors = [one.start, one.gradient, *moments, one.goal]
        if not all(one.is_cpu and one.dtype is torch.float32 and one.is_contiguous() for one in tensors):
            return False
        from bireme.runtime.trial_loop import try_adam

        weights, gradients, means, squares, trial = (tensor.view(-1).numpy() for tensor in tensors)
        factors = _adam_factors(one.piece.home, float(state["step"]) + 1, lr_factor, factor)
        try_adam(weights, gradients, means, squares, trial, factors)
        return True

    def _to_copy(self, stepped: Iterable[Tried]) -> Iterator[tuple[Tensor, torch.dtype]]:
        """What a trial must not change, each with the dtype that it is to be copied in: for each piece the
        weights, if the target cannot take their place, the gradient, and the state.
        """
        for one in stepped:
            assert one.gradient is not None, "what has none is not stepped"
            if one.goal.dtype != one.start.dtype:
                yield one.start, one.start.dtype
            yield one.gradient, one.start.dtype
            for value in self._stepper.state(one.piece.home.name).values():
                if isinstance(value, Tensor):
                    is_of_each_element = value.ndim > 0 and value.shape == one.piece.home.shape
                    yield one.piece.of(value) if is_of_each_element else value, value.dtype


def _group_of(home: Home) -> dict[str, Any]:
    group: dict[str, Any] = home.optimizer.param_groups[home.group]
    return group


def _is_plain_adam(home: Home) -> bool:
    """Whether a parameter is stepped by torch's fused Adam or AdamW, whose rounding the loop has."""
    if type(home.optimizer) not in (Adam, AdamW):
        return False
    group = _group_of(home)
    settings = (*group["betas"], group["lr"])
    is_plain = bool(group["fused"]) and not group["amsgrad"] and not group["maximize"]
    return is_plain and all(isinstance(one, float) for one in settings)


def _adam_factors(home: Home, step: float, lr_factor: float, factor: float) -> np.ndarray:
    """What the loop multiplies by."""
    group = _group_of(home)
    (beta1, beta2), lr, decay = group["betas"], group["lr"] * lr_factor, group["weight_decay"]
    is_decoupled = type(home.optimizer) is AdamW or bool(group.get("decoupled_weight_decay"))
    added, left = (0.0, 1 - lr * decay) if is_decoupled else (decay, 1.0)
    root, size = math.sqrt(1 - beta2**step), lr / (1 - beta1**step)
    return np.array(
        [factor, added, left, 1 - beta1, beta2, 1 - beta2, root, group["eps"], -size], dtype=np.float32
    )


def _tried(piece: ParameterRows, source: Tensors, target: Tensors, gradients: Gradients) -> Tried:
    name = piece.home.name
    gradient = piece.of_gradient(gradients[name]) if name in gradients else None
    return Tried(piece, piece.of(source[name]), piece.of(target[name].detach()), gradient)


class _Workspace:
    """Memory for the copies of one chunk at a time, one piece for each dtype and device."""

    def __init__(self) -> None:
        self._flat: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(flat.nbytes for flat in self._flat.values())

    def copies_of(self, originals: Iterable[tuple[Tensor, torch.dtype]]) -> list[Tensor]:
        """Copies in the given dtypes; they last until the next call."""
        wanted = list(originals)
        needed: dict[tuple[torch.dtype, torch.device], int] = {}
        begins: list[int] = []
        for tensor, dtype in wanted:
            kind = dtype, tensor.device
            begins.append(needed.get(kind, 0))
            needed[kind] = begins[-1] + -(-tensor.numel() // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
        for (dtype, device), num_elements in needed.items():
            flat = self._flat.pop((dtype, device), None)
            if flat is None or flat.numel() < num_elements:
                del flat  # before there is more, so that never both are there
                flat = torch.empty(num_elements, dtype=dtype, device=device)
            self._flat[dtype, device] = flat
        copies = [
            self._flat[dtype, tensor.device][begin : begin + tensor.numel()].view(tensor.shape)
            for (tensor, dtype), begin in zip(wanted, begins, strict=True)
        ]
        if copies:
            torch._foreach_copy_(copies, [tensor for tensor, _ in wanted])
        return copies


def _chunks(stepper: Stepper) -> Iterator[list[ParameterRows]]:
    """All parameters, in chunks of bounded size as far as they may be apart and in slices."""
    together = [ParameterRows(home) for home in stepper.homes if not home.may_be_apart]
    if together:
        yield together
    chunk: list[ParameterRows] = []
    size = 0
    for home in stepper.homes:
        for piece, elements in pieces_of(home) if home.may_be_apart else ():
            if chunk and size + elements > CHUNK_ELEMENTS:
                yield chunk
                chunk, size = [], 0
            chunk.append(piece)
            size += elements
    if chunk:
        yield chunk


def pieces_of(home: Home) -> Iterator[tuple[ParameterRows, int]]:
    """The pieces of a parameter with their lengths in elements."""
    num_elements = prod(home.shape)
    if num_elements <= CHUNK_ELEMENTS or not home.may_be_sliced:
        yield ParameterRows(home), num_elements
        return
    row_elements = num_elements // home.shape[0]
    rows = max(CHUNK_ELEMENTS // row_elements, 1)
    for begin in range(0, home.shape[0], rows):
        end = min(begin + rows, home.shape[0])
        yield ParameterRows(home, slice(begin, end)), (end - begin) * row_elements
