"""Loops that numba compiles give what the operations of torch and numpy give that they replace."""

import importlib.util

import pytest
import torch
from torch import Tensor

from bireme.codec import BlockCodec, Codec, Masking, codec_of, parse_codec
from bireme.codec.blocks import PART_VALUES

pytestmark = [
    pytest.mark.slow,  # imports numba, and at the first time compiles
    pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba"),
]

WORDS = ("topk:0.25", "topk:0.25:8", "topk:0.4:4", "topk:0.02:8", "topk:0.25:8:4")
CODECS = {
    **{word: codec_of(parse_codec(word)) for word in WORDS},
    **{f"int{bits}": codec_of(parse_codec(f"int{bits}")) for bits in (8, 7, 4, 3)},
    **{f"drawn int{bits}": BlockCodec(bits, is_rotated=bits < 8, is_stochastic=True) for bits in (8, 4)},
}
KINDS = ("normal", "tied", "mostly zero", "uneven", "not finite")


def tensor(kind: str, width: int, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(len(kind) + width)
    x = torch.randn(6, 7, width, generator=draw)
    match kind:
        case "tied":
            x = x.round()
        case "mostly zero":  # some rows of nothing but zeros, too
            x = (x - 1.5).relu() * (torch.rand(6, 7, 1, generator=draw) < 0.8)
        case "uneven":  # from row to row, and within each
            x = x.sign() * (4 * x.abs() + 8 * torch.rand(6, 7, 1, generator=draw) - 12).exp()
        case "not finite":
            x[1, 2, 3], x[2, 2, :9], x[3] = torch.nan, -torch.inf, torch.nan
    return x.to(dtype)


def sent(codec: Codec, x: Tensor) -> list[Tensor]:
    """The message of a tensor and what arrives, and the same for a gradient that goes back."""
    shape = tuple(x.shape)
    message = encoded(codec, x)
    found = [message, codec.decode(message, shape, x.dtype)]
    if isinstance(codec, Masking):
        back = codec.back(codec.mask_of(message, shape))
        found.append(encoded(back, x.flip(0)))
        found.append(back.decode(found[-1], shape, x.dtype))
    return found


def encoded(codec: Codec, x: Tensor) -> Tensor:
    message = torch.zeros(codec.most_bytes(tuple(x.shape), x.dtype), dtype=torch.uint8)
    return message[: codec.encode(x, message, seed=5)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_ranks_with_and_without_numba_send_and_read_the_same_bytes(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bireme.compiled.FEWEST_VALUES", 0)
    for width in (48, 45):  # masks of whole bytes, and others
        x = tensor(kind, width, dtype)
        for name, codec in CODECS.items():
            found = {}
            for is_compiled in (True, False):
                monkeypatch.setattr("bireme.compiled.IS_COMPILED", is_compiled)
                found[is_compiled] = sent(codec, x)
            for with_numba, without in zip(found[True], found[False], strict=True):
                torch.testing.assert_close(with_numba, without, rtol=0, atol=0, equal_nan=True, msg=name)


def test_a_message_of_many_parts_is_the_same_too(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1 + 2 * PART_VALUES // 45, 45, generator=torch.Generator().manual_seed(0))
    for name, codec in CODECS.items():
        with_numba = sent(codec, x)
        with monkeypatch.context() as without:
            without.setattr("bireme.compiled.IS_COMPILED", False)
            assert all(map(torch.equal, with_numba, sent(codec, x))), name
