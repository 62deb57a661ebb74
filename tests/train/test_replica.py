"""A rank of a replica that may die, as the loop of a run sees it."""

from pathlib import Path
from typing import cast

import pytest

from bireme.runtime.quorum.launch import Seat
from bireme.runtime.world import World
from bireme.sync.coordinator.messages import Life
from bireme.train import worker
from bireme.train.worker import Start, train_replica


def test_a_replica_that_is_started_again_needs_no_checkpoint_that_may_be_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Start] = []
    monkeypatch.setattr(worker, "train_rank", lambda _world, start, _seat: found.append(start))
    start = Start(Path("run"), Path("run/checkpoints/step-10"), None, False, {})
    for life in range(2):
        train_replica(cast(World, None), Seat(Life(1, life), (), "", 10.0), start)

    assert [one.checkpoint for one in found] == [start.checkpoint, None]
