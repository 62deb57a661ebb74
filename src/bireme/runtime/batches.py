"""Batches as a rank reads them: not whole, but some inputs of some samples.

A dict of tensors by the names of the model's inputs is a batch, with samples along the first axis. So is
anything that can be asked for `Rows`, as a loader that reads on every rank only what the rank's stages need.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable
from zlib import crc32

import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.model.graph import Value
from bireme.model.length import evaluate

__all__ = ["Batch", "LazyBatch", "Rows", "lazy", "read"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Some inputs of a batch, of the samples `begin` up to but without `end`."""

    names: tuple[str, ...]
    begin: int
    end: int

    @property
    def num_samples(self) -> int:
        """How many samples they are of."""
        return self.end - self.begin


@runtime_checkable
class LazyBatch(Protocol):
    """A batch that is read where it is needed.

    `stamp` is equal on all ranks where they are given the same batch, and most probably not where they are
    not.
    """

    @property
    def num_samples(self) -> int:
        """How many samples there are."""

    @property
    def stamp(self) -> int:
        """What tells the batch apart from others, without its tensors."""

    def rows(self, wanted: Rows) -> Mapping[str, Tensor]:
        """The tensors of these names; the first axis is these samples."""


Batch = Mapping[str, Tensor] | LazyBatch


def lazy(given: Batch, number: int, required: Sequence[Value]) -> LazyBatch:
    """A batch to be read; a dict must hold all inputs of the model. `number` is what to call it."""
    if isinstance(given, Mapping):
        return _Whole(_checked(given, number, required))
    if isinstance(given, LazyBatch):
        return given
    raise BiremeError(
        f"Batch {number} is a {type(given).__name__}. A batch is a dict of tensors, named like the "
        "model's inputs, or has num_samples, stamp and rows as bireme.runtime.batches.LazyBatch says."
    )


def read(batch: LazyBatch, wanted: Rows, number: int, required: Sequence[Value]) -> Mapping[str, Tensor]:
    """Rows of a batch, if they are like what the model was captured with."""
    found = batch.rows(wanted)
    for value in required:
        if value.name not in wanted.names:
            continue
        if value.name not in found:
            raise _lacks(number, [value.name], found)
        tensor = found[value.name]
        _check_like(tensor, value, number)
        if tensor.ndim and len(tensor) != wanted.num_samples:
            raise BiremeError(
                f"Batch {number} was asked for {wanted.num_samples} samples of {value.name} and gave "
                f"{len(tensor)}. Its rows() must give the samples from begin up to but without end."
            )
    return found


class _Whole:
    """A dict of tensors, read like any other batch.

    Its stamp is made from shapes and from the ends of tensors, so it tells apart those that a loader gives,
    but not two that differ in the middle of a tensor alone.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.num_samples = _num_samples_of(tensors)

    @property
    def stamp(self) -> int:
        """From shapes, dtypes, and the ends of the tensors, which cost nothing to read."""
        stamp = 0
        for name, tensor in self._tensors.items():
            stamp = crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), stamp)
            flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
            for end in (flat[:STAMPED_ELEMENTS], flat[-STAMPED_ELEMENTS:]):
                stamp = crc32(end.cpu().view(torch.uint8).numpy().data, stamp)
        return stamp

    def rows(self, wanted: Rows) -> Mapping[str, Tensor]:
        """Views of the tensors."""
        return {name: rows_of(self._tensors[name], wanted.begin, wanted.end) for name in wanted.names}


STAMPED_ELEMENTS = 1 << 10


def rows_of(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Some samples of an input; one without axes is the same for all."""
    return tensor[begin:end] if tensor.ndim else tensor


def _checked(batch: Mapping[str, Tensor], number: int, required: Sequence[Value]) -> Mapping[str, Tensor]:
    """The model's inputs in a batch, if they are there and like those that it was captured with."""
    missing = [value.name for value in required if not isinstance(batch.get(value.name), Tensor)]
    if missing:
        raise _lacks(number, missing, batch)
    for value in required:
        _check_like(batch[value.name], value, number)
    return {value.name: batch[value.name] for value in required}


def _lacks(number: int, missing: Sequence[str], batch: Mapping[str, Tensor]) -> BiremeError:
    return BiremeError(
        f"Batch {number} lacks {', '.join(missing)}: its tensors are "
        f"{', '.join(name for name, one in batch.items() if isinstance(one, Tensor)) or 'none'}. A batch "
        "holds every input that the model was captured with."
    )


def _check_like(tensor: Tensor, value: Value, number: int) -> None:
    """The first axis is the batch, and of any length."""
    inner = tuple(evaluate(length, len(tensor) if tensor.ndim else 1) for length in value.shape[1:])
    found = str(tensor.dtype).removeprefix("torch.")
    if tensor.ndim != len(value.shape) or tuple(tensor.shape[1:]) != inner:
        captured = ", ".join(map(str, value.shape))
        raise BiremeError(
            f"In batch {number}, {value.name} is of shape {list(tensor.shape)}, but the model was captured "
            f"for [{captured}], where b is the number of samples. Capture it with inputs like those it "
            "is trained on, or cut or pad these."
        )
    if found != value.dtype:
        raise BiremeError(
            f"In batch {number}, {value.name} is {found}, but the model was captured with {value.dtype}. "
            f"Convert it: {value.name}.to(torch.{value.dtype})."
        )


def _num_samples_of(batch: Mapping[str, Tensor]) -> int:
    sizes = {len(value) for value in batch.values() if value.ndim}
    if len(sizes) != 1:
        raise BiremeError(
            f"A batch has first axes of lengths {sorted(sizes)}. The first axis of every tensor must be the "
            "batch, with the same length."
        )
    return sizes.pop()
