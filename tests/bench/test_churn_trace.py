"""Traces of machines that come and go: what is written is read, what is wrong is named, and what is generated
is a trace.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.churning.trace import Kind, Market, Trace, TraceEvent, generated, read_trace, write_trace
from bireme.errors import BiremeError
from tests.support.extent import examples

MARKETS = st.builds(
    Market,
    machines=st.integers(1, 12),
    end_s=st.floats(1, 500),
    lifetime_s=st.floats(1, 200),
    away_s=st.floats(1, 100),
    notice=st.floats(0, 1),
    zones=st.integers(1, 3),
    burst_every_s=st.just(0.0) | st.floats(5, 100),
    burst_share=st.floats(0.1, 1),
)


def read(folder: Path, text: str, **more: float) -> Trace:
    (folder / "trace.csv").write_text(text)
    return read_trace(folder / "trace.csv", **more)


@examples(200, 40)
@given(market=MARKETS, seed=st.integers(0, 99))
def test_a_generated_trace_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, market: Market, seed: int
) -> None:
    made, path = generated(market, seed), tmp_path_factory.mktemp("trace") / "trace.csv"
    write_trace(made, path)
    assert read_trace(path) == made == generated(market, seed)
    assert made.fewest >= 1
    assert 0 < made.machine_s <= market.machines * market.end_s * (1 + 1e-9)
    assert made.scaled(0.5).machine_s == pytest.approx(made.machine_s / 2)


@examples(200, 40)
@given(market=MARKETS, least=st.integers(1, 12), seed=st.integers(0, 99))
def test_no_departure_leaves_too_few_machines(market: Market, least: int, seed: int) -> None:
    market = Market(market.machines, 200.0, 20.0, 20.0, 0.5, 2, 30.0, 0.9, min(least, market.machines))
    assert generated(market, seed).fewest >= market.least


def test_times_between_departures_are_as_long_as_asked() -> None:
    market = Market(100, 10_000.0, lifetime_s=100.0, away_s=25.0, notice=0.25)
    made = generated(market, 1)
    assert made.machine_s / (100 * 10_000.0) == pytest.approx(100 / 125, rel=0.05)
    departures = made.count(Kind.LOST, Kind.LEAVES)
    assert made.machine_s / departures == pytest.approx(100.0, rel=0.05)
    assert made.count(Kind.LEAVES) / departures == pytest.approx(0.25, abs=0.03)


def test_a_run_that_all_machines_begin_loses_at_the_start_those_that_arrive_later() -> None:
    arrives, lost = Kind.ARRIVES, Kind.LOST
    late = TraceEvent(3.0, "b", arrives)
    made = Trace((TraceEvent(0.0, "a", arrives), late, TraceEvent(5.0, "b", lost)), 9.0)
    assert made.from_all_there() == [TraceEvent(0.0, "b", Kind.LEAVES), *made.events[1:]]


def test_a_burst_takes_machines_of_one_zone_together() -> None:
    made = generated(Market(30, 1000.0, 1e9, 50.0, zones=3, burst_every_s=100.0, burst_share=1.0), 3)
    lost = [one for one in made.events if one.kind is Kind.LOST]
    assert lost
    for time_s in {one.time_s for one in lost}:
        zones = {int(one.machine[1:]) % 3 for one in lost if one.time_s == time_s}
        assert len(zones) == 1


@pytest.mark.parametrize(
    "text",
    [
        "time_s,machine,event\n0,a,arrives\n5,a,lost\n9,,end\n",
        "\ufeffevent,Node,Time\nadd,a,0\nremove,a,5\nend,,9\n",
        "0,a,join\n5,a,Preempted\n9,,end\n",
        "0,add,a\n5,remove,a\n9,end,\n",
        "# of a cloud\n\ntime_ms,instance,event\n0,a,up\n5000,a,down\n9000,,end\n",
        "time_s,machine,event\n5,a,lost\n9,,end\n",
        '[0, "add", {"nodes": ["a"]}]\n[1000, "no-op", {"nodes": []}]\n[5000, "remove", {"nodes": ["a"]}]\n'
        '[9000, "end", {"nodes": [""]}]\n',
    ],
    ids=["own", "other order", "no header", "event first", "milliseconds", "there from the start", "JSON"],
)
def test_traces_of_others_are_read(tmp_path: Path, text: str) -> None:
    events = (TraceEvent(0.0, "a", Kind.ARRIVES), TraceEvent(5.0, "a", Kind.LOST))
    assert read(tmp_path, text) == Trace(events, 9.0)


def test_counts_of_machines_are_a_trace(tmp_path: Path) -> None:
    made = read(tmp_path, "0,2\n4000,1\n6000,3\n10000,3\n", unit_s=1e-3)
    assert made.machine_s == pytest.approx(2 * 4 + 1 * 2 + 3 * 4)
    assert [one.machine for one in made.events if one.kind is Kind.LOST] == ["machine-0"]
    assert made.machines == ("machine-0", "machine-1", "machine-2", "machine-3")
    gaps = '{"metadata": {"gap_seconds": 2000}, "data": [2, 2, 1, 3, 3, 3]}'
    assert read(tmp_path, gaps, unit_s=1e-3) == made


def test_a_new_machine_takes_the_place_of_one_that_is_gone(tmp_path: Path) -> None:
    made = read(tmp_path, "0,2\n4,1\n6,3\n7,0\n8,3\n10,3\n").in_places()
    assert made.machines == ("machine-0", "machine-1", "machine-3")
    again = read(tmp_path, "0,a,up\n0,b,up\n1,a,lost\n2,b,lost\n3,b,up\n4,c,up\n5,b,lost\n6,c,lost\n")
    assert [one.machine for one in again.in_places().events] == [*"abab", *"baba"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no line"),
        ("when,who,what\n0,a,arrives\n", "Line 1 .* names the columns when, who, what"),
        ("0,a\n", "Line 1 .* is `0,a`"),
        ("0,a,arrives\n1,a,explodes\n", "Line 2 .* has the event `explodes`"),
        ("0,a,arrives\n1,a,arrives\n", "Line 2 .* a arrives, and is there already"),
        ("0,a,arrives\n1,a,lost\n2,a,lost\n", "Line 3 .* a lost, and is not there"),
        ("5,a,arrives\n1,a,lost\n", "Line 2 .* before the line above"),
        ("0,a,arrives\nnan,a,lost\n", "Line 2 .* has the time `nan`"),
        ("0,a,arrives\n-1,a,lost\n", "Line 2 .* has the time `-1`"),
        ("0,a,arrives\n1,a\n", "Line 2 .* has 2 fields instead of 3"),
        ("0,,arrives\n", "Line 1 .* names no machine"),
        ("0,a,arrives\n1,,end\n2,a,lost\n", "Line 2 .* is not its last line"),
        ("time_s,count\n0,many\n", "Line 2 .* has `many` machines"),
        ("0,a,arrives\n", "no machine is ever there"),
        (f"0,{'a' * 200_000},arrives\n", "cannot be read: field larger than field limit"),
        ('{"data": [1, 2]}', "cannot be read: 'metadata'"),
        ('[0, "add"]', "cannot be read: not enough values"),
    ],
)
def test_what_is_wrong_in_a_trace_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(BiremeError, match=sentence):
        read(tmp_path, text)


def test_a_trace_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BiremeError, match=r"cannot be read.*Name a CSV file"):
        read_trace(tmp_path / "none.csv")
