"""A plan by its program: how a model and its batches are divided over ranks that run a given program.

A `Plan` names a schedule; this has the programs themselves, which may come from a file. The engine asks for
no more than this, so it trains with any program that is proved right.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, takewhile

from bireme.codec.description import NO_CODECS, LinkCodecs
from bireme.errors import BiremeError
from bireme.schedule.source import ProgramSource


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """`cuts` are the units at which a new stage begins, without the first stage's 0; left out, stages get
    shares of the model's arithmetic that are as equal as can be. The other fields are those of a `Plan`.
    """

    source: ProgramSource
    cuts: tuple[int, ...] | None = None
    width: int = 1
    recompute_units: tuple[int, ...] = ()
    micro_batch_sizes: tuple[int, ...] = ()
    codecs: LinkCodecs = NO_CODECS

    def __post_init__(self) -> None:
        if self.cuts is not None:
            if list(self.cuts) != sorted(set(self.cuts)) or any(cut < 1 for cut in self.cuts):
                raise BiremeError(
                    f"The cuts {list(self.cuts)} are no way to cut a chain of units: they must rise, from 1 "
                    "on."
                )
            if len(self.cuts) != self.num_stages - 1:
                raise BiremeError(
                    f"The cuts {list(self.cuts)} make {len(self.cuts) + 1} stages, and {self.source.name} is "
                    f"a program of {self.num_stages}. Give {self.num_stages - 1} cuts."
                )
        if self.width < 1:
            raise BiremeError(f"A pipeline has at least one replica, not {self.width}.")
        sizes = self.micro_batch_sizes
        if sizes and (len(sizes) != self.width or min(sizes) < 1):
            raise BiremeError(
                f"Micro-batches of {', '.join(map(str, sizes))} samples are no shares for {self.width} "
                "replicas: give a size of 1 or more for each replica."
            )

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.source.num_stages

    @property
    def num_ranks(self) -> int:
        """How many processes it takes, replicas counted."""
        return self.width * self.source.num_ranks

    def cut(self, work: Sequence[float]) -> "ProgramPlan":
        """The same with its cuts, for a model of units that are so much work each."""
        return self if self.cuts is not None else replace(self, cuts=even_cuts(work, self.num_stages))

    def units_of(self, stage: int, num_units: int) -> range:
        """The units of a stage, of so many in all. The model must be cut."""
        assert self.cuts is not None, "cut() comes first"
        return units_between(self.cuts, stage, num_units)


def units_between(cuts: Sequence[int], stage: int, num_units: int) -> range:
    """The units of a stage, of so many in all."""
    bounds = [0, *cuts, num_units]
    if cuts and cuts[-1] >= num_units:
        raise BiremeError(
            f"The plan cuts at unit {cuts[-1]}, and the model has {num_units} units. It was made "
            "for another model."
        )
    begin, end = list(pairwise(bounds))[stage]
    return range(begin, end)


def even_cuts(work: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """The cuts that leave the stage with the most work as little as can be, each with a unit at least."""
    if len(work) < num_stages:
        raise BiremeError(
            f"The model has {len(work)} units, which are too few for {num_stages} stages. Use a program of "
            f"at most {len(work)} stages."
        )
    so_far = list(accumulate(work, initial=0.0))
    # For each number of units from the first: what the busiest of the stages has, and where they are cut.
    ways: dict[int, tuple[float, tuple[int, ...]]] = {end: (so_far[end], ()) for end in range(len(so_far))}

    def best_last(places: range, end: int) -> Iterator[tuple[float, tuple[int, ...]]]:
        """The ways whose last cut is at one of the places and leaves the busiest stage least. The work before
        a cut grows with its place and the work after it shrinks, so these places are neighbors.
        """

        def way(cut: int) -> tuple[float, tuple[int, ...]]:
            return max(ways[cut][0], so_far[end] - so_far[cut]), (*ways[cut][1], cut)

        middle = bisect_left(places, True, key=lambda cut: ways[cut][0] >= so_far[end] - so_far[cut])
        sides = (places[middle:], places[:middle][::-1])
        least = min(way(side[0])[0] for side in sides if side)
        return (one for side in sides for one in takewhile(lambda one: one[0] <= least, map(way, side)))

    for stages in range(2, num_stages + 1):
        ways = {end: min(best_last(range(stages - 1, end), end)) for end in range(stages, len(so_far))}
    return ways[len(work)][1]
