"""The Ray example: over the workers of Ray Train a run learns what it does alone, whatever is lost."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.paced_samples import PACE
from tests.support.patience import patience_s
from tests.support.ranks import wait_until_gone
from tests.support.torchrun_runs import paced_run
from tests.support.training import Ended, Running, losses, metrics, running, steps_of_checkpoints

pytest.importorskip("ray.train", reason="ray[train] is not installed")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_what_is_lost_is_started_again_and_the_curve_is_that_of_bireme_train(tmp_path: Path) -> None:
    run_file, run, alone = paced_run(tmp_path), tmp_path / "runs" / "first", tmp_path / "runs" / "run"
    with running(alone, "train", str(run_file), "--json") as plain:
        assert plain.ended().document["steps"] == 12
    with ray_train(run, run_file, pace_s=0.05) as started:
        started.wait_for_step(6)
        os.kill(ranks_of(run_file)[-1], signal.SIGKILL)
        started.wait_for_step(10)
        os.kill(parent(ranks_of(run_file)[0]), signal.SIGKILL)
        told = ended(started)

    assert told.status == 0, told.out + told.err
    first, second, third = (line["step"] for line in metrics(run, "start"))
    assert first == 0
    assert second in (4, 8)
    assert third == 8
    assert losses(run) == losses(alone)
    assert steps_of_checkpoints(run)[-1] == 12
    assert (run / "model" / "model.safetensors").is_file()


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    run_file = paced_run(tmp_path)
    text = run_file.read_text().replace("[cluster]", '[cluster]\nsource = "two-unequal-servers"')
    run_file.write_text(text.replace("workers = 2", ""))
    with ray_train(tmp_path / "runs" / "first", run_file) as started:
        told = ended(started)

    assert told.status == 2, told.out + told.err
    assert (told.out + told.err).count("but 2 processes were started. Start one per device.") == 1


@contextmanager
def ray_train(run: Path, run_file: Path, *, pace_s: float = 0.0) -> Iterator[Running]:
    """`ray_train.py` with two workers; nothing that Ray has started outlives the block."""
    scratch = tempfile.mkdtemp(prefix="ray")  # the paths of Ray's sockets must be short
    said = Path(scratch) / "said"
    words = [str(run_file), run.name, str(run.parents[1]), "2"]
    variables = {
        PACE: str(pace_s),
        "RAY_TMPDIR": scratch,
        "RAY_AUTH_MODE": "disabled",  # else Ray leaves a token in the home of who tests
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with said.open("w") as handle:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / "launch" / "ray_train.py"), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=handle,
            text=True,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, **variables},
        )
    try:
        yield Running(process, run, said)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        left = processes_with(f"RAY_TMPDIR={scratch}", "environ")
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until_gone(left)
        shutil.rmtree(scratch)


def ended(started: Running) -> Ended:
    """What came of it. Ray's own processes may take a while longer."""
    out, _ = started.process.communicate(timeout=patience_s())
    return Ended(started.process.returncode, out, started.said)


def ranks_of(run_file: Path) -> list[int]:
    """The processes of the run, in the order of their start."""
    return [
        pid
        for pid in processes_with(str(run_file), "cmdline")
        if "bireme" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    ]


def processes_with(words: str, name: str) -> list[int]:
    """Those that have these words in such a file of theirs."""
    found = []
    for path in Path("/proc").glob(f"[0-9]*/{name}"):
        with suppress(OSError):
            if words.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return sorted(found)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
