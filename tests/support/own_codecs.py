"""Codecs of one's own, as a user writes them: one that is right, and some that are not."""

import zlib

import torch
from torch import Tensor


class Zipped:
    """Two bytes a value, packed by zlib: messages are as long as their tensors let them be."""

    def most_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        values = 2 * torch.Size(shape).numel()
        return values + values // 1000 + 64

    def encode(self, tensor: Tensor, out: Tensor, *, seed: int = 0) -> int:
        values = tensor.detach().to(torch.float16).contiguous()
        packed = zlib.compress(values.numpy().tobytes(), 1)
        out[: len(packed)].copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
        return len(packed)

    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        values = zlib.decompress(message.numpy().tobytes())
        return torch.frombuffer(bytearray(values), dtype=torch.float16).view(shape).to(dtype)


class Hiding(Zipped):
    """Lets no NaN through."""

    def encode(self, tensor: Tensor, out: Tensor, *, seed: int = 0) -> int:
        return super().encode(tensor.nan_to_num(), out)


class Flat(Zipped):
    """Forgets the shape."""

    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return super().decode(message, shape, dtype).view(-1)


class Overlong(Zipped):
    """Writes more than it promised."""

    def most_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return super().most_bytes(shape, dtype) // 2

    def encode(self, tensor: Tensor, out: Tensor, *, seed: int = 0) -> int:
        return 2 * len(out)


class Drawing(Zipped):
    """Makes other bytes each time."""

    def encode(self, tensor: Tensor, out: Tensor, *, seed: int = 0) -> int:
        return super().encode(tensor + torch.rand_like(tensor), out)


class Seeded(Zipped):
    """Says its seed: every value arrives as it."""

    def encode(self, tensor: Tensor, out: Tensor, *, seed: int = 0) -> int:
        return super().encode(tensor * 0 + seed % 1000, out)


class Half:
    """Cannot decode."""

    def most_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return 8

    def encode(self, tensor: Tensor, out: Tensor, *, seed: int = 0) -> int:
        return 8


zipped = Zipped()
