"""What every codec promises: the bytes it says, errors within bounds, and NaN where a value is not finite."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bireme.codec import BlockCodec, Codec, TopK, codec_of, parse_codec
from bireme.codec.codec import Masking, pack_mask
from bireme.codec.description import encoded_bytes, kept_of_row, mask_bytes, place_bytes
from bireme.codec.topk import read_places, write_places
from bireme.errors import BiremeError

WORDS = [
    "none",
    "bfloat16",
    "int8",
    "int5",
    "int4",
    "int3",
    "int2",
    "int1",
    "topk:0.3",
    "topk:0.25:8",
    "topk:0.5:4",
]
SPARSE = ["topk:0.05:8", "topk:0.02"]
"""Their places take fewer bytes than a mask."""

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

shapes = st.lists(st.integers(1, 9), min_size=1, max_size=2).flatmap(
    lambda front: st.integers(1, 70).map(lambda width: (*front, width))
)


def sent(codec: Codec, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
    """What arrives of a tensor."""
    shape = tuple(tensor.shape)
    room = torch.full((codec.most_bytes(shape, tensor.dtype) + 8,), 255, dtype=torch.uint8)
    used = codec.encode(tensor, room, seed=seed)
    assert used <= len(room) - 8
    assert (room[-8:] == 255).all(), "written past the end"
    return codec.decode(room[:used].clone(), shape, tensor.dtype)


def normal(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(st.sampled_from([*WORDS, *SPARSE]), shapes, st.sampled_from(DTYPES), st.integers(0, 99))
def test_a_tensor_takes_the_bytes_that_its_shape_says(
    word: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    choice = parse_codec(word)
    codec = codec_of(choice)
    given_ = normal(shape, dtype, seed)
    assert codec.most_bytes(shape, dtype) == encoded_bytes(choice, shape, dtype.itemsize)
    back = sent(codec, given_)
    assert back.shape == given_.shape
    assert back.dtype == dtype
    assert back.isfinite().all()


@given(shapes, st.integers(1, 8), st.booleans(), st.booleans(), st.integers(0, 99))
def test_rounding_errs_by_no_more_than_a_step(
    shape: tuple[int, ...], bits: int, is_rotated: bool, is_stochastic: bool, seed: int
) -> None:
    codec = BlockCodec(bits, is_rotated=is_rotated, is_stochastic=is_stochastic)
    given_ = normal(shape, seed=seed)
    error = torch.nn.functional.pad(
        (sent(codec, given_, seed=seed) - given_).flatten(), (0, -given_.numel() % 32)
    )
    flat = torch.nn.functional.pad(given_.flatten(), (0, -given_.numel() % 32)).view(-1, 32)
    steps = (1 << bits) - 2 if bits == 8 or is_stochastic else 1 << bits
    largest = flat.abs().sum(1) if is_rotated else flat.abs().amax(1)
    step = 2 * 1.02 * largest / max(steps, 1)
    most = step if is_stochastic else step / 2
    assert (error.view(-1, 32).abs().amax(1) <= most).all()


def test_stochastic_rounding_has_the_mean_of_what_was_given() -> None:
    for bits, is_rotated in ((8, False), (4, True), (1, True)):
        codec = BlockCodec(bits, is_rotated=is_rotated, is_stochastic=True)
        given_ = normal((64,))
        tries = torch.stack([sent(codec, given_, seed=seed) for seed in range(400)])
        deviation = tries.std(0) / math.sqrt(len(tries))
        assert ((tries.mean(0) - given_).abs() <= 5 * deviation + 1e-6).all()
        assert torch.equal(sent(codec, given_, seed=3), tries[3])


@pytest.mark.parametrize("word", [word for word in WORDS if word != "none"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives_so(word: str, bad: float) -> None:
    given_ = normal((4, 64))
    given_[2, 5] = bad
    back = sent(codec_of(parse_codec(word)), given_)
    assert not back[2, 5].isfinite()
    assert back[:2].isfinite().all()
    if word.startswith(("int", "topk:0.25:8")):
        assert back[2, 5].isnan()


@pytest.mark.parametrize("word", ["int8", "int4", "topk:0.25:8"])
def test_zeros_arrive_as_zeros_and_any_size_of_number_keeps_its_digits(word: str) -> None:
    codec = codec_of(parse_codec(word))
    assert not sent(codec, torch.zeros(5, 40)).any()
    for size in (2.0**-90, 2.0**-30, 2.0**30, 2.0**90):
        assert torch.equal(sent(codec, normal((4, 64)) * size) / size, sent(codec, normal((4, 64))))


@given(shapes, st.floats(0.01, 1.0), st.booleans(), st.sampled_from(DTYPES), st.integers(0, 99))
def test_topk_sends_exactly_its_share_of_each_row_and_no_entry_larger_is_left_out(
    shape: tuple[int, ...], share: float, is_tied: bool, dtype: torch.dtype, seed: int
) -> None:
    given_ = normal(shape, dtype, seed)
    if is_tied:
        given_ = given_.round()
    codec = TopK(share)
    room = torch.empty(codec.most_bytes(shape, dtype), dtype=torch.uint8)
    codec.encode(given_, room)
    ones = torch.ones_like(given_)
    mask = sent(codec.back(codec.mask_of(room, shape)), ones).bool()
    kept = kept_of_row(shape[-1], share)
    assert (mask.sum(-1) == kept).all()
    least_kept = given_.abs().masked_fill(~mask, math.inf).amin(-1)
    most_left = given_.abs().masked_fill(mask, -math.inf).amax(-1)
    assert (least_kept >= most_left).all()
    assert torch.equal(codec.decode(room, shape, dtype), given_ * mask)


@given(st.integers(256, 5000), st.floats(0.0, 0.2), st.integers(0, 99))
def test_few_places_say_the_same_entries_in_at_most_half_the_bytes_of_a_mask(
    count: int, share: float, seed: int
) -> None:
    num_sent = round(share * count)
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:num_sent]] = True
    mask = torch.empty(mask_bytes(count), dtype=torch.uint8)
    pack_mask(chosen, mask)
    size = place_bytes(count, num_sent)
    assert size == mask_bytes(count) or 2 * size <= mask_bytes(count)
    message = torch.full((size + 8,), 255, dtype=torch.uint8)
    write_places(mask, count, num_sent, message[:size])
    assert (message[size:] == 255).all(), "written past the end"
    assert torch.equal(read_places(message, count, num_sent), mask)


def test_places_of_a_twentieth_take_a_third_of_a_bit_an_entry() -> None:
    assert place_bytes(100_000, 5_000) * 8 / 100_000 == pytest.approx(0.05 * (4 + 1) + 2**-4, rel=0.01)
    least = -0.05 * math.log2(0.05) - 0.95 * math.log2(0.95)
    assert place_bytes(100_000, 5_000) * 8 / 100_000 < 1.1 * least


@pytest.mark.parametrize("word", ["bfloat16", "int8", "int4", "topk:0.3", "topk:0.05:8", "topk:0.25:8:4"])
def test_integers_and_messages_cut_short_are_refused(word: str) -> None:
    codec, given_ = codec_of(parse_codec(word)), normal((4, 128))
    room = torch.empty(codec.most_bytes((4, 128), torch.float32), dtype=torch.uint8)
    for strange in (torch.arange(512).view(4, 128), given_ > 0, given_.to(torch.complex64)):
        with pytest.raises(BiremeError, match="is for real numbers"):
            codec.encode(strange, room)
    with pytest.raises(BiremeError, match="room for most_bytes"):
        codec.encode(given_, room[:-1])
    used = codec.encode(given_, room)
    for length in (used // 16, used - 40):  # in the places, and in the values
        with pytest.raises(BiremeError, match="all that was written"):
            codec.decode(room[:length], (4, 128), torch.float32)


def test_of_equal_entries_the_first_are_kept() -> None:
    given_ = torch.tensor([[1.0, -2.0, 2.0, 2.0, 0.0, 2.0, -2.0, 1.0]])
    assert sent(TopK(0.375), given_).tolist() == [[0, -2, 2, 2, 0, 0, 0, 0]]


def test_only_topk_ties_the_gradient_to_the_entries_it_sent() -> None:
    found = {word: isinstance(codec_of(parse_codec(word)), Masking) for word in WORDS}
    assert found == {word: word.startswith("topk") for word in WORDS}
