"""Train over the workers of a Ray cluster: python ray_train.py RUN.toml NAME STORAGE [NUM_WORKERS]

Ray Train places the workers and starts them again if one is lost; each runs `bireme train` as a process of
its own, for a run wants the main thread. The run goes on in the folder STORAGE/runs/NAME, which all
machines share. Paths in the run file are relative to the folder that this script is called in.
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
"""Statuses of `bireme train` that another start would not change: done, a mistake, started often enough."""


def main() -> None:
    """Start a worker for each GPU that is asked for, or on CPUs where there are none."""
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
    """On each worker: be the rank that Ray says, at a port that the first one finds.

    Returns a final status; any other raises, so that Ray starts all workers again.
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
        # MASTER_ADDR is there already: Ray names the address of the first worker in it.
        "MASTER_PORT": str(port[0]),
        # With these the process ends with this worker, and knows that it may be started again.
        "TORCHELASTIC_RUN_ID": config["name"],
        "TORCHELASTIC_MAX_RESTARTS": "3",
    }
    settings = ["--set", f"log.name={config['name']}", "--set", f"log.folder={config['storage']}/runs"]
    words = [sys.executable, "-m", "bireme", "train", config["run"], *settings]
    status = subprocess.run(words, env=environment, cwd=config["folder"], check=False).returncode
    if status not in FINAL:
        raise RuntimeError(f"Rank {context.get_world_rank()} has ended with status {status}.")
    return status


if __name__ == "__main__":
    main()
