"""A plan as the search handles it: devices by their numbers, cuts at units of the whole chain."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import pairwise
from math import lcm

from bireme.cluster.cluster import Cluster
from bireme.codec.description import BoundaryCodecs
from bireme.errors import BiremeError
from bireme.plan.plan import Paging, Plan, values_of
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.shapes import PARTS, Outline
from bireme.schedule.budgets import Cut
from bireme.schedule.catalogue import generate, schedule_named
from bireme.schedule.gathering import gathered
from bireme.schedule.paging import PagedPrograms
from bireme.schedule.program import Program, Rule
from bireme.schedule.source import WRITTEN_OUT
from bireme.schedule.weave import UpdateTiming

Grid = tuple[tuple[int, ...], ...]
"""The device of each replica of each rank: `grid[rank][replica]`. Stages of unequal width are a rank each."""

_SETTLED = 2
"""Times as many micro-batches as there are stages: after so many, each more takes as long as the last."""

_FEWEST = 8
"""Micro-batches that show what updates do before the end of a batch."""

_MOST_PASSES = 512
"""Forwards that are simulated to let a plan settle, over all stages; deeper plans are simulated for less."""

_LARGE = 4_096
"""Forwards of a batch, over all stages, from which on a shorter batch is tried first."""

_DRAINING, _FLOWING = 2, 4
"""Batches of the window that is looked at; in its middle the pipeline has come to its pace, and all that is
ever kept at once has been."""

_LOOPED = WRITTEN_OUT + 2
"""Batches where chunks are paged: what becomes of them is decided for a loop, as in a long run."""

_ESTIMATED = 2
"""The same for an estimate, if the pipeline drains after each batch."""


def shares_by_speed(speeds: Sequence[float], num_microbatches: int) -> tuple[int, ...]:
    """Whole micro-batches for replicas of these speeds, one at least for each, so that the last is done as
    early as possible. Of replicas that are equally good the first takes more.
    """
    each = (num_microbatches - len(speeds)) / sum(speeds)
    found = [max(1, int(each * speed)) for speed in speeds]
    ends = [((one + 1) / speed, place) for place, (one, speed) in enumerate(zip(found, speeds, strict=True))]
    heapify(ends)
    for _ in range(num_microbatches - sum(found)):
        place = ends[0][1]
        found[place] += 1
        heapreplace(ends, ((found[place] + 1) / speeds[place], place))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Seat:
    """A replica of a stage of unequal width: its rank, its device, and its micro-batches of a batch."""

    stage: int
    rank: int
    device: int
    num_microbatches: int


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan in the making."""

    outline: Outline
    grid: Grid
    cuts: tuple[int, ...]
    recompute: tuple[int, ...] = ()
    num_sliced: int | None = None
    lookahead: int = 0
    codecs: tuple[BoundaryCodecs, ...] = ()
    """Of its boundaries; the one that is wished for on all of them if it is empty."""
    sweep: int = 1
    paging: Paging | None = None
    whole_weights: int = 0
    shares: tuple[tuple[int, ...], ...] = ()
    """Of stages of unequal width, the micro-batches of a batch that each replica takes."""
    share_of_sums: float = 1.0
    """The share of its sums over replicas that counts: less if it stands for a longer batch."""

    @property
    def splits_backward(self) -> bool:
        """Whether its backwards run in halves."""
        return schedule_named(self.outline.schedule).splits_backward

    @property
    def rule(self) -> Rule:
        """Its update rule."""
        return schedule_named(self.outline.schedule).rule

    def stages(self, num_units: int) -> list[tuple[int, int]]:
        """The units from which and up to which each stage goes."""
        return list(pairwise((0, *self.cuts, num_units)))

    @property
    def widths(self) -> tuple[int, ...]:
        """The replicas of each stage."""
        return self.outline.stage_widths or (self.outline.width,) * self.outline.num_stages

    def sites(self, request: PlanRequest) -> list[slice]:
        """The replicas of each site."""
        if self.outline.stage_widths:
            return [slice(0, self.outline.most_replicas)]
        width = request.site_width(self.outline.width)
        return [slice(first, first + width) for first in range(0, self.outline.width, width)]

    def counts_of(self, stage: int) -> tuple[int, ...]:
        """The micro-batches of a batch on each replica of a stage."""
        outline = self.outline
        return self.shares[stage] if self.shares else (outline.num_microbatches,) * outline.width

    def seats(self) -> Iterator[Seat]:
        """The seats of stages of unequal width, stage by stage."""
        rank = 0
        for stage, (row, share) in enumerate(zip(self.grid, self.shares, strict=True)):
            for device, count in zip(row, share, strict=True):
                yield Seat(stage, rank, device, count)
                rank += 1

    @property
    def may_be_shortened(self) -> bool:
        """Whether fewer micro-batches can show all it does: not where tensors come and go, as more of these
        may be under way in a longer batch.
        """
        return self.paging is None and not self.whole_weights

    def much_shorter(self) -> "Draft | None":
        """A large draft with delayed updates in batches of at most half as many micro-batches, with which the
        pipeline settles, and with a part of its sums that is as large; None of any other draft.
        """
        outline, ranks = self.outline, self.outline.num_ranks
        is_small = outline.num_stages * outline.num_microbatches < _LARGE
        if is_small or outline.stage_widths or self.rule is Rule.SYNCHRONOUS or not self.may_be_shortened:
            return None
        count = -(-(_SETTLED * outline.num_stages + self.lookahead) // ranks) * ranks
        share = count / outline.num_microbatches
        few = replace(self, outline=replace(outline, num_microbatches=count), share_of_sums=share)
        return few if share <= 1 / 2 else None

    def shortened(self, least: int) -> tuple["Draft", "Draft"] | None:
        """The same with two smaller numbers of micro-batches, `least` or more and a period apart, that show
        all it does and what a period takes; None where it has too few for that to be less to simulate.
        """
        outline, ranks = self.outline, self.outline.num_ranks
        if not self.may_be_shortened:
            return None
        if outline.stage_widths:
            return self._shortened_unequal(least)
        stages = ranks * (2 if outline.stages_per_rank > 1 else 1)
        times = _SETTLED if outline.num_stages * _SETTLED * stages <= _MOST_PASSES else 1
        shows_all = max(times * stages + self.lookahead, self.num_sliced or 0, _FEWEST, least)
        one = -(-shows_all // ranks) * ranks
        other = one + times * ranks
        if one + other >= outline.num_microbatches:
            return None
        short, longer = (
            replace(self, outline=replace(outline, num_microbatches=count)) for count in (one, other)
        )
        return short, longer

    def _shortened_unequal(self, least: int) -> tuple["Draft", "Draft"] | None:
        """The same for stages of unequal width, whose replicas take turns: a period is a number of rounds of
        all of them, if these are short enough, and what is left over stays.
        """
        outline, ranks = self.outline, self.outline.num_devices
        times = _SETTLED if outline.num_stages * _SETTLED * ranks <= _MOST_PASSES else 1
        round_of_all = lcm(*outline.stage_widths)
        if round_of_all > times * ranks:
            round_of_all = max(outline.stage_widths)
        period = -(-times * ranks // round_of_all) * round_of_all
        shows_all = max(times * ranks + self.lookahead, _FEWEST, least)
        one = outline.num_microbatches - (outline.num_microbatches - shows_all) // round_of_all * round_of_all
        if 2 * one + period >= outline.num_microbatches:
            return None
        return self._with_count(one), self._with_count(one + period)

    def _with_count(self, count: int) -> "Draft":
        """The same with another number of micro-batches, in proportion."""
        shares = tuple(shares_by_speed(share, count) for share in self.shares)
        return replace(self, outline=replace(self.outline, num_microbatches=count), shares=shares)

    def program(self, *, is_brief: bool = False, estimates: bool = False) -> Program:
        """What one replica does in a few batches; where it pages, in fewer with `is_brief`, and in fewest if
        that `estimates`.
        """
        if self.paging is None:
            return self.resident_program()
        return _paged(self, is_brief=is_brief, estimates=estimates)

    def resident_program(self, num_batches: int | None = None) -> Program:
        """The same without paging; in `num_batches` if that is given."""
        return _gathered(self, num_batches) if self.whole_weights else self.ungathered_program(num_batches)

    def ungathered_program(self, num_batches: int | None = None) -> Program:
        """The same without what sharing weights takes; in `num_batches` if that is given."""
        usual = (
            _LOOPED if self.paging is not None else _DRAINING if self.rule is Rule.SYNCHRONOUS else _FLOWING
        )
        shape = replace(self.outline, sizes=(), sites=1)
        like = Draft(shape, (), (), **values_of(self, _OF_PROGRAMS))
        return _program(like, num_batches or usual)

    def plan(self, names: tuple[str, ...], codecs: tuple[BoundaryCodecs, ...] = ()) -> Plan:
        """The plan, with the devices' names and the codecs of its boundaries."""
        outline = self.outline
        is_told = outline.stages_per_rank > 1 or outline.schedule in PARTS
        return Plan(
            width=outline.width,
            stages_per_rank=outline.stages_per_rank if is_told else None,
            micro_batch_sizes=outline.sizes,
            devices=tuple(tuple(names[device] for device in row) for row in self.grid),
            codecs=() if all(one.is_none for one in codecs) else codecs,
            stage_shares=self.shares,
            **values_of(self, _OF_BOTH),
            **values_of(outline, _OF_OUTLINES),
        )


_OF_PROGRAMS = ("num_sliced", "lookahead", "sweep", "recompute", "shares")
"""The fields of a draft that its programs depend on, beside its outline."""

_OF_BOTH = ("cuts", "recompute", "num_sliced", "lookahead", "sweep", "paging", "whole_weights")
_OF_OUTLINES = ("schedule", "num_microbatches", "updates_early", "updates_halfway", "sites", "stage_widths")
"""The fields of a plan that a draft has too, and those that its outline has."""


@lru_cache(maxsize=256)
def _program(draft: Draft, num_batches: int) -> Program:
    outline = draft.outline
    return generate(
        outline.schedule,
        num_stages=outline.num_stages,
        num_microbatches=outline.num_microbatches,
        num_batches=num_batches,
        stages_per_rank=outline.stages_per_rank,
        timing=UpdateTiming(early=outline.updates_early, halfway=outline.updates_halfway),
        **values_of(draft, _OF_PROGRAMS),
    )


def _paged(draft: Draft, *, is_brief: bool, estimates: bool) -> Program:
    paging = draft.paging
    assert paging is not None, "the draft pages"
    num_batches = _ESTIMATED if estimates and draft.rule is Rule.SYNCHRONOUS else None
    made = _paged_programs(replace(draft, paging=replace(paging, ahead=1)), num_batches)
    return made.fetched(paging.ahead, is_brief=is_brief or estimates)


@lru_cache(maxsize=8)
def _paged_programs(draft: Draft, num_batches: int | None) -> PagedPrograms:
    paging = draft.paging
    assert paging is not None, "the draft pages"
    plain = replace(paging, updates_together=False, updates_apart=False)
    return paging.paged(draft.resident_program(num_batches), _cut(replace(draft, paging=plain)))


@lru_cache(maxsize=64)
def _cut(draft: Draft) -> Cut:
    """How memory is cut, which depends neither on the lead of copies nor on the order of updates."""
    assert draft.paging is not None, "the draft pages"
    return draft.paging.cut(draft.resident_program())


@lru_cache(maxsize=64)
def _gathered(draft: Draft, num_batches: int | None) -> Program:
    sharers = draft.outline.width // draft.outline.sites
    return gathered(draft.ungathered_program(num_batches), sharers, draft.whole_weights)


def draft_of(plan: Plan, cluster: Cluster) -> Draft:
    """The draft of a plan that names its devices and the samples of its micro-batches."""
    if not plan.devices or not plan.micro_batch_sizes:
        raise BiremeError(
            "The plan names no devices or no micro-batch sizes, so "
            "its time cannot be predicted. Give it both."
        )
    if plan.recompute_units:
        raise BiremeError(
            "Plans that recompute single units cannot be predicted. Name whole stages to recompute."
        )
    num_ranks = plan.num_stages if plan.stage_widths else plan.source.num_ranks
    outline = Outline(
        num_ranks=num_ranks,
        stages_per_rank=plan.num_stages // num_ranks,
        sizes=plan.micro_batch_sizes,
        **values_of(plan, _OF_OUTLINES) | {"updates_early": plan.is_early},
    )
    grid = tuple(tuple(cluster.number_of(name) for name in row) for row in plan.devices)
    used = [device for row in grid for device in row]
    if len(set(used)) != len(used):
        twice = next(device for device in used if used.count(device) > 1)
        raise BiremeError(
            f"The plan puts two ranks on {cluster.devices()[twice].name}; each rank needs its own device."
        )
    return Draft(outline, grid, codecs=plan.codecs, shares=plan.shares, **values_of(plan, _OF_BOTH))


@dataclass(frozen=True, slots=True)
class LowerBound:
    """A lower bound on the time of a batch of a draft, and the device or lane that causes it."""

    seconds: float
    bottleneck: str
    device_s: Mapping[int, float]
    """For how long a batch keeps each device busy."""
