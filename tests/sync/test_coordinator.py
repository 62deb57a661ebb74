"""The coordinator under a bad network and deaths: no committed batch is lost, none counts twice."""

from random import Random

import pytest

from bireme.sync.coordinator.ledger_line import Committed
from tests.support.coordinated import Faults, World, settings_for
from tests.support.extent import draws

ROUNDS = 12


def world_of(seed: int, *, num_hosts: int = 1, lost: float = 0.1) -> World:
    random = Random(seed)
    settings = settings_for(random.choice([2, 3, 4]), random.choice([1, 2]))
    faults = Faults(lost=lost, doubled=0.2, longest_s=0.05, end_s=4.0)
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


@pytest.mark.parametrize("seed", range(draws(1000, 40)))
def test_messages_that_are_late_lost_doubled_or_reordered_change_no_result(seed: int) -> None:
    world = world_of(seed)
    assert world.run(lambda: finished(world), 60.0)
    checked(world)
