"""A program for batches that nobody has counted: it goes on as long as there are some.

A long program is a loop, so one for a number of batches that is not known yet is that loop, left when the
batches are about to end. To know when, one must look some batches ahead.
"""

from collections.abc import Callable, Iterator

from bireme.schedule.folding import WRITTEN_OUT
from bireme.schedule.program import Block, Program

__all__ = ["stream"]

LONG = 8 * WRITTEN_OUT


def stream(make: Callable[[int], Program], rank: int, has: Callable[[int], bool]) -> Iterator[Block]:
    """What a rank does, run by run, where `make(n)` is the program of n batches.

    `has(n)` tells whether there are at least n batches. It is asked for larger and larger n, so a source of
    batches need be read only a little ahead of what is worked on.
    """
    long = make(LONG)
    track = long.tracks[rank]
    least = LONG - track.repeats
    number = 0
    while number < least and has(number + 1):
        number += 1
    if number < least or not track.repeats:
        while has(number + 1):
            number += 1
        if number:
            yield from make(number).tracks[rank].blocks()
        return
    yield Block(track.head, 0, 0)
    while has(number + 1):
        shift = number - least
        yield Block(track.body, shift, shift * track.versions_per_batch)
        number += 1
    late = number - LONG
    yield Block(track.tail, late, late * track.versions_per_batch)
