"""The words for codecs: they are read and written alike, and wrong ones are explained."""

import math

import pytest

from bireme.codec.description import CodecChoice, bits_a_value, encoded_bytes, parse_codec
from bireme.errors import BiremeError


@pytest.mark.parametrize(
    ("word", "choice"),
    [
        ("none", CodecChoice()),
        ("bfloat16", CodecChoice("bfloat16")),
        ("int8", CodecChoice("int", 8)),
        ("int3", CodecChoice("int", 3)),
        ("topk:0.25", CodecChoice("topk", None, 0.25)),
        ("topk:0.125:4", CodecChoice("topk", 4, 0.125)),
    ],
)
def test_a_codec_is_written_as_it_is_read(word: str, choice: CodecChoice) -> None:
    assert parse_codec(word) == choice
    assert str(choice) == word


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("itn8", "Did you mean 'int8'?"),
        ("int9", "1 to 8 bits"),
        ("int0", "1 to 8 bits"),
        ("int8:4", "takes no numbers"),
        ("topk", "needs the share"),
        ("topk:0", "above 0 and at most 1"),
        ("topk:1.5", "above 0 and at most 1"),
        ("topk:much", "are no numbers"),
        ("topk:0.25:5", "may have 4 or 8"),
        ("projection:16", "a part of the model"),
    ],
)
def test_a_wrong_word_says_what_is_wrong(word: str, why: str) -> None:
    with pytest.raises(BiremeError, match=word.split(":", maxsplit=1)[0]) as raised:
        parse_codec(word)
    assert why in str(raised.value)


def test_bytes_count_scales_and_masks() -> None:
    shape, values = (4, 128, 64), 4 * 128 * 64
    bits = {
        word: 8 * encoded_bytes(parse_codec(word), shape, 4) / values for word in ("int8", "int4", "int3")
    }
    assert bits == {"int8": 8.5, "int4": 4.5, "int3": 3.5}
    topk = parse_codec("topk:0.25:8")
    assert 8 * encoded_bytes(topk, shape, 4) / values == 1 + 2 + 16 / 64
    assert 8 * encoded_bytes(topk, shape, 4, is_back=True) / values == 2 + 16 / 64


@pytest.mark.parametrize("word", ["int8", "int4", "topk:0.25", "topk:0.25:8", "topk:0.0625:8", "topk:0.02:4"])
def test_bits_that_plans_count_are_those_of_a_large_tensor(word: str) -> None:
    choice, shape = parse_codec(word), (64, 1024, 64_000)
    for is_back in (False, True):
        sent = 8 * encoded_bytes(choice, shape, 2, is_back=is_back) / math.prod(shape)
        assert sent == pytest.approx(bits_a_value(choice, 2, is_back=is_back), rel=0.05)
