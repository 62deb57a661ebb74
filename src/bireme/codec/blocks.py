"""Blocks of values rounded to a few bits, with a scale for each block.

    values of a block ──(rotate)──▶ divide by the scale ──round──▶ codes ──▶ bytes

A message is the scales (bfloat16, one a block) and then the codes. All is done by a few operations of torch
on parts that fit into a cache, chosen one by one as measured: of two that do the same one may take
ten times as long. On one core with AVX-512 they encode about 1 GB/s of float32 in 8 bits and 0.8 in 4
(`benchmarks/codec_speed.py`), and need no compiler where Bireme runs. Where numba is installed, its loops
(`loops.py`) do the same a few times as fast.

The rotation is by a Hadamard matrix, of ones and minus ones: it spreads what is large over its block, so that
few bits serve all values alike. When it is taken back, whole numbers are summed before they are scaled, which
is exact: the same message becomes the same bits on every machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bireme.codec.codec import (
    NOISE_LENGTH,
    check_given,
    check_length,
    noise,
    noise_start,
    noise_table,
    pack_codes,
    scattered,
    unpack_codes,
)
from bireme.codec.description import BLOCK, aligned, blocks_bytes
from bireme.compiled import pays_off

PART_VALUES = NOISE_LENGTH
"""Values that are worked on at a time on a CPU."""

_MARGIN = 1 + 2**-7 + 2**-10
"""What scales are larger by, so that rounded to bfloat16 they are large enough for the largest value."""

_LARGEST = 1e38
"""One over the scale of a block of zeros, or of values too small for a scale."""

_LOOP_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
"""The types that compiled loops read and write, and as what they take their bits."""

CPU, _NO_FLOATS = torch.device("cpu"), np.empty(0, np.float32)


@dataclass(eq=False)
class BlockCodec:
    """Rounds values to `bits` (1 to 8) in blocks of `block` values that share a scale.

    With 8 bits zero stays zero; with fewer, codes lie in the middle of equal steps from the most negative to
    the most positive value. `is_rotated` spreads each block first (`block` is then a power of two): wanted
    below 8 bits. `is_stochastic` rounds up or down by chance, from the seed, so that no mean is shifted.
    Tensors may have any shape; a last block that is not full is filled with zeros.
    """

    bits: int
    block: int = field(default=BLOCK, kw_only=True)
    is_rotated: bool = field(default=False, kw_only=True)
    is_stochastic: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        assert 1 <= self.bits <= 8
        assert not self.is_rotated or self.block & (self.block - 1) == 0
        half = 2.0 ** (self.bits - 1)
        self._centre = half - (1 if self.bits == 8 else 0.5)
        """The code of zero; with fewer bits it is between two codes."""
        # Drawn, a value may go to the code above or below, so the last code is at the largest value.
        self._reach = self._centre if self.bits == 8 or self.is_stochastic else half
        """The largest value of a block, in steps between codes."""
        self._offset = self._centre if self.is_stochastic else self._centre + 0.5
        """What is added before codes are cut to whole numbers, so that they are the nearest."""

    def most_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Exactly what a tensor of that shape takes."""
        return blocks_bytes(prod(shape), self.bits, self.block)

    def encode(self, tensor: Tensor, out: Tensor, *, seed: int = 0) -> int:
        """Write scales and codes. A NaN or an infinite value makes its whole block NaN."""
        flat = tensor.detach().reshape(-1)
        check_given(flat, out, self.most_bytes((flat.numel(),), flat.dtype))
        scales, packed = self._parts_of(out, flat.numel())
        if self._is_compiled(flat):
            self._encode_compiled(flat, scales, packed, seed)
        else:
            self._encode_parts(flat, scales, packed, seed)
        return self.most_bytes((flat.numel(),), flat.dtype)

    def _encode_parts(self, flat: Tensor, scales: Tensor, packed: Tensor, seed: int) -> None:
        """Write scales and codes by operations of torch."""
        if self.bits == 8:
            codes = packed
        else:
            codes = torch.zeros(8 * packed.numel() // self.bits, dtype=torch.uint8, device=flat.device)
        room: Tensor | None = None
        for begin, end in self._parts(flat):
            rows = self._rows(flat, begin, end)
            # One piece of memory for what is in between: to ask for it again takes longer than to fill it.
            room = torch.empty(2, *rows.shape, device=rows.device) if room is None else room
            rotated, scratch = room[:, : len(rows)]
            if self.is_rotated:
                rows = _rotated(rows, out=rotated)
            into = codes[begin * self.block : end * self.block].view(-1, self.block)
            shares = self._note_scales(torch.abs(rows, out=scratch).amax(1), scales[begin:end])
            torch.mul(rows, shares, out=scratch)
            if self.is_stochastic:
                scratch += noise(rows.numel(), scattered(seed) + begin, rows.device).view(rows.shape)
            # Cut to whole numbers, which rounds to the nearest, or to one of its two neighbors.
            scratch += self._offset
            if self.bits == 8:  # by way of what torch converts to fastest
                into.copy_(rotated.view(torch.int32).copy_(scratch))
            else:
                into.view(torch.int8).copy_(scratch)
        if codes is not packed:
            pack_codes(codes, self.bits, packed)

    def _encode_compiled(self, flat: Tensor, scales: Tensor, packed: Tensor, seed: int) -> None:
        """Write the same by loops that numba compiles."""
        from bireme.codec import loops

        given = flat if flat.dtype in _LOOP_INTEGERS else flat.float()
        missing = len(scales) * self.block - len(given)
        if missing:
            given = functional.pad(given, (0, missing))
        starts = [
            noise_start(scattered(seed) + begin) for begin, _ in self._parts(flat) if self.is_stochastic
        ]
        written = torch.empty(len(scales))
        loops.encode_blocks(
            given.view(_LOOP_INTEGERS[given.dtype]).numpy(),
            self.block,
            self.bits,
            self._signs(),
            np.float32(_MARGIN / self._reach),
            np.float32(self._offset),
            noise_table(flat.device).numpy() if starts else _NO_FLOATS,
            np.array(starts, np.int64),
            written.numpy(),
            packed.numpy(),
        )
        scales.copy_(written)

    def decode(
        self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """The rounded values, in `out` if that is given: a contiguous tensor of that shape and type."""
        count = prod(shape)
        check_length(message, self.most_bytes(shape, dtype))
        scales, packed = self._parts_of(message, count)
        is_full = count == len(scales) * self.block
        if out is not None and is_full:
            whole = out.view(-1, self.block)
        else:
            whole = torch.empty(len(scales), self.block, dtype=dtype, device=message.device)
        if dtype in _LOOP_INTEGERS and self._is_compiled(whole):
            self._decode_compiled(packed, scales, whole.view(-1))
        else:
            self._decode_parts(packed, scales, whole)
        values = whole.view(-1)[:count].view(shape)
        return values if out is None or is_full else out.copy_(values)

    def _decode_parts(self, packed: Tensor, scales: Tensor, whole: Tensor) -> None:
        """Write the values by operations of torch."""
        codes = unpack_codes(packed, self.bits)
        for begin, end in self._parts(whole):
            steps = codes[begin * self.block : end * self.block].view(-1, self.block).float()
            steps -= self._centre
            scale = scales[begin:end].float().view(-1, 1)
            if self.is_rotated:
                steps = _rotated(steps)
                scale = scale / self.block
            torch.mul(steps, scale, out=whole[begin:end])

    def _decode_compiled(self, packed: Tensor, scales: Tensor, whole: Tensor) -> None:
        """Write the same by loops that numba compiles."""
        from bireme.codec import loops

        scale = scales.float() / self.block if self.is_rotated else scales.float()
        loops.decode_blocks(
            packed.numpy(),
            self.block,
            self.bits,
            self._signs(),
            np.float32(self._centre),
            scale.numpy(),
            whole.view(_LOOP_INTEGERS[whole.dtype]).numpy(),
        )

    def _is_compiled(self, tensor: Tensor) -> bool:
        """Whether loops do the same as torch's operations, and faster."""
        if not tensor.is_cpu or not pays_off(tensor.numel()):
            return False
        return not self.is_rotated or (self.block == BLOCK and _rotates_alike())

    def _signs(self) -> np.ndarray:
        """What loops rotate by; nothing where they do not."""
        return _hadamard(BLOCK, CPU).view(-1).numpy() if self.is_rotated else _NO_FLOATS

    def _parts_of(self, message: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The scales of a message and its packed codes, as views."""
        num_blocks = -(-count // self.block)
        scales = message[: 2 * num_blocks].view(torch.bfloat16)
        return scales, message[aligned(2 * num_blocks) : self.most_bytes((count,), torch.float32)]

    def _parts(self, tensor: Tensor) -> Iterator[tuple[int, int]]:
        """The blocks to work on at a time: on a CPU what fits into a cache."""
        num_blocks = -(-tensor.numel() // self.block)
        most = max(1, PART_VALUES // self.block)
        step = most if tensor.is_cpu or self.is_stochastic else max(num_blocks, 1)
        for begin in range(0, num_blocks, step):
            yield begin, min(begin + step, num_blocks)

    def _rows(self, flat: Tensor, begin: int, end: int) -> Tensor:
        """Blocks as rows, in float32."""
        values = flat[begin * self.block : end * self.block].float()
        missing = (end - begin) * self.block - values.numel()
        if missing:
            values = functional.pad(values, (0, missing))
        return values.view(-1, self.block)

    def _note_scales(self, largest: Tensor, scales: Tensor) -> Tensor:
        """Write what a step between codes is worth, block by block; gives how many steps one is.

        Where a value is not finite the scale is NaN: infinity times zero is.
        """
        scale = largest.mul_(_MARGIN / self._reach)
        scales.copy_(scale.add_(scale, alpha=0.0))
        return scale.copy_(scales).reciprocal_().clamp_max_(_LARGEST).view(-1, 1)


def _rotated(rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Each row times the matrix. A single row is another product, which adds in another order."""
    if len(rows) == 1:
        rows = _rotated(rows.expand(2, -1))[:1]
        return rows if out is None else out.copy_(rows)
    return torch.mm(rows, _hadamard(rows.shape[1], rows.device), out=out)


@lru_cache(maxsize=64)
def _hadamard(size: int, device: torch.device) -> Tensor:
    """The matrix of ones and minus ones whose square is `size` times the identity."""
    made = torch.ones(1, 1)
    while len(made) < size:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return made.to(device)


@cache
def _rotates_alike() -> bool:
    """Whether this machine's product of matrices adds in the order of the loops, to the last bit."""
    from bireme.codec import loops

    given = torch.randn(PART_VALUES // BLOCK, BLOCK, generator=torch.Generator().manual_seed(0))
    signs, found = _hadamard(BLOCK, CPU), torch.empty_like(given)
    loops.rotate_blocks(given.view(-1).numpy(), signs.view(-1).numpy(), found.view(-1).numpy())
    return all(torch.equal(_rotated(given[:num]), found[:num]) for num in (1, 2, 7, 100, len(given)))
