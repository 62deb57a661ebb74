"""Emulated lanes: messages come through when fluid flowing in small steps would, whoever looks how often."""

import multiprocessing
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rehearsal.lanes import Channel, Lanes, SharedLanes
from bireme.cluster.inference import fair_rates
from bireme.simulate.network import Network, Traffic, Wire
from bireme.simulate.network import Path as Way
from tests.support.extent import examples


@st.composite
def paths_on_lanes(draw: st.DrawFn) -> tuple[list[float], list[list[int]]]:
    capacity = draw(st.lists(st.sampled_from([1.0, 2.0, 3.0, 7.0]), min_size=1, max_size=5))
    lanes = st.lists(st.integers(0, len(capacity) - 1), min_size=1, max_size=3, unique=True)
    return capacity, draw(st.lists(lanes, min_size=1, max_size=6))


@given(paths_on_lanes())
def test_rates_are_those_of_the_simulators_network(case: tuple[list[float], list[list[int]]]) -> None:
    capacity, paths = case
    traffic = Traffic(Network(tuple(Wire(str(n), rate) for n, rate in enumerate(capacity)), {}))
    for number, path in enumerate(paths):
        traffic.begin(number, Way(tuple(path)), 1.0, 0.0)
    expected = [traffic.flows[number].rate for number in range(len(paths))]
    assert fair_rates(paths, dict(enumerate(capacity))) == pytest.approx(expected)


def test_a_flow_that_crosses_nothing_is_held_up_by_nothing() -> None:
    assert fair_rates([[], [0]], {0: 5.0}) == [float("inf"), 5.0]


STEP_S = 1e-3


def in_small_steps(
    capacity: list[float], channels: list[list[int]], sent: list[tuple[int, float, float]]
) -> dict[int, float]:
    """When each of the messages (channel, bytes, moment) is through, by letting a little flow at a time."""
    left = {number: num_bytes for number, (_, num_bytes, _) in enumerate(sent)}
    through: dict[int, float] = {}
    now_s = 0.0
    while len(through) < len(sent):
        heads: dict[int, int] = {}
        for number, (channel, _, begin_s) in enumerate(sent):
            if number not in through and begin_s <= now_s + 1e-12:
                heads.setdefault(channel, number)
        paths = [channels[channel] for channel in heads]
        rates = fair_rates(paths, dict(enumerate(capacity)))
        now_s += STEP_S
        for number, rate in zip(heads.values(), rates, strict=True):
            left[number] -= rate * STEP_S
            if left[number] <= 1e-9:
                through[number] = now_s
    return through


@examples(60)
@given(
    paths_on_lanes(),
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([0.05, 0.1, 0.3]), st.integers(0, 300)),
        min_size=1,
        max_size=7,
    ),
    st.lists(st.integers(0, 2000), max_size=6),
)
def test_messages_come_through_when_small_steps_say_so(
    case: tuple[list[float], list[list[int]]],
    messages: list[tuple[int, float, int]],
    looks: list[int],
) -> None:
    """`looks` are moments in ms at which somebody looks, which changes nothing."""
    capacity, paths = case
    sent = sorted(((one % len(paths), b, ms / 1e3) for one, b, ms in messages), key=lambda one: one[2])
    lanes = Lanes(tuple(capacity), tuple(Channel(tuple(path), 0.0, 1) for path in paths))
    events = sorted([(begin_s, number) for number, (_, _, begin_s) in enumerate(sent)])
    moments = sorted(
        [*((begin_s, 1, number) for begin_s, number in events), *((ms / 1e3, 0, -1) for ms in looks)]
    )
    for moment_s, is_message, number in moments:
        if is_message:
            lanes.ready(sent[number][0], number, sent[number][1], moment_s)
        else:
            lanes.advance(moment_s)
    expected = in_small_steps(capacity, paths, sent)
    for number, (channel, _, _) in enumerate(sent):
        arrival_s = lanes.arrival_s(channel, number)
        assert arrival_s == pytest.approx(expected[number], abs=STEP_S * (len(sent) + 1))


def test_a_message_sets_out_when_both_ends_are_ready_and_is_late_by_the_latency() -> None:
    lanes = Lanes((10.0,), (Channel((0,), 0.5),))
    lanes.ready(0, "a", 20.0, 1.0)
    assert lanes.arrival_s(0, "a") is None
    lanes.ready(0, "a", 20.0, 3.0)
    assert lanes.arrival_s(0, "a") == pytest.approx(3.0 + 2.0 + 0.5)


def test_what_was_taken_is_forgotten() -> None:
    lanes = Lanes((10.0,), (Channel((0,), 0.0, 1, 2),))
    lanes.ready(0, "a", 20.0, 0.0)
    lanes.advance(5.0)
    lanes.take(0, "a")
    assert lanes.arrival_s(0, "a") == pytest.approx(2.0)
    lanes.take(0, "a")
    assert lanes.arrival_s(0, "a") is None


def _send(path: Path, place: int) -> None:
    lanes = SharedLanes(path, (1e6,), (Channel((0,), 0.0, 1), Channel((0,), 0.0, 1)))
    for number in range(20):
        lanes.ready(place, number, 1e3)
        lanes.wait(place, number)
    lanes.close()


@pytest.mark.slow
def test_processes_share_what_they_see(tmp_path: Path) -> None:
    """40 messages of a millisecond each over one lane take 40 ms at the least, however they mix."""
    path = tmp_path / "lanes"
    SharedLanes.make(path)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_send, args=(path, place)) for place in range(2)]
    own = SharedLanes(path, (1e6,), (Channel((0,), 0.0, 1), Channel((0,), 0.0, 1)))
    begin_s = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert time.monotonic() - begin_s >= 0.040
    with own:
        assert own.plain()[1:] == ([], {}, {}, {}, {})
    own.close()
