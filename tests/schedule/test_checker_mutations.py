"""The checker against programs with one mistake: it must find what does harm, and pass what does not.

A valid program is spoilt in one place; `tests/support/symbolic.py` says whether the result still computes
what its rule demands. A reordering may well be harmless, and then the checker may not complain. A wrong label
may be harmless to the machine too, for it believes no label; there nothing is claimed.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.schedule.catalogue import SCHEDULES
from bireme.schedule.checker import check
from bireme.schedule.instruction import RECEIVES, SENDS, Instruction, Kind, Message
from bireme.schedule.program import Program, Rule, Track
from tests.schedule.test_semantics import Request
from tests.support.extent import examples
from tests.support.symbolic import expected, outcome

Tracks = list[list[Instruction]]

SIBLINGS = {
    Kind.FORWARD: (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.RECOMPUTE),
    Kind.BACKWARD: (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT),
    Kind.BACKWARD_INPUT: (Kind.BACKWARD, Kind.BACKWARD_WEIGHT),
    Kind.BACKWARD_WEIGHT: (Kind.BACKWARD, Kind.BACKWARD_INPUT),
    Kind.RECOMPUTE: (Kind.FORWARD,),
    Kind.SEND_FORWARD: (Kind.SEND_BACKWARD, Kind.RECV_FORWARD),
    Kind.SEND_BACKWARD: (Kind.SEND_FORWARD, Kind.RECV_BACKWARD),
    Kind.RECV_FORWARD: (Kind.RECV_BACKWARD, Kind.SEND_FORWARD),
    Kind.RECV_BACKWARD: (Kind.RECV_FORWARD, Kind.SEND_BACKWARD),
    Kind.REDUCE: (Kind.UPDATE,),
    Kind.UPDATE: (Kind.REDUCE, Kind.TRIAL),
    Kind.TRIAL: (Kind.UPDATE,),
}


@dataclass(frozen=True, slots=True)
class Place:
    """An instruction of a program."""

    rank: int
    index: int


def tracks_of(program: Program) -> Tracks:
    return [list(track) for track in program.tracks]


def with_tracks(program: Program, tracks: Tracks) -> Program:
    return replace(program, tracks=tuple(Track(tuple(track)) for track in tracks))


def drop(program: Program, place: Place) -> Program:
    tracks = tracks_of(program)
    del tracks[place.rank][place.index]
    return with_tracks(program, tracks)


def copy(program: Program, place: Place, to: Place) -> Program:
    tracks = tracks_of(program)
    tracks[to.rank].insert(to.index, tracks[place.rank][place.index])
    return with_tracks(program, tracks)


def swap(program: Program, place: Place, other: int) -> Program:
    tracks = tracks_of(program)
    track = tracks[place.rank]
    track[place.index], track[other] = track[other], track[place.index]
    return with_tracks(program, tracks)


def move(program: Program, place: Place, to: Place) -> Program:
    tracks = tracks_of(program)
    tracks[to.rank].insert(to.index, tracks[place.rank].pop(place.index))
    return with_tracks(program, tracks)


def put(program: Program, place: Place, instruction: Instruction) -> Program:
    tracks = tracks_of(program)
    tracks[place.rank][place.index] = instruction
    return with_tracks(program, tracks)


def retagged(instruction: Instruction) -> Iterator[Instruction]:
    """The instruction with one label changed; some may be as they were."""
    for kind in SIBLINGS[instruction.kind]:
        yield instruction._replace(kind=kind)
    for by in (-2, -1, 1, 2):
        yield instruction._replace(stage=instruction.stage + by)
        yield instruction._replace(batch=instruction.batch + by)
        if instruction.microbatch is not None:
            yield instruction._replace(microbatch=instruction.microbatch + by)
        if instruction.version is not None:
            yield instruction._replace(version=instruction.version + by)
        if instruction.seen is not None:
            yield instruction._replace(seen=instruction.seen + by)
    for half in (None, 0, 1):
        yield instruction._replace(half=half)
    yield instruction._replace(microbatch=None)
    yield instruction._replace(version=None)
    yield instruction._replace(seen=None)


def places(program: Program) -> list[Place]:
    return [Place(rank, index) for rank, track in enumerate(program.tracks) for index in range(len(track))]


generated = cache(Request.program)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Valid programs of all schedules with up to 4 stages, 5 micro-batches and 3 batches."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    num_stages = draw(st.sampled_from((2, 4) if name in ("interleaved", "zbv") else (1, 2, 3, 4)))
    fewest = num_stages if SCHEDULES[name].rule in (Rule.DELAYED, Rule.FRESH) else 1
    recompute = draw(st.sampled_from((frozenset[int](), frozenset({0}), frozenset(range(num_stages)))))
    return generated(
        Request(
            name,
            num_stages,
            draw(st.integers(fewest, 5)),
            draw(st.integers(1, 3)),
            recompute=recompute,
            first_batch=draw(st.sampled_from((0, 0, 2))),
        )
    )


@dataclass(frozen=True, slots=True)
class Mutant:
    """A program in which one thing has been changed."""

    what: str
    program: Program = field(repr=False)

    def harmless(self) -> bool:
        return outcome(self.program) == expected(self.program)


@st.composite
def reorderings(draw: st.DrawFn) -> Mutant:
    """Two instructions of a rank swapped, or one moved along its rank; near more often than far."""
    program = draw(programs())
    place = draw(st.sampled_from(places(program)))
    length = len(program.tracks[place.rank])
    by = draw(st.sampled_from((-3, -2, -1, 1, 2, 3)) | st.integers(-length, length))
    to = Place(place.rank, min(max(place.index + by, 0), length - 1))
    what = described(program, place)
    if draw(st.booleans()):
        return Mutant(f"{what} swapped with {to}", swap(program, place, to.index))
    return Mutant(f"{what} moved to {to}", move(program, place, to))


@st.composite
def mistakes(draw: st.DrawFn) -> Mutant:
    """One instruction dropped, doubled, labelled wrongly, or put on another rank."""
    program = draw(programs())
    place = draw(st.sampled_from(places(program)))
    what = described(program, place)
    change = draw(st.sampled_from(("drop", "copy", "label", "label", "move")))
    if change == "drop":
        return Mutant(f"{what} dropped", drop(program, place))
    if change == "label":
        wrong = draw(st.sampled_from(list(retagged(program.tracks[place.rank][place.index]))))
        return Mutant(f"{what} turned into {wrong}", put(program, place, wrong))
    if change == "copy":
        to = Place(place.rank, draw(st.integers(0, len(program.tracks[place.rank]))))
        return Mutant(f"{what} copied to {to}", copy(program, place, to))
    rank = draw(st.integers(0, program.num_ranks - 1))
    to = Place(rank, draw(st.integers(0, len(program.tracks[rank]) - (rank == place.rank))))
    return Mutant(f"{what} moved to {to}", move(program, place, to))


def described(program: Program, place: Place) -> str:
    p = program
    shape = f"{p.num_stages} stages, {p.num_microbatches} micro-batches, {p.num_batches} batches"
    window = f"from batch {p.first_batch}, recomputed {sorted(p.recomputed)}"
    return f"{p.name} ({shape}, {window}): {p.tracks[place.rank][place.index]} at {place}"


def assert_found_if_harmful(mutant: Mutant) -> None:
    if not mutant.harmless():
        assert not check(mutant.program).ok, mutant


def orders_agree(program: Program) -> bool:
    """Whether every channel's sends and receives bear the same labels in the same order."""
    sent: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    for track in program.tracks:
        for instruction in track:
            if instruction.kind in SENDS | RECEIVES:
                message = instruction.carries()
                source = message.to_stage - 1 if message.forward else message.to_stage + 1
                channel = program.rank_of_stage[source], program.rank_of_stage[message.to_stage]
                (sent if instruction.kind in SENDS else received)[channel].append(message)
    return sent == received


@pytest.mark.slow
@examples(1500)
@given(mistakes())
def test_every_harmful_mistake_is_found(mutant: Mutant) -> None:
    assert_found_if_harmful(mutant)


@pytest.mark.slow
@examples(2000)
@given(reorderings())
def test_a_reordering_is_refused_exactly_if_it_does_harm(mutant: Mutant) -> None:
    assert check(mutant.program).ok == mutant.harmless()


@pytest.mark.slow
@examples(1000)
@given(reorderings())
def test_a_deadlock_is_reported_exactly_if_ranks_wait_in_a_ring(mutant: Mutant) -> None:
    result = outcome(mutant.program)
    if result.problems or not orders_agree(mutant.program):
        return
    deadlock = check(mutant.program).deadlock
    assert (deadlock is not None) == bool(result.cycle)
    for rank in result.cycle:
        assert any(f"rank {rank} waits" in line for line in deadlock or ())


@pytest.mark.slow
@examples(40)
@given(programs(), st.randoms(use_true_random=False))
def test_many_harmless_reorderings_in_a_row_are_passed(program: Program, random: Random) -> None:
    """Sound programs that no generator would write."""
    want = expected(program)
    for _ in range(60):
        place = random.choice(places(program))
        length = len(program.tracks[place.rank])
        to = Place(place.rank, min(max(place.index + random.randint(-4, 4), 0), length - 1))
        moved = move(program, place, to)
        if outcome(moved) == want:
            program = moved
    assert check(program).ok


EXHAUSTED = [
    Request("sequential", 2, 2, 2),
    Request("gpipe", 3, 2, 1, recompute=frozenset({1})),
    Request("1f1b", 3, 3, 1),
    Request("1f1b-sliced", 3, 2, 1, num_sliced=2),
    Request("2bw", 2, 2, 3),
    Request("2bw", 3, 3, 2, recompute=frozenset({0, 1, 2}), first_batch=1),
    Request("2bw-fresh", 2, 2, 3),
    Request("pipedream", 3, 2, 2),
    Request("interleaved", 4, 2, 1),
    Request("zb-h1", 2, 2, 2, recompute=frozenset({0, 1})),
    Request("zbv", 4, 2, 1),
]


@pytest.mark.few(4)
@pytest.mark.parametrize("request_", EXHAUSTED, ids=lambda request: request.name)
def test_every_dropped_instruction_is_missed(request_: Request) -> None:
    program = request_.program()
    assert check(program).ok
    for place in places(program):
        dropped = drop(program, place)
        assert outcome(dropped) != expected(program), described(program, place)
        assert not check(dropped).ok, described(program, place)


@pytest.mark.few(4)
@pytest.mark.parametrize("request_", EXHAUSTED, ids=lambda request: request.name)
def test_every_swap_of_neighbors_is_refused_exactly_if_it_does_harm(request_: Request) -> None:
    program = request_.program()
    for place in places(program):
        if place.index + 1 < len(program.tracks[place.rank]):
            swapped = swap(program, place, place.index + 1)
            harmless = outcome(swapped) == expected(program)
            assert check(swapped).ok == harmless, described(program, place)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_program_of_another_rule_or_with_other_banks_is_refused_if_it_does_harm(name: str) -> None:
    program = Request(name, 4, 4, 3, first_batch=1).program()
    for rule in Rule:
        other = replace(program, rule=rule)
        assert_found_if_harmful(Mutant(f"under the {rule} rule", other))
    for stage, by in itertools.product(range(4), (-1, 1)):
        banks = tuple(max(1, bank + by * (at == stage)) for at, bank in enumerate(program.banks))
        other = replace(program, banks=banks)
        assert_found_if_harmful(Mutant(f"with banks {banks}", other))


def two_ranks(*lines: str) -> Program:
    """A program of 2 stages and 2 micro-batches from tokens such as `F0` or `SEND_B1`."""
    tracks = [[spelt(stage, token) for token in line.split()] for stage, line in enumerate(lines)]
    return with_tracks(Request("1f1b", 2, 2, 1).program(), tracks)


def spelt(stage: int, token: str) -> Instruction:
    kind, microbatch = Kind(token.rstrip("01")), int(token[-1]) if token[-1] in "01" else None
    version = {Kind.FORWARD: 0, Kind.BACKWARD: 0, Kind.UPDATE: 1}.get(kind)
    return Instruction(kind, stage, 0, microbatch, version)


def test_two_ranks_that_send_before_they_receive_deadlock() -> None:
    second = "RECV_F0 F0 B0 SEND_B0 RECV_F1 F1 B1 SEND_B1 REDUCE UPDATE"
    stuck = two_ranks("F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1 REDUCE UPDATE", second)
    report = check(stuck)
    assert outcome(stuck).cycle == (0, 1)
    assert not report.ok
    assert report.deadlock is not None
    assert ["rank 0" in line and "rank 1" in line for line in report.deadlock] == [True, True]
    assert report.deadlock[0].startswith("rank 0 waits at 0SEND_F1 of batch 0")
    assert report.deadlock[1].startswith("rank 1 waits at 1SEND_B0 of batch 0")
    freed = two_ranks("F0 SEND_F0 F1 RECV_B0 SEND_F1 B0 RECV_B1 B1 REDUCE UPDATE", second)
    assert outcome(freed) == expected(freed)
    assert check(freed).ok


def test_an_update_before_what_another_rank_needs_for_the_same_sum_deadlocks() -> None:
    """The checker knew of messages only: such a file passed, and the engine waited for ever."""
    program = Request("2bw", 2, 2, 3).program()
    send = place_of(program, "1SEND_B1 of batch 0")
    for token in ("1REDUCE of batch 0", "1UPDATE of batch 0 making version 1"):
        sound, program = program, move(program, place_of(program, token), send)
        send = Place(send.rank, send.index + 1)
    assert check(sound).ok
    assert outcome(program).cycle == (0, 1)
    report = check(program)
    assert report.deadlock is not None
    assert report.deadlock_if_buffered
    assert report.deadlock[1] == (
        "rank 1 waits at 1UPDATE of batch 0 making version 1 for rank 0 to reach that batch's REDUCE"
    )


def place_of(program: Program, token: str) -> Place:
    """Where the instruction is that is spelt so."""
    found = [place for place in places(program) if str(program.tracks[place.rank][place.index]) == token]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("request_", "moved", "to"),
    [
        (Request("gpipe", 2, 2, 1), "1RECV_F0 of batch 0", "1RECV_F1 of batch 0"),
        (Request("1f1b", 2, 2, 1), "0B1 of batch 0 on version 0", "0REDUCE of batch 0"),
        (
            Request("2bw", 1, 2, 3, first_batch=1),
            "0UPDATE of batch 1 making version 2",
            "0F0 of batch 3 on version 2",
        ),
    ],
    ids=["values change places", "a gradient comes too late", "a forward on the version before"],
)
def test_the_symbolic_checker_sees_what_no_buffer_shows(request_: Request, moved: str, to: str) -> None:
    """The machine runs these to their end; only what they compute is wrong."""
    program = request_.program()
    result = outcome(move(program, place_of(program, moved), place_of(program, to)))
    assert result.broken is None
    assert result != expected(program)
