"""Datasets for worker processes: one that draws, one that fails, one that hangs, one that dies."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["dying", "failing", "hanging", "noting", "numbered"]

NUM_SAMPLES = 40


class Numbered:
    """Sample i holds i, and what three generators draw."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return {
            "number": number,
            "pixels": torch.full((2, 3), number, dtype=torch.bfloat16),
            "drawn": torch.tensor(draws, dtype=torch.float64),
            "flag": torch.tensor(number % 2 == 0),
        }


class Failing(Numbered):
    """Sample 7 cannot be made."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == 7:
            raise ValueError("the image is broken")
        return super().__getitem__(number)


class Dying(Numbered):
    """Sample 7 kills the process that makes it, as a lack of memory would."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(number)


class Hanging(Numbered):
    """From sample 7 on nothing is ever made."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number >= 7:
            time.sleep(1000)
        return super().__getitem__(number)


class Noting(Hanging):
    """Like one that hangs; each process that makes a sample leaves its number in a folder."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        Path(os.environ["BIREME_TEST_PIDS"], str(os.getpid())).touch()
        return super().__getitem__(number)


def numbered() -> Numbered:
    return Numbered()


def failing() -> Failing:
    return Failing()


def dying() -> Dying:
    return Dying()


def hanging() -> Hanging:
    return Hanging()


def noting() -> Noting:
    return Noting()
