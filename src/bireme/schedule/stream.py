"""A program for batches that nobody has counted: it goes on as long as there are some.

A long program is a loop, so one for a number of batches that is not known yet is that loop, left when the
batches are about to end. To know when, one must look some batches ahead.
"""

from collections.abc import Callable, Iterator

from bireme.errors import BiremeError
from bireme.schedule.folding import WRITTEN_OUT
from bireme.schedule.instruction import Kind
from bireme.schedule.program import Block, Program, Track
from bireme.schedule.tiers import RankTiers

__all__ = ["LONG", "Begins", "read_ahead", "stream"]

LONG = 8 * WRITTEN_OUT
"""Batches of the window whose loop is run, however many batches there are."""

Make = Callable[[int, int], Program]
"""Gives the program of n batches from batch `first` on."""

Begins = Callable[[Program, RankTiers], None]
"""Is told which program runs, maybe with fewer or more repetitions, and where the chunks of a rank begin."""


def stream(
    make: Make,
    rank: int,
    has: Callable[[int], bool],
    *,
    first_batch: int = 0,
    begins: Begins | None = None,
) -> Iterator[Block]:
    """What a rank does, run by run.

    `has(n)` tells whether there are at least n batches. It is asked for larger and larger n, so a source of
    batches need be read only a little ahead of what is worked on. `begins` is told the program that runs,
    before its first block comes, if the rank pages.
    """
    # All windows but the very first are alike, so that one program, which may be remembered, does for them.
    base = min(first_batch, 1)
    late = first_batch - base

    def begun(program: Program) -> Track:
        tiers, track = program.tiers_of(rank), program.tracks[rank]
        if begins is not None and tiers is not None:
            begins(program, tiers.later(late * track.versions_per_batch, program.banks))
        return track

    for block, versions_per_batch in _from_base(lambda count: make(count, base), rank, has, begun):
        yield Block(block.instructions, block.batches + late, block.versions + late * versions_per_batch)


def read_ahead(make: Make) -> int:
    """How many batches after a batch a stream has read, at most and on any rank, once that batch is updated.

    So ranks that learn from the result of a batch that they are to end can all end this many batches later.
    """
    return max(_most_ahead(track, base) for base in (0, 1) for track in make(LONG, base).tracks)


def _most_ahead(track: Track, first_batch: int) -> int:
    if not track.repeats:
        raise BiremeError(
            f"The program does not repeat itself within {LONG} batches, so all of its batches must be there "
            "before it begins. Use a schedule that reaches a steady state."
        )
    least = LONG - track.repeats
    # A body is run once the batch after those before it is there; the tail once there are no more.
    parts = ((least, track.head), (least + 1, track.body), (LONG, track.tail))
    return max(
        num_read - 1 - (step.batch - first_batch)
        for num_read, steps in parts
        for step in steps
        if step.kind is Kind.UPDATE
    )


def _from_base(
    make: Callable[[int], Program],
    rank: int,
    has: Callable[[int], bool],
    begun: Callable[[Program], Track],
) -> Iterator[tuple[Block, int]]:
    """The blocks of a window that begins at the base, each with its versions per batch."""
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
            short = begun(make(number))
            yield from ((block, short.versions_per_batch) for block in short.blocks())
        return
    begun(long)
    yield Block(track.head, 0, 0), track.versions_per_batch
    while has(number + 1):
        shift = number - least
        yield Block(track.body, shift, shift * track.versions_per_batch), track.versions_per_batch
        number += 1
    late = number - LONG
    yield Block(track.tail, late, late * track.versions_per_batch), track.versions_per_batch
