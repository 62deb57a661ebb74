"""Lines between the machines of a run: which is measured next, what counts, and how plans use them."""

from collections.abc import Sequence

import pytest

from bireme.cluster.cluster import MOST_BYTES_PER_S, Card, Link, Server
from bireme.cluster.device import Device
from bireme.machines.measured_lines import (
    LINES_VARIABLE,
    LineBetween,
    LineTable,
    MeasuredLine,
    lines_in_variable,
    variable_of,
)
from bireme.train.machines import cluster_of

LAN, WAN = MeasuredLine(1e8, 9e7, 4e-4), MeasuredLine(2e6, 1e6, 4e-2)
CPU = Device("a core", "cpu", 1 << 30)


def measured(table: LineTable, there: Sequence[str]) -> set[str]:
    """The lines that are measured until none is due."""
    found = set[str]()
    while pairs := [(key, other) for key in there if (other := table.next_of(key, there, 0.0))]:
        for one, other in pairs:  # which are all busy, and each in one measurement
            found.add("".join(sorted((one, other))))
            table.note(one, other, LAN)
        assert len({key for pair in pairs for key in pair}) == 2 * len(pairs)
    return found


def test_each_line_is_measured_once_after_each_arrival_and_three_times_in_all() -> None:
    table = LineTable()
    assert not table.is_new("a")
    table.note_arrival()
    assert measured(table, "ab") == {"ab"}
    assert not measured(table, "ab")
    table.note_arrival()
    assert table.is_new("abc")
    assert table.next_of("c", "abc", 0.0) == "a", "a line that was never measured comes first"
    assert table.next_of("c", "abc", 1.0) is None
    assert table.next_of("b", "abc", 1.0) is None
    table.note("c", "a", None)
    assert measured(table, "abc") == {"ab", "bc"}
    assert not table.is_new("abc")
    for due in ({"ab", "ac", "bc"}, {"ac", "bc"}, {"ac"}, set()):
        table.note_arrival()
        assert measured(table, "abc") == due
    assert [(one.first, one.second) for one in table.among("abc")] == [(0, 1), (0, 2), (1, 2)]


def test_a_measurement_that_is_never_reported_holds_up_no_other() -> None:
    table = LineTable()
    table.note_arrival()
    assert table.next_of("a", "ab", 0.0) == "b"
    assert table.next_of("b", "ab", 29.0) is None
    assert table.next_of("b", "ab", 31.0) == "a"


def test_of_many_machines_only_near_ones_measure() -> None:
    table, there = LineTable(), "abcdefghijkl"
    table.note_arrival()
    found = measured(table, there)
    assert {"ab", "al", "be", "il"} <= found
    assert not {"bf", "bl", "dl"} & found
    assert len(found) < 4 * len(there)


def test_the_best_of_the_last_measurements_counts_and_an_older_one_is_forgotten() -> None:
    table = LineTable()
    for rate in (9.0, 5.0, 7.1234, 6.0):
        table.note("b", "a", MeasuredLine(rate, 10 * rate, 1 / rate))
    (found,) = table.among("ab")
    assert (found.first, found.second) == (0, 1)
    assert found.line == MeasuredLine(71.2, 7.12, 0.14)
    assert table.among("ba")[0].line == found.line.turned
    assert table.among("ac") == ()


def test_plans_use_the_lines_between_all_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines share a fast network, and the third is elsewhere."""
    given = (LineBetween(0, 1, LAN), LineBetween(0, 2, WAN), LineBetween(1, 2, WAN))
    for name, value in variable_of(given).items():
        monkeypatch.setenv(name, value)
    assert lines_in_variable() == given
    monkeypatch.delenv(LINES_VARIABLE)
    assert lines_in_variable() == ()
    cluster, sentence = cluster_of([Server(name, (CPU,)) for name in "abc"], given)
    assert sentence == "The plan uses the lines between the machines as they were measured."
    ways = ((0, 1), (1, 0), (0, 2), (2, 1))
    assert [cluster.bandwidth(*way) for way in ways] == [1e8, 9e7, 2e6, 1e6]
    assert [cluster.latency(*way) for way in ways] == pytest.approx([2e-4, 2e-4, 2e-2, 2e-2])


def test_a_machine_without_measured_lines_and_cards_faster_than_a_processor() -> None:
    """A rated card stays if nothing slower is on the way, and a line as fast is no limit."""
    rated = Server("a", (CPU, CPU), cards=(Card("eth0", (0, 1), Link(1.25e9)),))
    fast = MeasuredLine(6e8, 4e8, 1e-3)
    cluster, sentence = cluster_of(
        [rated, Server("a", (CPU,)), Server("b", (CPU,))], [LineBetween(0, 1, fast)]
    )
    assert sentence.startswith("The links of 1 of 3 machines are unknown; the plan assumes 1 Gbit/s")
    assert [server.cards[0].name for server in cluster.servers] == ["eth0", "measured", "assumed"]
    assert cluster.routes[0].link.bytes_per_s == MOST_BYTES_PER_S
    slow, _ = cluster_of([rated, rated], [LineBetween(0, 1, MeasuredLine(1e8, 1e8, 1e-3))])
    assert {server.cards[0].link.bytes_per_s for server in slow.servers} == {1e8}
