"""How long a replica takes to recover.

The others measure how late they notice its loss. The replica measures the rest when it heals, and sends it
along with its first contribution.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bireme.sync.coordinator.messages import Absence, Commit, CoordinatorReply, Grant, Incarnation


class LossTimes:
    """Measures how late this rank notices the loss of a replica: the seconds from the last new round or batch
    that the replica had a part in to the word of the coordinator that lists it as gone.
    """

    def __init__(self) -> None:
        self.detect_s: dict[int, float] = {}
        """The seconds of the last loss of each replica that this rank noticed."""
        self._gone: set[Incarnation] = set()
        self._places: dict[tuple[int, int], int] = {}
        """How far each replica is in a line of rounds, or in its own batches (line -1)."""
        self._active_s: dict[int, float] = {}

    def note(self, word: CoordinatorReply, now_s: float) -> None:
        """Read a word that has come by `now_s`. Members are lost only once their epoch is installed."""
        for replica, line, place in _places_in(word):
            if place > self._places.get((replica, line), -1):
                self._places[replica, line], self._active_s[replica] = place, now_s
        for one in word.gone if word.is_installed else ():
            if one.own_life not in self._gone:
                self._gone.add(one.own_life)
                active_s = self._active_s.pop(one.replica, None)
                if active_s is not None and one.why is not Absence.LEFT:
                    self.detect_s[one.replica] = now_s - active_s


def _places_in(word: CoordinatorReply) -> Iterator[tuple[int, int, int]]:
    rounds: list[Grant | Commit] = [*word.grants, *word.commits]
    for one in rounds:
        for part in one.parts:
            yield part.replica, one.line, one.round
    for own in word.progress:
        yield own.replica, -1, own.dealt


@dataclass(frozen=True, slots=True)
class HealTimes:
    """The seconds from the first request of a replica to a donor until the state had come, and from there to
    where the replica contributes.
    """

    transfer_s: float
    catch_up_s: float


def numbers_of_healing(own: HealTimes | None, replica: int, num_replicas: int) -> list[float]:
    """The times of this replica as numbers that are summed over all replicas; zeros if there are none."""
    found = [0.0] * (2 * num_replicas)
    if own is not None:
        found[replica], found[num_replicas + replica] = own.transfer_s, own.catch_up_s
    return found


def healed_in(numbers: Sequence[float]) -> dict[int, HealTimes]:
    """The replicas that sent their times, from the sum of all `numbers_of_healing`."""
    half = len(numbers) // 2
    times = zip(numbers[:half], numbers[half:], strict=True)
    return {replica: HealTimes(*both) for replica, both in enumerate(times) if any(both)}


@dataclass(frozen=True, slots=True)
class Recovery:
    """A replica that was lost and contributes again from `step` on. `detect_s` is None if the rank that
    reports it had not seen the replica before.
    """

    replica: int
    step: int
    detect_s: float | None
    transfer_s: float
    catch_up_s: float

    @property
    def text(self) -> str:
        """The sentence for people."""
        noticed = "" if self.detect_s is None else f"its loss was noticed after {self.detect_s:.1f} s, "
        return (
            f"Replica {self.replica} is back at step {self.step}: {noticed}its state took "
            f"{self.transfer_s:.1f} s to arrive, and it caught up in {self.catch_up_s:.1f} s."
        )
