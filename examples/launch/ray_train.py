"""Train over the workers of a Ray cluster: python ray_train.py RUN.toml NAME STORAGE [NUM_WORKERS]

Ray Train places the workers and restarts them if one is lost. Each worker runs `bireme train` in a separate
process, because a run needs the main thread. The run is in the folder STORAGE/runs/NAME, which all machines
share. Paths in the run file are relative to the folder in which you call this script.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ray import train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

FINAL = (0, 2, 3)
"""Exit statuses of `bireme train` that a restart would not change: done, a mistake, restart limit reached."""


def main() -> None:
    """Start NUM_WORKERS workers, with a GPU each if USE_GPU is set."""
    run_file, name = sys.argv[1:3]
    storage = str(Path(sys.argv[3]).resolve())
    num_workers = int(sys.argv[4]) if len(sys.argv) > 4 else 2
    trainer = TorchTrainer(
        run_rank,
        train_loop_config={
            "run": str(Path(run_file).resolve()),
            "name": name,
            "storage": storage,
            "folder": str(Path.cwd()),
        },
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=bool(os.environ.get("USE_GPU"))),
        run_config=RunConfig(name=name, storage_path=storage, failure_config=FailureConfig(max_failures=3)),
    )
    sys.exit(trainer.fit().return_value)


def run_rank(config: dict[str, Any]) -> int:
    """Run one rank on a worker: the rank comes from Ray, the port from the first worker.

    Returns a final exit status; any other raises, so that Ray restarts all workers.
    """
    context = train.get_context()
    port = [0]
    if dist.get_rank() == 0:
        with socket.create_server(("", 0)) as free:
            port = [free.getsockname()[1]]
    dist.broadcast_object_list(port, src=0)
    environment = {
        **os.environ,
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "GROUP_RANK": str(context.get_node_rank()),
        # Ray has already set MASTER_ADDR to the address of the first worker.
        "MASTER_PORT": str(port[0]),
        # These tell the process to end with this worker, and that it may be restarted.
        "TORCHELASTIC_RUN_ID": config["name"],
        "TORCHELASTIC_MAX_RESTARTS": "3",
    }
    settings = ["--set", f"log.name={config['name']}", "--set", f"log.folder={config['storage']}/runs"]
    words = [sys.executable, "-m", "bireme", "train", config["run"], *settings]
    status = subprocess.run(words, env=environment, cwd=config["folder"], check=False).returncode
    if status not in FINAL:
        raise RuntimeError(f"Rank {context.get_world_rank()} ended with status {status}.")
    return status


if __name__ == "__main__":
    main()
