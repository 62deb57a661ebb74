"""What runs for frozen weights in four bits: their packing, and linear layers that multiply by them.

A layer unpacks its weight into the type of its input and multiplies, some rows of the weight at a time on a
processor, where new memory is slow, and all at once on an accelerator. Its backward unpacks the weight again:
what is kept for it are the bytes. Levels are multiplied with their scales in the type of the input, or in
float32 if that is longer: the rounding is small beside that to four bits.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bireme.devices import is_accelerator
from bireme.model.graph import ModelState
from bireme.model.nf4 import BLOCK, FACTOR_BYTES, GROUP, nf4_bytes, num_blocks, num_groups

LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
"""The values of NF4 between -1 and 1, from the appendix of the paper."""

STEPS = 2**12
"""Values are rounded to as many steps on each side of zero before they are rounded to levels."""

_LARGEST_ROOT = 255

_PIECE_BLOCKS, _ACCELERATOR_PIECE_BLOCKS = 2**11, 2**19
"""Blocks that are converted at a time: few enough for a processor's cache, or enough to keep a device
busy."""

_LAYER_VALUES = 2**22
"""Values of a weight that a processor multiplies by at a time."""

_OPERATORS = torch.ops.bireme


def packed(weight: Tensor) -> Tensor:
    """The bytes of a weight: the values, two in a byte, then the scales of the blocks, then the factors of
    the groups.

    A scale is the square of its byte, times the factor of its group, so that small scales beside a large one
    are kept too. A value is rounded to the levels times the scale that is kept.
    """
    count, device = weight.numel(), weight.device
    flat, blocks = weight.detach().reshape(-1), num_blocks(count)
    found = torch.zeros(nf4_bytes(count), dtype=torch.uint8, device=device)
    values, roots, factors = _parts(found, count)
    pieces = [(begin, min(begin + _PIECE_BLOCKS, blocks)) for begin in range(0, blocks, _PIECE_BLOCKS)]
    largest = torch.zeros(num_groups(count) * GROUP, device=device)
    for begin, end in pieces:
        largest[begin:end] = _blocks(flat, begin, end).abs().amax(1)
    groups = largest.view(-1, GROUP)
    factor = groups.amax(1) / _LARGEST_ROOT**2
    least = torch.finfo(torch.float32).tiny
    factors.copy_(factor.view(torch.uint8))
    roots.copy_((groups / factor.clamp(min=least).unsqueeze(1)).sqrt().round().view(-1)[:blocks])
    scales, levels = _scales(roots, factors).clamp(min=least).unsqueeze(1), _levels_of_steps(device)
    for begin, end in pieces:
        relative = (_blocks(flat, begin, end) / scales[begin:end]).clamp(-1, 1).nan_to_num_()
        steps = relative.mul_(STEPS).add_(STEPS).round_().int()
        codes = levels.index_select(0, steps.view(-1)).view(-1, 2)
        values[begin * BLOCK // 2 : end * BLOCK // 2] = codes[:, 0] << 4 | codes[:, 1]
    return found


def unpacked(given: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """The weight in these bytes."""
    found = torch.empty(rows, columns, dtype=dtype, device=given.device)
    _OPERATORS.nf4_unpack(given, found, 0, rows * columns)
    return found


def plain(tensor: Tensor, state: ModelState) -> Tensor:
    """The tensor of a state in the type of the graph, unpacked if it is packed."""
    one = state.unpacked
    dtype: torch.dtype = getattr(torch, one.dtype)
    return tensor.to(dtype) if state.packed is None else unpacked(tensor, *state.packed.shape, dtype)


def nf4_linear(hidden: Tensor, given: Tensor, bias: Tensor | None, rows: int, columns: int) -> Tensor:
    """`linear(hidden, weight, bias)` by the weight in these bytes, which gets no gradient."""
    made: Tensor = _Nf4Linear.apply(hidden.reshape(-1, columns), given, bias, rows)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return made.view(*hidden.shape[:-1], rows)


class _Nf4Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, given: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        ctx.save_for_backward(given)
        ctx.rows, ctx.columns = rows, hidden.shape[1]
        made = hidden.new_empty(len(hidden), rows)
        for piece, weight in _pieces(given, ctx.rows, ctx.columns, hidden.dtype):
            if bias is None:
                torch.mm(hidden, weight.T, out=made[:, piece])
            else:
                torch.addmm(bias[piece], hidden, weight.T, out=made[:, piece])
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (given,), back = ctx.saved_tensors, gradients[0]
        needs_hidden, _, needs_bias, _ = ctx.needs_input_grad
        of_hidden = None
        for piece, weight in _pieces(given, ctx.rows, ctx.columns, back.dtype) if needs_hidden else ():
            more = back[:, piece] @ weight
            # Sums of parts are made in float32 at least.
            wide = torch.promote_types(more.dtype, torch.float32)
            of_hidden = more if of_hidden is None else of_hidden.to(wide).add_(more)
        of_bias = back.sum(0) if needs_bias else None
        return None if of_hidden is None else of_hidden.to(back.dtype), None, of_bias, None


def _pieces(given: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Which rows of a weight, and these rows. All pieces use the same memory; each begins with a block."""
    step = BLOCK // math.gcd(BLOCK, columns)
    at_once = rows if is_accelerator(given.device) else max(_LAYER_VALUES // (columns * step), 1) * step
    memory = torch.empty(min(at_once, rows), columns, dtype=dtype, device=given.device)
    for begin in range(0, rows, at_once):
        piece = slice(begin, min(begin + at_once, rows))
        weight = memory[: piece.stop - begin]
        _OPERATORS.nf4_unpack(given, weight, begin * columns, rows * columns)
        yield piece, weight


def _blocks(flat: Tensor, begin: int, end: int) -> Tensor:
    """Some blocks of a weight in float32; the last one is filled up with zeros."""
    piece = flat[begin * BLOCK : end * BLOCK].float()
    return functional.pad(piece, (0, (end - begin) * BLOCK - len(piece))).view(-1, BLOCK)


def _parts(found: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values, roots of scales, and factors in the bytes of a weight, as views."""
    first = num_blocks(count) * BLOCK // 2
    second = first + num_blocks(count)
    return found[:first], found[first:second], found[second : second + num_groups(count) * FACTOR_BYTES]


def _scales(roots: Tensor, factors: Tensor, first: int = 0) -> Tensor:
    """The scales of some blocks in float32; `first` is the index of the first one."""
    end = -(-(first + len(roots)) // GROUP) * FACTOR_BYTES
    # The copy lies where a float32 may lie.
    factor = factors[first // GROUP * FACTOR_BYTES : end].clone().view(torch.float32)
    of_blocks = factor.repeat_interleave(GROUP)[first % GROUP :][: len(roots)]
    return roots.float().square_().mul_(of_blocks)


@cache
def _levels_of_steps(device: torch.device) -> Tensor:
    """The number of the nearest level for each step from -1 to 1."""
    levels = torch.tensor(LEVELS)
    steps = torch.arange(-STEPS, STEPS + 1) / STEPS
    return torch.bucketize(steps, (levels[1:] + levels[:-1]) / 2).to(device, torch.uint8)


@cache
def _levels_of_bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The two levels in each byte, taken together as one integer."""
    levels = torch.tensor(LEVELS, dtype=dtype)
    both = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1)
    return both.view(torch.int32 if dtype.itemsize == 2 else torch.int64).view(-1).to(device)


def _unpack(given: Tensor, into: Tensor, begin: int, count: int) -> None:
    """Write the values of a weight of `count` from `begin` on, where a block begins, into memory without
    gaps.
    """
    values, roots, factors = _parts(given, count)
    kind = into.dtype if into.dtype.itemsize == 2 else torch.float32
    levels, flat = _levels_of_bytes(kind, given.device), into.view(-1)
    at_once = _ACCELERATOR_PIECE_BLOCKS if is_accelerator(given.device) else _PIECE_BLOCKS
    for first in range(begin // BLOCK, num_blocks(begin + len(flat)), at_once):
        own = values[first * BLOCK // 2 : (first + at_once) * BLOCK // 2]
        scales = _scales(roots[first : first + at_once], factors, first).to(kind).unsqueeze(1)
        made = levels.index_select(0, own.int()).view(kind).view(-1, BLOCK)
        target = flat[first * BLOCK - begin :][: made.numel()]
        if len(target) == made.numel():
            torch.mul(made, scales, out=target.view(-1, BLOCK))
        else:
            target.copy_((made * scales).view(-1)[: len(target)])


def _without_numbers(_given: Tensor, _into: Tensor, _begin: int, _count: int) -> None:
    pass


# As an operator of torch, compilers leave it alone, and bytes are counted without a look at its blocks.

if not hasattr(torch.ops.bireme, "nf4_unpack"):  # else this module was imported before, and is once more
    _library: Any = torch.library.Library("bireme", "FRAGMENT")
    _library.define("nf4_unpack(Tensor given, Tensor(a!) into, int begin, int count) -> ()")
    _library.impl("nf4_unpack", _unpack, "CompositeExplicitAutograd")
    _library.impl("nf4_unpack", _without_numbers, "Meta")
