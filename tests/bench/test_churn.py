"""Machines that come and go on the clock of the benchmark, and what its rows are made of."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.churn import costs_of, many_row, many_verdicts, quick_trace
from benchmarks.churning.real_run import Churned, churned, redone, row_of
from benchmarks.churning.simulated import Costs, Ran, simulated
from benchmarks.churning.trace import Kind, Market, Trace, TraceEvent, generated
from benchmarks.killing.mortal_run import Round
from bireme.errors import BiremeError
from bireme.sync.coordinator import coordinator
from bireme.sync.coordinator.messages import SamplePlaces
from tests.support.extent import TRY_ALL, examples

COSTS = Costs(sample_s=0.05, start_s=2.0, transfer_s=0.5)


def there(*names: str) -> list[TraceEvent]:
    return [TraceEvent(0.0, name, Kind.ARRIVES) for name in names]


def each_once(ran: Ran) -> None:
    """No sample is in two rounds, and rounds follow each other."""
    places = sorted(own for _, one in ran.committed for of_one in one.samples for own in of_one)
    for early, late in pairwise(places):
        assert early.end <= late.begin
    assert [one.batch for _, one in ran.committed] == list(range(len(ran.committed)))
    open_ = ran.committed[-1][1].open
    covered = sum(one.count for one in (*places, *open_))
    assert covered == ran.committed[-1][1].fresh
    assert all(isinstance(one, SamplePlaces) for one in places)


def test_a_machine_that_is_lost_is_noticed_after_its_lease_and_trains_again_after_its_return() -> None:
    events = [*there("a", "b", "c"), TraceEvent(10.0, "c", Kind.LOST), TraceEvent(20.0, "c", Kind.ARRIVES)]
    ran = simulated(Trace(tuple(events), 40.0), COSTS, samples=8, lease_s=4.0)
    each_once(ran)
    (back,) = ran.recoveries
    assert back.machine == "c"
    assert back.detect_s is not None
    assert 3.0 < back.detect_s <= 4.1
    assert back.start_s == pytest.approx(2.0)
    assert back.transfer_s >= 0.5
    assert ran.samples_redone > 0
    assert len(ran.committed[-1][1].members) == 3


def test_a_machine_that_leaves_is_noticed_at_once() -> None:
    events = [*there("a", "b", "c"), TraceEvent(10.0, "c", Kind.LEAVES), TraceEvent(20.0, "c", Kind.ARRIVES)]
    ran = simulated(Trace(tuple(events), 40.0), COSTS, samples=8, lease_s=4.0)
    (back,) = ran.recoveries
    assert back.detect_s == pytest.approx(COSTS.told_s)


@pytest.mark.slow
@examples(60, 8)
@given(st.integers(2, 8), st.integers(0, 999), st.floats(0, 1), st.integers(0, 1))
def test_any_trace_has_every_sample_once_and_what_costs_the_coordinator_little_changes_nothing(
    machines: int, seed: int, notice: float, bursts: int
) -> None:
    """Of most reports the coordinator knows that nothing follows, without looking at all members."""
    market = Market(machines, 30.0, 20.0, 4.0, notice, 2, 15.0 * bursts, least=machines // 2 + 1)
    trace = generated(market, seed)
    quick = simulated(trace, COSTS, samples=4, lease_s=4.0)
    each_once(quick)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator, "_without_more", lambda *_: None)
        slow = simulated(trace, COSTS, samples=4, lease_s=4.0)
    assert [one for _, one in quick.committed] == [one for _, one in slow.committed]
    assert [at for at, _ in quick.committed] == pytest.approx([at for at, _ in slow.committed])
    assert quick.recoveries == slow.recoveries


def test_messages_of_a_batch_grow_as_the_members_do() -> None:
    rows = []
    for count in (5, 40):
        trace = Trace(tuple(there(*map(str, range(count)))), 20.0)
        rows.append(many_row(trace, COSTS, 20, simulated(trace, COSTS, samples=20)))
    assert [one.ok for one in many_verdicts(rows)] == [True, True]
    assert rows[0]["goodput"] > 0.9


RUN = Churned(
    about="",
    calm_per_s=60.0,
    goodput=0.9,
    samples=1000,
    samples_redone=96,
    rounds=20,
    returns_s=(10.0, 12.0, 14.0),
    recoveries=(
        {"detect_s": None, "transfer_s": 1.0, "catch_up_s": 2.0},
        {"detect_s": 4.0, "transfer_s": 3.0, "catch_up_s": 2.0},
    ),
    longest_gap_s=3.0,
    moved_bytes=2000,
    statuses=(0, 0, 0),
    is_whole=True,
    left_over=(),
)


def test_samples_that_are_assigned_again_are_counted_over_coordinators_that_take_up() -> None:
    rounds = [Round(number, (0, 1), 8, 0.0, count) for number, count in enumerate((40, 40, 56, 16, 24))]
    assert redone(rounds) == 16 + 16 + 8


def test_a_row_splits_a_return_into_its_parts() -> None:
    row = row_of(RUN, Trace(tuple(there("a", "b", "c")), 30.0))
    assert row["median_detect_s"] == 4.0
    assert row["median_start_s"] == pytest.approx(12.0 - 2.0 - 2.0)
    assert row["batches_lost"] == pytest.approx(2.0)
    assert row["moved_bytes_a_batch"] == 100


def test_the_clock_takes_what_a_run_has_measured() -> None:
    costs = costs_of(RUN, 3)
    assert (costs.sample_s, costs.transfer_s, costs.start_s) == (0.05, 2.0, 8.0)
    assert costs_of(replace(RUN, recoveries=(), returns_s=()), 3).start_s == Costs().start_s
    assert costs_of(None, 3) == Costs()


def test_no_run_is_begun_over_a_trace_that_leaves_no_machine() -> None:
    events = [*there("a"), TraceEvent(1.0, "a", Kind.LOST), TraceEvent(2.0, "a", Kind.ARRIVES)]
    with pytest.raises(BiremeError, match="no machine is there"):
        churned(Trace(tuple(events), 3.0), 1.0)


@pytest.mark.slow
@pytest.mark.skipif(not TRY_ALL, reason="a run over three hosts takes a minute: make test-all")
def test_a_run_over_a_trace_has_every_sample_once_and_leaves_nothing() -> None:
    found = churned(quick_trace(), 4.0)
    assert found.is_whole
    assert set(found.statuses) == {0}
    assert not found.left_over
    assert found.rounds > 0
