"""The scripts that start a run on several machines: they are whole, and those that can run here do."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import patience_s
from tests.support.ranks import wait_until_gone
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
    """One process of torchrun's, for all of this is in new Pythons, which take seconds to begin."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    model, data = f"python:{SAMPLES}:regression", f"{SAMPLES}:regressed"
    run_file, root = write_run(tmp_path, "1f1b", 1, model=model, data=data), str(EXAMPLES.parents[1])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        [str(EXAMPLES / "torchrun.sh"), str(run_file), "127.0.0.1", "1", "0", "--set", "training.steps=4"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=root,
        env={**os.environ, "PORT": port, "PATH": path, "PROCESSES": "1"},
    )
    try:
        said, _ = process.communicate(timeout=patience_s())
    finally:
        process.kill()
        process.communicate()
        wait_until_gone([process.pid])

    assert process.returncode == 0, said
    assert sorted(losses(tmp_path / "runs" / run_file.stem)) == [1, 2, 3, 4]
