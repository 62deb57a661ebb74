"""The coordinator under a bad network and deaths: no committed batch is lost, none counts twice."""

from functools import partial
from random import Random

import pytest

from bireme.sync.coordinator import messages
from bireme.sync.coordinator.messages import Report
from bireme.sync.coordinator.samples import Committed
from bireme.sync.coordinator.state import Ended, Tick
from tests.support.coordinated import LEASE_S, Faults, World, settings_for
from tests.support.extent import draws, several

ROUNDS = 8


@pytest.fixture(autouse=True)
def _news_comes_with_answers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every other world members hear of changes as many members do: with the next answers to them."""
    numbers = request.node.callspec.params
    monkeypatch.setattr(messages, "MANY", 1 if next(iter(numbers.values())) % 2 else messages.MANY)


def world_of(seed: int, *, num_hosts: int = 1, lost: float = 0.1) -> World:
    random = Random(seed)
    settings = settings_for(random.choice([2, 3, 4]), random.choice([1, 2]))
    faults = Faults(lost=lost, doubled=0.2, longest_s=0.05, end_s=2.0)
    return World(settings, seed, faults, num_hosts=num_hosts)


def finished(world: World) -> bool:
    return world.num_common >= ROUNDS


def checked(world: World) -> None:
    """Every sample is in one committed round at most, all stages agree, and the ledger says the same."""
    rounds = max(number for _, number in world.applied) + 1
    seen: set[int] = set()
    for number in range(rounds):
        sums = {
            world.applied[stage, number]
            for stage in range(world.settings.num_stages)
            if (stage, number) in world.applied
        }
        assert len(sums) == 1
        places = [place for _, own in sums.pop() for one in own for place in range(one.begin, one.end)]
        assert len(places) <= world.settings.batch_size
        assert not seen & set(places)
        assert len(set(places)) == len(places)
        seen |= set(places)
    last = {one.batch: one for one in world.ledger if isinstance(one, Committed)}
    for number in range(rounds):
        assert tuple(zip(last[number].members, last[number].samples, strict=True)) == world.applied[0, number]


@pytest.mark.parametrize("seed", range(draws(1000, 15)))
def test_messages_that_are_late_lost_doubled_or_reordered_change_no_result(seed: int) -> None:
    world = world_of(seed)
    assert world.run(lambda: finished(world), 60.0)
    checked(world)


def steady(num_hosts: int = 1) -> World:
    """Three replicas of two stages and a network without faults."""
    return World(settings_for(3, 2), 0, Faults(), num_hosts=num_hosts)


@pytest.mark.parametrize("number", several(range(1, 160), 10))
def test_the_coordinator_may_die_at_each_event_of_a_round(number: int) -> None:
    world = steady()
    hear, heard = world.hosts[0].hear, [0]

    def counted(event: Report | Ended | Tick) -> None:
        heard[0] += 1
        if heard[0] == number:
            world.hosts[0].die(again_s=0.3)
        hear(event)

    world.hosts[0].hear = counted  # type: ignore[method-assign]
    assert world.run(lambda: finished(world), 60.0)
    checked(world)


@pytest.mark.parametrize("number", several(range(20, 400), 10))
def test_a_replica_may_die_at_each_event_and_the_others_have_its_round_within_a_lease_and_a_half(
    number: int,
) -> None:
    world = steady()
    count = [0]

    def is_time() -> bool:
        count[0] += 1
        return count[0] == number

    assert world.run(is_time, 60.0)
    applied, killed_s = len(world.applied), world.now_s
    world.kill(number % 3, is_told=False, again_s=None)
    assert world.run(lambda: len(world.applied) > applied + 2, 60.0)
    assert world.now_s - killed_s < 1.5 * LEASE_S
    world.start(number % 3)
    assert world.run(lambda: finished(world), 60.0)
    checked(world)


def with_deaths(world: World, count: int) -> None:
    """Have replicas die, at any time in the first seconds, one at a time or several at once."""
    random = world.random
    for _ in range(count):
        replica, is_told = random.randrange(world.settings.num_replicas), random.random() < 0.5
        world.after(random.uniform(0.1, 2.5), partial(kill_unless_last, world, replica, is_told=is_told))


def kill_unless_last(world: World, replica: int, *, is_told: bool) -> None:
    """Kill a replica if another one holds all weights: else nothing would be left of them."""
    if any(world.is_whole(other) for other in world.lives if other != replica):
        world.kill(replica, is_told=is_told)


@pytest.mark.parametrize("seed", range(draws(1000, 15)))
def test_replicas_that_die_at_any_time_come_back_with_the_weights_of_the_others(seed: int) -> None:
    world = world_of(seed)
    with_deaths(world, world.random.choice([1, 2]))
    assert world.run(lambda: finished(world), 60.0)
    checked(world)


@pytest.mark.parametrize("seed", range(draws(1000, 10)))
def test_replicas_that_all_die_before_anything_counts_begin_again(seed: int) -> None:
    """Also with the coordinator, or the host that it is on."""
    world = world_of(seed, num_hosts=3)
    replicas = range(world.settings.num_replicas)

    def may_begin_anew() -> bool:
        return not world.applied and not any(isinstance(one, Committed) for one in world.ledger)

    def kill_all() -> None:
        for replica in replicas:
            if may_begin_anew():
                world.kill(replica, is_told=True, again_s=world.random.uniform(0.3, 1.0))

    begin_s = world.random.uniform(0.05, 0.6)
    world.after(begin_s, kill_all)
    if seed % 2:
        again_s = world.random.choice([None, 0.3])
        world.after(begin_s, lambda: world.hosts[0].die(again_s=again_s) if may_begin_anew() else None)
    if world.run(lambda: finished(world), 60.0):
        checked(world)
    else:  # the last report of a sum was on its way: it counts, and nobody who held it is left to apply it
        assert not world.applied
        assert [one.batch for one in world.ledger if isinstance(one, Committed)] == [0]


@pytest.mark.parametrize("seed", range(draws(1000, 15)))
def test_a_coordinator_that_dies_at_any_time_is_started_again_and_loses_no_batch(seed: int) -> None:
    world = world_of(seed)
    for _ in range(world.random.choice([1, 2])):
        world.after(world.random.uniform(0.1, 2.5), lambda: world.hosts[0].die(again_s=0.3))
    assert world.run(lambda: finished(world), 60.0)
    checked(world)


@pytest.mark.parametrize("seed", range(draws(1000, 15)))
def test_the_next_host_takes_up_when_the_coordinator_s_host_dies(seed: int) -> None:
    world = world_of(seed, num_hosts=3)
    world.after(world.random.uniform(0.1, 2.5), lambda: world.hosts[0].die(again_s=None))
    if world.settings.num_replicas > 2:
        with_deaths(world, 1)
    assert world.run(lambda: finished(world), 60.0)
    checked(world)


@pytest.mark.parametrize("seed", range(draws(1000, 15)))
def test_when_the_network_is_cut_only_one_side_goes_on(seed: int) -> None:
    world = world_of(seed, num_hosts=2, lost=0.05)
    replicas = list(range(world.settings.num_replicas))
    world.random.shuffle(replicas)
    here = {"host0", *replicas[: world.random.randrange(len(replicas) + 1)]}
    there = {"host1", *set(replicas) - here}
    cut = {(one, other) for one in here for other in there} | {
        (one, other) for one in there for other in here
    }
    begin_s = world.random.uniform(0.1, 2.0)
    world.after(begin_s, lambda: world.cut.update(cut))
    world.after(begin_s + world.random.uniform(0.5, 4.0), world.cut.clear)
    assert world.run(lambda: finished(world), 60.0)
    checked(world)
