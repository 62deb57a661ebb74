"""One rank of a contender that is not Bireme: `python -m benchmarks.racing.rank ORDER.json` on each host.

It trains by the contender's code, and has the weights evaluated every so many steps. The clock stands still
meanwhile: it counts from when the first rank goes on to when the last rank has stopped.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.hosts import CARD
from benchmarks.racing.task import Batches, Judge

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Order:
    """What a rank is to do: `module` names the contender's code, `choice` its settings.

    It trains until the loss is at most `target`, or to the end of `steps` or of `seconds`.
    """

    module: str
    choice: dict[str, Any]
    seed: int
    steps: int
    every: int
    target: float
    seconds: float
    folder: str


@dataclass(frozen=True, slots=True)
class Reached:
    """A place of a run: the step, seconds of training so far, bytes on the busiest card, and the loss."""

    step: int
    seconds: float
    card_bytes: int | None
    loss: float


class Racer(Protocol):
    """What a contender's `enter(choice, seed)` gives on every rank."""

    def step(self, number: int, batch: Tensor) -> None:
        """Train on a batch, of which this rank takes its part."""

    def weights(self) -> Mapping[str, Tensor]:
        """The weights that this rank has, by their names in the whole model."""


def card_bytes(process: int | str = "self") -> int | None:
    """Bytes that the card of a process's host has carried in the busier direction; None without a card."""
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        name, _, counts = line.strip().partition(":")
        if name == CARD:
            received, sent = (int(counts.split()[place]) for place in (0, 8))
            return max(received, sent)
    return None


class _Clock:
    """Seconds and bytes of all ranks, which stand still between two windows."""

    def __init__(self, folder: Path, judge: Judge | None) -> None:
        self.seconds, self.bytes = 0.0, 0
        self._folder, self._judge = folder, judge
        self._begin_s, self._begin_bytes = time.monotonic(), card_bytes()

    def begin(self) -> None:
        self._begin_s, self._begin_bytes = time.monotonic(), card_bytes()

    def stop(self, step: int, racer: Racer) -> Reached | None:
        """On the first rank, where all stand now."""
        own = card_bytes()
        moved = 0 if own is None or self._begin_bytes is None else own - self._begin_bytes
        told = torch.tensor([time.monotonic(), self._begin_s, moved], dtype=torch.float64)
        path = self._folder / f"weights-{dist.get_rank()}.pt"
        torch.save(dict(racer.weights()), path)
        all_told = [torch.empty_like(told) for _ in range(dist.get_world_size())]
        dist.all_gather(all_told, told)
        ends, begins, moves = (one.tolist() for one in torch.stack(all_told, 1))
        self.seconds += max(ends) - min(begins)
        self.bytes += int(max(moves))
        if self._judge is None:
            return None
        loss = self._judge.loss(torch.load(path.with_name(f"weights-{rank}.pt")) for rank in range(len(ends)))
        return Reached(step, self.seconds, None if own is None else self.bytes, loss)


def race(order: Order) -> None:
    """Train as ordered; the first rank writes a line for each evaluation."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    is_first = dist.get_rank() == 0
    folder, batches = Path(order.folder), Batches(order.seed)
    racer: Racer = import_module(order.module).enter(order.choice, order.seed)
    clock, is_over = _Clock(folder, Judge() if is_first else None), torch.zeros(())
    clock.stop(0, racer)
    clock.seconds = 0.0
    clock.bytes = 0
    clock.begin()
    for step in range(order.steps):
        racer.step(step, batches[step])
        if (step + 1) % order.every and step + 1 < order.steps:
            continue
        reached = clock.stop(step + 1, racer)
        if reached is not None:
            with (folder / "reached.jsonl").open("a") as file:
                file.write(json.dumps(asdict(reached)) + "\n")
            is_over.fill_(not order.target < reached.loss or reached.seconds > order.seconds)
        dist.broadcast(is_over, 0)
        if is_over:
            break
        clock.begin()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # connections that torch keeps open may hold up the end


if __name__ == "__main__":
    race(Order(**json.loads(Path(sys.argv[1]).read_text())))
