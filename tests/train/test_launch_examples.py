"""The scripts that start a run on several machines: they are whole, and those that can run here do."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.torchrun_runs import torchrun_train
from tests.support.training import losses, write_run

SAMPLES = "tests.support.paced_samples"
EXAMPLES = Path(__file__).parents[2] / "examples" / "launch"


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_the_scripts_are_whole(name: str) -> None:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    subprocess.run(["bash", "-n", str(EXAMPLES / name)], check=True)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_manifests_start_torchrun_in_a_folder_that_all_share(path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="there is no yaml here")
    documents = list(yaml.safe_load_all(path.read_text()))

    assert [one["kind"] for one in documents] in (["TrainingRuntime", "TrainJob"], ["PyTorchJob"])
    assert "command: [torchrun, --no-python, bireme, train, run.toml]" in path.read_text()
    assert "claimName: training" in path.read_text()


def test_the_ray_example_is_whole() -> None:
    compile((EXAMPLES / "ray_train.py").read_text(), "ray_train.py", "exec")


@pytest.mark.slow
@pytest.mark.long
def test_the_torchrun_script_trains(tmp_path: Path) -> None:
    """The script calls a torchrun that prints its arguments, and these start copies of a process that has
    imported all: new Pythons take seconds to begin.
    """
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    model, data = f"python:{SAMPLES}:regression", f"{SAMPLES}:regressed"
    run_file = write_run(tmp_path, "1f1b", 1, model=model, data=data)
    script = [str(EXAMPLES / "torchrun.sh"), str(run_file), "127.0.0.1", "1", "0"]
    path = f"{torchrun.parent}:{os.environ['PATH']}"
    said = subprocess.run(
        [*script, "--set", "training.steps=4"],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PORT": str(free_port()), "PATH": path, "PROCESSES": "1"},
    ).stdout.splitlines()

    command = said.index("--no-python")
    assert said[command : command + 3] == ["--no-python", "bireme", "train"]
    run = tmp_path / "runs" / run_file.stem
    with torchrun_train(run, *said[command + 3 :], ranks=1, options=said[:command]) as started:
        ended = started.ended()
    assert ended.status == 0, ended.err
    assert sorted(losses(run)) == [1, 2, 3, 4]
