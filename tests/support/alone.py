"""Runs of one rank inside the test's own process, for tests that are about training and not about processes.

Starting a process costs more than training these tiny models. Only the call of `launch` is replaced: the run
is prepared, planned, trained, exported and summed up as ever.
"""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bireme.devices import Backend
from bireme.runtime.world import World

__all__ = ["alone"]


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
