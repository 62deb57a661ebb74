"""Gradients of parameters that several stages use: who holds them, and what their sums take."""

from collections.abc import Sequence
from dataclasses import dataclass

from bireme.plan.ring import ring_share
from bireme.plan.search.contention import Ring, ring_over
from bireme.plan.search.draft import Draft
from bireme.plan.search.problem import PlanningProblem
from bireme.profile.profile import Profile

__all__ = ["Tied", "TiedGradients", "TiedRing", "tied_rings"]


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter that these stages use, two at least, and the bytes of its gradient."""

    name: str
    stages: tuple[int, ...]
    num_bytes: float


class TiedGradients:
    """The parameters that units of a profile share."""

    def __init__(self, profile: Profile) -> None:
        self._places: dict[str, list[tuple[int, int]]] = {}
        """The units that hold each, and the bytes of its gradient."""
        for place, unit in enumerate(profile.units):
            for held in unit.tied:
                if held.gradient_bytes:
                    self._places.setdefault(held.name, []).append((place, held.gradient_bytes))

    def between(self, stages: Sequence[tuple[int, int]]) -> list[Tied]:
        """Those that several of some stages use, each of which goes from one unit up to another."""
        found = []
        for name, places in self._places.items():
            holders = tuple(
                stage
                for stage, (begin, end) in enumerate(stages)
                if any(begin <= place < end for place, _ in places)
            )
            if len(holders) > 1:
                found.append(Tied(name, holders, float(places[0][1])))
        return found

    def of_stages(self, stages: Sequence[tuple[int, int]]) -> tuple[float, ...]:
        """Bytes of each stage's gradients that other stages have a part of; empty where there are none."""
        shared = self.between(stages)
        each = tuple(
            sum(one.num_bytes for one in shared if place in one.stages) for place in range(len(stages))
        )
        return each if shared else ()


@dataclass(frozen=True, slots=True)
class TiedRing:
    """A sum of tied gradients over all devices of some ranks, which these stages wait for."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    ring: Ring
    sent_bytes: float
    """What each device sends on for it."""


def tied_rings(problem: PlanningProblem, draft: Draft, tied: Sequence[Tied]) -> list[TiedRing]:
    """The sums of tied gradients that go around in addition to those of replicas.

    What stages of one rank share, the rank adds up itself; the replicas then sum it with the rest, but where
    they share weights: then it goes around alone, when the first of the stages has it.
    """
    rank_of_stage = draft.outline.rank_of_stage
    of_ranks: dict[tuple[int, ...], list[Tied]] = {}
    for one in tied:
        ranks = tuple(sorted({rank_of_stage[stage] for stage in one.stages}))
        if len(ranks) > 1 or draft.whole_weights:
            of_ranks.setdefault(ranks, []).append(one)
    found = []
    for ranks, own in of_ranks.items():
        num_bytes = sum(one.num_bytes for one in own)
        devices = [device for rank in ranks for device in draft.grid[rank]]
        stages = sorted({stage for one in own for stage in one.stages})
        found.append(
            TiedRing(
                tuple(stages if len(ranks) > 1 else stages[:1]),
                ranks,
                ring_over(problem, devices, num_bytes),
                ring_share(len(devices)) * num_bytes,
            )
        )
    return found
