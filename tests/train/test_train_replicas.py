"""`sync.mode = "quorum"` with real processes: one is killed, one is stopped, and the run goes on."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bireme.model.graph_file import load_graph
from bireme.plan.plan_file import load_plan
from bireme.runtime.optimizers import named_optimizer
from bireme.runtime.pipeline import Pipeline
from bireme.train.folder import RunFolder
from bireme.train.model import RunModel
from bireme.train.rates import rate_factor
from bireme.train.run_data import data_of
from tests.support.command import bireme
from tests.support.training import losses, running, settings, write_run

pytestmark = pytest.mark.slow

PACED = "tests.support.paced_samples:paced"
PACE_S = 0.01
UNTIED = "gpt:layers=2,width=16,heads=2,vocab=257,context=32,tied=false"
DEPTH, WIDTH = 2, 2


def write_quorum(folder: Path, model: str = UNTIED, **more: object) -> Path:
    """A run file of two replicas of two stages."""
    path = write_run(folder, "2bw", DEPTH, model=model, data=PACED)
    plan = folder / "plan-2bw-2.json"
    document = json.loads(plan.read_text())
    document["plan"]["width"] = WIDTH
    plan.write_text(json.dumps(document))
    text = path.read_text().replace(f"workers = {DEPTH}", f"workers = {DEPTH * WIDTH}")
    keys = "".join(f"{name} = {value}\n" for name, value in more.items())
    path.write_text(f'{text}\n[sync]\nmode = "quorum"\n{keys}')
    return path


def ledger_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "round"]


def losses_of_one_process(run: Path, ledger: list[dict[str, Any]]) -> list[float]:
    """What one process makes of the ledger's samples, batch by batch."""
    torch.set_num_threads(1)
    folder = RunFolder.of(run)
    asked = folder.load_run()
    model, graph = RunModel.of(asked, 1), load_graph(folder.graph)
    data = data_of(asked, model)
    order = data.order(asked.data.seed)

    def batch(line: dict[str, Any]) -> dict[str, Any]:
        places = [pair for own in line["samples"] for pair in own]
        numbers = [int(one) for begin, end in places for one in order.numbers(begin, end - begin)]
        return dict(data.training.take(numbers))

    alone = replace(load_plan(folder.plan).plan, cuts=(), width=1, updates_early=False)
    optimizer = named_optimizer(
        asked.training.optimizer,
        lr=asked.training.learning_rate,
        weight_decay=asked.training.weight_decay,
        betas=asked.training.betas,
    )
    pipeline = Pipeline(
        graph,
        alone,
        weights=model.weights(graph),
        optimizer=optimizer,
        clip_norm=asked.training.clip_norm or None,
        lr=rate_factor(asked.training),
        seed=asked.training.seed,
    )
    return [result.loss for result in pipeline.train(map(batch, ledger))]


def test_a_run_goes_on_when_one_rank_is_killed_and_another_one_is_stopped(tmp_path: Path) -> None:
    """Each comes back with its replica, though the first start of one fails by what is told as a mistake. One
    process learns the same of the ledger's samples.
    """
    mistake = tmp_path / "mistake"
    path, run = write_quorum(tmp_path, lease_s=2.0), tmp_path / "runs" / "run"
    more = settings(training__steps=5000, cluster__timeout_s=16)
    with running(run, "train", str(path), *more, "--json", pace_s=PACE_S, mistake=mistake) as train:
        train.wait_for_step(4)
        mistake.touch()
        os.kill(train.ranks[-1], signal.SIGKILL)
        train.wait_for_words("Replica 1 is back")
        os.kill(train.ranks[0], signal.SIGSTOP)
        train.wait_for_words("Replica 0 is back")
        os.kill(train.process.pid, signal.SIGTERM)
        ended = train.ended()
    document, ledger = ended.document, ledger_of(run)

    assert document["reason"] == "signal"
    assert document["checkpoint"] == document["steps"]
    assert "killed by signal 9" in ended.err
    assert "The samples are out of reach. The run goes on with replica 0" in ended.err
    assert "has other weights" not in ended.err
    members = [one["members"] for one in document["membership"]]
    assert members[0] == members[-1] == [0, 1]
    assert [one for one in members if len(one) == 1] == [[0], [1]]
    sync = document["sync"]
    assert (sync["mode"], sync["rounds"], document["steps"]) == ("quorum", len(ledger), len(ledger))
    places = [place for line in ledger for own in line["samples"] for one in own for place in range(*one)]
    assert len(set(places)) == len(places) == sync["samples_committed"]
    assert sync["samples_redone"] == sum(line["returned"] for line in ledger)
    assert sync["epochs"] >= 5
    found = losses(run)
    expected = losses_of_one_process(run, ledger)
    assert len(found) >= len(expected) - 2  # who speaks for the run may die with a line unwritten
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step - 1], rel=1e-3), step


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (settings(sync__codec="int8"), "sync.codec is 'int8'"),
        (settings(balance__mode="start"), "balance.mode is 'start'"),
    ],
)
def test_what_quorum_does_not_do_is_refused_before_anything_starts(
    more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bireme(capsys, "train", str(write_quorum(tmp_path)), *more)

    assert result.status == 2
    assert words in result.err
    assert not (tmp_path / "runs").exists()
