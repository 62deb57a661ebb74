"""A rank of a replica that averages weights, as the loop of a run sees it."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bireme.errors import BiremeError
from bireme.runtime.averaging.agent import AveragingAgent
from bireme.runtime.averaging.averages import Met
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.quorum.launch import ReplicaOrder
from bireme.runtime.world import World
from bireme.sync.coordinator.messages import Life, Member, Word
from bireme.train.averaging_replica import AveragingReplica
from bireme.train.run_file import RunFile
from bireme.train.stops import Reason, Stops

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


def test_who_meets_is_a_member_with_samples_or_without_and_all_end_their_window_at_one_place(
    make: Maker,
) -> None:
    ends = 24.0
    met = Met((0, 1), (0.0, 2 * ends, 0.0, 24.0, 0.0, 0.0))
    pipeline = cast(Pipeline, SimpleNamespace(meet=lambda *_numbers: met))
    replica, other = make(0, 0), make(1, 0)
    replica._agent.deals.ended_at = round(ends)
    meeting = replica.meet(pipeline)

    assert (meeting.members, meeting.shares) == ((0, 1), (0, 24))
    with pytest.raises(BiremeError, match=r"Replica 1 ended .* at place 0 .* at place 24 in the mean"):
        other.meet(pipeline)


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
