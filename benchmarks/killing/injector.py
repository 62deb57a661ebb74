"""The model and the data of runs in which ranks die, and what kills them there.

Who watches a run writes an order: which rank, after which part of the instructions of one of its next
batches, and which signal. The rank sends that to itself right before the instruction, and says before that
where it is. An order may also be for the moment in which it has written its part of a checkpoint.

    ORDERS/order.json    {"number": 3, "replica": 1, "stage": 0, "at": 0.4, "signal": 9}
    ORDERS/hit-3.json    {"pid": 4711, "where": "B5.1", "life": 2}
"""

import json
import os
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.runtime.exchange.agent import ExchangeAgent
from bireme.runtime.watch import Watch
from bireme.sync.coordinator.messages import RankId
from bireme.train.checkpoint.writer import CheckpointWriter

__all__ = ["MISTAKE", "ORDERS", "PACE", "SAVING", "model", "samples"]

ORDERS = "BIREME_KILLING_ORDERS"
"""Names the variable with the folder of orders."""
PACE = "BIREME_KILLING_PACE_S"
"""Names the variable with the seconds that a sample takes, as if the device were so slow."""
MISTAKE = "mistake"
"""Beside the orders: the next rank that looks for its samples finds none."""
SAVING = "saving"
"""Where an order is for a checkpoint."""
WIDTH, NUM_SAMPLES = 8, 5000


class Network(nn.Module):
    """A few layers that fit numbers. Under SGD the last bits of what was done before are forgotten, so sums
    in another order make no difference that grows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return {"loss": functional.mse_loss(x.sum(1, keepdim=True), y)}


def model() -> tuple[nn.Module, dict[str, Tensor]]:
    """For `model.source`."""
    rows = torch.zeros(2, WIDTH)
    return Network(), {"x": rows, "y": rows[:, :1]}


class Samples:
    """Rows of numbers and their noisy sums. Each takes its time."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._x = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
        noise = torch.randn(NUM_SAMPLES, 1, generator=generator)
        self._y = self._x.sin().sum(1, keepdim=True) + noise
        self._pace_s = float(os.environ.get(PACE, "0"))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        time.sleep(self._pace_s)
        return {"x": self._x[number], "y": self._y[number]}


def samples() -> Samples:
    """For `data.source`. Raises a `BiremeError` once, where somebody has put a mistake next to the orders.

    Every rank reads samples, and only then gets an agent: so here it begins to follow orders.
    """
    if ORDERS in os.environ:
        _follow_orders(Path(os.environ[ORDERS]))
    mistake = Path(os.environ.get(ORDERS, os.devnull)) / MISTAKE
    try:
        mistake.unlink()
    except OSError:
        return Samples()
    raise BiremeError("The samples are out of reach.")


class Injector:
    """Does what orders ask of this process, which is some rank once it has an agent."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / "order.json"
        self._rank: RankId | None = None
        self._stamp = 0
        self._order: dict[str, Any] | None = None
        self._counts: Counter[int] = Counter()
        """Instructions of each batch so far."""
        self._usual = 0
        """Instructions of a whole batch."""
        self._batch: int | None = None
        """In which to die."""

    def is_rank(self, rank: RankId) -> None:
        """This process is that rank."""
        self._rank = rank

    def before(self, step: Any) -> None:
        """An instruction is about to be run."""
        batch = getattr(step, "batch", None)
        if self._rank is None or batch is None:
            return
        if batch not in self._counts:
            self._usual = max(self._usual, self._counts.pop(batch - 4, 0))
            self._look()
            if self._batch is None and self._usual and self._order and self._order["at"] != SAVING:
                self._batch = batch
        self._counts[batch] += 1
        if batch == self._batch and self._counts[batch] > self._order_at() * self._usual:
            self._do(str(step))

    def is_saving(self) -> None:
        """A part of a checkpoint is written, and the checkpoint not yet complete."""
        self._look()
        if self._order is not None and self._order["at"] == SAVING:
            self._do("a checkpoint")

    def _order_at(self) -> float:
        return 0.0 if self._order is None else float(self._order["at"])

    def _look(self) -> None:
        try:
            stamp = self._path.stat().st_mtime_ns
        except OSError:
            return
        if stamp != self._stamp:
            self._stamp, found = stamp, json.loads(self._path.read_text())
            is_own = self._rank is not None and (found["replica"], found["stage"]) == (
                self._rank.replica,
                self._rank.stage,
            )
            is_open = not (self._folder / f"hit-{found['number']}.json").exists()
            self._order, self._batch = (found if is_own and is_open else None), None

    def _do(self, where: str) -> None:
        order, self._order, self._batch = self._order, None, None
        if order is not None and self._rank is not None:
            words = {"pid": os.getpid(), "where": where, "life": self._rank.life, "at_s": time.time()}
            write_text_atomically(self._folder / f"hit-{order['number']}.json", json.dumps(words))
            os.kill(os.getpid(), order["signal"])


@cache
def _follow_orders(folder: Path) -> None:
    """Have the engine of this process tell an injector where it is."""
    injector = Injector(folder)
    begin, write = ExchangeAgent.__init__, CheckpointWriter._write_own

    def begun(agent: ExchangeAgent, own: RankId, *words: Any, **more: Any) -> None:
        injector.is_rank(own)
        begin(agent, own, *words, **more)

    def written(writer: CheckpointWriter, draft: Any) -> Any:
        found = write(writer, draft)
        injector.is_saving()
        return found

    def does(watch: Watch, step: object) -> None:
        watch.__dict__["doing"] = step
        injector.before(step)

    told = property(lambda watch: watch.__dict__.get("doing"), does)
    for owner, name, value in (
        (ExchangeAgent, "__init__", begun),
        (CheckpointWriter, "_write_own", written),
        (Watch, "doing", told),
    ):
        setattr(owner, name, value)
