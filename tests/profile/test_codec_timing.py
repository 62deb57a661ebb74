"""How long codecs take on this machine, as a profile has it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bireme.codec.sum_description import parse_sum_codec
from bireme.profile import codec_timing
from bireme.profile.codec_timing import with_codec_rates
from bireme.profile.profile import load_profile, plain_profile, save_profile
from tests.support.hand_plans import tiny_profile

CPU = torch.device("cpu")
WORDS = ("int8", "topk:0.25:8", "topk:0.25:8:50")


def test_codecs_are_measured_once_and_kept_with_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIREME_CACHE", str(tmp_path))
    monkeypatch.setattr(codec_timing, "SHAPE", (4, 1024))
    bare = replace(tiny_profile(2), num_threads=1)
    found = with_codec_rates(bare, WORDS, 4, CPU)
    assert [one.codec for one in found.codecs] == [*WORDS]
    for one in found.codecs:
        assert min(one.encode_s, one.decode_s, one.back_encode_s, one.back_decode_s) > 0
    save_profile(found, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == found
    assert "codecs" not in plain_profile(replace(found, codecs=()))

    monkeypatch.setattr(codec_timing, "_median_s", None)
    assert with_codec_rates(bare, WORDS, 4, CPU) == found


@pytest.mark.parametrize("word", ["int8", "int2", "threshold:0.1:5", "lowrank:2"])
def test_a_codec_of_sums_is_measured_beside_that_of_boundaries(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIREME_CACHE", str(tmp_path))
    monkeypatch.setattr(codec_timing, "SHAPE", (16, 256))
    bare, sums = replace(tiny_profile(2), num_threads=1), parse_sum_codec(word)
    found = with_codec_rates(bare, ["int8"], 4, CPU, sums=[sums])
    assert [one.codec for one in found.codecs] == ["int8", f"{word} in sums"]
    assert found.codecs[1].encode_s + 2 * found.codecs[1].decode_s > 0
    monkeypatch.setattr(codec_timing, "_median_s", None)
    assert with_codec_rates(bare, ["int8"], 4, CPU, sums=[sums]) == found


def test_codecs_are_measured_beside_a_profile_of_an_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIREME_CACHE", str(tmp_path))
    monkeypatch.setattr(codec_timing, "SHAPE", (4, 1024))
    before = torch.get_num_threads()
    found = with_codec_rates(replace(tiny_profile(2), num_threads=0), ["int8"], 4, CPU)
    assert found.codecs[0].encode_s > 0
    assert torch.get_num_threads() == before
