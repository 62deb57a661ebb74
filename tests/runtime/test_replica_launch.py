"""What a launch of replicas makes of their ends, without any process."""

from pathlib import Path
from typing import cast

import pytest

from bireme.balance.shares import Limits
from bireme.runtime.coordinator_process import CoordinatorProcess
from bireme.runtime.failures import Failure, RunFailed
from bireme.runtime.quorum import launch as launching
from bireme.runtime.quorum.launch import ReplicaOrder, launch_replicas
from bireme.runtime.quorum.site import Site
from bireme.runtime.world import World
from bireme.sync.coordinator.ledger_line import LEDGER
from bireme.sync.coordinator.messages import Life
from bireme.sync.coordinator.settings import Settings, SyncMode


class Well:
    """A coordinator that nothing is wrong with."""

    port, is_closed = 0, False

    def trouble(self) -> None:
        """There is none."""

    def ended(self, life: Life) -> None:
        """Nobody has to know."""

    def close(self) -> None:
        self.is_closed = True


class AllWait:
    """In the place of a replica's processes: one of them has found that all replicas wait for each other."""

    ranks, is_given_up = (), False
    cause = Failure.of(RunFailed("All replicas wait."), 0, None)

    def __init__(self, *_: object) -> None:
        """It has no order."""

    def __enter__(self) -> "AllWait":
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to end."""

    def start(self) -> None:
        """There is nothing to start."""

    supervise = start


def never_runs(_world: World, _order: ReplicaOrder) -> None:
    raise AssertionError("there is no process")


def test_a_standstill_ends_the_run_by_no_mistake_of_the_user_and_no_replica_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next life could do nothing else."""
    monkeypatch.setattr(launching, "Crew", AllWait)
    coordinator, told = Well(), list[str]()
    settings = Settings(SyncMode.GROUPS, 2, 1, 8, Limits((1, 1), (8, 8)))
    site = Site(0, cast(CoordinatorProcess, coordinator), (("127.0.0.1", 0),), "secret", (0, 1), 0.0)
    with pytest.raises(RunFailed, match=r"^All replicas wait\.$"):
        launch_replicas(never_runs, settings, ledger=tmp_path / LEDGER, tell=told.append, site=site)
    assert told == []
    assert coordinator.is_closed
