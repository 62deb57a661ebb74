"""How training iterations repeat: whether they are the same events, and after how many the events come again.

Two events are the same if they are of one kind, by one operator, in one phase, and on blocks of one size and
owner that were born at the same place of the same, the previous, … iteration.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bireme.profile.events import Event, EventKind, Storage

__all__ = ["Repetition", "period", "repetition_of"]


@dataclass(frozen=True, slots=True)
class Repetition:
    """What several iterations in a row have in common.

    `is_stable` is set if all are the same; `period_events` is the least number of events after which they
    repeat, None where they do not.
    """

    num_iterations: int
    is_stable: bool
    period_events: int | None


def repetition_of(iterations: Sequence[Sequence[Event]], storages: Mapping[int, Storage]) -> Repetition:
    """Compare the events of iterations that follow each other."""
    words = [list(iteration) for iteration in _words(iterations, storages)]
    return Repetition(
        num_iterations=len(words),
        is_stable=len(words) > 1 and all(word == words[0] for word in words),
        period_events=period([event for word in words for event in word]),
    )


def period(sequence: Sequence[Hashable]) -> int | None:
    """The least distance at which a sequence equals itself, if it fits into it at least twice."""
    # The longest proper border of each prefix, as Knuth, Morris and Pratt find it; the rest is the period.
    borders = [0] * len(sequence)
    for end in range(1, len(sequence)):
        border = borders[end - 1]
        while border and sequence[border] != sequence[end]:
            border = borders[border - 1]
        borders[end] = border + 1 if sequence[border] == sequence[end] else 0
    shortest = len(sequence) - borders[-1] if sequence else 0
    return shortest if 0 < 2 * shortest <= len(sequence) else None


def _words(
    iterations: Sequence[Sequence[Event]], storages: Mapping[int, Storage]
) -> Iterator[Iterator[Hashable]]:
    """The events of each iteration without what differs between iterations: moments and numbers of blocks."""
    born: dict[int, tuple[int, int]] = {}
    """Of each block the iteration and the place among its births."""
    for index, iteration in enumerate(iterations):
        births = (event.block for event in iteration if event.kind is EventKind.BIRTH)
        born |= {block: (index, place) for place, block in enumerate(births)}
        yield (_word(event, index, born, storages) for event in iteration)


def _word(
    event: Event, iteration: int, born: Mapping[int, tuple[int, int]], storages: Mapping[int, Storage]
) -> Hashable:
    birth = born.get(event.block)
    block = ("before", event.block) if birth is None else (str(iteration - birth[0]), birth[1])
    owner = storages[event.block].owner
    return event.kind, event.operator, event.phase, event.num_bytes, owner, block
