"""One replica of torchft, as a program: `python -m … LIGHTHOUSE ADDRESS SAMPLES LOG`. It trains until it is
killed, and its log has the time of each step that it took part in and committed.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torchft  # type: ignore[import-not-found]  # only the peer's Python has it
from torchft.ddp import PureDistributedDataParallel  # type: ignore[import-not-found]  # as above

from benchmarks.home import model as home
from bireme.runtime.stores import TCPStore


def replica(lighthouse: str, address: str, samples: int, path: Path) -> None:
    """Train until it is killed."""
    torch.set_num_threads(1)
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    module, rows = home.model()[0], home.samples()
    inner = torch.optim.AdamW(module.parameters(), lr=0.0005)

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    limits = dict.fromkeys(("timeout", "quorum_timeout", "connect_timeout"), timedelta(seconds=30))
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=f"http://{lighthouse}",
        replica_id=path.stem,
        hostname=address,
        **limits,
    )
    # DistributedDataParallel of 0.2.0 ends the process by an assertion whenever a sum fails.
    model = PureDistributedDataParallel(manager, module)
    optimizer = torchft.Optimizer(manager, inner)
    with path.open("w") as file:
        while True:
            picked = torch.randint(len(rows["input_ids"]), (samples,))
            before = manager.current_step()
            optimizer.zero_grad()
            model(rows["input_ids"][picked], rows["labels"][picked])["loss"].backward()
            optimizer.step()
            if manager.current_step() > before and manager.is_participating():
                file.write(f"{time.time()}\n")
                file.flush()


if __name__ == "__main__":
    replica(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
