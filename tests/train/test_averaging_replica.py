"""A rank of a replica that averages weights, as the loop of a run sees it."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bireme.runtime.averaging.agent import AveragingAgent
from bireme.runtime.averaging.averages import Met
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.quorum.launch import ReplicaOrder
from bireme.runtime.stores import HashStore
from bireme.runtime.world import World
from bireme.sync.coordinator.messages import Life, Member, Word
from bireme.train.averaging_replica import AveragingReplica
from bireme.train.checkpoint.checkpoint import step_folder
from bireme.train.checkpoint.writer import CheckpointWriter
from bireme.train.replica import LeaderWriter
from bireme.train.run_checkpoints import RunCheckpoints
from bireme.train.run_file import RunFile
from bireme.train.stops import Reason, Stops
from tests.support.checkpoints import META, ignore, snapshot_of, steps_in

RUN = RunFile.model_validate({"format": 1, "sync": {"mode": "outer"}})
FIRST = 100


class Maker:
    """Makes replicas, and closes what they have opened."""

    def __init__(self) -> None:
        self._agents: list[AveragingAgent] = []

    def __call__(self, replica: int, life: int) -> AveragingReplica:
        watch = SimpleNamespace(failed=None, abort_on_failure=self._agents.append)
        world: Any = SimpleNamespace(rank=0, timeout_s=1.0, device=torch.device("cpu"), watch=watch)
        order = ReplicaOrder(Life(replica, life), (), "", 1.0, 0.0, is_empty=life > 0, first=FIRST)
        return AveragingReplica(cast(World, world), order, RUN, 2)

    def close(self) -> None:
        for one in self._agents:
            one.abort()


@pytest.fixture
def make() -> Iterator[Maker]:
    maker = Maker()
    yield maker
    maker.close()


def test_a_replica_that_is_started_again_counts_from_where_the_run_went_on(make: Maker) -> None:
    """It has no checkpoint that says so. Nobody has trained yet, so it begins where the others do."""
    replica = make(1, 1)
    replica.join(cast(Pipeline, SimpleNamespace(join_averaging=lambda _until: None)))

    assert (replica.averaging.first, replica.step) == (FIRST, FIRST)


def test_all_ranks_find_the_same_replica_to_lead(make: Maker) -> None:
    """That follows from the mean alone: which members a rank knows of is another matter."""
    met = Met((0, 1), (0.0, 0.0, 8.0, 8.0, 1.0, 0.0))
    pipeline = cast(Pipeline, SimpleNamespace(meet=lambda *_numbers: met))
    replicas = [make(0, 1), make(1, 0)]
    meetings = [one.meet(pipeline) for one in replicas]

    assert [one.leads for one in replicas] == [False, True]
    assert [one.shares for one in meetings] == [(8, 8)] * 2


def test_a_limit_of_time_holds_after_the_replica_that_leads_has_died(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, stops = make(1, 0), cast(Stops, SimpleNamespace(vote=lambda: float(Reason.TIME)))
    found = []
    for members in ((0, 1), (1,)):
        word = Word(1, 1, members=tuple(Member(one, 0, ()) for one in members))
        monkeypatch.setattr(AveragingAgent, "word", word)
        found.append(replica.votes(stops)())

    assert found == [0.0, float(Reason.TIME)]


def has_members(monkeypatch: pytest.MonkeyPatch, *lives: Life) -> None:
    """So says the last word of the coordinator; members that came later have a later life."""
    members = tuple(Member(one.replica, one.life, (), first=one.life) for one in lives)
    monkeypatch.setattr(AveragingAgent, "word", Word(1, 1, members=members))


def test_when_who_leads_dies_one_of_the_others_writes_the_log_until_they_meet(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes back within a window has not trained for as long as the others."""
    first, second, back = make(0, 0), make(1, 0), make(0, 1)
    has_members(monkeypatch, Life(0, 0), Life(1, 0))
    assert (first.speaks, second.speaks) == (True, False)
    has_members(monkeypatch, Life(1, 0))
    assert (second.speaks, second.leads) == (True, False)
    has_members(monkeypatch, Life(0, 1), Life(1, 0))
    assert (second.speaks, back.speaks) == (True, False)
    has_members(monkeypatch, Life(0, 1))
    assert back.speaks

    met = Met((0, 1), (0.0, 0.0, 8.0, 8.0, 1.0, 0.0))
    pipeline = cast(Pipeline, SimpleNamespace(meet=lambda *_numbers: met))
    for one in (second, back):
        one.meet(pipeline)
    has_members(monkeypatch, Life(0, 1), Life(1, 0))
    assert (second.speaks, second.leads, back.speaks) == (True, True, False)


@pytest.mark.parametrize("is_written", [True, False])
def test_the_next_replica_writes_the_last_checkpoint_if_who_leads_dies_before_it_has(
    is_written: bool, make: Maker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replica, gone = make(1, 0), list[int]()

    def leads_no_more(_agent: AveragingAgent, one: int) -> None:
        gone.append(one)
        if is_written:
            step_folder(tmp_path, 8).mkdir()

    monkeypatch.setattr(AveragingAgent, "wait_until_gone", leads_no_more)
    pipeline: Any = SimpleNamespace(
        snapshot=lambda **_: snapshot_of(0, 8), gather=lambda row: [list(row)], num_trained=8
    )
    writer = LeaderWriter(
        tmp_path,
        lambda _number: CheckpointWriter(tmp_path, 0, 1, HashStore(), on_event=ignore, resumed_from=None),
        pytest.fail,
    )
    with writer:
        found = RunCheckpoints(RUN, writer, META, Stops(), replica, frozenset())
        found.save(pipeline, 8)
        assert steps_in(tmp_path) == []
        found.finish(pipeline, 8)

    assert (gone, steps_in(tmp_path), found.newest) == ([0], [8], 8)
    assert found.has_led is not is_written
