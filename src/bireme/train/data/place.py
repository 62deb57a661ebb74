"""The place of a resumed run in its streams: found by reading what came before, and skipping it."""

import sys
from time import monotonic

from bireme.train.data.mixture import sources_of
from bireme.train.data.prepare import RunData
from bireme.train.data.stream import StreamSamples

__all__ = ["find_place"]

TOLD_EVERY_S = 5.0


def find_place(data: RunData, seed: int, num_taken: int, *, is_shown: bool) -> None:
    """Bring each stream to its next sample, after so many of the run; with `is_shown` tell how far it is.

    All ranks do it before their pipeline is made, for one that waits for another does not wait long.
    """
    first = 0
    numbers = data.order(seed).numbers(num_taken, NUM_NEXT)
    for samples in sources_of(data.training).values():
        own = numbers[(numbers >= first) & (numbers < first + len(samples))]
        if isinstance(samples, StreamSamples) and len(own):
            samples.seek(
                int(own[0]) - first, _Told(samples.origin, int(own[0]) - first) if is_shown else None
            )
        first += len(samples)


NUM_NEXT = 1 << 14
"""Places to look at for the next sample of each source."""


class _Told:
    """Says now and then how many samples have been left out."""

    def __init__(self, origin: str, number: int) -> None:
        self._origin, self._number, self._told_s = origin, number, monotonic()

    def __call__(self, done: int) -> None:
        if monotonic() - self._told_s < TOLD_EVERY_S:
            return
        self._told_s = monotonic()
        text = f"finding the place in {self._origin}: {done:,} of {self._number:,} samples read and left out"
        print(text, file=sys.stderr, flush=True)  # noqa: T201 (for people)
