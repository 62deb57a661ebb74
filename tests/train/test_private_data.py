"""`data.private` from the run file to the result of a run, on servers that are all this machine."""

import json
from pathlib import Path

import pytest

from tests.support.command import bireme
from tests.support.training import TEXT, losses, metrics, settings, stopped, write_run

pytestmark = pytest.mark.slow

CLUSTER = """
format = 1

[[server]]
name = "here"
[[server.device]]
kind = "cpu"
memory_bytes = 1e9
[[server.card]]
bytes_per_s = 1e9

[[server]]
name = "there"
[[server.device]]
kind = "cpu"
memory_bytes = 1e9
[[server.card]]
bytes_per_s = 1e9
"""


def words(folder: Path, plan: dict[str, object], **more: object) -> list[str]:
    """A run on two servers, by a plan made by hand."""
    run = write_run(folder, "1f1b", 1)
    (folder / "cluster.toml").write_text(CLUSTER)
    (folder / "plan.json").write_text(json.dumps({"format": 1, "plan": plan}))
    own = folder / "own.txt"
    if not own.exists():
        own.write_text(TEXT[:1600])
    usual: dict[str, object] = {
        "plan__file": folder / "plan.json",
        "cluster__source": folder / "cluster.toml",
        "cluster__workers": "",
        "data__private": f'{{there = "{own}"}}',
    }
    return [str(run), *settings(**{**usual, **more})]


REPLICAS = {"cuts": [], "num_microbatches": 2, "schedule": "1f1b", "width": 2}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_with_private_data_resumes_with_the_same_data_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = words(tmp_path, REPLICAS, log__name="whole", training__steps=8)
    found = bireme(capsys, "train", *asked, "--json")
    assert found.status == 0, found.err
    document = json.loads(found.out)
    assert document["private_samples"] == {"there": 50}
    assert document["placement"]["private_left_out"] == {"there": 0}
    assert document["placement"]["public_repeated"] == 0
    whole = tmp_path / "runs" / "whole"
    parts = stopped(whole, tmp_path / "runs" / "parts", 4)
    (told,) = metrics(whole, "private")
    assert "50 of 50 private samples of there" in told["text"]

    (tmp_path / "own.txt").write_text(TEXT[1:1601])
    found = bireme(capsys, "resume", str(parts))
    assert found.status == 2
    assert "50 private samples of there, and now it has as many others" in found.err
    (tmp_path / "own.txt").write_text(TEXT[:1600])
    assert bireme(capsys, "resume", str(parts)).status == 0
    assert [line["step"] for line in metrics(parts, "train")] == [*range(1, 9), *range(5, 9)]
    assert losses(parts) == losses(whole)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            {"data__private": '{their = "own.txt"}'},
            "the server 'their', which the cluster lacks. Did you mean",
        ),
        ({"data__private": '{there = "gone.txt"}'}, "data.private.there = 'gone.txt': There is no file"),
        ({"data__private": '{there = "empty.txt"}'}, "has no text in it"),
        ({}, "does not keep the private samples of there there"),
        ({"data__private": "{}"}, "it must be a source for each server"),
    ],
)
def test_a_mistake_with_private_data_ends_before_training(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, object],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    pipeline: dict[str, object] = {"cuts": [3], "num_microbatches": 2, "schedule": "1f1b"}
    found = bireme(capsys, "train", *words(tmp_path, pipeline, **more))
    assert found.status == 2
    assert told in " ".join(found.err.split())
    assert not (tmp_path / "runs").exists()
