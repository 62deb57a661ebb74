"""One tensor of a message: what both ends know of it before it comes."""

from dataclasses import dataclass
from math import prod

import torch

from bireme.codec.description import ALIGNMENT_BYTES, NONE, CodecChoice, encoded_bytes
from bireme.codec.of_choice import codec_of

__all__ = ["TensorSpec", "shown"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Its name, shape and type, and how it is encoded. `is_back` is set for a gradient; `batch_axis` is the
    axis of its samples, which counts where it is encoded.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    codec: CodecChoice = NONE
    is_back: bool = False
    batch_axis: int = 0

    @property
    def is_encoded(self) -> bool:
        """Whether it is not sent as it is."""
        return self.codec != NONE

    @property
    def num_bytes(self) -> int:
        """What it takes of a message; at most, where it is bounded: its bytes come after their number."""
        if not self.is_encoded:
            return prod(self.shape) * self.dtype.itemsize
        if self.codec.where is not None:
            return ALIGNMENT_BYTES + codec_of(self.codec).most_bytes(self.shape, self.dtype)
        length = ALIGNMENT_BYTES if self.codec.is_bounded else 0
        return length + encoded_bytes(self.codec, self.shape, self.dtype.itemsize, is_back=self.is_back)

    def __str__(self) -> str:
        """Such as `hidden float32 [4, 128]`, or `hidden float32 [4, 128] as int8`."""
        return f"{self.name} {self.form}"

    @property
    def form(self) -> str:
        """What tells it apart from others in the same place."""
        encoded = f" as {self.codec}" if self.is_encoded else ""
        return f"{shown(self.shape, self.dtype)}{encoded}"


def shown(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """A shape and a type in words."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
