"""A run from its first machine to its model, with everything that may happen to its machines in between.

Each machine has an address and a folder of its own. The last one has a slow link and is slower.
"""

import json
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.killing.mortal_run import losses_of_one_process
from bireme.machines.keys import HOME
from bireme.sync.coordinator.ledger_check import check_ledger
from bireme.train.joined_processes import RUNS
from tests.support.copies import Copy
from tests.support.extent import TRY_ALL
from tests.support.hosts import Host, hosts, set_cable
from tests.support.paced_samples import PACE
from tests.support.patience import patience_s
from tests.support.training import Running, metrics, settings
from tests.train.test_train_joined import lines_of
from tests.train.test_train_phases import planned

pytest.importorskip("cryptography", reason="keys of machines need it")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TRY_ALL, reason="four machines for minutes: make test-all"),
]
NARROW = "gpt:layers=4,width=16,heads=2,vocab=257,context=32"
"""With a large batch it is much work for few gradients. So a fourth machine with a slow link is predicted to
save time, even if lines are measured while the processor is busy.
"""
CUT_S = 12.0
"""Longer than a lease, and shorter than the patience with which the run is planned again."""


class Machine:
    """A machine with an address, a key and a folder for runs of its own."""

    def __init__(self, folder: Path, host: Host, name: str, stack: ExitStack, pace_s: float) -> None:
        self.host, self.name, self._folder, self._stack = host, name, folder, stack
        self.runs = folder / f"runs-of-{name}"
        self._variables = {HOME: str(folder / name), RUNS: str(self.runs), PACE: str(pace_s)}

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.runs / "run"

    def type(self, *words: str) -> Running:
        """Type `bireme WORDS…` there."""
        process = Copy(
            ["-m", "bireme", *words], self._folder, variables=self._variables, first=self.host.begin
        )
        self._stack.callback(process.close)
        return Running(process, self.run, process.err)


def test_machines_come_go_and_are_lost_with_their_coordinator_and_the_model_is_that_of_one_process(
    tmp_path: Path,
) -> None:
    path = planned(tmp_path, "quorum", model=NARROW)
    more = settings(
        training__steps=400,
        training__batch_size=144,
        training__learning_rate=0.0005,
        plan__schedule="1f1b",
        sync__lease_s=5.0,
        elastic__patience_s=20.0,
        checkpoint__every_steps=20,
    )
    with ExitStack() as stack:
        found = stack.enter_context(hosts(4, slow=3, megabits_per_s=200.0))
        red, blue, green, gray = (
            Machine(tmp_path, host, name, stack, pace_s)
            for host, name, pace_s in zip(
                found, ("red", "blue", "green", "gray"), (0.01, 0.01, 0.01, 0.015), strict=True
            )
        )
        words = ("--machines", "3..4", "--wait", "5", "--deputy", "blue", "--json")
        first = red.type("coordinate", str(path), "--listen", f"{red.host.address}:0", *words, *more)
        lines = lines_of(first, 3)
        second, third = (
            one.type(*words, "--name", one.name) for one, words in zip((blue, green), lines, strict=False)
        )
        first.wait_for_step(3)
        second.wait_for_words("bireme coordinate --take-over run")

        last = gray.type("join", *lines[2][2:], "--name", "gray")  # finds the coordinator in its network
        last.wait_for_words(f"{lines[2][1]} coordinates the run run with Bireme")
        first.wait_for_words("Phase 2 trains")
        first.wait_for_words("Phase 2: a batch takes")

        set_cable(1, is_plugged=False)
        first.wait_for_words("blue (10.98.0.2) is gone")
        time.sleep(CUT_S)
        set_cable(1, is_plugged=True)
        first.wait_for_words("blue (10.98.0.2) is back")

        last.kill_all()
        first.wait_for_words("gray (10.98.0.4) is gone")
        step = metrics(first.run, "train")[-1]["step"]
        first.wait_for_step(step + 5)

        first.kill_all()
        second.wait_for_words("The coordinator does not answer. The training goes on.")
        where = ("--listen", f"{blue.host.address}:0")
        successor = blue.type("coordinate", "--take-over", "run", *where, "--json")
        second.wait_for_words(f"The coordinator answers at {blue.host.address}")
        out, said = successor.process.communicate(timeout=3 * patience_s())
        assert successor.process.returncode == 0, said
        assert [one.process.wait(patience_s()) for one in (second, third)] == [0, 0], second.said
    assert "green (10.98.0.3) is back" in said
    assert json.loads(out)["run"]["steps"] == 400
    assert not [*(tmp_path / "blue" / "deputy").iterdir()]
    check = check_ledger(blue.run / "ledger.jsonl")
    assert check.is_whole
    assert (blue.run / "model").is_dir()
    trained = {one["step"]: one["loss"] for one in metrics(blue.run, "train")}
    expected = losses_of_one_process(blue.run, num_microbatches=4)
    found = [trained[step] for step in sorted(trained)]
    assert found == pytest.approx(expected, rel=1e-4)
