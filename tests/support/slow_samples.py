"""Datasets for worker processes: one that draws, and others that fail, hang or die, once or always."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["dying", "dying_once", "failing", "hanging", "hanging_once", "is_first", "noting", "numbered"]

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


class DyingOnce(Numbered):
    """Sample 7 kills the first process that makes it."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == 7 and is_first():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(number)


class HangingOnce(Numbered):
    """Sample 7 is never made by the first process that is to."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == 7 and is_first():
            time.sleep(1000)
        return super().__getitem__(number)


def is_first() -> bool:
    """Whether no process has asked before, in a test that names the file of a mark."""
    try:
        Path(os.environ["BIREME_TEST_MARK"]).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


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


def dying_once() -> DyingOnce:
    return DyingOnce()


def hanging_once() -> HangingOnce:
    return HangingOnce()


def hanging() -> Hanging:
    return Hanging()


def noting() -> Noting:
    return Noting()
