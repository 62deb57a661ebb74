"""Replicas that average weights, on a simulated clock: in whatever order ranks act, the run comes to its end.

Agents, programs, the coordinator and the order of a run are the real ones.
"""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from bireme.sync.coordinator.samples import Began, SyncMode
from tests.support.averaging_ranks import Case, RankWorld, simulated
from tests.support.extent import draws

__all__ = ["simulated"]

pytestmark = pytest.mark.usefixtures("simulated")
SEEDS = range(draws(3000, 20))
LONGEST_S = 200.0
"""Of the simulated clock, far longer than any of these runs takes."""


def case_of(seed: int, **more: object) -> Case:
    random = Random(seed)
    fields: dict[str, Any] = {
        "schedule": random.choice(["1f1b", "2bw", "2bw-fresh"]),
        "num_stages": random.choice([1, 2, 2, 3]),
        "num_replicas": random.choice([2, 2, 3]),
        "every": random.choice([2, 4, 8]),
        "first": random.choice([0, 0, 12]),
        "connect_every": random.choice([1, 2, 5]),
        "late_s": random.choice([0.0, 0.01, 0.2]),
        "spread": random.choice([1.0, 3.0, 20.0]),
        "is_bad": random.random() < 0.5,
        "is_tied": random.random() < 0.4,
        **more,
    }
    if random.random() < 0.4:
        fragments, lag = random.choice([1, 2]), random.choice([1, 2])
        every = random.choice([2, 3, 5])
        fields |= {"mode": SyncMode.DILOCO, "diloco_every": every, "fragments": fragments, "lag": lag}
    fields["steps"] = fields["first"] + 8
    return Case(seed=seed, **fields)


def check_met(world: RankWorld) -> None:
    """All ranks of a stage that meet have the same weights, and all ranks that share them; all are at the
    same step; no sample has counted twice.
    """
    for number, met in world.meetings.items():
        assert len({meeting.step for meeting, _ in met.values()}) == 1, (world.case, number, met)
        for stage in range(world.case.num_stages):
            found = {weight for rank, (_, weight) in met.items() if world.case.is_tied or rank.stage == stage}
            assert len(found) <= 1, (world.case, number, met)
    places = counted(world)
    assert len(set(places)) == len(places)


def counted(world: RankWorld) -> list[int]:
    """The samples that count; what a coordinator finds open where it takes up does not, or not yet."""
    found: list[int] = []
    for line in world.lines:
        if isinstance(line, Began):
            found = [place for place in found if not any(one.begin <= place < one.end for one in line.open)]
        else:
            samples = [one for own in line.samples for one in own]
            found += [place for one in samples for place in range(one.begin, one.end)]
    return found


@pytest.mark.slow
def test_all_replicas_come_to_the_end_whichever_rank_is_late_and_each_sample_counts_once() -> None:
    for seed in SEEDS:
        world = RankWorld(case_of(seed))
        world.run(LONGEST_S)
        case = world.case
        check_met(world)
        assert sorted(counted(world)) == list(
            range(case.first * case.batch_size, case.steps * case.batch_size)
        )
        assert set(world.ended.values()) == {case.steps}
        assert len(world.ended) == case.num_replicas * case.num_stages


def test_all_replicas_stop_at_the_same_step_where_one_of_them_asks_to() -> None:
    for seed in SEEDS[::3]:
        world = RankWorld(case_of(seed, stops_after=Random(seed).randint(1, 6)))
        world.run(LONGEST_S)
        check_met(world)
        assert len(set(world.ended.values())) == 1


@pytest.mark.slow
def test_replicas_that_die_hold_up_nobody_and_come_back_in_step() -> None:
    for seed in SEEDS[::2]:
        world = RankWorld(case_of(seed))
        for _ in range(world.random.randint(1, 3)):
            replica = world.random.randrange(world.case.num_replicas)
            world.after(world.random.uniform(0.005, 0.3), lambda r=replica, w=world: w.end(r))  # type: ignore[misc]
        world.run(LONGEST_S)
        check_met(world)
        assert len(set(world.ended.values())) == 1


def test_a_coordinator_that_dies_while_replicas_leave_holds_up_none_of_them() -> None:
    """Ranks that leave wait to be let go, so the next coordinator hears of all ranks of a replica. If the
    last one was let go in part, the rest of it goes after three leases.
    """
    for seed in SEEDS[2::3]:
        case = case_of(seed, is_bad=False)
        num_ranks = case.num_replicas * case.num_stages
        world = RankWorld(replace(case, outlives_leaving=Random(seed).randint(1, num_ranks)))
        world.run(LONGEST_S)
        check_met(world)
        assert len(world.left) == num_ranks


@pytest.mark.slow
def test_a_coordinator_that_dies_at_any_time_is_succeeded_by_one_that_knows_what_ranks_know() -> None:
    """Every third time a replica dies too."""
    for seed in SEEDS[1::2]:
        world = RankWorld(case_of(seed))
        for _ in range(world.random.randint(1, 3)):
            world.after(world.random.uniform(0.005, 0.3), world.end_coordinator)
        if seed % 3 == 0:
            replica = world.random.randrange(world.case.num_replicas)
            world.after(world.random.uniform(0.005, 0.3), lambda r=replica, w=world: w.end(r))  # type: ignore[misc]
        world.run(LONGEST_S)
        check_met(world)
        assert len(set(world.ended.values())) == 1
        if not world.num_deaths:
            case = world.case
            samples = range(case.first * case.batch_size, case.steps * case.batch_size)
            assert sorted(counted(world)) == list(samples)
