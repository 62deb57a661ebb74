"""`topk` over a whole tensor by a threshold that lives for some batches."""

import pytest
import torch
from torch import Tensor

from bireme.codec import BoundaryCodecs, through
from bireme.codec.above import Thresholds, TopKAbove
from bireme.codec.description import encoded_bytes, parse_codec
from bireme.errors import BiremeError

WORD = "topk:0.25:8:4"


def sent(codec: TopKAbove, x: Tensor, threshold: Tensor | None = None) -> tuple[int, Tensor]:
    shape = tuple(x.shape)
    message = torch.empty(codec.most_bytes(shape, x.dtype), dtype=torch.uint8)
    used = codec.encode(x, message, threshold=threshold)
    return used, codec.decode(message[:used].clone(), shape, x.dtype)


def test_the_threshold_lets_exactly_the_share_through_and_an_old_one_what_is_above_it() -> None:
    codec = TopKAbove(0.25, 8, 4)
    torch.manual_seed(0)
    x, later = torch.randn(64, 48), 1.2 * torch.randn(64, 48)
    threshold = codec.threshold_of(x)
    _, found = sent(codec, x)
    assert (found != 0).sum() == x.numel() // 4
    assert found.abs()[found != 0].min() >= x.abs()[found == 0].max() * (1 - 2**-6)
    used, found = sent(codec, later, threshold)
    size = threshold.to(torch.int32).view(torch.float32)
    assert torch.equal(found != 0, later.abs() >= size)
    assert used < codec.most_bytes((64, 48), x.dtype) == encoded_bytes(parse_codec(WORD), (64, 48), 4)


@pytest.mark.parametrize("times", [100.0, 0.001])
def test_a_threshold_that_has_become_useless_is_not_used(times: float) -> None:
    codec = TopKAbove(0.25, 8, 4)
    x = torch.randn(64, 48)
    _, found = sent(codec, times * x, codec.threshold_of(x))
    assert (found != 0).sum() == x.numel() // 4


def test_the_gradient_comes_back_for_the_same_entries_and_a_nan_arrives_as_one() -> None:
    x = torch.randn(8, 64, requires_grad=True)
    found = through(BoundaryCodecs(WORD, WORD), x)
    (gradient,) = torch.autograd.grad(found, x, torch.ones_like(found))
    assert torch.equal(gradient != 0, found != 0)
    with torch.no_grad():
        x[3, 3] = torch.nan
    assert through(BoundaryCodecs(WORD, WORD), x)[3, 3].isnan()


def test_a_threshold_lives_from_a_batch_that_its_life_divides_and_can_be_taken_up() -> None:
    codec, thresholds = TopKAbove(0.25, 8, 4), Thresholds()
    xs = [torch.randn(16, 32) for _ in range(10)]
    used = [thresholds.of("x", codec, batch, x) for batch, x in enumerate(xs)]
    assert [int(one) for one in used] == [int(codec.threshold_of(xs[batch // 4 * 4])) for batch in range(10)]
    assert thresholds.after(8) == {}
    again = Thresholds()
    again.load(thresholds.after(6), 6)
    assert [int(again.of("x", codec, batch, xs[batch])) for batch in (6, 7, 8)] == [
        int(one) for one in used[6:9]
    ]


@pytest.mark.parametrize("word", ["topk:0.25:8:0", "topk:0.25:5:3", "topk:0.25:8:3:1"])
def test_impossible_numbers_are_refused(word: str) -> None:
    with pytest.raises(BiremeError):
        parse_codec(word)


def test_both_directions_have_the_same_entries() -> None:
    with pytest.raises(BiremeError, match="the same entries"):
        BoundaryCodecs(WORD, "topk:0.25:8")
