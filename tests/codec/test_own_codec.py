"""One's own codec by its name: found, checked once, and refused in a sentence where it is wrong."""

import pytest
import torch

from bireme.codec import BoundaryCodecs, Codec, codec_of, parse_codec, through
from bireme.errors import BiremeError

PLACE = "tests.support.own_codecs"


@pytest.mark.parametrize("name", ["Zipped", "zipped"])
def test_a_codec_is_found_by_module_and_name_whether_made_or_to_be_made(name: str) -> None:
    choice = parse_codec(f"{PLACE}:{name}")
    assert str(choice) == f"{PLACE}:{name}"
    codec: Codec = codec_of(choice)
    assert codec_of(choice) is codec
    x = torch.randn(8, 64)
    found = through(BoundaryCodecs(str(choice), "int8"), x)
    assert torch.equal(found, x.half().float())


@pytest.mark.parametrize(
    ("where", "why"),
    [
        (f"{PLACE}:Hiding", "hides a NaN"),
        (f"{PLACE}:Flat", r"makes torch.float32 \[512\]"),
        (f"{PLACE}:Overlong", "never more"),
        (f"{PLACE}:Drawing", "the second time"),
        (f"{PLACE}:Half", "it has no decode"),
        (f"{PLACE}:Ziped", "Did you mean 'Zipped'"),
        ("no_such_module:codec", "cannot be imported"),
        ("int9", "1 to 8 bits"),
    ],
)
def test_a_codec_that_breaks_the_protocol_is_refused(where: str, why: str) -> None:
    with pytest.raises(BiremeError, match=why):
        codec_of(parse_codec(where))
