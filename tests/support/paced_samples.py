"""Datasets for whole runs: tokens that come when a test wants them, and numbers of which some are none."""

import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bireme import balance

__all__ = [
    "GATE",
    "PACE",
    "a_number",
    "broken",
    "broken_at_its_end",
    "broken_for_ever",
    "failing_always",
    "failing_once",
    "gated",
    "impatient",
    "no_loss",
    "of_each",
    "paced",
    "regressed",
    "regression",
    "uncounted",
]

PACE = "BIREME_TEST_PACE_S"
"""Names the variable with the seconds that a sample takes; none if it is not set."""

GATE = "BIREME_TEST_GATE"
"""Names the variable with the file of a gate."""

LOADER = "bireme data"
"""The thread that reads ahead in a rank."""

NUM_SAMPLES, LENGTH, VOCABULARY = 400, 32, 257


class Paced:
    """Rows of tokens that count up in steps of their own."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        time.sleep(float(os.environ.get(PACE, "0")))
        ids = (torch.arange(LENGTH) * (number % 7 + 1) + number) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


def paced() -> Paced:
    return Paced()


def impatient() -> Paced:
    """The same, in a run that soon takes the slower of two stages for one that has become slow."""
    balance.LONG, balance.SLOW = 3, 1.0
    return Paced()


class Gated(Paced):
    """Rows of which a process gets as many as a file says by now, and waits for more."""

    def __init__(self) -> None:
        self._num_given = 0

    def __getitem__(self, number: int) -> dict[str, Any]:
        self._num_given += 1
        while self._num_given > int(Path(os.environ[GATE]).read_text() or "0"):
            time.sleep(0.01)
        return super().__getitem__(number)


def gated() -> Gated:
    return Gated()


class Failing(Gated):
    """Rows of which one cannot be read: the first that the loader of a rank asks for after a test has made
    the file of a mark. Its number is noted there; if it fails `always`, no rank can read it from then on.
    """

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self._always = always

    def __getitem__(self, number: int) -> dict[str, Any]:
        sample, mark = super().__getitem__(number), Path(os.environ["BIREME_TEST_MARK"])
        if threading.current_thread().name == LOADER and mark.exists():
            with mark.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                noted = file.read()
                file.write("" if noted else str(number))
            if not noted or (self._always and noted == str(number)):
                raise OSError("the disk does not answer")
        return sample


def failing_once() -> Failing:
    return Failing(always=False)


def failing_always() -> Failing:
    return Failing(always=True)


class Uncounted(Paced):
    """Rows whose tokens are read, and none of them is to be learnt."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        sample = super().__getitem__(number)
        return sample | {"labels": torch.full_like(sample["labels"], -100)}


def uncounted() -> Uncounted:
    return Uncounted()


class Network(nn.Module):
    """A few layers that fit numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return {"loss": functional.mse_loss(x.sum(1, keepdim=True), y)}


def regression() -> tuple[nn.Module, dict[str, Tensor]]:
    return Network(), {"x": torch.zeros(2, 4), "y": torch.zeros(2, 1)}


class Lossless(Network):
    """It tells what it makes, and not how wrong that is."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return {"output": x}


def no_loss() -> tuple[nn.Module, dict[str, Tensor]]:
    return Lossless(), {"x": torch.zeros(2, 4), "y": torch.zeros(2, 1)}


def of_each(outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
    """A loss that is not reduced to one number."""
    return (outputs["output"] - inputs["y"]).square()


def a_number(outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> float:
    """A loss that no parameter has a part in."""
    return 3.0


def regressed() -> dict[str, Tensor]:
    """All are numbers."""
    return _numbers(torch.tensor([], dtype=torch.int64))


def broken() -> dict[str, Tensor]:
    """One sample in sixty-four is no number."""
    return _numbers(torch.tensor([5]))


def broken_at_its_end() -> dict[str, Tensor]:
    """The last one is none, which is kept apart for evaluation."""
    return _numbers(torch.tensor([63]))


def broken_for_ever() -> dict[str, Tensor]:
    """None is a number."""
    return _numbers(torch.arange(64))


def _numbers(bad: Tensor) -> dict[str, Tensor]:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    x[bad] = torch.nan
    return {"x": x, "y": y}
