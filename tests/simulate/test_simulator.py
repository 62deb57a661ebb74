"""The simulator is exact: closed forms where there are some, an independent longest path elsewhere."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.cluster.cluster import Overlap
from bireme.errors import BiremeError
from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Kind, Message
from bireme.schedule.program import Program
from bireme.schedule.weave import lower
from bireme.simulate.comparison import Contest, solve_slices
from bireme.simulate.costs import Costs
from bireme.simulate.links import Links
from bireme.simulate.network import Network, Path
from bireme.simulate.simulator import pairs_that_talk, simulate
from bireme.timeline.timeline import Timeline
from tests.support.extent import examples

SHAPES = [(1, 1), (1, 3), (2, 2), (3, 5), (4, 4), (4, 9), (8, 8), (8, 16)]


def run(
    name: str, stages: int, microbatches: int, batches: int = 1, *, f: float = 1.0, b: float = 2.0
) -> Timeline:
    program = generate(name, num_stages=stages, num_microbatches=microbatches, num_batches=batches)
    return simulate(program, Costs.per_stage(stages, forward_s=f, backward_s=b))


# --- closed forms, exact in whole seconds ------------------------------------------------------------------


@pytest.mark.parametrize(("d", "m"), SHAPES)
def test_no_pipelining_takes_every_stage_one_after_the_other(d: int, m: int) -> None:
    assert run("sequential", d, m).makespan_s == m * d * (1 + 2)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("d", "m"), SHAPES)
@pytest.mark.parametrize(("f", "b"), [(1, 2), (3, 3), (2, 7)])
def test_a_flush_schedule_takes_m_plus_d_minus_1_passes(name: str, d: int, m: int, f: int, b: int) -> None:
    timeline = run(name, d, m, 4, f=f, b=b)
    assert timeline.steady_batch_s == (m + d - 1) * (f + b)
    assert timeline.makespan_s == 4 * (m + d - 1) * (f + b)
    assert timeline.bubble_fraction == pytest.approx((d - 1) / (m + d - 1))


@pytest.mark.parametrize("name", ["2bw", "2bw-fresh"])
@pytest.mark.parametrize(("d", "m"), SHAPES)
def test_2bw_has_no_bubble_once_it_is_full(name: str, d: int, m: int) -> None:
    timeline = run(name, d, m, 10)
    assert timeline.steady_batch_s == m * (1 + 2)
    assert timeline.makespan_s == (10 * m + d - 1) * (1 + 2)
    assert timeline.steady_bubble_fraction == pytest.approx(0.0, abs=1e-12)


@given(
    times=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    extra=st.integers(0, 4),
)
def test_2bw_runs_at_the_pace_of_its_slowest_stage(times: list[tuple[int, int]], extra: int) -> None:
    d, m = len(times), len(times) + extra
    program = generate("2bw", num_stages=d, num_microbatches=m, num_batches=12)
    costs = Costs.per_stage(d, forward_s=[f for f, _ in times], backward_s=[b for _, b in times])
    assert simulate(program, costs).steady_batch_s == m * max(f + b for f, b in times)


@pytest.mark.slow
@given(
    name=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    times=st.lists(st.tuples(*[st.integers(1, 9)] * 4), min_size=1, max_size=5),
    latency_s=st.integers(0, 2),
)
def test_ranks_that_agree_on_a_batch_begin_the_next_together(
    name: str, times: list[tuple[int, int, int, int]], latency_s: int
) -> None:
    """So a batch in the middle takes what it takes alone; without that a rank may begin early."""
    d, m = len(times), len(times) + 2
    forward_s, input_s, weight_s, reduce_s = zip(*times, strict=True)
    costs = Costs.per_stage(
        d,
        forward_s=forward_s,
        backward_s=[a + b for a, b in zip(input_s, weight_s, strict=True)],
        backward_input_s=input_s,
        reduce_s=reduce_s,
    )

    def timeline(batches: int, *, agree: bool) -> Timeline:
        program = generate(name, num_stages=d, num_microbatches=m, num_batches=batches)
        network = Network.dedicated(pairs_that_talk(program), latency_s=latency_s)
        return simulate(program, costs, network, agree=agree)

    together, apart = timeline(4, agree=True), timeline(4, agree=False)
    assert together.makespan_s == 4 * timeline(1, agree=True).makespan_s
    assert together.steady_batch_s >= apart.steady_batch_s


@pytest.mark.parametrize(("name", "waited_s"), [("1f1b", 0.5), ("2bw", 0.0)])
def test_a_pipeline_that_drains_waits_until_its_ranks_agree(name: str, waited_s: float) -> None:
    program = generate(name, num_stages=3, num_microbatches=6, num_batches=8)
    costs = Costs.per_stage(3, forward_s=1, backward_s=2)
    near = Network.dedicated(pairs_that_talk(program))
    near_s, far_s = (
        simulate(program, costs, one, agree=True).steady_batch_s for one in (near, replace(near, agree_s=0.5))
    )
    assert far_s - near_s == waited_s


def test_2bw_loses_nothing_by_agreeing() -> None:
    program = generate("2bw", num_stages=4, num_microbatches=6, num_batches=10)
    costs = Costs.per_stage(4, forward_s=[1, 2, 1, 1], backward_s=2, reduce_s=1)
    assert simulate(program, costs, agree=True).steady_batch_s == simulate(program, costs).steady_batch_s


@pytest.mark.parametrize("name", ["2bw", "1f1b", "interleaved", "zbv"])
def test_ranks_that_wait_for_their_syncs_can_still_agree(name: str) -> None:
    """In REDUCE they wait for their own sync, and in UPDATE for those of all."""
    program = generate(name, num_stages=4, num_microbatches=6, num_batches=6)
    costs = Costs.per_stage(4, forward_s=1, backward_s=2, reduce_s=[1, 3, 1, 2])
    apart, together = (
        simulate(program, costs, overlap_reduce=False, agree=agree).steady_batch_s for agree in (False, True)
    )
    assert together >= apart
    if name == "2bw":
        assert together == apart


def test_stages_that_step_one_by_one_cannot_agree() -> None:
    program = generate("pipedream", num_stages=2, num_microbatches=4)
    with pytest.raises(BiremeError, match="step one by one"):
        simulate(program, Costs.per_stage(2, forward_s=1, backward_s=2), agree=True)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 4), (4, 2, 8), (4, 3, 12), (3, 4, 9), (1, 3, 5)])
def test_interleaving_divides_the_bubble(p: int, v: int, m: int) -> None:
    program = generate("interleaved", num_stages=p * v, num_microbatches=m, stages_per_rank=v)
    timeline = simulate(program, Costs.per_stage(p * v, forward_s=1, backward_s=2))
    assert timeline.makespan_s == m * v * 3 + (p - 1) * 3


@pytest.mark.parametrize(("d", "m"), [(2, 2), (3, 5), (4, 4), (4, 9), (8, 8), (8, 24)])
def test_zb_h1_leaves_a_third_of_the_bubble(d: int, m: int) -> None:
    """With f = i = w."""
    assert run("zb-h1", d, m, 3).steady_batch_s == 3 * m + (d - 1)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 7), (3, 6), (4, 8), (4, 20), (6, 12)])
def test_zbv_leaves_none(p: int, m: int) -> None:
    """With f = i = w: ranks start one after the other and never wait from there on."""
    timeline = run("zbv", 2 * p, m, 5)
    assert timeline.steady_batch_s == 6 * m
    assert timeline.makespan_s == 5 * 6 * m + (p - 1)


# --- an independent longest path ----------------------------------------------------------------------------


class LongestPath:
    """When each instruction of a program starts, by recursion over what it must wait for.

    It shares nothing with the simulator but the program. A transfer sets out when it has been sent, its
    receive posted, and the transfer before it on the same pair of ranks is through.
    """

    def __init__(self, program: Program, costs: Costs, seconds_per_byte: float, latency_s: float) -> None:
        self.program = program
        self.costs = costs
        self.latency_s = latency_s
        self.tracks = [list(track) for track in program.tracks]
        self.sends: dict[tuple[int, int], list[tuple[int, Instruction]]] = {}
        self.posts: dict[Message, tuple[int, int]] = {}
        self.place: dict[Message, tuple[tuple[int, int], int]] = {}
        for rank, track in enumerate(self.tracks):
            for index, step in enumerate(track):
                if step.kind in SENDS:
                    pair = rank, program.rank_of_stage[step.carries().to_stage]
                    channel = self.sends.setdefault(pair, [])
                    self.place[step.carries()] = pair, len(channel)
                    channel.append((index, step))
                elif step.kind in RECEIVES:
                    self.posts[step.carries()] = rank, index
        self.seconds_per_byte = seconds_per_byte
        self.known: dict[tuple[int, int], float] = {}
        self.through: dict[tuple[tuple[int, int], int], float] = {}

    def start(self, rank: int, index: int) -> float:
        if (rank, index) not in self.known:
            step = self.tracks[rank][index]
            earliest = self.end(rank, index - 1) if index else 0.0
            needed = step.needs(self.program.num_stages) if step.kind in COMPUTE else None
            if needed is not None and needed in self.place:
                earliest = max(earliest, self.channel_through(*self.place[needed]) + self.latency_s)
            self.known[rank, index] = earliest
        return self.known[rank, index]

    def end(self, rank: int, index: int) -> float:
        return self.start(rank, index) + self.costs.seconds(self.tracks[rank][index], rank)

    def channel_through(self, pair: tuple[int, int], number: int) -> float:
        if (pair, number) not in self.through:
            index, step = self.sends[pair][number]
            begin = max(self.start(pair[0], index), self.start(*self.posts[step.carries()]))
            if number:
                begin = max(begin, self.channel_through(pair, number - 1))
            size = self.costs.boundary_bytes(step)
            self.through[pair, number] = begin + size * self.seconds_per_byte
        return self.through[pair, number]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Program, Costs]:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    per_rank = SCHEDULES[name].stages_per_rank
    d = per_rank * draw(st.integers(1, 4))
    m = draw(st.integers(d if name.startswith("2bw") else 1, d + 4))
    recompute = draw(st.booleans())
    program = generate(
        name,
        num_stages=d,
        num_microbatches=m,
        num_batches=draw(st.integers(1, 3)),
        recompute=range(d) if recompute else (),
    )

    def each(least: int, most: int) -> Sequence[float]:
        return draw(st.lists(st.integers(least, most), min_size=d, max_size=d))

    costs = Costs.per_stage(
        d,
        forward_s=each(0, 9),
        backward_s=each(0, 9),
        half_forward_s=each(0, 9),
        update_s=each(0, 3),
        trial_s=each(0, 3),
        message_bytes=each(0, 4),
        rank_speed=[draw(st.sampled_from([0.5, 1, 2])) for _ in range(program.num_ranks)],
    )
    return program, costs


@examples(150)
@given(problem=problems(), seconds_per_byte=st.sampled_from([0, 1, 3]), latency_s=st.sampled_from([0, 2]))
def test_every_start_is_the_longest_path_to_it(
    problem: tuple[Program, Costs], seconds_per_byte: int, latency_s: int
) -> None:
    program, costs = problem
    network = Network.dedicated(
        pairs_that_talk(program),
        bytes_per_s=1 / seconds_per_byte if seconds_per_byte else float("inf"),
        latency_s=latency_s,
    )
    timeline = simulate(program, costs, network)
    oracle = LongestPath(program, costs, seconds_per_byte, latency_s)
    for rank in timeline.ranks:
        for index, start_s in enumerate(rank.start_s):
            assert start_s == pytest.approx(oracle.start(rank.rank, index), abs=1e-9)


@examples(60)
@given(problem=problems())
def test_going_forward_in_the_order_of_time_changes_nothing_where_nobody_shares(
    problem: tuple[Program, Costs],
) -> None:
    """The two ways through the inner loop agree: an idle wire on two idle paths forces the other one."""
    program, costs = problem
    apart = Network.dedicated(pairs_that_talk(program), bytes_per_s=1.0, latency_s=1.0)
    spare = len(apart.wires)
    paths = dict(apart.paths)
    crossing = Network(
        (*apart.wires, *Network.dedicated([(0, 1)]).wires),
        paths | {(-1, -2): _over(spare), (-2, -1): _over(spare)},
    )
    assert crossing.is_shared()
    one, other = simulate(program, costs, apart), simulate(program, costs, crossing)
    for a, b in zip(one.ranks, other.ranks, strict=True):
        assert list(a.start_s) == pytest.approx(list(b.start_s), abs=1e-9)


def _over(wire: int) -> Path:
    return Path((wire,))


# --- slicing ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize(("p", "m", "k"), [(16, 32, 4), (12, 24, 3), (4, 8, 1), (8, 16, 2)])
def test_slices_are_solved_to_the_published_rule_at_equal_stages(p: int, m: int, k: int) -> None:
    """⌈(p−1)f / 2b⌉ with b = 2f."""
    assert solve_slices(Contest(Costs.per_stage(p, forward_s=1, backward_s=2), m, Links().network)) == k


@pytest.mark.slow
@examples(40)
@given(st.lists(st.tuples(st.integers(2, 12), st.integers(2, 24)), min_size=2, max_size=6), st.integers(0, 6))
def test_the_solved_number_of_slices_is_the_best_of_all(times: list[tuple[int, int]], extra: int) -> None:
    d, m = len(times), len(times) + extra
    costs = Costs.per_stage(d, forward_s=[f for f, _ in times], backward_s=[b for _, b in times])

    def taken_s(k: int) -> float:
        program = generate("1f1b-sliced", num_stages=d, num_microbatches=m, num_sliced=k)
        return simulate(program, costs).makespan_s

    all_s = [taken_s(k) for k in range(min(d, m) + 1)]
    assert solve_slices(Contest(costs, m, Links().network)) == all_s.index(min(all_s))


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_slicing_halves_the_start_up_and_saves_just_that(p: int) -> None:
    def last_stage_starts(timeline: Timeline) -> float:
        return next(i.start_s for i in timeline.ranks[-1].intervals() if i.instruction.kind is Kind.FORWARD)

    whole, sliced = run("1f1b", p, 2 * p), run("1f1b-sliced", p, 2 * p)
    assert last_stage_starts(sliced) == last_stage_starts(whole) / 2
    assert whole.makespan_s - sliced.makespan_s == (p - 1) / 2


# --- the rest of the clock ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_loop_takes_what_its_written_out_form_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    d = 4
    costs = Costs.per_stage(d, forward_s=[1, 2, 3, 1], backward_s=[2, 5, 3, 4], message_bytes=1)

    def timeline() -> Timeline:
        program = generate(name, num_stages=d, num_microbatches=5, num_batches=14)
        network = Network.dedicated(pairs_that_talk(program), bytes_per_s=2, latency_s=1)
        return simulate(program, costs, network)

    folded = timeline()
    monkeypatch.setattr("bireme.schedule.source.WRITTEN_OUT", 100)
    written = timeline()
    assert folded.program.tracks[0].repeats > 0
    assert written.program.tracks[0].repeats == 0
    assert [list(r.start_s) for r in folded.ranks] == [list(r.start_s) for r in written.ranks]
    assert folded.memory == written.memory
    assert folded.steady_batch_s == written.steady_batch_s


def test_a_slower_rank_takes_longer_by_its_speed() -> None:
    program = generate("2bw", num_stages=3, num_microbatches=3, num_batches=10)
    costs = Costs.per_stage(3, forward_s=1, backward_s=2, rank_speed=[1, 0.5, 1])
    assert simulate(program, costs).steady_batch_s == 2 * 3 * 3


def test_blocking_messages_cost_their_receiver_time_even_where_it_sets_the_pace() -> None:
    program = generate("2bw", num_stages=2, num_microbatches=4, num_batches=10)
    costs = Costs.per_stage(2, forward_s=[2, 6], backward_s=[4, 12], message_bytes=1)

    def steady_s(overlap: Overlap) -> float:
        network = Network.dedicated(pairs_that_talk(program), bytes_per_s=1, overlap=overlap)
        return simulate(program, costs, network).steady_batch_s

    assert steady_s(Overlap.FULL) == 4 * 18
    assert steady_s(Overlap.RECEIVER) == 4 * 19


def test_2bw_hides_a_gradient_sync_that_a_flush_schedule_waits_for() -> None:
    costs = Costs.per_stage(4, forward_s=1, backward_s=2, reduce_s=3)

    def batch_s(name: str, *, overlap_reduce: bool = True) -> float:
        program = generate(name, num_stages=4, num_microbatches=8, num_batches=10)
        return simulate(program, costs, overlap_reduce=overlap_reduce).steady_batch_s

    assert batch_s("2bw") == 8 * 3
    assert batch_s("2bw", overlap_reduce=False) == 8 * 3 + 3
    assert batch_s("1f1b") == (8 + 3) * 3 + 3


def test_a_sync_that_keeps_its_rank_busy_is_recorded_alike_on_own_and_shared_links() -> None:
    program = generate("2bw", num_stages=2, num_microbatches=4, num_batches=3)
    costs = Costs.per_stage(2, forward_s=1, backward_s=2, reduce_s=5)
    apart = simulate(program, costs, overlap_reduce=False)
    shared = simulate(program, costs, Links(full_duplex=False).network(program), overlap_reduce=False)
    for one, other in zip(apart.ranks, shared.ranks, strict=True):
        assert (list(one.start_s), list(one.end_s)) == (list(other.start_s), list(other.end_s))


def test_the_syncs_of_one_rank_go_one_after_the_other() -> None:
    program = generate("interleaved", num_stages=2, num_microbatches=2, stages_per_rank=2)
    costs = Costs.per_stage(2, forward_s=0, backward_s=0, reduce_s=1)
    assert simulate(program, costs).makespan_s == 2


def test_what_cannot_be_is_refused_wherever_it_comes_from() -> None:
    program = generate("1f1b", num_stages=2, num_microbatches=2)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(BiremeError, match="forward_s has the value"):
            Costs.per_stage(2, forward_s=wrong, backward_s=1)
    with pytest.raises(BiremeError, match="rank_speed has the value 0"):
        Costs.per_stage(2, forward_s=1, backward_s=1, rank_speed=[1, 0])
    with pytest.raises(BiremeError, match=r"no path from rank [01] to rank [01]"):
        simulate(program, Costs.per_stage(2, forward_s=1, backward_s=1), Network((), {}))
    with pytest.raises(BiremeError, match=r"no path for rank [01]'s gradient sync"):
        simulate(program, Costs.per_stage(2, forward_s=1, backward_s=1, reduce_bytes=1))
    with pytest.raises(BiremeError, match="already has its sends and receives"):
        lower(program)
    with pytest.raises(BiremeError, match="cannot start at batch -3"):
        generate("2bw", num_stages=2, num_microbatches=2, first_batch=-3)


def test_costs_for_another_number_of_stages_are_refused() -> None:
    program = generate("1f1b", num_stages=3, num_microbatches=3)
    with pytest.raises(BiremeError, match="costs are for 2 stages, but the program has 3"):
        simulate(program, Costs.per_stage(2, forward_s=1, backward_s=1))
    with pytest.raises(BiremeError, match="rank_speed has 2 values for 3 ranks"):
        simulate(program, Costs.per_stage(3, forward_s=1, backward_s=1, rank_speed=[1, 1]))
    with pytest.raises(BiremeError, match="backward_s has 2 values for 3 stages"):
        Costs.per_stage(3, forward_s=1, backward_s=[1, 2])
