"""What a message keeps waiting while it crosses a link: neither end, its receiver, or both."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.cluster.cluster import Overlap
from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.generators.shape import Shape
from bireme.schedule.instruction import COMPUTE, SENDS, Instruction, Kind, Message
from bireme.schedule.program import Program
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network, Path, Wire
from bireme.simulate.simulator import pairs_that_talk, simulate
from bireme.timeline.timeline import Timeline
from tests.support.extent import examples

ONE_STAGE = ("gpipe", "1f1b", "2bw", "zb-h1")
TIMES = st.lists(st.integers(1, 4), min_size=4, max_size=4)


def run(program: Program, forward_s: Sequence[float], overlap: Overlap, hop_s: float = 1.0) -> Timeline:
    network = Network.dedicated(pairs_that_talk(program), bytes_per_s=1 / hop_s, overlap=overlap)
    return simulate(program, costs_of(forward_s), network)


def costs_of(forward_s: Sequence[float]) -> Costs:
    backward_s = [2 * one for one in forward_s]
    return Costs.per_stage(len(forward_s), forward_s=forward_s, backward_s=backward_s, message_bytes=1)


@pytest.mark.parametrize(
    ("overlap", "first", "last"),
    [
        (Overlap.FULL, [0, 1, 2], [2, 3, 4]),
        (Overlap.RECEIVER, [0, 1, 2], [2, 4, 6]),
        (Overlap.NONE, [0, 2, 4], [2, 4, 6]),
    ],
)
def test_who_waits_for_a_message_is_as_asked(overlap: Overlap, first: list[int], last: list[int]) -> None:
    """Three forwards of 1 s on two stages, and messages of 1 s."""
    program = generate("gpipe", num_stages=2, num_microbatches=3)
    timeline = run(program, [1, 1], overlap)
    for rank, starts in enumerate((first, last)):
        own = [one for one in timeline.ranks[rank].intervals() if one.instruction.kind is Kind.FORWARD]
        assert [one.start_s for one in own] == starts


@dataclass(frozen=True, slots=True)
class Step:
    """A computation of a rank, and the messages that it makes."""

    instruction: Instruction
    makes: list[Message]


def exchanged_s(program: Program, costs: Costs, hop_s: float) -> float:
    """A window by an account of its own: between two computations a rank sends what the first made and gets
    what the second needs, at once, and both ends of each message are there from its begin to its end.
    """
    ranks: list[list[Step]] = []
    for track in program.tracks:
        steps: list[Step] = []
        for one in track:
            if one.kind in COMPUTE:
                steps.append(Step(one, []))
            elif one.kind in SENDS:
                steps[-1].makes.append(one.carries())
        ranks.append(steps)
    made = {
        message: (r, i) for r, own in enumerate(ranks) for i, one in enumerate(own) for message in one.makes
    }
    needs = [[one.instruction.needs(program.num_stages) for one in own] for own in ranks]
    used = {need: (r, i) for r, own in enumerate(needs) for i, need in enumerate(own) if need in made}
    starts = [[0.0] * len(own) for own in ranks]

    def ended(rank: int, place: int) -> float:
        if place < 0:
            return 0.0
        return starts[rank][place] + costs.seconds(ranks[rank][place].instruction, rank)

    while True:
        before = [list(own) for own in starts]
        for rank, own in enumerate(ranks):
            for place in range(len(own)):
                crossing = [*own[place - 1].makes] if place else []
                crossing += [need] if (need := needs[rank][place]) in used else []
                begins = [max(ended(*made[one]), ended(used[one][0], used[one][1] - 1)) for one in crossing]
                starts[rank][place] = max(ended(rank, place - 1), *(one + hop_s for one in begins), 0.0)
        if starts == before:
            return max(ended(rank, len(own) - 1) for rank, own in enumerate(ranks))


@examples(60)
@given(st.sampled_from(ONE_STAGE), TIMES, st.integers(4, 8), st.sampled_from([0.25, 0.5, 1.0]))
def test_where_both_ends_wait_stages_exchange_what_they_made_for_what_they_need(
    name: str, forward_s: list[int], num_microbatches: int, hop_s: float
) -> None:
    program = generate(name, num_stages=4, num_microbatches=num_microbatches)
    found = run(program, forward_s, Overlap.NONE, hop_s)
    assert found.makespan_s == pytest.approx(exchanged_s(program, costs_of(forward_s), hop_s))


@examples(60)
@given(st.sampled_from(sorted(SCHEDULES)), TIMES, st.integers(0, 2), st.integers(1, 2))
def test_a_batch_ends_and_takes_no_less_where_ends_wait(
    name: str, forward_s: list[int], ahead: int, num_batches: int
) -> None:
    """Also where a rank has several stages or runs ahead, so that every rank may come to wait."""
    most = SCHEDULES[name].most_lookahead
    lookahead = min(ahead, most(Shape(4, 6, num_batches)) if most is not None else 0)
    program = generate(name, num_stages=4, num_microbatches=6, num_batches=num_batches, lookahead=lookahead)
    both, receiver, nobody = (run(program, forward_s, overlap).makespan_s for overlap in Overlap)
    assert both >= receiver >= nobody


def test_a_link_that_stops_its_ends_leaves_the_others_as_they_are() -> None:
    """Of three stages the last two meet on a link without overlap; the first sends when it likes."""
    program = generate("gpipe", num_stages=3, num_microbatches=2)
    wires = tuple(Wire(f"wire {n}", 1.0) for n in range(4))
    pairs = sorted(pairs_that_talk(program))
    paths = {
        pair: Path((n,), overlap=Overlap.NONE if 2 in pair else Overlap.FULL) for n, pair in enumerate(pairs)
    }
    timeline = simulate(program, costs_of([1, 1, 1]), Network(wires, paths))
    starts = [[one.start_s for one in rank.intervals() if one.end_s > one.start_s] for rank in timeline.ranks]
    assert [own[:2] for own in starts] == [[0, 1], [2, 4], [4, 6]]
