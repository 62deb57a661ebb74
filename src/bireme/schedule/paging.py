"""Paging: the same program for ranks whose memory is too small, with FETCH and EVICT in it.

The program says which items every instruction uses, so what leaves the device when, and what comes back, is
planned before anything runs: `eviction.py` chooses, tier by tier. The copies that the device's plan makes are
the accesses of the tier below, which is planned in the same way over a disk.

An update may be made on the host, where what the optimizer remembers stays: then gradients come down for
it, and the weights that it makes go up.

An EVICT comes right after the last instruction that uses the chunk, a FETCH as far before the next one as
there is room. Where everything fits, the program stays what it is. A loop stays a loop: what becomes of a
chunk is decided once for all batches of the steady state.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from bireme.grouping import grouped
from bireme.schedule.accesses import ChunkAccess, accesses_of
from bireme.schedule.budgets import (
    Cut,
    TierTooSmallError,
    check_capacity,
    check_working_sets,
)
from bireme.schedule.eviction import Evictions, Gap, Leads, gaps_of, most_at_a_step, settle
from bireme.schedule.instruction import SENDS, Instruction, Item, Kind, Page
from bireme.schedule.program import Program, Rule, Track
from bireme.schedule.proofs.stages import stage_problems
from bireme.schedule.source import fold, repeats_of
from bireme.schedule.tiers import Chunk, RankTiers

_STEADY = 4
"""Batches of the steady state in which what becomes of chunks is decided for all."""


class PagedPrograms:
    """The program with FETCH and EVICT on the ranks whose memory is cut, for each lead of the copies. What
    does not depend on the lead is made once.

    With `updates_together` a rank updates all its stages when it updates the first, where that is right: the
    copies of an update take long, and the others would wait for the next batch's first micro-batch. With
    `updates_apart` each stage is updated as soon as it has its gradients, where the rule is synchronous,
    replicas share nothing, and nothing `is_summed`: these need not leave the device then. `is_summed` where
    gradients are summed over replicas between REDUCE and UPDATE, and must stay. Raises where a tier is
    smaller than the largest working set.
    """

    def __init__(
        self,
        program: Program,
        cut: Cut,
        *,
        is_summed: bool = False,
        updates_together: bool = False,
        updates_apart: bool = False,
    ) -> None:
        self._program, self._cut, self._is_summed = program, cut, is_summed
        may_be_apart = not is_summed and program.num_sharers == 1
        if may_be_apart:  # then what an instruction needs does not depend on the order of updates
            check_working_sets(program, cut)
        self._repeats = repeats_of(program)
        self._least = program.num_batches - self._repeats
        model = program.of_length(self._least + _STEADY) if self._repeats else program
        self._reorder = _order_of(program, together=updates_together, apart=updates_apart and may_be_apart)
        moved = self._reorder(model)
        self._is_moved = moved is not model and next(stage_problems(moved), None) is None
        self._model = moved if self._is_moved else model
        """The window in which what becomes of chunks is decided."""
        self._deciding = self._planners(self._model)
        self._windows: list[tuple[_Plans, Program]] = []

    def fetched(self, ahead: int, *, is_brief: bool = False) -> Program:
        """The program whose fetched chunks are there `ahead` instructions before they are used, where that
        leaves room. With `is_brief` a loop becomes the window in which what becomes of chunks was decided:
        the same object for leads that come to the same.
        """
        if not any(self._cut):
            return self._program
        plans = [None if one is None else one.decided(ahead) for one in self._deciding]
        if is_brief or not self._repeats:
            known = next((window for own, window in self._windows if own == plans), None)
            if known is None:
                known = self._written(self._model, self._deciding, plans)
                self._windows.append((plans, known))
            return known

        def make(num_batches: int) -> Program:
            shown = self._program.of_length(num_batches)
            shown = self._reorder(shown) if self._is_moved else shown
            return self._written(shown, self._planners(shown), plans)

        return fold(make, self._program.num_batches, shortest=self._least + 1)

    def _planners(self, shown: Program) -> "list[_Planner | None]":
        return [
            None if tiers is None else _Planner(shown, rank, tiers, self._is_summed)
            for rank, tiers in enumerate(self._cut)
        ]

    @staticmethod
    def _written(shown: Program, own: "Sequence[_Planner | None]", plans: "_Plans") -> Program:
        made = [
            (track.of(track), None) if planner is None or plan is None else planner.written(plan)
            for track, planner, plan in zip(shown.tracks, own, plans, strict=True)
        ]
        return replace(
            shown, tracks=tuple(track for track, _ in made), tiers=tuple(tiers for _, tiers in made)
        )


_Plans = Sequence[Sequence[Leads] | None]
"""What is evicted from the tiers of each rank that pages."""


def _order_of(program: Program, *, together: bool, apart: bool) -> Callable[[Program], Program]:
    """What puts the updates of a program, written out, in another order. Under rules that update late the
    pipeline does not drain, and would wait for what comes of a batch.
    """
    order = _updates_apart if apart and program.rule is Rule.SYNCHRONOUS else None
    order = _updates_together if together and order is None else order
    if order is None:
        return lambda same: same

    def ordered(shown: Program) -> Program:
        tracks = tuple(track.of(order(shown, rank)) for rank, track in enumerate(shown.tracks))
        return replace(shown, tracks=tracks)

    return ordered


def _updates_apart(program: Program, rank: int) -> Iterator[Instruction]:
    """Each update of a rank right after its REDUCE and what is sent then. All but the last one of a batch
    wait for no other stage.
    """
    track = program.tracks[rank]
    updates = {(step.batch, step.stage): step for step in track if step.kind is Kind.UPDATE}
    num_left = dict.fromkeys(program.batches, len(program.stages_of(rank)))
    due: list[Instruction] = []
    for step in track:
        if due and step.kind not in SENDS:
            yield from due
            due = []
        if step.kind is not Kind.UPDATE:
            yield step
        if step.kind is Kind.REDUCE:
            num_left[step.batch] -= 1
            due.append(updates[step.batch, step.stage]._replace(is_apart=num_left[step.batch] > 0))
    yield from due


def _updates_together(program: Program, rank: int) -> Iterator[Instruction]:
    """A rank's updates of a batch one after the other."""
    own = grouped((step.batch, step) for step in program.tracks[rank] if step.kind is Kind.UPDATE)
    for step in program.tracks[rank]:
        yield from own.pop(step.batch, ()) if step.kind is Kind.UPDATE else (step,)


class _Copy(NamedTuple):
    """A FETCH or EVICT, and what it is to the tier below: an access of that chunk."""

    instruction: Instruction
    access: ChunkAccess

    @property
    def goes_into(self) -> int | None:
        """The tier that it copies the chunk into, if it copies it."""
        step = self.instruction
        assert step.page is not None, "FETCH and EVICT have a page"
        return step.page.tier + (step.kind is Kind.EVICT) if step.page.is_copied else None


_Woven = list[Instruction | _Copy]
"""A track with copies between its instructions."""


class _Planner:
    """One rank of a program that is written out."""

    def __init__(self, program: Program, rank: int, tiers: RankTiers, is_summed: bool) -> None:
        self.program = program
        self.rank = rank
        self.tiers = tiers
        self.track = program.tracks[rank]
        accesses = accesses_of(program, rank, tiers, is_summed=is_summed)
        self.used, self.used_on_host = accesses.on_device, accesses.on_host
        self.accesses = [access for own in self.used.values() for access in own]
        self.gaps = gaps_of(self.accesses)
        self.num_steps = len(self.used)
        self._lower: dict[int, tuple[Evictions, int]] = {}
        """What may leave the tier below the device for each plan of the device, and ahead by how much."""

    def decided(self, ahead: int) -> list[Leads]:
        """For each tier that overflows into another which gaps to evict. Raises where one is too small."""
        upper = self._upper.leads(ahead)
        if len(self.tiers.tiers) < 3 or self.tiers.tiers[1].capacity is None:
            return [upper]
        if id(upper) not in self._lower:  # plans of the device are kept
            settle(self.gaps, upper, self.num_steps)
            below, num_steps = self._accesses_below(self._woven_above(), self.gaps)
            evictions = self._evictions(1, below, gaps_of(below), num_steps)
            self._lower[id(upper)] = evictions, -(-num_steps // self.num_steps)
        evictions, times = self._lower[id(upper)]
        return [upper, evictions.leads(ahead * times)]

    @cached_property
    def _upper(self) -> Evictions:
        return self._evictions(0, self.accesses, self.gaps, self.num_steps)

    def written(self, plan: Sequence[Leads]) -> tuple[Track, RankTiers]:
        """The track with its copies, and where the chunks begin."""
        gaps = self.gaps
        settle(gaps, plan[0], self.num_steps)
        begin = {
            access.chunk: 1
            for own in self.used_on_host.values()
            for access in own
            if access.chunk.item is Item.OPTIMIZER
        }
        begin |= {gap.chunk: int(gap.is_evicted) for gap in gaps if gap.before is None}
        woven = self._woven_above()
        if len(plan) > 1:
            below, num_steps = self._accesses_below(woven, gaps)
            lower = gaps_of(below)
            settle(lower, plan[1], num_steps)
            begin |= {gap.chunk: 2 for gap in lower if gap.before is None and gap.is_evicted}
            steps = ((one, bool(own)) for one, own, _ in self._below(woven))
            woven = self._woven(steps, lower, 1, num_steps)
        self._check_lowest(woven, begin)
        track = tuple(one.instruction if isinstance(one, _Copy) else one for one in woven)
        return self.track.of(track), replace(self.tiers, begin=dict(sorted(begin.items())))

    def _check_lowest(self, woven: _Woven, begin: Mapping[Chunk, int]) -> None:
        """Refuse what the lowest tier cannot hold: nothing can be moved away from there."""
        number = len(self.tiers.tiers) - 1
        lowest = self.tiers.tiers[number]
        if lowest.capacity is None:
            return
        there = {chunk for chunk, tier in begin.items() if tier == number}
        most = len(there)
        for one, below, above in self._below(woven):
            if not isinstance(one, _Copy):
                there.difference_update(access.chunk for access in above if access.writes or access.ends)
                there.update(access.chunk for access in below if number == 1 and not access.ends)
            elif one.goes_into == number:
                there.add(one.access.chunk)
            most = max(most, len(there))
        if most > lowest.capacity:
            advice = "a larger one" if lowest.name == "disk" else "more, or a disk"
            raise TierTooSmallError(self.rank, lowest, most * self.tiers.chunk_bytes, advice)

    def _woven_above(self) -> _Woven:
        """The track with the device's copies, as they are settled."""
        steps = ((step, index in self.used) for index, step in enumerate(self.track))
        return self._woven(steps, self.gaps, 0, self.num_steps)

    def _woven(
        self,
        steps: Iterable[tuple[Instruction | _Copy, bool]],
        gaps: Sequence[Gap],
        tier: int,
        num_steps: int,
    ) -> _Woven:
        """A track with the copies of a tier, whose steps are marked: out right after a step, back to the
        device right after the step before, and to other tiers right before a step.
        """
        out, back = self._copies(gaps, tier, num_steps)
        woven: _Woven = [] if tier else list(back[0])
        at = 0
        for one, is_step in steps:
            woven += back[at] if is_step and tier else []
            woven.append(one)
            if is_step:
                woven += out[at]
                at += 1
                woven += [] if tier else back[at]
        return woven

    def _below(
        self, woven: _Woven
    ) -> Iterator[tuple[Instruction | _Copy, Sequence[ChunkAccess], Sequence[ChunkAccess]]]:
        """Each of a track with its accesses of the tier below the device, and of the device."""
        index = -1
        for one in woven:
            if isinstance(one, _Copy):
                yield one, [one.access] if one.access.reads or one.access.writes else [], ()
            else:
                index += 1
                yield one, self.used_on_host.get(index, ()), self.used.get(index, ())

    def _accesses_below(self, woven: _Woven, gaps: Sequence[Gap]) -> tuple[list[ChunkAccess], int]:
        """What the device's copies read and write in the tier below, and what is updated there; and how many
        steps that are.

        What is written on the device is worthless below, and what ends there ends below.
        """
        there = {gap.chunk for gap in gaps if gap.before is None and gap.is_evicted}
        found: list[ChunkAccess] = []
        at = 0
        for _, below, above in self._below(woven):
            found += [access._replace(at=at) for access in below]
            there.update(access.chunk for access in below)
            there.difference_update(access.chunk for access in below if access.ends)
            at += bool(below)
            for access in above:
                if (access.writes or access.ends) and access.chunk in there and not access.is_below:
                    there.discard(access.chunk)
                    label = ("stale", access.label)
                    found.append(
                        access._replace(at=at, label=label, reads=False, writes=True, takes=False, ends=True)
                    )
        return found, at

    def _evictions(
        self, number: int, accesses: Sequence[ChunkAccess], gaps: Sequence[Gap], num_steps: int
    ) -> Evictions:
        capacity = self.tiers.tiers[number].capacity
        assert capacity is not None, "a tier without a limit needs no plan"
        check_capacity(self.rank, self.tiers, number, most_at_a_step(accesses))
        return Evictions(accesses, gaps, num_steps, capacity)

    def _copies(
        self, gaps: Sequence[Gap], tier: int, num_steps: int
    ) -> tuple[defaultdict[int, list[_Copy]], defaultdict[int, list[_Copy]]]:
        """The copies out of a tier, by the step before them, and into it, by the step after them.

        Gaps are in the order of their ends, and so are the fetches of a place.
        """
        outs: defaultdict[int, list[_Copy]] = defaultdict(list)
        backs: defaultdict[int, list[_Copy]] = defaultdict(list)
        for gap in gaps:
            if not gap.is_evicted:
                continue
            if gap.before is not None and not gap.before.is_below:
                outs[gap.start].append(
                    self._copy(Kind.EVICT, gap.before, tier, gap.group, is_copied=gap.is_copied)
                )
            if gap.is_fetched and gap.after is not None:
                back = self._copy(Kind.FETCH, gap.after, tier, gap.group, is_copied=True)
                backs[gap.end(num_steps) - gap.lead].append(back)
        return outs, backs

    def _copy(self, kind: Kind, access: ChunkAccess, tier: int, group: Hashable, *, is_copied: bool) -> _Copy:
        """The copy after or before an access of the tier, of a gap of that group."""
        chunk, step = access.chunk, access.step
        batch, microbatch, version = step.batch, None, None
        if chunk.item is Item.WEIGHTS:
            version = step.version
            if version is not None and version % self.program.banks[chunk.stage] != chunk.number:
                version -= 1  # an UPDATE reads the version before the one that it makes
        elif chunk.item is Item.STASH or (chunk.item is Item.GRADIENT and self.program.rule is Rule.STASHED):
            batch, microbatch = divmod(chunk.number, self.program.num_microbatches)
        elif chunk.item is Item.GRADIENT:
            batch = chunk.number
        page, is_fetch = Page(chunk.item, chunk.chunk, tier, is_copied), kind is Kind.FETCH
        made = Instruction(kind, chunk.stage, batch, microbatch, version, page=page)
        writes, label = is_copied and not is_fetch, (kind, group)
        below = access._replace(label=label, reads=is_fetch, writes=writes, ends=False, is_kept_below=False)
        return _Copy(made, below)
