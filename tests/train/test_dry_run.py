"""`bireme train --dry-run`, and what a run file asks of its plan: seen before anything is trained."""

import json
from pathlib import Path

import pytest

from bireme.model.sources import load_source
from bireme.plan.plan_file import load_plan
from bireme.train.machines import machines_of
from bireme.train.plan_search import is_recorded
from bireme.train.run_file import load_run_file
from tests.support.alone import alone
from tests.support.command import bireme
from tests.support.training import GPT, metrics, settings, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Capture = pytest.CaptureFixture[str]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.long
def test_a_dry_run_says_what_plan_says_and_leaves_nothing(tmp_path: Path, capsys: Capture) -> None:
    """With pins, a range and a largest batch: the plan of the two is the same."""
    path, runs = write_run(tmp_path / "given"), tmp_path / "given" / "runs"
    before = _files(tmp_path / "given")
    devices = machines_of(load_run_file(path), num_cuda=0, num_cores=2).cluster.devices()
    first, second = (placed.name for placed in devices)
    asked = settings(plan__file="", plan__schedule="gpipe", plan__pin=f"0={second}", plan__together="0..3")
    words = ["train", str(path), *asked, *settings(plan__largest_batch=16), "--name", "mine", "--dry-run"]
    found = bireme(capsys, *words, "--json")
    assert found.status == 0, found.err
    document = found.document
    assert [stage["devices"] for stage in document["stages"]] == [[second], [first]]
    assert document["stages"][0]["units"][:4] == [0, 1, 2, 3]
    assert document["batch_size"] == 16, "a larger batch has less of a bubble"
    assert str(runs / "mine" / "run.toml") in document["writes"]
    assert str(runs / "mine" / "checkpoints") in document["writes"]
    assert _files(tmp_path / "given") == before

    by_hand = bireme(capsys, "train", str(path), "--steps", "3", "--dry-run", "--json").document
    planned = bireme(capsys, "plan", str(path), *asked, *settings(plan__largest_batch=16), "--json").document
    same = ("schedule", "depth", "width", "num_stages", "batch_size", "stages", "sync")
    assert {key: planned[key] for key in same} == {key: document[key] for key in same}
    fields = set(planned)
    assert set(document) == set(by_hand) == fields | {"learns", "writes", "disk", "taken"}
    assert (by_hand["schedule"], by_hand["num_stages"], by_hand["predicted_batch_s"]) == ("2bw", 2, None)

    shown = bireme(capsys, "train", str(path), "--dry-run")
    assert f"Nothing was written. The run would write:\n  {runs}/run/run.toml\n" in shown.out
    assert _files(tmp_path / "given") == before


def test_a_dry_run_lists_what_the_run_then_writes(tmp_path: Path, capsys: Capture) -> None:
    """No measured timeline, for which it is too short unless one is asked for."""
    words = ["train", str(write_run(tmp_path, "1f1b", 1)), "--steps", "5"]
    with alone():
        document = bireme(capsys, *words, "--dry-run", "--json").document
        trained = bireme(capsys, *words)
        again = bireme(capsys, *words, "--dry-run")
    assert trained.status == 0
    assert again.status == 0, "a dry run of a name that is taken says so, and is not refused"
    assert "The run itself would be refused" in again.out
    assert "already exists. Resume it with" in again.out
    run = tmp_path / "runs" / "run"
    assert {*map(Path, document["writes"])} == {*run.iterdir()}
    learns = document["learns"]
    samples = learns["num_samples"], learns["num_evaluation_samples"]
    assert learns["epochs"] == 5 * 8 / samples[0]
    assert sum(samples) <= learns["num_tokens"] // 32 <= sum(samples) + 1
    source = load_source(GPT).model
    num_parameters = sum(one.numel() for one in source.parameters())
    assert learns["num_parameters"] == learns["num_learning_parameters"] == num_parameters
    assert (learns["sources"], learns["num_files"]) == ([str(tmp_path / "texts")], 1)
    assert (learns["tokenizer"], learns["length"], learns["loss_on"]) == ("bytes", 32, "all tokens")
    assert metrics(run, "start")[0]["learns"] == learns
    assert json.loads((run / "summary.json").read_text())["learns"] == learns
    header = " ".join(trained.out.split())
    assert (
        f"Learns from {tmp_path}/texts: 1 file, {learns['num_tokens']:,} tokens, {samples[0]} samples"
        in header
    )
    assert "tokenizer: bytes; 32 tokens in a sample; loss on all tokens;" in header
    assert f"{num_parameters:,} parameters, all of which learn; float32, learning rate 0.01" in header
    asked = load_run_file(Path(words[1]), ["training.steps=5", "log.trace=true"])
    plan = load_plan(tmp_path / "runs" / "run" / "plan.json")
    assert is_recorded(asked, plan)
    assert is_recorded(load_run_file(Path(words[1]), ["training.steps=7"]), plan)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"plan__devices": "nowhere"}, "There is no device 'nowhere' in the cluster."),
        ({"plan__largest_batch": 4}, "plan.largest_batch is 4, but training.batch_size is 8"),
        ({"plan__largest_batch": 16, "plan__microbatches": 2}, "Leave out one of the two."),
        ({"plan__memory_fraction": 1.5}, "it must be less than or equal to 1"),
        ({"plan__pin": "[]"}, "plan.pin is []"),
    ],
)
def test_contradictions_in_a_run_file_are_one_sentence_before_anything_is_measured(
    values: dict[str, object], part: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bireme.train.captured_run.profile", lambda *_, **__: 1 / 0)
    words = settings(plan__file="", **values)
    found = bireme(capsys, "train", str(write_run(tmp_path)), *words, "--dry-run")
    assert found.status == 2, found.err
    assert part in found.err
    assert len(found.err.strip().splitlines()) == 1
