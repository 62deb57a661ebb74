"""Running further ahead than a schedule must: the same numbers, more stashed, slow links hidden."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import BiremeError
from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.checker import check
from bireme.schedule.instruction import Kind
from bireme.simulate.comparison import Contest, solve_lookahead
from bireme.simulate.costs import Costs
from bireme.simulate.links import Links
from bireme.simulate.simulator import simulate
from tests.support.extent import examples
from tests.support.symbolic import expected, outcome

ABLE = sorted(schedule.name for schedule in SCHEDULES.values() if schedule.most_lookahead)


@examples(80)
@given(data=st.data(), name=st.sampled_from(ABLE), d=st.integers(2, 5), extra=st.integers(0, 6))
def test_it_is_proved_right_and_keeps_its_update_rule(
    data: st.DataObject, name: str, d: int, extra: int
) -> None:
    m = d + extra
    lookahead = data.draw(st.integers(0, m - d + (name != "2bw-fresh")))
    program = generate(name, num_stages=d, num_microbatches=m, num_batches=4, lookahead=lookahead)
    report = check(program)
    assert report.ok, report.problems or report.deadlock
    made = outcome(program)
    assert made.broken is None
    if name != "2bw-fresh":
        assert made.weights == expected(program).weights


def test_two_versions_allow_no_stage_to_be_more_than_a_batch_ahead() -> None:
    generate("2bw", num_stages=4, num_microbatches=6, num_batches=4, lookahead=3)
    with pytest.raises(BiremeError, match="allows a lookahead of 3 with 4 stages and 6 micro-batches, not 4"):
        generate("2bw", num_stages=4, num_microbatches=6, num_batches=4, lookahead=4)


def test_a_trial_step_sees_as_many_micro_batches_less() -> None:
    def seen(lookahead: int) -> list[int | None]:
        program = generate("2bw-fresh", num_stages=4, num_microbatches=8, num_batches=2, lookahead=lookahead)
        return [next(i.seen for i in track if i.kind is Kind.TRIAL) for track in program.tracks]

    assert seen(0) == [8 - 3, 8 - 2, 8 - 1, 8]
    assert seen(3) == [8 - 6, 8 - 4, 8 - 2, 8]


@pytest.mark.slow
def test_it_hides_a_link_that_is_slow_but_not_too_slow() -> None:
    """A message takes a third of a micro-batch, and each batch pays for the way there and back."""
    costs = Costs.per_stage(8, forward_s=1, backward_s=2, message_bytes=1)
    found = solve_lookahead("2bw", Contest(costs, 16, Links(1.0).network))
    assert found.steady_batch_s == pytest.approx(16 * 3)
    assert found.without_s > 1.5 * found.steady_batch_s
    assert 0 < found.lookahead <= 9


def test_where_messages_take_no_time_there_is_nothing_to_hide() -> None:
    for name in ABLE:
        for num_stages in (4, 1):
            costs = Costs.per_stage(num_stages, forward_s=1, backward_s=2)
            assert solve_lookahead(name, Contest(costs, 8, Links().network)).lookahead == 0


@pytest.mark.slow
@examples(30)
@given(
    name=st.sampled_from(["1f1b", "2bw"]),
    times=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 12)), min_size=2, max_size=5),
    extra=st.integers(0, 6),
    size=st.integers(0, 6),
)
def test_the_solved_lookahead_is_as_good_as_any(
    name: str, times: list[tuple[int, int]], extra: int, size: int
) -> None:
    d, m = len(times), len(times) + extra
    costs = Costs.per_stage(
        d, forward_s=[f for f, _ in times], backward_s=[b for _, b in times], message_bytes=size
    )
    links = Links(1.0)

    def batch_s(lookahead: int) -> float:
        program = generate(name, num_stages=d, num_microbatches=m, num_batches=6, lookahead=lookahead)
        return simulate(program, costs, links.network(program)).steady_batch_s

    all_s = [batch_s(lookahead) for lookahead in range(m - d + 2)]
    found = solve_lookahead(name, Contest(costs, m, links.network))
    assert found.steady_batch_s == batch_s(found.lookahead)
    assert found.steady_batch_s <= min(all_s) * 1.01
