"""Groups as SDPipe forms them, with replicas that die and come: what holds whatever happens."""

from collections import defaultdict
from functools import partial
from itertools import pairwise
from random import Random
from statistics import fmean

import pytest

from bireme.sync.coordinator.groups import (
    Arrived,
    groups_begun,
    groups_step,
    is_connected,
    next_deadline_s,
    next_wait_s,
)
from bireme.sync.coordinator.samples import GroupSettings
from tests.support.extent import draws
from tests.support.grouped import GroupWorld

SEEDS = range(draws(2000, 36))
SPREAD = 2.0
"""Of the places that replicas pull their weights to."""


def world_of(seed: int, *, most: int = 6) -> GroupWorld:
    random = Random(seed)
    settings = GroupSettings(connect_every=random.choice([1, 2, 5]), pairs_above=random.choice([3, 8]))
    return GroupWorld(random.randint(2, most), random.choice([1, 2, 3]), settings, seed)


def check_once(world: GroupWorld) -> None:
    """Every rank is in exactly one group of each batch, whose members all agree."""
    seen = set()
    for group in world.settled:
        assert list(group.members) == sorted(group.members, key=lambda one: one.replica)
        for one in group.members:
            key = (group.stage, one.replica, one.batch)
            assert key not in seen
            seen.add(key)


def check_progress(world: GroupWorld) -> None:
    """Everybody who is there has gone on at every stage."""
    for one in world.replicas.values():
        assert one.batch > 0
        assert {*one.done} == {*range(world.num_stages)}


def check_connected(world: GroupWorld, members: int) -> None:
    """When a forced group closes, the groups since the last one connect all, soon enough."""
    pairs: dict[int, list[tuple[int, int]]] = defaultdict(list)
    updates: dict[int, int] = defaultdict(int)
    every = world.state.settings.connect_every
    for _, group in world.formed:
        if group.attempt:
            continue
        pairs[group.stage] += [(group.replicas[0], one) for one in group.replicas]
        updates[group.stage] += len(group.members)
        if group.is_forced:
            assert is_connected(range(members), pairs[group.stage])
            pairs[group.stage] = []
            if world.num_stages == 1:
                assert updates[group.stage] <= 2 * (every * members + members)
            updates[group.stage] = 0


def test_every_rank_is_in_one_group_of_each_batch_and_only_one_stage_at_a_time_forces_one() -> None:
    for seed in SEEDS[::3]:
        world = world_of(seed)
        most = 0

        def watch(world: GroupWorld = world) -> None:
            nonlocal most
            most = max(most, sum(one.is_forced for one in world.state.formers))

        world.watch = watch
        world.run(1.0)
        check_once(world)
        assert most <= 1
        names = [(group.number, group.attempt) for _, group in world.formed]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("part", range(3))
def test_all_replicas_are_connected_again_and_again_and_nobody_waits_past_the_opener_s_limit(
    part: int,
) -> None:
    for seed in SEEDS[part::3]:
        world = world_of(seed)
        num_replicas = len(world.replicas)

        def watch(world: GroupWorld = world, num_replicas: int = num_replicas) -> None:
            forced = [one for one in world.state.formers if one.is_forced]
            assert len(forced) <= 1
            assert all(one.present == set(range(num_replicas)) for one in forced)
            for former in world.state.formers:
                if former.ready and not former.is_forced:
                    assert world.now_s <= former.deadline_s + 1e-9

        world.watch = watch
        world.run(2.0)
        check_once(world)
        check_progress(world)
        check_connected(world, num_replicas)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_members_that_die_hold_up_nobody_and_those_that_come_take_part(part: int) -> None:
    for seed in SEEDS[part::3]:
        world = world_of(seed)
        numbers = list(world.replicas)
        for number in world.random.sample(numbers, len(numbers) - 1):
            begin_s = world.random.uniform(0.02, 0.6)
            world.after(begin_s, partial(world.kill, number))
            if world.random.random() < 0.5:
                world.after(begin_s + 0.2, partial(world.come, number))
        if seed % 2:
            world.after(world.random.uniform(0.0, 0.6), world.drain)
        world.run(1.5)
        before = {one.number: one.batch for one in world.replicas.values()}
        world.run(3.0)
        assert all(one.batch > before[one.number] for one in world.replicas.values())
        assert world.state.members == set(world.replicas)


@pytest.mark.parametrize("part", range(3))
def test_a_replica_that_drains_holds_up_no_group_and_none_is_forced_meanwhile(
    part: int,
) -> None:
    for seed in SEEDS[part::3]:
        world = world_of(seed)
        world.after(world.random.uniform(0.05, 0.5), world.drain)
        numbers = set(world.replicas)
        forced_before: set[int] = set()

        def watch(
            world: GroupWorld = world, numbers: set[int] = numbers, before: set[int] = forced_before
        ) -> None:
            forced = {stage for stage, one in enumerate(world.state.formers) if one.is_forced}
            assert all(world.state.formers[stage].present == numbers for stage in forced - before)
            before.clear()
            before.update(forced)

        world.watch = watch
        world.run(2.0)
        check_once(world)
        check_progress(world)
        assert {number for number, _, _ in world.drained} == numbers
        after = {(number, batch) for number, _, batch in world.drained}
        assert len(after) == len(numbers)  # all stages of a replica after the same batch
        assert len(world.drained) == len(numbers) * world.num_stages
        for one in world.replicas.values():
            assert one.drains_after is not None
            assert one.batch > one.drains_after + 1


def test_with_one_batch_between_forced_groups_equal_replicas_are_always_in_one_group() -> None:
    world = GroupWorld(4, 1, GroupSettings(connect_every=1), 0)
    for one in world.replicas.values():
        one.batch_s = 0.02
    world.run(1.0)
    sizes = [len(group.members) for _, group in world.formed]
    assert sum(sizes) / len(sizes) > 2


def test_a_replica_that_was_alone_waits_longer_the_next_time_and_one_that_was_not_shorter() -> None:
    assert next_wait_s(0.001, 1) == 0.002
    assert next_wait_s(0.008, 1) == 0.01
    assert next_wait_s(0.01, 3) == pytest.approx(0.009)
    assert next_wait_s(1e-5, 2) == 1e-5


@pytest.mark.parametrize(("until_next", "waits_s"), [(4.0, 0.01), (40.0, 0.3)])
def test_an_opener_is_patient_only_if_a_group_may_be_forced_before_it_comes_again(
    until_next: float, waits_s: float
) -> None:
    state = groups_begun(GroupSettings(connect_every=10), 1, range(4))
    arrived = Arrived(0, 0, 0, wait_s=0.01, patient_s=0.3, until_next=until_next)
    assert next_deadline_s(groups_step(state, arrived, 0.0)[0]) == waits_s


def test_replicas_stay_close_to_their_mean_and_closer_the_smaller_the_learning_rate_is() -> None:
    """Each pulls its weight, one number, to a place of its own; some are ten times slower than others."""
    for seed in SEEDS[::3]:
        world = world_of(seed)
        world.run(2.0)
        apart = [farthest(world, rate) for rate in (0.1, 0.01, 0.001)]
        assert apart[0] < SPREAD
        for larger, smaller in pairwise(apart):
            assert smaller < larger / 4


def farthest(world: GroupWorld, rate: float) -> float:
    """How far a replica was from the mean of all at most, in the groups of the last stage that there were."""
    weights = [0.0] * len(world.replicas)
    found = 0.0
    for group in world.settled:
        if group.stage != world.num_stages - 1:
            continue
        for one in group.replicas:
            own = SPREAD * (one / (len(weights) - 1) - 0.5)
            weights[one] += rate * (own - weights[one])
        mean = fmean(weights[one] for one in group.replicas)
        for one in group.replicas:
            weights[one] = mean
        middle = fmean(weights)
        found = max(found, *(abs(one - middle) for one in weights))
    return found
