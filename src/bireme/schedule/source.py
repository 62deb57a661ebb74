"""A program source: what all programs of one kind have in common, and the programs themselves for any window.

Who asks what a schedule is like (its rule, its banks, which rank has which stage) asks its source; who runs
it asks the source for a window. A named schedule is a source of windows of any length. A program that
somebody gives, such as one from a file, becomes a source by `source_of`, which proves it right first:

* If its tracks are loops, so are its windows: any number of batches from its shortest on, nobody needs to
  know how many.
* A synchronous program of one batch is such a loop as it is, for it drains before it steps.
* Any other runs as it is written: each window is just as many batches as it has, neither more nor fewer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from bireme.errors import BiremeError
from bireme.schedule.checker import check
from bireme.schedule.instruction import COMPUTE, Instruction, Kind
from bireme.schedule.program import Block, Program, ProgramTraits, Rule, Track
from bireme.schedule.tiers import RankTiers

# Fold a long program into a loop.
#
# After a start-up, every schedule repeats itself batch by batch. So a program of many batches is made from
# three short ones: what the second has more than the first is the body of the loop, and the third must come
# out as that loop foretells. Where it does not (the start-up is longer), longer ones are tried.

WRITTEN_OUT = 8
"""Up to so many batches a program is simply written out."""


def repeats_of(program: Program) -> int:
    """How often the loops of a long program are run; 0 if it is written out."""
    repeats = {track.repeats for track in program.tracks}
    return min(repeats) if len(repeats) == 1 and program.num_batches > WRITTEN_OUT else 0


def fold(make: Callable[[int], Program], num_batches: int, *, shortest: int = 2) -> Program:
    """`make(num_batches)`, as a loop where it is long; `make` builds a program of so many batches, if they
    are `shortest` or more.
    """
    if num_batches <= WRITTEN_OUT:
        return make(num_batches)
    short = shortest
    while short + 2 < num_batches:
        first, second, third = make(short), make(short + 1), make(short + 2)
        folded = [_fold(a, b, num_batches - short) for a, b in zip(first.tracks, second.tracks, strict=True)]
        foretold = [_fold(a, b, 2) for a, b in zip(first.tracks, second.tracks, strict=True)]
        if all(
            track is not None and list(track) == list(written)
            for track, written in zip(foretold, third.tracks, strict=True)
        ):
            tracks = tuple(track for track in folded if track is not None)
            return replace(first, tracks=tracks, num_batches=num_batches)
        short += short // 2
    return make(num_batches)


def _fold(short: Track, longer: Track, repeats: int) -> Track | None:
    """The loop that gives `short` with 0 repeats and `longer` with 1, shown with `repeats`."""
    before, after = list(short), list(longer)
    versions = short.versions_per_batch

    def later(instruction: Instruction, batches: int) -> Instruction:
        return instruction.shifted(batches, batches * versions)

    suffix = 0
    while suffix < len(before) and later(before[-1 - suffix], 1) == after[-1 - suffix]:
        suffix += 1
    cut = len(before) - suffix
    if before[:cut] != after[:cut]:
        return None
    body = after[cut : len(after) - suffix]
    tail = [later(instruction, repeats) for instruction in before[cut:]]
    return Track(tuple(before[:cut]), tuple(body), repeats, tuple(tail), versions)


# A program for batches that nobody has counted: it goes on as long as there are some.
#
# A long program is a loop, so one for a number of batches that is not known yet is that loop, left when the
# batches are about to end. To know when, one must look some batches ahead.

LONG = 8 * WRITTEN_OUT
"""Batches of the window whose loop is run, however many batches there are."""

Make = Callable[[int, int], Program]
"""Gives the program of n batches from batch `first` on."""

_Begins = Callable[[Program, RankTiers], None]
"""Is told which program runs, maybe with fewer or more repetitions, and where the chunks of a rank begin."""


def stream(
    make: Make,
    rank: int,
    has: Callable[[int], bool],
    *,
    first_batch: int = 0,
    begins: _Begins | None = None,
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


SETTLED = 4
"""Batches after which no schedule keeps more than it has kept."""

Window = Callable[[int, int], Program]
"""Gives the right program of so many batches from the batch of that number on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSource(ProgramTraits):
    """Programs that differ only in their window, which `window` gives: (number of batches, first batch).

    `num_batches` is the length of every window where there is only one, else None.
    """

    num_sliced: int
    """How many micro-batches of a batch go forward in halves."""
    splits_backward: bool
    """Whether any backward runs in two halves."""
    window: Window
    num_batches: int | None = None
    least: int = 1
    """The fewest batches of a window."""

    @property
    def read_ahead(self) -> int:
        """How many batches after a batch have been read, at most, on any rank, once that one is updated."""
        return read_ahead(self.program) if self.num_batches is None else self.num_batches - 1

    def program(self, num_batches: int, first_batch: int = 0) -> Program:
        """What each rank does in a window of batches."""
        return self.window(num_batches, first_batch)

    def settled(self) -> Program:
        """A window that shows all that longer ones do."""
        return self.program(self.num_batches or max(self.least, SETTLED))

    def blocks(
        self,
        rank: int,
        has: Callable[[int], bool],
        *,
        first_batch: int = 0,
        begins: _Begins | None = None,
    ) -> Iterator[Block]:
        """What a rank does with the batches that come, run by run. `has(n)` tells whether there are n.

        Where windows are of one length, all their batches are asked for before the first instruction.
        `begins` is as for `stream`.
        """
        if self.num_batches is None:
            yield from stream(self.program, rank, has, first_batch=first_batch, begins=begins)
        elif has(1):
            if not has(self.num_batches) or has(self.num_batches + 1):
                raise BiremeError(
                    f"{self.name} is a program of {self.num_batches} batches that does not repeat, so each "
                    f"training is of just as many, and there are "
                    f"{'more' if has(self.num_batches) else 'fewer'}. Give it {self.num_batches} at a time, "
                    "or a program whose tracks are loops."
                )
            program = self.program(self.num_batches, first_batch)
            tiers = program.tiers_of(rank)
            if begins is not None and tiers is not None:
                begins(program, tiers)
            yield from program.tracks[rank].blocks()


def source_like(
    program: Program, window: Window, num_batches: int | None = None, least: int = 1
) -> ProgramSource:
    """A source of programs that are like this one but for their window."""
    traits: dict[str, Any] = {one.name: getattr(program, one.name) for one in fields(ProgramTraits)}
    return ProgramSource(
        **traits,
        num_sliced=program.num_sliced,
        splits_backward=program.splits_backward,
        window=window,
        num_batches=num_batches,
        least=least,
    )


def source_of(program: Program) -> ProgramSource:
    """The source of a program that is given. Refuses one that is not right, and says why."""
    _prove(program)
    given = _Given(_as_loop(program))
    if given.least:
        return source_like(program, given.window, least=given.least)
    return source_like(program, given.window, program.num_batches, program.num_batches)


class _Given:
    """A program that was given, at other places and, if it is a loop, in other lengths."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.proved: set[int] = set()
        """The first batches of windows that are proved."""

    @cached_property
    def least(self) -> int:
        """The fewest batches of a window, where all tracks loop alike; else 0."""
        repeats = {track.repeats for track in self.program.tracks}
        return (
            max(self.program.num_batches - repeats.pop(), 1) if len(repeats) == 1 and 0 not in repeats else 0
        )

    def window(self, num_batches: int, first_batch: int) -> Program:
        """The program of so many batches from one on."""
        name, least = self.program.name, self.least
        if not least and num_batches != self.program.num_batches:
            raise BiremeError(
                f"{name} is a program of {self.program.num_batches} batches that does not repeat, and one of "
                f"{num_batches} was asked for. Give it as many batches as it has."
            )
        if num_batches < least:
            raise BiremeError(
                f"{name} takes at least {least} batches to fill and drain, and there are {num_batches}. "
                "Train on more of them in one go, or use a program that is made for fewer."
            )
        if first_batch not in self.proved:
            # What holds for the loop run through once, twice and three times holds however often it is.
            for more in range(3) if least else (0,):
                _prove(_at(self.program.of_length((least or num_batches) + more), first_batch))
            self.proved.add(first_batch)
        return _at(self.program.of_length(num_batches), first_batch)


def _prove(program: Program) -> None:
    report = check(program)
    if not report.ok:
        raise BiremeError(report.verdict(program.name))


def _as_loop(program: Program) -> Program:
    """A synchronous program of one batch as a loop that runs once."""
    if program.num_batches != 1 or program.rule is not Rule.SYNCHRONOUS:
        return program
    tracks = (Track((), tuple(track), 1, (), track.versions_per_batch) for track in program.tracks)
    return replace(program, tracks=tuple(tracks))


def _at(program: Program, first_batch: int) -> Program:
    """The same order of instructions, beginning with another batch, on the versions that the rule then asks
    for.
    """
    if first_batch == program.first_batch:
        return program
    moved = program.later(first_batch - program.first_batch)

    def asked(steps: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
        return tuple(
            step._replace(version=moved.version_of(step)) if step.kind in COMPUTE else step for step in steps
        )

    tracks = (
        replace(track, head=asked(track.head), body=asked(track.body), tail=asked(track.tail))
        for track in moved.tracks
    )
    return replace(moved, tracks=tuple(tracks))
