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
from dataclasses import dataclass, replace
from functools import cached_property

from bireme.errors import BiremeError
from bireme.schedule.checker import check
from bireme.schedule.instruction import COMPUTE, Instruction
from bireme.schedule.program import Block, Program, Track
from bireme.schedule.residency import gradient_sets
from bireme.schedule.rule import Rule
from bireme.schedule.stream import Begins, read_ahead, stream

__all__ = ["SETTLED", "ProgramSource", "source_like", "source_of"]

SETTLED = 4
"""Batches after which no schedule keeps more than it has kept."""

Window = Callable[[int, int], Program]
"""Gives the right program of so many batches from the batch of that number on."""


@dataclass(frozen=True, slots=True)
class ProgramSource:
    """Programs that differ only in their window, which `window` gives: (number of batches, first batch).

    `num_batches` is the length of every window where there is only one, else None.
    """

    name: str
    rule: Rule
    rank_of_stage: tuple[int, ...]
    num_microbatches: int
    banks: tuple[int, ...]
    recomputed: frozenset[int]
    num_sliced: int
    """How many micro-batches of a batch go forward in halves."""
    splits_backward: bool
    """Whether any backward runs in two halves."""
    window: Window
    num_batches: int | None = None
    least: int = 1
    """The fewest batches of a window."""

    @property
    def gradient_sets(self) -> tuple[int, ...]:
        """For each stage, how many batches' gradients it keeps at once."""
        return gradient_sets(self.settled())

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

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        """How many processes one replica has."""
        return max(self.rank_of_stage) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on a rank, in the model's order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    def blocks(
        self,
        rank: int,
        has: Callable[[int], bool],
        *,
        first_batch: int = 0,
        begins: Begins | None = None,
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
    return ProgramSource(
        name=program.name,
        rule=program.rule,
        rank_of_stage=program.rank_of_stage,
        num_microbatches=program.num_microbatches,
        banks=program.banks,
        recomputed=program.recomputed,
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
            replace(step, version=moved.version_of(step)) if step.kind in COMPUTE else step for step in steps
        )

    tracks = (
        replace(track, head=asked(track.head), body=asked(track.body), tail=asked(track.tail))
        for track in moved.tracks
    )
    return replace(moved, tracks=tuple(tracks))
