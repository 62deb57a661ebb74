"""A rank of a replica that averages weights, as the loop of a run sees it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bireme.runtime.board import RunFailed
from bireme.runtime.coordinator_client import CoordinatorClient
from bireme.runtime.exchange.agent import ExchangeAgent
from bireme.runtime.exchange.averages import Met
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.replicas.launch import ReplicaOrder
from bireme.runtime.stores import HashStore
from bireme.runtime.updates import BatchResult
from bireme.runtime.world import World
from bireme.schedule.program import Rule
from bireme.sync.coordinator.messages import Absence, CoordinatorReply, Gone, Incarnation, Member
from bireme.sync.coordinator.recoveries import HealTimes, Recovery
from bireme.sync.exchange import SentBytes
from bireme.train.checkpoint.checkpoint import step_folder
from bireme.train.checkpoint.writer import CheckpointWriter
from bireme.train.data.loader import PartlyRead
from bireme.train.data.placing import Order
from bireme.train.data.samples import Batch
from bireme.train.loop import Loop
from bireme.train.outcome import Reason, Stops
from bireme.train.rank_part import RankPart
from bireme.train.replica import AveragingReplica, LeaderWriter, Meeting
from bireme.train.run_checkpoints import RunCheckpoints
from bireme.train.run_file import RunFile
from tests.support.checkpoints import META, ignore, snapshot_of, steps_in

RUN = RunFile.model_validate({"format": 1, "sync": {"mode": "diloco"}})
FIRST = 100


class Maker:
    """Makes replicas, and closes what they have opened."""

    def __init__(self) -> None:
        self._agents: list[ExchangeAgent] = []
        self._store = HashStore()

    def __call__(self, replica: int, life: int, rank: int = 0) -> AveragingReplica:
        watch = SimpleNamespace(failed=None, abort_on_failure=self._agents.append)
        world: Any = SimpleNamespace(
            rank=rank, timeout_s=1.0, device=torch.device("cpu"), watch=watch, store=self._store
        )
        order = ReplicaOrder(Incarnation(replica, life), (), "", 1.0, 0.0, is_empty=life > 0, first=FIRST)
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
    replica.join(cast(Pipeline, SimpleNamespace(join=lambda: None)))

    assert (replica.averaging.first, replica.step) == (FIRST, FIRST)


def test_all_ranks_of_a_replica_that_comes_back_begin_at_the_step_that_its_first_rank_reads(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could read another one each, around a step from which on the schedule is another."""
    monkeypatch.setattr(ExchangeAgent, "begin", lambda *_, **__: None)
    size, found = RUN.training.batch_size, []
    for rank, fresh in ((0, 120 * size), (1, 120 * size + 1), (2, 121 * size)):
        word = CoordinatorReply(1, 1, members=(Member(0, 0, ()),), fresh=fresh)
        monkeypatch.setattr(CoordinatorClient, "word", word)
        found.append(make(1, 1, rank).begin(FIRST))

    assert found == [119, 119, 119]  # all of its samples are dealt, and its window may not have ended


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
    with pytest.raises(RunFailed, match=r"Replica 1 ended .* at place 0 .* at place 24 on average"):
        other.meet(pipeline)


def test_a_limit_of_time_holds_after_the_replica_that_leads_has_died(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, stops = make(1, 0), cast(Stops, SimpleNamespace(vote=lambda: float(Reason.TIME)))
    found = []
    for members in ((0, 1), (1,)):
        word = CoordinatorReply(1, 1, members=tuple(Member(one, 0, ()) for one in members))
        monkeypatch.setattr(ExchangeAgent, "word", word)
        found.append(replica.votes(stops)())

    assert found == [0.0, float(Reason.TIME)]


def has_members(monkeypatch: pytest.MonkeyPatch, *lives: Incarnation) -> None:
    """So says the last word of the coordinator; members that came later have a later life."""
    members = tuple(Member(one.replica, one.life, (), first=one.life) for one in lives)
    monkeypatch.setattr(ExchangeAgent, "word", CoordinatorReply(1, 1, members=members))


def test_when_who_leads_dies_one_of_the_others_writes_the_log_until_they_meet(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes back within a window has not trained for as long as the others."""
    first, second, back = make(0, 0), make(1, 0), make(0, 1)
    has_members(monkeypatch, Incarnation(0, 0), Incarnation(1, 0))
    assert (first.speaks, second.speaks) == (True, False)
    has_members(monkeypatch, Incarnation(1, 0))
    assert (second.speaks, second.leads) == (True, False)
    has_members(monkeypatch, Incarnation(0, 1), Incarnation(1, 0))
    assert (second.speaks, back.speaks) == (True, False)
    has_members(monkeypatch, Incarnation(0, 1))
    assert back.speaks

    met = Met((0, 1), (0.0, 0.0, 8.0, 8.0, 1.0, 0.0))
    pipeline = cast(Pipeline, SimpleNamespace(meet=lambda *_numbers: met))
    for one in (second, back):
        one.meet(pipeline)
    has_members(monkeypatch, Incarnation(0, 1), Incarnation(1, 0))
    assert (second.speaks, second.leads, back.speaks) == (True, True, False)


def test_a_replica_that_came_too_late_to_meet_the_others_writes_the_log_when_they_are_gone(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last meeting of a run may be over when it is back, and then who led may die before it has saved."""
    late, met = make(1, 1), Met((0,), (0.0, 0.0, 16.0, 0.0, 0.0, 0.0))
    late.meet(cast(Pipeline, SimpleNamespace(meet=lambda *_numbers: met)))
    has_members(monkeypatch, Incarnation(0, 0), Incarnation(1, 1))
    assert not late.speaks
    monkeypatch.setattr(ExchangeAgent, "wait_until_gone", lambda _agent, _one: None)
    has_members(monkeypatch, Incarnation(1, 1))
    late.succeed()

    assert (late.leads, late.speaks) == (True, True)


def test_a_replica_that_healed_sends_its_times_to_the_first_meeting_that_it_is_in(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others make of them is a recovery if the replica was a member before."""
    times = HealTimes(0.5, 2.0)
    back, sent = make(1, 1), list[float]()
    back._agent.heal_times = times

    def meet(replica: AveragingReplica, *parts: int) -> Meeting:
        def summed(*numbers: float) -> Met:
            sent[:] = numbers
            return Met(parts, (0.0, 0.0, *(one * (1 in parts) for one in numbers[2:])))

        return replica.meet(cast(Pipeline, SimpleNamespace(meet=summed)))

    assert meet(back, 0).healed == {}
    assert meet(back, 0, 1).healed == {1: times}
    assert (meet(back, 0, 1).healed, sent[6:]) == ({}, [0.0] * 4)

    other, gone = make(0, 0), Gone(1, 0, 5, Absence.ENDED)
    other._agent.losses.detect_s[1] = 3.0
    monkeypatch.setattr(ExchangeAgent, "word", CoordinatorReply(1, 1, gone=(gone,)))
    assert other.recoveries({1: times}, 7) == [Recovery(1, 7, 3.0, 0.5, 2.0)]
    assert back.recoveries({1: times}, 7) == [Recovery(1, 7, None, 0.5, 2.0)]
    monkeypatch.setattr(ExchangeAgent, "word", CoordinatorReply(1, 1))
    assert other.recoveries({1: times}, 7) == []


@pytest.mark.parametrize("is_written", [True, False])
def test_the_next_replica_writes_the_last_checkpoint_if_who_leads_dies_before_it_has(
    is_written: bool, make: Maker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replica, gone = make(1, 0), list[int]()

    def leads_no_more(_agent: ExchangeAgent, one: int) -> None:
        gone.append(one)
        if is_written:
            step_folder(tmp_path, 8).mkdir()

    monkeypatch.setattr(ExchangeAgent, "wait_until_gone", leads_no_more)
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


class Counted:
    """Samples that remember which of them were read."""

    is_quick, is_columnar = True, False

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 50

    def take(
        self, numbers: Sequence[int], names: Sequence[str] | None = None, seeds: Sequence[int] | None = None
    ) -> Batch:
        self.read += numbers
        return {"x": torch.zeros(len(numbers))}


class Alone(AveragingReplica):
    """A replica without others, whose batches have two samples."""

    speaks = True

    def __init__(self) -> None:
        self.number, self.has_come_late, self._order = 0, False, (0,)
        self.step = self._until = 0

    def votes(self, stops: Stops) -> Callable[[], float]:
        return stops.vote

    def enter(self, until: int) -> None:
        self._until = until

    def meet(self, pipeline: Pipeline) -> Meeting:
        self.step = self._until
        return Meeting(self.step, Reason.NONE, (0,), (4,), 0)

    def deal(self, batch: int) -> Sequence[range] | None:
        return [range(2 * batch, 2 * batch + 2)] if batch < self._until else None


class Drained(SimpleNamespace):
    """A pipeline that takes batches and trains nothing."""

    def train(self, batches: Iterable[PartlyRead], **_: object) -> Iterator[BatchResult]:
        self.num_trained += len(list(batches))
        return iter(())


def test_what_tells_whether_ranks_read_the_same_is_read_once_and_not_in_each_window() -> None:
    """Samples may take long to read."""
    training = {"steps": 6, "batch_size": 2, "evaluate_every": 2}
    saving = {"every_steps": 0, "at_end": False}
    run = RunFile.model_validate({"format": 1, "training": training, "checkpoint": saving})
    samples = Counted()
    order = Order(len(samples))
    data = SimpleNamespace(training=samples, evaluation=None, is_text=False, order=lambda _seed: order)
    pipeline = Drained(
        num_trained=0,
        plan=SimpleNamespace(source=SimpleNamespace(rule=Rule.SYNCHRONOUS, name="1f1b")),
        graph=None,
        cutter=SimpleNamespace(wanted=None),
        layout=SimpleNamespace(rank=0, pipeline_rank=0),
        balancer=None,
        recording=None,
        sum_bytes=SentBytes(),
        traffic={},
        tiers=(),
    )
    part = SimpleNamespace(
        world=SimpleNamespace(rank=1, size=2, store=HashStore()),
        start=SimpleNamespace(first_delayed_step=0, may_replan=False, is_phase=False),
        run=run,
        data=data,
        memory=SimpleNamespace(peak_bytes=lambda: 0),
        stops=Stops(),
        home=None,
        member=Alone(),
        copies=lambda: None,
        control=lambda: None,
        in_base=lambda _graph: frozenset(),
        meta=lambda _pipeline: META,
    )
    writer = cast(LeaderWriter, SimpleNamespace(wait=lambda: None))
    loop = Loop(cast(RankPart, part), cast(Pipeline, pipeline), writer)
    assert loop.go().steps == pipeline.num_trained == 6
    assert len(samples.read) == len(order.probes) + 6 * 2
