"""Pairs of capabilities as whole runs, by the keys that `bireme capabilities` gives."""

import json
from pathlib import Path

import pytest

from bireme.capabilities import CAPABILITIES, exclusion, pairs
from tests.support.command import bireme
from tests.support.training import settings

pytestmark = pytest.mark.slow

TOGETHER = [
    f"{one.name} {other.name}"
    for one, other in pairs(CAPABILITIES.values())
    if exclusion(one.name, other.name) is None
]


@pytest.mark.few(4)
@pytest.mark.parametrize("names", TOGETHER)
def test_a_run_with_both_ends_well(names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(bireme(capsys, "capabilities", *names.split(), "--json").out)
    (pair,) = document["pairs"]
    assert pair["excluded"] is None
    keys = {"model.source": "gpt:layers=2,width=16,heads=2,vocab=257,context=32"} | pair["settings"]
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    more = settings(
        training__steps=3,
        training__batch_size=16,
        training__evaluation_batches=1,
        cluster__device="cpu",
        cluster__threads_per_worker=1,
        cluster__timeout_s=600,
        log__folder=tmp_path / "runs",
        log__sample_tokens=0,
        export__at_end="false",
    )
    result = bireme(capsys, "train", *sets, *more, "--json")
    assert result.status == 0, result.err
    assert result.document["steps"] == 3
