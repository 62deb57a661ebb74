"""Codecs on an accelerator: the same messages as on the host, and what they say comes out alike."""

import pytest
import torch

from bireme.codec import codec_of, parse_codec

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "word", ["none", "bfloat16", "int8", "int4", "int3", "topk:0.3", "topk:0.25:8", "topk:0.05:8"]
)
def test_a_message_of_a_gpu_is_read_on_the_host_and_the_other_way_round(word: str) -> None:
    codec = codec_of(parse_codec(word))
    given = torch.randn(6, 50, 96, generator=torch.Generator().manual_seed(0))
    shape, size = tuple(given.shape), codec.most_bytes(tuple(given.shape), given.dtype)
    here, there = torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8, device="cuda")
    codec.encode(given, here)
    codec.encode(given.cuda(), there)
    on_host = codec.decode(here, shape, given.dtype)
    assert torch.equal(codec.decode(here.cuda(), shape, given.dtype).cpu(), on_host)
    close = codec.decode(there.cpu(), shape, given.dtype)
    # A rotation may round otherwise there, and then a value lies on the other side of two codes.
    assert (close != on_host).float().mean() < 0.01
