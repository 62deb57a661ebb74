"""DistributedDataParallel with its PowerSGD hook, or with gradients in bfloat16.

PowerSGD has one bucket: its callbacks wait for further sums in gloo's two threads, and two buckets at a time
can wait for each other for ever. Torch refuses its own bfloat16 hook without a GPU, so that one is written
here, in the same words.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.racing.task import adamw, first_model, set_rate

ONE_BUCKET_MB = 1024


def _in_bfloat16(
    _: None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch lacks its declaration
) -> torch.futures.Future[torch.Tensor]:
    sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future: torch.futures.Future[Any] = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


class _Replica:
    """`choice`: hook, rank, learning_rate."""

    def __init__(self, choice: Mapping[str, Any], seed: int) -> None:
        self._model, self._rate = first_model(seed), choice["learning_rate"]
        is_power = choice["hook"] == "powersgd"
        bucket_mb = ONE_BUCKET_MB if is_power else None
        self._whole = DistributedDataParallel(self._model, broadcast_buffers=False, bucket_cap_mb=bucket_mb)
        if is_power:
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=choice["rank"], start_powerSGD_iter=10
            )
            self._whole.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            self._whole.register_comm_hook(None, _in_bfloat16)
        self._optimizer = adamw(self._model, self._rate)

    def step(self, number: int, batch: Tensor) -> None:
        set_rate(self._optimizer, self._rate, number)
        self._optimizer.zero_grad()
        own = batch[dist.get_rank() :: dist.get_world_size()]
        self._whole(own, own)["loss"].backward()
        self._optimizer.step()

    def weights(self) -> Mapping[str, Tensor]:
        return dict(self._model.named_parameters())


def enter(choice: Mapping[str, Any], seed: int) -> _Replica:
    """A replica."""
    return _Replica(choice, seed)
