"""Two replicas that train a small GPT together: the engine with a codec, or torch's own DDP with its hook.

Both take the same batches, the same weights at first, the same optimizer and the same rates. Bytes are those
that the network device of the processes has sent, whoever sent them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.delay_study.task import SIZES, text
from bireme.codec.sum_description import WHOLE_STEPS
from bireme.model.capture import capture
from bireme.model.sources import load_source
from bireme.model.weights import materialize
from bireme.plan.plan import Plan
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.settings import PipelineSettings, named_optimizer
from bireme.runtime.stepper import OptimizerFactory
from bireme.runtime.world import World

__all__ = ["REPLICAS", "TORCH_DENSE", "TORCH_POWER_SGD", "Outcome", "train"]

REPLICAS = 2
SIZE = SIZES["small"]
RATE = 4e-3
WARM_UP, CLIP_NORM = 0.1, 1.0
FIRST = WHOLE_STEPS + 2
"""Steps that count neither for seconds nor for bytes: in the first, low rank sends whole gradients."""

TORCH_DENSE, TORCH_POWER_SGD = "torch", "torch-powersgd"
"""Contenders that are not a codec of ours; the second is followed by a colon and its rank."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run. `step_s` is the median, `processor_s` the mean of one replica's processor time,
    `network_bytes` the mean of a step and of both replicas;
    `times_fewer` compares what the sums sent with what they would have sent as they are, None of torch's.
    """

    codec: str
    seed: int
    steps: int
    train_loss: float
    loss: float
    step_s: float
    processor_s: float
    network_bytes: float
    times_fewer: float | None


def train(world: World, codec: str, seed: int, steps: int) -> Outcome:
    """Train as one of the replicas; all of them find the same."""
    torch.set_num_threads(1)
    run = _with_torch if codec.startswith("torch") else _with_engine
    return run(world, codec, seed, steps)


def _with_engine(world: World, codec: str, seed: int, steps: int) -> Outcome:
    source = load_source(_source(), batch=SIZE.num_samples // REPLICAS)
    pipeline = Pipeline(
        capture(source.model, source.example_inputs, name="small GPT"),
        Plan((), 1, "1f1b", width=REPLICAS),
        world,
        weights=lambda names: materialize(source.model, names, seed=seed),
        optimizer=_optimizer(),
        settings=PipelineSettings(clip_norm=CLIP_NORM, lr=lambda step: _rate(step, steps), sum_codec=codec),
    )
    clock, losses = _Clock(), []
    try:
        for result in pipeline.train(_batch(seed, number) for number in range(steps)):
            losses.append(result.loss)
            clock.step()
        weights = pipeline.full_state_dict()
        sums = pipeline.sum_bytes
    finally:
        pipeline.close()
    loss = math.nan if world.rank else _loss(source.model, weights)
    return _outcome(codec, seed, clock, losses, loss, sums.raw / sums.sent)


def _with_torch(world: World, codec: str, seed: int, steps: int) -> Outcome:
    world.join_torch()
    source = load_source(_source(), batch=SIZE.num_samples // REPLICAS)
    model = _filled(source.model, materialize(source.model, _names(source.model), seed=seed))
    replica = DistributedDataParallel(model)
    if codec != TORCH_DENSE:
        state = PowerSGDState(
            None, matrix_approximation_rank=int(codec.rpartition(":")[2]), start_powerSGD_iter=WHOLE_STEPS
        )
        replica.register_comm_hook(state, powerSGD_hook)
    made = _optimizer()([*model.named_parameters()])
    optimizers = [made] if isinstance(made, torch.optim.Optimizer) else list(made)
    clock, losses = _Clock(), []
    for step in range(steps):
        for group in (group for one in optimizers for group in one.param_groups):
            group["lr"] = RATE * _rate(step, steps)
        own = {name: rows.chunk(REPLICAS)[world.rank] for name, rows in _batch(seed, step).items()}
        loss = replica(**own)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        for one in optimizers:
            one.step()
            one.zero_grad()
        losses.append(float(loss.detach()))
        clock.step()
    dist.barrier()
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    loss_now = math.nan if world.rank else _loss(source.model, weights)
    return _outcome(codec, seed, clock, losses, loss_now, None)


class _Clock:
    """Seconds between steps, and bytes on the network since the first that count."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self._since = perf_counter()
        self._bytes = self._bytes_now = 0.0
        self._processor_s = self._processor_now_s = 0.0

    def step(self) -> None:
        now = perf_counter()
        self.steps_s.append(now - self._since)
        self._since = now
        if len(self.steps_s) >= FIRST:
            self._bytes_now, self._processor_now_s = _network_bytes(), process_time()
            self._processor_s = self._processor_s or self._processor_now_s
            self._bytes = self._bytes or self._bytes_now

    def processor_s(self) -> float:
        """Of this replica, in the mean of a step."""
        return (self._processor_now_s - self._processor_s) / max(len(self.steps_s) - FIRST, 1)

    def bytes_per_step(self) -> float:
        """Of both replicas."""
        return (self._bytes_now - self._bytes) / max(len(self.steps_s) - FIRST, 1)


def _outcome(
    codec: str, seed: int, clock: _Clock, losses: Sequence[float], loss: float, times: float | None
) -> Outcome:
    last = losses[-20:]
    return Outcome(
        codec,
        seed,
        steps=len(losses),
        train_loss=sum(last) / len(last),
        loss=loss,
        step_s=median(clock.steps_s[FIRST:]),
        processor_s=clock.processor_s(),
        network_bytes=clock.bytes_per_step(),
        times_fewer=times,
    )


def _source() -> str:
    config = SIZE.config
    return (
        f"gpt:layers={config.layers},width={config.width},heads={config.heads},vocab={config.vocab},"
        f"context={config.context},tied=false"
    )


def _batch(seed: int, number: int) -> dict[str, Tensor]:
    windows = text().batch(SIZE, seed, number)
    return {"input_ids": windows, "labels": windows}


def _optimizer() -> OptimizerFactory:
    return named_optimizer("adamw", lr=RATE)


def _rate(step: int, steps: int) -> float:
    """A warm-up, then half a cosine down to a tenth."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(steps - warm, 1))


def _names(model: nn.Module) -> list[str]:
    return [*(name for name, _ in model.named_parameters()), *(name for name, _ in model.named_buffers())]


def _filled(model: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A model with these weights, in memory of its own."""
    model.load_state_dict(
        {name: tensor.clone() for name, tensor in weights.items()}, strict=False, assign=True
    )
    return model


def _loss(model: nn.Module, weights: dict[str, Tensor]) -> float:
    """On what was held out, with nothing coded."""
    whole = _filled(model, weights).eval()
    call: Callable[..., Any] = whole
    windows = text().at_the_end()
    with torch.no_grad():
        return float(call(input_ids=windows, labels=windows)["loss"])


def _network_bytes() -> float:
    """All that the network devices of this process's namespace have sent."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    return sum(float(line.split(":")[1].split()[8]) for line in lines)
