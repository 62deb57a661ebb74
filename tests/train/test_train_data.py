"""Whole runs on a mixture with a stream, documents kept apart: they go on exactly where they were."""

import json
from pathlib import Path

import pytest

from tests.support.alone import alone
from tests.support.command import bireme
from tests.support.training import losses, metrics, settings, stopped, write_run


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_mixture_with_a_stream_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    rows = [
        json.dumps({"text": f"value_{number} = {number % 7}\n" * (number % 4 + 1)}) for number in range(600)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = {
        "data__mixture": json.dumps(
            [
                {"source": str(tmp_path / "texts"), "weight": 1.0},
                {"source": f"hf:{tmp_path}/rows.jsonl,streaming=true", "weight": 3.0},
            ]
        ).replace('": ', '" = '),
        "data__packing": "documents",
        "data__shuffle_buffer": 20,
        "data__source": "",
        "training__evaluate_every": 3,
        "training__evaluation_batches": 2,
    }
    run_file = str(write_run(tmp_path, "1f1b", 1))
    whole, parts = tmp_path / "runs" / "run", tmp_path / "runs" / "parts"
    with alone():
        found = bireme(capsys, "train", run_file, *settings(**words, training__steps=6))
        assert found.status == 0, found.err
        found = bireme(capsys, "resume", str(stopped(whole, parts, 4)))
        assert found.status == 0, found.err
    assert [line["step"] for line in metrics(parts, "train")] == [*range(1, 7), 5, 6]
    assert losses(parts) == losses(whole)
    for line in metrics(whole, "evaluation"):
        assert len(line["sources"]) == 2
        low, high = sorted(line["sources"].values())
        assert low < line["loss"] < high
