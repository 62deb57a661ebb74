"""When replicas average their weights, and which: the order of trainings and averages of a run.

`groups:P` has the groups that the coordinator forms on the simulator's clock, where each forward and
backward is held up at chance for as long as a batch takes; all are connected at least about every P batches
of each. `groups:P:k` also has one replica that is k times slower. `diloco:H` and `diloco:H:RATE:MOMENTUM`
have a round of all replicas every H batches, with a step of Nesterov's on their mean.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.replica_speeds.mortal import UnevenSpeed
from bireme.errors import BiremeError
from bireme.simulate.agreements import GroupsAgreement
from bireme.simulate.together import Exchange, SampleWork, Together, one_stage
from bireme.sync.coordinator.samples import GroupSettings

__all__ = ["Agreed", "agreed_named", "meetings"]

BATCH_S, HELD_CHANCE = 0.1, 0.1
PARTS = (1 / 3, 2 / 3)
"""Of a batch's time in the forward and in the backward."""
DILOCO_RATE, DILOCO_MOMENTUM = 0.7, 0.9


@dataclass(frozen=True, slots=True)
class Agreed:
    """How replicas agree: by groups of those that are ready, or by outer steps every so many batches."""

    every: int
    is_diloco: bool = False
    slowness: float = 1.0
    held_s: float = BATCH_S
    rate: float = DILOCO_RATE
    momentum: float = DILOCO_MOMENTUM


def agreed_named(word: str) -> Agreed:
    """Such as `groups:5`, `groups:5:10` or `diloco:50:0.7:0.9`."""
    mode, *values = word.split(":")
    try:
        if mode == "groups" and 1 <= len(values) <= 2:
            return Agreed(int(values[0]), slowness=float(values[1]) if values[1:] else 1.0)
        if mode == "diloco" and len(values) in (1, 3):
            rate, momentum = map(float, values[1:] or (DILOCO_RATE, DILOCO_MOMENTUM))
            return Agreed(int(values[0]), is_diloco=True, rate=rate, momentum=momentum)
    except ValueError:
        pass
    raise BiremeError(
        f"{word!r} says no agreement. Write groups:5, groups:5:10, diloco:50 or diloco:50:0.7:0.9."
    )


def meetings(agreed: Agreed, num_replicas: int, num_updates: int, seed: int = 0) -> Iterator[dict[int, int]]:
    """The groups in the order of time, each as its members and the batch after which each of them is there.

    They are enough for as many updates of a replica, all added up; a replica alone is a group too.
    """
    seconds = 2 * BATCH_S * num_updates / num_replicas
    while True:
        ran = _simulated(agreed, num_replicas, seed).until(seconds, round(4 * seconds / BATCH_S) + 100)
        found = [dict(one.members) for one in sorted(ran.averages, key=lambda one: one.at_s)]
        if sum(map(len, found)) >= num_updates:
            yield from found
            return
        seconds *= 2


def _simulated(agreed: Agreed, num_replicas: int, seed: int) -> Together:
    """Replicas of one stage; `until` may be asked once."""
    forward, backward = (BATCH_S * part for part in PARTS)
    speeds = [
        UnevenSpeed(
            slowness=((0.0, agreed.slowness if replica == 0 else 1.0),),
            held_s=agreed.held_s,
            held_chance=HELD_CHANCE,
        )
        for replica in range(num_replicas)
    ]
    work = SampleWork((forward,), (backward,))
    groups = GroupsAgreement(GroupSettings(agreed.every), 1)
    return Together(one_stage(0), work, speeds, groups, Exchange(), batch_size=num_replicas, seed=seed)
