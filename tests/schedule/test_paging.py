"""Paged programs: what is used is there, no budget is passed, and the result is the one without paging."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.paging.exact import fewest_copies
from benchmarks.paging.rivals import least_recently_used
from benchmarks.paging.traces import program_trace, small_trace
from bireme.errors import BiremeError
from bireme.schedule.accesses import Mode, Sizes, accesses_of, uses
from bireme.schedule.budgets import Budgets, most_at_once
from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.checker import check
from bireme.schedule.chunk_account import Holding, chunk_of
from bireme.schedule.eviction import Evictions, gaps_of, num_copies, settle
from bireme.schedule.gathering import gathered
from bireme.schedule.instruction import COMPUTE, PAGING, Instruction, Item, Kind
from bireme.schedule.program import Program, Rule, Track
from bireme.schedule.residency import resident
from bireme.schedule.tiers import Chunk, best_chunk_bytes, num_chunks
from tests.support.extent import examples, several
from tests.support.page_programs import page, paged_programs
from tests.support.plain_eviction import plain_decide

CHUNK = 64


def sizes(
    num_stages: int, chunks: tuple[int, int, int, int], *, master: bool = True, frozen: int = 0
) -> Sizes:
    """Weights, gradients, optimizer, stash and frozen weights of every stage, in chunks; messages have half a
    chunk.
    """
    weights, gradient, optimizer, stash = ((one * float(CHUNK),) * num_stages for one in chunks)
    message = (CHUNK / 2,) * num_stages
    still = (frozen * float(CHUNK),) * num_stages
    return Sizes(
        weights,
        gradient,
        optimizer,
        stash,
        message,
        message,
        message,
        master,
        buffers=still,
        frozen=still,
    )


def peak(program: Program, of: Sizes) -> float:
    return max(resident(program, rank, of).peak_bytes for rank in range(program.num_ranks))


def without_paging(program: Program) -> list[list[Instruction]]:
    return [
        [step for step in track if (step.kind not in PAGING or step.moves_whole)] for track in program.tracks
    ]


def copies_of(program: Program) -> list[int]:
    return [sum(step.page.is_copied for step in track if step.page is not None) for track in program.tracks]


@dataclass(frozen=True)
class Asked:
    program: Program
    sizes: Sizes
    budgets: Budgets
    ahead: int
    updates_together: bool
    updates_apart: bool
    host_updates: bool

    @property
    def how(self) -> dict[str, Any]:
        return {
            "chunk_bytes": CHUNK,
            "updates_together": self.updates_together,
            "updates_apart": self.updates_apart,
            "host_updates": self.host_updates,
        }


@st.composite
def asked(draw: st.DrawFn, *, most_batches: int = 3) -> Asked:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    schedule = SCHEDULES[name]
    ranks = draw(st.integers(1, 3))
    per_rank = schedule.stages_per_rank
    if per_rank == 1 and schedule.rule is not Rule.STASHED:
        per_rank = draw(st.integers(1, 3))
    stages = ranks * per_rank
    program = generate(
        name,
        num_stages=stages,
        num_microbatches=draw(st.integers(ranks, 5)),
        num_batches=draw(st.integers(1, most_batches)),
        stages_per_rank=per_rank,
        recompute=range(stages) if draw(st.booleans()) and not schedule.slices else (),
    )
    if schedule.rule in (Rule.SYNCHRONOUS, Rule.DELAYED):
        program = gathered(program, draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    counts = (
        draw(st.integers(1, 3)),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 4)),
        draw(st.integers(0, 3)),
    )
    of = sizes(stages, counts, master=draw(st.booleans()), frozen=draw(st.integers(0, 3)))
    share = draw(st.floats(0.1, 1.0))
    host = draw(st.sampled_from((None, 0.0, 0.3, 0.6)))
    whole = peak(program, of)
    disk = 0 if host is None else int(1000 * whole)
    budgets = Budgets(int(share * whole), None if host is None else int(host * whole), disk)
    together, apart = draw(st.sampled_from(((False, False), (True, False), (False, True))))
    return Asked(program, of, budgets, draw(st.integers(0, 3)), together, apart, draw(st.booleans()))


def paged(one: Asked) -> Program:
    """The program within its budgets; cases below the least budget are tried elsewhere."""
    try:
        return page(one.program, one.sizes, one.budgets, ahead=one.ahead, **one.how)
    except BiremeError:
        assume(False)
        raise


# --- what a paged program is -------------------------------------------------------------------------------


@examples(150)
@given(asked())
def test_a_paged_program_is_proved_right_within_its_budgets(one: Asked) -> None:
    program = paged(one)
    report = check(program)
    assert report.ok, report.problems or report.deadlock
    for left, track in zip(without_paging(program), one.program.tracks, strict=True):
        same = [step._replace(is_apart=False) for step in left]
        assert sorted(map(str, same)) == sorted(map(str, track))
        assert left == list(track) or one.updates_together or one.updates_apart
    for rank, tiers in enumerate(program.tiers):
        kept = resident(program, rank, one.sizes)
        if tiers is None:
            assert kept.peak_bytes <= one.budgets.device_bytes
        else:  # the last of weights and frozen weights was counted alone
            holding = Holding(program, rank)
            for step in program.tracks[rank]:
                assert not [*holding.start(step)]
                holding.end(step)
            assert kept.peak_bytes >= holding.peak[0] * tiers.chunk_bytes
        for tier in kept.tiers:
            assert tier.budget_bytes is None or tier.peak_bytes <= tier.budget_bytes


@examples(40)
@given(asked())
def test_paging_is_the_same_whichever_leads_were_planned_before(one: Asked) -> None:
    alone = paged(one)
    made = paged_programs(one.program, one.sizes, one.budgets, **one.how)
    for ahead in (3, 0):
        with suppress(BiremeError):
            made.fetched(ahead)
    assert made.fetched(one.ahead) == alone
    assert made.fetched(one.ahead, is_brief=True) is made.fetched(one.ahead, is_brief=True)


@examples(100)
@given(asked())
def test_the_largest_working_set_is_that_of_all_accesses(one: Asked) -> None:
    program = paged(one)
    for rank in range(program.num_ranks):
        tiers = program.tiers_of(rank)
        if tiers is not None:
            steps = accesses_of(one.program, rank, tiers).on_device.values()
            most = max(sum(access.takes for access in own) for own in steps)
            assert most_at_once(one.program, rank, tiers) == most


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_budget_that_holds_everything_gives_back_the_very_program(name: str) -> None:
    stages = 2 * SCHEDULES[name].stages_per_rank
    program = generate(name, num_stages=stages, num_microbatches=4, num_batches=3)
    of = sizes(stages, (2, 2, 6, 1))
    assert page(program, of, Budgets(int(peak(program, of)))) is program


def parts(name: str, microbatches: int, batches: int, per_rank: int = 4, sweep: int = 1) -> Program:
    return generate(
        name,
        num_stages=per_rank,
        num_microbatches=microbatches,
        num_batches=batches,
        stages_per_rank=per_rank,
        sweep=sweep,
    )


def test_a_budget_below_the_largest_working_set_is_refused_with_the_number_that_would_do() -> None:
    program, of = parts("1f1b", 2, 2), sizes(4, (2, 2, 6, 1))
    with pytest.raises(BiremeError, match="needs at least") as refused:
        page(program, of, Budgets(4 * CHUNK), chunk_bytes=CHUNK)
    needed = int(str(refused.value).split("(")[1].split(" bytes)")[0])
    enough = page(program, of, Budgets(needed), chunk_bytes=CHUNK)
    assert enough.tiers
    assert check(enough).ok
    with pytest.raises(BiremeError, match="needs at least"):
        page(program, of, Budgets(needed - CHUNK), chunk_bytes=CHUNK)


def test_a_host_too_small_for_the_rest_is_refused_and_a_disk_helps() -> None:
    program, of = parts("1f1b", 2, 2), sizes(4, (2, 2, 6, 1))
    device = 14 * CHUNK
    with pytest.raises(BiremeError, match="host memory"):
        page(program, of, Budgets(device, 12 * CHUNK), chunk_bytes=CHUNK)
    program = page(program, of, Budgets(device, 12 * CHUNK, 100 * CHUNK), chunk_bytes=CHUNK)
    assert check(program).ok
    assert [tier.name for tier in resident(program, 0, of).tiers] == ["device", "host", "disk"]


@pytest.mark.parametrize("name", ["1f1b", "2bw", "zb-h1"])
@pytest.mark.parametrize("master", [True, False])
def test_an_update_on_the_host_moves_gradients_down_and_weights_up_and_no_moment(
    name: str, master: bool
) -> None:
    """And the steady state of a long window is a loop with it too."""
    counts = weights, gradients, _, _ = 2, 2, 6, 0
    of, batches = sizes(4, counts, master=master), 30
    program = generate(name, num_stages=4, num_microbatches=1, num_batches=batches, stages_per_rank=4)
    program = page(program, of, Budgets(9 * CHUNK), ahead=0, chunk_bytes=CHUNK, host_updates=True)
    assert check(program).ok
    (track,) = program.tracks
    assert track.repeats >= batches - 12
    moved = Counter((step.kind, step.page.item) for step in track.body if step.page and step.page.is_copied)
    assert moved[Kind.EVICT, Item.GRADIENT] == 4 * gradients
    assert moved[Kind.FETCH, Item.WEIGHTS] >= 4 * weights
    assert not moved[Kind.EVICT, Item.WEIGHTS]
    assert {item for _, item in moved} <= {Item.GRADIENT, Item.WEIGHTS}
    with pytest.raises(BiremeError, match="needs at least"):  # for one stage's moments and all else of it
        page(parts(name, 1, batches), of, Budgets(9 * CHUNK), chunk_bytes=CHUNK)


def test_stages_that_update_apart_copy_no_gradients_and_wait_for_no_other_but_the_last() -> None:
    """And the steady state of a long window is a loop with it too."""
    of, batches = sizes(4, (2, 2, 4, 0), master=False), 30
    program = parts("1f1b", 1, batches)
    budgets = Budgets(9 * CHUNK)
    agreed = page(program, of, budgets, ahead=0, chunk_bytes=CHUNK)
    apart = page(program, of, budgets, ahead=0, chunk_bytes=CHUNK, updates_apart=True)
    assert check(apart).ok
    (track,) = apart.tracks
    assert track.repeats >= batches - 12
    assert Item.GRADIENT not in {step.page.item for step in track if step.page and step.page.is_copied}
    assert copies_of(apart)[0] <= 0.8 * copies_of(agreed)[0]
    updates = [step for step in track if step.kind is Kind.UPDATE]
    assert [(step.stage, step.is_apart) for step in updates[:4]] == [
        (3, True),
        (2, True),
        (1, True),
        (0, False),
    ]


@pytest.mark.parametrize("name", ["2bw", "2bw-fresh"])
def test_a_pipeline_that_never_drains_does_not_update_apart(name: str) -> None:
    program, of = parts(name, 4, 3), sizes(4, (2, 2, 4, 0))
    budgets = Budgets(int(0.7 * peak(program, of)))
    with_it, without = (
        page(program, of, budgets, chunk_bytes=CHUNK, updates_apart=apart) for apart in (True, False)
    )
    assert with_it == without


# --- loops and sweeps --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.few(8)
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "2bw", "2bw-fresh", "zb-h1"])
@pytest.mark.parametrize("master", [True, False])
def test_the_steady_state_of_a_long_window_is_a_loop(name: str, master: bool) -> None:
    stages, batches = 4, 40
    program = generate(name, num_stages=stages, num_microbatches=3, num_batches=batches, stages_per_rank=2)
    of = sizes(stages, (2, 2, 6, 1), master=master)
    program = page(
        program, of, Budgets(int(0.6 * peak(program, of)), 20 * CHUNK, 500 * CHUNK), chunk_bytes=CHUNK
    )
    assert program.tiers
    assert all(track.repeats >= batches - 12 for track in program.tracks)
    assert check(program).ok


@pytest.mark.slow
def test_with_k_of_p_parts_on_the_device_a_micro_batch_fetches_the_others_twice() -> None:
    """Forwards go up the parts and backwards down, so the last k and the first k parts are still there."""
    p, k, m = 6, 2, 4
    of = sizes(p, (1, 0, 0, 0))
    fetched = []
    for batches in (20, 21):
        program = parts("1f1b", m, batches, per_rank=p)
        program = page(program, of, Budgets(k * CHUNK), ahead=0, chunk_bytes=CHUNK)
        assert check(program).ok
        fetched.append(sum(step.kind is Kind.FETCH for step in program.tracks[0]))
    # An update makes new weights from the master copy, so what it leaves need not be fetched first.
    assert fetched[1] - fetched[0] <= 2 * (p - k) * m
    assert fetched[1] - fetched[0] >= 2 * (p - k) * (m - 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "2bw", "2bw-fresh", "zb-h1", "interleaved", "zbv"])
def test_programs_of_sweeps_are_right(name: str) -> None:
    per_rank = max(SCHEDULES[name].stages_per_rank, 2)
    program = generate(
        name, num_stages=2 * per_rank, num_microbatches=8, num_batches=3, stages_per_rank=per_rank, sweep=2
    )
    report = check(program)
    assert report.ok, report.problems or report.deadlock


def test_a_sweep_of_g_divides_what_weights_are_fetched_by_g() -> None:
    p, k, m, g = 8, 3, 8, 4
    of = sizes(p, (4, 0, 0, 0))
    fetched = {}
    for sweep in (1, g):
        program = page(parts("1f1b", m, 1, p, sweep), of, Budgets(4 * k * CHUNK), ahead=0, chunk_bytes=CHUNK)
        assert check(program).ok
        fetched[sweep] = sum(step.kind is Kind.FETCH for step in program.tracks[0])
    assert fetched[g] == pytest.approx(fetched[1] / g, rel=0.3)


def test_what_cannot_be_swept_says_so() -> None:
    with pytest.raises(BiremeError, match="sweeps of 3"):
        parts("1f1b", 4, 1, sweep=3)
    with pytest.raises(BiremeError, match="no sweeps"):
        generate("pipedream", num_stages=2, num_microbatches=4, sweep=2)


# --- mistakes ----------------------------------------------------------------------------------------------

Value = tuple[object, ...]


class HarmError(Exception):
    """A program did something that training would notice."""


class Machine:
    """Runs a rank's chunks by value: what is not where it is read, or more than fits, is harm.

    It shares nothing with the checker but the words of the language.
    """

    def __init__(self, program: Program, rank: int) -> None:
        tiers = program.tiers_of(rank)
        assert tiers is not None
        self.program, self.rank, self.tiers = program, rank, tiers
        self.memory: list[dict[Chunk, Value]] = [{} for _ in tiers.tiers]
        for chunk, tier in tiers.begin.items():
            self.memory[tier][chunk] = ("begin", chunk)
        self.truth: dict[Chunk, Value] = {chunk: ("begin", chunk) for chunk in tiers.begin}
        self.under_way: set[Chunk] = set()
        self.summed: set[Chunk] = set()
        self.whole: dict[tuple[int, int], bool] = {}

    def run(self) -> None:
        for index, step in enumerate(self.program.tracks[self.rank]):
            self._share(step)
            if step.page is not None and not step.moves_whole:
                self._copy(step)
            used = [
                (use, chunk)
                for use in uses(
                    self.program, step, master=self.tiers.master, host_updates=self.tiers.host_updates
                )
                for chunk in self.tiers.chunks_of(use.item, use.stage, use.number)
            ]
            for use, chunk in used:
                if use.tier == 0 or use.mode is not Mode.READ:
                    self.under_way.discard(chunk)
                is_made = use.mode is Mode.MAKE or (use.mode is Mode.ADD and chunk not in self.truth)
                if not is_made and self.memory[use.tier].get(chunk) != self.truth[chunk]:
                    raise HarmError(f"{step} reads a wrong value")
                if use.mode is not Mode.READ:
                    for memory in self.memory:
                        memory.pop(chunk, None)
                    self.truth[chunk] = self.memory[use.tier][chunk] = (index, chunk)
                if step.kind is Kind.SCATTER:
                    self.summed.add(chunk)
                elif step.kind is Kind.COLLECT:
                    self.summed.remove(chunk)
            self._fits()
            for use, chunk in used:
                if use.ends:
                    del self.truth[chunk]
                    for memory in self.memory:
                        memory.pop(chunk, None)
        if self.whole:
            raise HarmError("weights are whole after the window")
        for chunk, value in self.truth.items():
            lasts = chunk.item in (Item.OPTIMIZER, Item.FROZEN)
            if lasts and value not in (memory.get(chunk) for memory in self.memory):
                raise HarmError("what outlives the window is lost")

    def _share(self, step: Instruction) -> None:
        weights = step.stage, step.version or 0
        if step.moves_whole:
            if (weights in self.whole) == (step.kind is Kind.FETCH):
                raise HarmError(f"{step} has nothing to do")
            if step.kind is Kind.FETCH:
                self.whole[weights] = False
            elif not self.whole.pop(weights):
                raise HarmError(f"{step} comes before the weights are used")
        elif step.kind in COMPUTE and self.program.num_sharers > 1:
            if weights not in self.whole:
                raise HarmError(f"{step} has no whole weights")
            self.whole[weights] = True
        elif step.kind is Kind.UPDATE:
            banks = self.program.banks[step.stage]
            of_stage = [version for stage, version in self.whole if stage == step.stage]
            if any((version - weights[1]) % banks == 0 for version in of_stage):
                raise HarmError(f"{step} leaves whole weights out of date")

    def _copy(self, step: Instruction) -> None:
        assert step.page is not None
        chunk, tier = chunk_of(self.program, step), step.page.tier
        if step.kind is Kind.FETCH:
            if chunk not in self.memory[tier + 1] or chunk in self.memory[tier]:
                raise HarmError(f"{step} has nothing to do")
            self.memory[tier][chunk] = self.memory[tier + 1][chunk]
            if tier == 0:
                self.under_way.add(chunk)
        else:
            if chunk not in self.memory[tier] or (tier == 0 and chunk in self.under_way | self.summed):
                raise HarmError(f"{step} has nothing to do, or does it too early")
            value = self.memory[tier].pop(chunk)
            if step.page.is_copied:
                if chunk in self.memory[tier + 1]:
                    raise HarmError(f"{step} copies what is there")
                self.memory[tier + 1][chunk] = value
        self._fits()

    def _fits(self) -> None:
        for tier, memory in zip(self.tiers.tiers, self.memory, strict=True):
            if tier.capacity is not None and len(memory) > tier.capacity:
                raise HarmError(f"{tier.name} holds {len(memory)}")


def does_harm(program: Program) -> bool:
    try:
        for rank, tiers in enumerate(program.tiers):
            if tiers is not None:
                Machine(program, rank).run()
    except HarmError:
        return True
    return False


def mutated(program: Program) -> Iterator[Program]:
    """The program with one FETCH or EVICT left out, moved one place, or made to copy where it did not."""
    for rank, track in enumerate(program.tracks):
        steps = list(track)
        for index, step in enumerate(steps):
            if step.page is None:
                continue
            uncopied = step._replace(page=step.page._replace(is_copied=not step.page.is_copied))
            for changed in (
                [*steps[:index], *steps[index + 1 :]],
                [*steps[:index], *steps[index + 1 : index + 2], step, *steps[index + 2 :]],
                [*steps[:index], step, *steps[index:]],
                [*steps[:index], uncopied, *steps[index + 1 :]]
                if step.kind is Kind.EVICT and not step.moves_whole
                else steps,
            ):
                tracks = list(program.tracks)
                tracks[rank] = Track(tuple(changed), versions_per_batch=track.versions_per_batch)
                yield replace(program, tracks=tuple(tracks))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "budgets", "frozen", "host_updates", "sharers"),
    [
        ("1f1b", Budgets(12 * CHUNK), 0, False, 1),
        ("1f1b", Budgets(13 * CHUNK), 2, False, 1),
        ("2bw", Budgets(14 * CHUNK, 9 * CHUNK, 99 * CHUNK), 0, False, 1),
        ("2bw-fresh", Budgets(14 * CHUNK), 0, False, 1),
        ("1f1b", Budgets(8 * CHUNK), 0, True, 1),
        ("2bw", Budgets(9 * CHUNK, 14 * CHUNK, 99 * CHUNK), 0, True, 1),
        ("1f1b", Budgets(19 * CHUNK), 2, False, 2),
        ("2bw", Budgets(16 * CHUNK, 8 * CHUNK, 99 * CHUNK), 0, False, 2),
    ],
)
def test_one_mistake_that_does_harm_is_found_and_no_other(
    name: str, budgets: Budgets, frozen: int, host_updates: bool, sharers: int
) -> None:
    of = sizes(2, (2, 2, 5, 1), frozen=frozen, master=not host_updates)
    whole = parts(name, 2, 2, per_rank=2)
    program = page(gathered(whole, sharers, 1), of, budgets, chunk_bytes=CHUNK, host_updates=host_updates)
    assert program.tiers
    assert not does_harm(program)
    mistakes = several(list(mutated(program)), 160)
    verdicts = [(check(wrong).ok, does_harm(wrong)) for wrong in mistakes]
    assert {ok for ok, _ in verdicts} == {True, False}
    assert all(ok != harm for ok, harm in verdicts)


# --- how good plans are ------------------------------------------------------------------------------------


def test_small_plans_copy_hardly_more_than_any_plan_must_and_never_more_than_least_recently_used() -> None:
    ours = fewest = 0
    for seed in range(120):
        capacity, num_steps = 2 + seed % 3, 14
        accesses = small_trace(seed, 6, num_steps)
        gaps = gaps_of(accesses)
        settle(gaps, Evictions(accesses, gaps, num_steps, capacity).leads(0), num_steps)
        copies = num_copies(gaps)
        least = fewest_copies(accesses, num_steps, capacity)
        assert least <= copies <= least_recently_used(accesses, capacity)
        ours, fewest = ours + copies, fewest + least
    assert ours <= 1.05 * fewest


@examples(60)
@given(st.integers(0, 10**6), st.integers(3, 9), st.integers(6, 40), st.integers(2, 6), st.integers(0, 3))
def test_plans_are_those_of_the_rules_taken_step_by_step(
    seed: int, num_chunks: int, num_steps: int, capacity: int, ahead: int
) -> None:
    accesses = small_trace(seed, num_chunks, num_steps)
    found = Evictions(accesses, gaps_of(accesses), num_steps, capacity).leads(ahead)
    assert found == plain_decide(accesses, gaps_of(accesses), num_steps, capacity, ahead)


@pytest.mark.parametrize(("name", "sweep"), [("1f1b", 1), ("2bw", 1), ("gpipe", 2)])
def test_plans_of_loops_are_those_of_the_rules_taken_step_by_step(name: str, sweep: int) -> None:
    accesses, num_steps, most = program_trace(name, sweep, parts=3, microbatches=4)
    for ahead in (0, 4):
        found = Evictions(accesses, gaps_of(accesses), num_steps, most // 2).leads(ahead)
        assert found == plain_decide(accesses, gaps_of(accesses), num_steps, most // 2, ahead)


@examples(80)
@given(st.dictionaries(st.integers(1, 2000).map(float), st.integers(1, 4), min_size=1, max_size=6))
def test_no_chunk_size_that_is_tried_wastes_a_hundredth_less(items: dict[float, int]) -> None:
    def waste(chunk_bytes: int) -> float:
        return sum(
            min(num_chunks(one, chunk_bytes) * chunk_bytes - one, one) * count for one, count in items.items()
        )

    found = best_chunk_bytes(items)
    assert found % 64 == 0
    whole = sum(one * count for one, count in items.items())
    for num_bytes in items:
        assert waste(found) <= waste(-(-int(num_bytes) // 64) * 64) + 0.01 * whole
