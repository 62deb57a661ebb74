"""Runs of one rank inside the test's own process, for tests that are about training and not about processes.

Starting a process costs more than training these tiny models. Only the call of `launch` is replaced: the run
is prepared, planned, trained, exported and summed up as ever.
"""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bireme.devices import Backend
from bireme.runtime.world import World
from tests.support.command import bireme_once
from tests.support.once import made_once
from tests.support.training import losses, write_run

__all__ = ["alone", "learned_alone"]


@contextmanager
def alone() -> Iterator[None]:
    """Inside of this, runs of one rank start no process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bireme.train.launching.launch", _launch)
        yield


def _launch(
    function: Callable[..., Any],
    num_processes: int,
    *args: object,
    timeout_s: float,
    threads_per_process: int | None,
    backend: Backend,
    device: str,
) -> list[Any]:
    assert num_processes == 1, "a run alone has one rank"
    with World.alone(timeout_s=timeout_s, backend=backend, device=device) as world:
        return [function(world, *pickle.loads(pickle.dumps(args)))]


def learned_alone() -> dict[int, float]:
    """The loss of every step of the run of `write_run` that one process trains."""
    return losses(made_once("alone", _train) / "runs" / "run")


def _train(folder: Path) -> None:
    with alone():
        trained = bireme_once("train", str(write_run(folder, "1f1b", 1)))
    assert trained.status == 0, trained.err
