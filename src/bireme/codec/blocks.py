"""Blocks of values rounded to a few bits, with a scale for each block.

    values of a block  ──transpose──▶ a column ──(rotate)──▶ divide by the scale ──round──▶ codes ──▶ bytes

A message is the scales (bfloat16, one a block) and then the codes, in rows: the first row has the first value
of every block. So everything works on long rows, and a large tensor is done in parts that fit into a cache.
"""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from bireme.codec.description import BLOCK, aligned, blocks_bytes, code_bytes
from bireme.codec.noise import NOISE_LENGTH, noise, scattered
from bireme.codec.packing import pack_codes, unpack_codes
from bireme.codec.rotation import rotated

__all__ = ["Blocks"]

PART_VALUES = NOISE_LENGTH
"""Values that are worked on at a time on a CPU."""

MARGIN = 1 + 2**-7 + 2**-10
"""What scales are larger by, so that rounded to bfloat16 they are still large enough for the largest value."""

LARGEST = 1e38
"""One over the scale of a block of zeros, or of values too small for a scale."""


class Blocks:
    """Rounds values to `bits` (1 to 8) in blocks of `block` values that share a scale.

    With 8 bits zero stays zero; with fewer, codes lie in the middle of equal steps from the most negative to
    the most positive value. `is_rotated` spreads each block first (`block` is then a power of two): wanted
    below 8 bits. `is_stochastic` rounds up or down by chance, from the seed, so that no mean is shifted.
    Tensors may have any shape; a last block that is not full is filled with zeros.
    """

    def __init__(
        self, bits: int, *, block: int = BLOCK, is_rotated: bool = False, is_stochastic: bool = False
    ) -> None:
        assert 1 <= bits <= 8
        assert not is_rotated or block & (block - 1) == 0
        self._bits = bits
        self._block = block
        self._is_rotated = is_rotated
        self._is_stochastic = is_stochastic
        half = 2.0 ** (bits - 1)
        self._centre = half - (1 if bits == 8 else 0.5)
        """The code of zero; with fewer bits it is between two codes."""
        # Drawn, a value may go to the code above or below, so the last code is at the largest value.
        self._reach = self._centre if bits == 8 or is_stochastic else half
        """The largest value of a block, in steps between codes."""

    def most_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Exactly what a tensor of that shape takes."""
        return blocks_bytes(prod(shape), self._bits, self._block)

    def encode(self, tensor: Tensor, out: Tensor, *, seed: int = 0) -> int:
        """Write scales and codes. A NaN or an infinite value makes its whole block NaN."""
        flat = tensor.detach().reshape(-1)
        used = self.most_bytes((flat.numel(),), flat.dtype)
        scales, codes = self._parts_of(out[:used], flat.numel())
        for begin, end in self._parts(flat):
            columns = self._columns(flat, begin, end)
            if self._is_rotated:
                columns = rotated(columns)
            scale = self._scale(columns)
            scales[begin:end] = scale
            shares = scale.float().reciprocal_().clamp_max_(LARGEST)
            shift = self._shift(columns, scattered(seed) + begin)
            rounded = torch.addcmul(shift, columns, shares).to(torch.uint8)
            pack_codes(rounded, self._bits, codes[:, begin:end])
        return used

    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The rounded values."""
        count = prod(shape)
        num_blocks = -(-count // self._block)
        scales, rows = self._parts_of(message, count)
        whole = torch.empty(num_blocks, self._block, dtype=dtype, device=message.device)
        for begin, end in self._parts(whole):
            codes = unpack_codes(rows[:, begin:end], self._block, self._bits)
            scale = scales[begin:end].float()
            if self._is_rotated:
                scale /= self._block
            # Codes times a scale of 8 bits are exact, and so is what the centre takes away.
            columns = torch.addcmul(scale * -self._centre, codes, scale)
            if self._is_rotated:
                columns = rotated(columns)
            whole[begin:end].copy_(columns.t())
        return whole.view(-1)[:count].view(shape)

    def _parts_of(self, message: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The scales of a message and its rows of codes, as views."""
        num_blocks = -(-count // self._block)
        used = self.most_bytes((count,), torch.float32)
        scales = message[: 2 * num_blocks].view(torch.bfloat16)
        codes = message[aligned(2 * num_blocks) : used]
        return scales, codes.view(code_bytes(self._bits, self._block), num_blocks)

    def _parts(self, tensor: Tensor) -> Iterator[tuple[int, int]]:
        """The blocks to work on at a time: on a CPU what fits into a cache."""
        num_blocks = -(-tensor.numel() // self._block)
        most = max(1, PART_VALUES // self._block)
        step = most if tensor.is_cpu or self._is_stochastic else max(num_blocks, 1)
        for begin in range(0, num_blocks, step):
            yield begin, min(begin + step, num_blocks)

    def _columns(self, flat: Tensor, begin: int, end: int) -> Tensor:
        """Blocks as columns, in float32."""
        values = flat[begin * self._block : end * self._block]
        missing = (end - begin) * self._block - values.numel()
        if missing:
            values = torch.nn.functional.pad(values, (0, missing))
        columns = torch.empty(self._block, end - begin, dtype=torch.float32, device=flat.device)
        return columns.copy_(values.view(-1, self._block).t())

    def _scale(self, columns: Tensor) -> Tensor:
        """What a step between codes is worth, block by block; NaN where a value is not finite."""
        largest = torch.linalg.vector_norm(columns, torch.inf, dim=0)
        scale = largest.mul_(MARGIN / self._reach).to(torch.bfloat16)
        return scale.masked_fill_(scale == torch.inf, torch.nan)

    def _shift(self, columns: Tensor, seed: int) -> Tensor:
        """What is added before codes are cut to whole numbers, which rounds them."""
        nearest = self._centre + 0.5
        if not self._is_stochastic:
            return columns.new_full((), nearest)
        return noise(columns.numel(), seed, columns.device).view(columns.shape) + (nearest - 0.5)
