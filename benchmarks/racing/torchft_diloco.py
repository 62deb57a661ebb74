"""torchft's DiLoCo: a manager and a server beside each replica, and a lighthouse on the first host.

It needs an interpreter that has torchft (`--rivals PYTHON`).
"""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft  # type: ignore[import-not-found]  # only the contender's Python has it
from torch import Tensor
from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]  # as above
from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]  # as above

from benchmarks.racing.diloco import OUTER_MOMENTUM, OUTER_RATE
from benchmarks.racing.field import ADDRESS
from benchmarks.racing.task import adamw, first_model, set_rate
from bireme.runtime.stores import TCPStore

_TIMEOUT = timedelta(seconds=60)


class _Replica:
    """`choice`: inner_steps, learning_rate."""

    def __init__(self, choice: Mapping[str, Any], seed: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        address, first = os.environ[ADDRESS], [""]
        if rank == 0:
            self._lighthouse = LighthouseServer(bind=f"{address}:0", min_replicas=size)
            first[0] = f"http://{address}:{self._lighthouse.address().rpartition(':')[2]}"
        dist.broadcast_object_list(first, 0)
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._model, self._rate = first_model(seed), choice["learning_rate"]
        self._optimizer = adamw(self._model, self._rate)
        outer = torch.optim.SGD(self._model.parameters(), OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
        self._manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=_TIMEOUT),
            load_state_dict=self._model.load_state_dict,
            state_dict=self._model.state_dict,
            min_replica_size=size,
            use_async_quorum=False,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self._store.port,
            lighthouse_addr=first[0],
            replica_id=f"replica-{rank}",
            hostname=address,
            timeout=_TIMEOUT,
            quorum_timeout=_TIMEOUT,
            connect_timeout=_TIMEOUT,
        )
        self._rounds = DiLoCo(
            self._manager, [self._model], self._optimizer, outer, sync_every=choice["inner_steps"]
        )
        self._rounds.__enter__()

    def step(self, number: int, batch: Tensor) -> None:
        set_rate(self._optimizer, self._rate, number)
        self._optimizer.zero_grad()
        own = batch[dist.get_rank() :: dist.get_world_size()]
        self._model(own, own)["loss"].backward()
        self._optimizer.step()  # DiLoCo's hook makes the rounds

    def weights(self) -> Mapping[str, Tensor]:
        return dict(self._model.named_parameters())


def enter(choice: Mapping[str, Any], seed: int) -> _Replica:
    """A replica."""
    return _Replica(choice, seed)
