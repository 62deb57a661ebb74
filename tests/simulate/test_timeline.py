"""What a timeline says of a window: its critical path, its memory, its pace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.cluster.cluster import Overlap
from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.instruction import Kind
from bireme.schedule.residency import Residency
from bireme.schedule.torch_csv import parse
from bireme.simulate.costs import Costs
from bireme.simulate.links import Links
from bireme.simulate.simulator import simulate
from bireme.timeline.timeline import critical_path, pace
from tests.support.extent import examples


@examples(80)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    times=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=4, max_size=4),
    latency_s=st.integers(0, 3),
    sizes=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    update_s=st.integers(0, 2),
    reduce_s=st.integers(0, 6),
    overlap=st.sampled_from(Overlap),
)
def test_the_critical_path_has_no_gap(
    name: str,
    times: list[tuple[int, int]],
    latency_s: int,
    sizes: list[int],
    update_s: int,
    reduce_s: int,
    overlap: Overlap,
) -> None:
    """From the window's begin to its end it is work and waiting, one right after the other."""
    program = generate(name, num_stages=4, num_microbatches=5, num_batches=2)
    costs = Costs.per_stage(
        4,
        forward_s=[f for f, _ in times],
        backward_s=[b for _, b in times],
        message_bytes=sizes,
        update_s=update_s,
        reduce_s=reduce_s,
    )
    timeline = simulate(program, costs, Links(1.0, latency_s, overlap=overlap).network(program))
    now = 0.0
    for step in reversed(list(critical_path(timeline))):
        assert step.interval.start_s - step.waited_s == now
        now = step.interval.end_s
    assert now == timeline.makespan_s
    assert sum(part.share for part in pace(timeline)) == pytest.approx(1.0)


def test_a_receiver_that_posts_late_is_what_its_message_waited_for() -> None:
    """Stage 0 has sent long before; stage 1 is busy and posts the receive only after its first backward."""
    text = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1\n"
    text += "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    program = parse(text, source="late.csv")
    costs = Costs.per_stage(2, forward_s=1, backward_s=9, message_bytes=1)
    path = list(critical_path(simulate(program, costs, Links(1.0).network(program))))
    steps = [str(step.interval.instruction).split(" of ")[0] for step in reversed(path)]
    assert steps[:4] == ["0F0", "1F0", "1B0", "1F1"]


def test_the_slowest_stage_is_named_as_what_sets_the_pace() -> None:
    program = generate("2bw", num_stages=4, num_microbatches=8, num_batches=10)
    costs = Costs.per_stage(4, forward_s=[1, 1, 3, 1], backward_s=[2, 2, 6, 2])
    first, second, *_ = pace(simulate(program, costs))
    assert (first.stage, first.kind) == (2, Kind.BACKWARD)
    assert (second.stage, second.kind) == (2, Kind.FORWARD)
    assert first.share + second.share > 0.9


def memory(
    name: str,
    *,
    recompute: bool = False,
    master: bool = False,
    weight_bytes: float = 0.0,
    gradient_bytes: float | None = None,
    optimizer_bytes: float = 0.0,
    stash_bytes: float = 0.0,
    input_bytes: float | None = None,
) -> list[Residency]:
    d = 4
    program = generate(
        name, num_stages=d, num_microbatches=8, num_batches=4, recompute=range(d) if recompute else ()
    )
    costs = Costs.per_stage(
        d,
        forward_s=1,
        backward_s=2,
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        stash_bytes=stash_bytes,
        input_bytes=input_bytes,
        master_weights=master,
    )
    return list(simulate(program, costs).memory)


def test_2bw_keeps_just_one_weight_copy_more_than_1f1b() -> None:
    flush = memory("1f1b", weight_bytes=1000, gradient_bytes=0, stash_bytes=7, optimizer_bytes=50)
    two = memory("2bw", weight_bytes=1000, gradient_bytes=0, stash_bytes=7, optimizer_bytes=50)
    assert [b.peak_bytes - a.peak_bytes for a, b in zip(flush, two, strict=True)] == [1000] * 4


def test_fresh_2bw_keeps_one_copy_more_unless_the_optimizer_has_a_master() -> None:
    two = memory("2bw", weight_bytes=1000, gradient_bytes=0)
    fresh = memory("2bw-fresh", weight_bytes=1000, gradient_bytes=0)
    assert [b.peak_bytes - a.peak_bytes for a, b in zip(two, fresh, strict=True)] == [1000] * 4
    with_master = memory("2bw-fresh", weight_bytes=1000, gradient_bytes=0, master=True)
    assert [kept.peak_bytes for kept in with_master] == [kept.peak_bytes for kept in two]


def test_a_rank_needs_the_workspace_of_its_greediest_stage_and_not_of_all() -> None:
    program = generate("zbv", num_stages=4, num_microbatches=4, num_batches=2)
    workspace = [10.0, 20.0, 40.0, 80.0]
    costs = Costs.per_stage(4, forward_s=1, backward_s=2, workspace_bytes=workspace)
    for kept in simulate(program, costs).memory:
        own = [workspace[stage] for stage in program.stages_of(kept.rank)]
        assert len(own) == 2
        assert kept.peak_bytes == kept.at_peak["workspace"] == max(own)


@pytest.mark.parametrize(
    ("name", "stashed"),
    [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1]), ("2bw", [4, 3, 2, 1]), ("zb-h1", [4, 4, 4, 4])],
)
def test_what_is_stashed_is_what_is_paid_for(name: str, stashed: list[int]) -> None:
    kept = memory(name, stash_bytes=100)
    assert [k.peak_stashed_microbatches for k in kept] == stashed
    assert [k.peak_bytes for k in kept] == [100 * count for count in stashed]


def test_recomputing_keeps_inputs_and_one_full_set_of_activations() -> None:
    kept = memory("1f1b", recompute=True, stash_bytes=100, input_bytes=1)
    assert [k.peak_bytes for k in kept] == [100 + 4, 100 + 3, 100 + 2, 100 + 1]


def test_gpipes_stash_grows_with_the_batch_and_buffers_of_nobody_do() -> None:
    def kept(name: str, m: int) -> list[tuple[int, int]]:
        program = generate(name, num_stages=4, num_microbatches=m, num_batches=3)
        timeline = simulate(program, Costs.per_stage(4, forward_s=1, backward_s=2))
        return [(k.peak_stashed_microbatches, k.receive_buffers) for k in timeline.memory]

    assert [stashed for stashed, _ in kept("gpipe", 64)] == [64] * 4
    for name in SCHEDULES:
        if SCHEDULES[name].stages_per_rank == 1:
            buffers = [[b for _, b in kept(name, m)] for m in (4, 16, 64)]
            assert buffers[0] == buffers[1] == buffers[2]
            assert max(buffers[0]) <= 3


def test_a_deferred_update_keeps_a_second_gradient_on_the_last_stage() -> None:
    """Batch t+1 accumulates while batch t's gradient waits for its update: paid for, and shown."""
    kept = memory("2bw", gradient_bytes=10)
    assert kept[-1].at_peak["gradients"] == 20
    assert memory("1f1b", gradient_bytes=10)[-1].at_peak["gradients"] == 10


def test_the_series_has_the_peak_where_it_is_said_to_be() -> None:
    program = generate("2bw", num_stages=3, num_microbatches=3, num_batches=3)
    costs = Costs.per_stage(3, forward_s=1, backward_s=2, weight_bytes=5, stash_bytes=3, message_bytes=1)
    for kept in simulate(program, costs, memory_series=True).memory:
        assert kept.series is not None
        assert max(kept.series) == kept.peak_bytes == sum(kept.at_peak.values())
        assert kept.series[kept.peak_index] == kept.peak_bytes


def test_a_window_of_one_batch_has_no_steady_state_but_its_makespan() -> None:
    program = generate("2bw", num_stages=3, num_microbatches=3, num_batches=1)
    timeline = simulate(program, Costs.per_stage(3, forward_s=1, backward_s=2))
    assert timeline.steady_batch_s == timeline.makespan_s


@pytest.mark.parametrize("batches", [2, 3, 4, 5])
def test_short_windows_have_a_steady_time_too(batches: int) -> None:
    program = generate("1f1b", num_stages=3, num_microbatches=3, num_batches=batches)
    timeline = simulate(program, Costs.per_stage(3, forward_s=1, backward_s=2))
    assert timeline.steady_batch_s == (3 + 2) * 3


def test_pipedream_keeps_a_gradient_for_every_update_to_come() -> None:
    assert [kept.at_peak["gradients"] for kept in memory("pipedream", gradient_bytes=10)] == [40, 30, 20, 10]
    assert memory("2bw", gradient_bytes=10)[0].at_peak["gradients"] == 20


def test_every_posted_receive_has_its_buffer_paid_for() -> None:
    program = generate("1f1b", num_stages=4, num_microbatches=8)
    costs = Costs.per_stage(4, forward_s=1, backward_s=2, message_bytes=1, input_bytes=0)
    for kept in simulate(program, costs).memory:
        assert kept.peak_bytes == kept.at_peak["receive buffers"] == kept.receive_buffers > 0


def test_two_halves_are_stashed_as_one_micro_batch() -> None:
    assert [k.peak_bytes for k in memory("1f1b-sliced", stash_bytes=100)] == [400, 300, 200, 100]
