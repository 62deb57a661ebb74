"""Fold a long program into a loop.

After a start-up, every schedule repeats itself batch by batch. So a program of many batches is made from
three short ones: what the second has more than the first is the body of the loop, and the third must come
out as that loop foretells. Where it does not (the start-up is longer), longer ones are tried.
"""

from collections.abc import Callable
from dataclasses import replace

from bireme.schedule.instruction import Instruction
from bireme.schedule.program import Program, Track

__all__ = ["WRITTEN_OUT", "fold"]

WRITTEN_OUT = 8
"""Up to so many batches a program is simply written out."""


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
