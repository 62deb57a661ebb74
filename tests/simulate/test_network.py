"""Links: who waits for whom on a wire, and how fair sharing divides it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import BiremeError
from bireme.schedule.catalogue import generate
from bireme.simulate.costs import Costs
from bireme.simulate.links import Links
from bireme.simulate.network import Network, Path, Traffic, Wire
from bireme.simulate.simulator import pairs_that_talk, simulate


def traffic(capacities: list[float], paths: list[tuple[int, ...]]) -> tuple[Traffic, dict[int, float]]:
    """All flows of 1000 bytes, begun at once; returns the traffic and each flow's rate."""
    wires = tuple(Wire(str(i), capacity) for i, capacity in enumerate(capacities))
    moving = Traffic(Network(wires, {}))
    for flow, path in enumerate(paths):
        moving.begin(flow, Path(path), 1000.0, 0.0)
    return moving, {number: flow.rate for number, flow in moving.flows.items()}


def test_two_messages_on_one_wire_take_twice_as_long_each() -> None:
    moving = Traffic(Network((Wire("card", 10.0),), {}))
    assert moving.begin(0, Path((0,)), 100.0, 0.0) == {0: 10.0}
    assert moving.begin(1, Path((0,)), 100.0, 4.0) == {0: 16.0, 1: 24.0}
    assert moving.end(0, 16.0) == {1: 20.0}


def test_a_message_held_up_on_one_wire_leaves_its_share_of_another_to_others() -> None:
    _, rates = traffic([10.0, 4.0], [(0, 1), (0,), (1,)])
    assert rates == {0: 2.0, 1: 8.0, 2: 2.0}


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=4).flatmap(
        lambda capacities: st.tuples(
            st.just(capacities),
            st.lists(
                st.sets(st.integers(0, len(capacities) - 1), min_size=1).map(lambda s: tuple(sorted(s))),
                min_size=1,
                max_size=7,
            ),
        )
    )
)
def test_sharing_is_max_min_fair(case: tuple[list[int], list[tuple[int, ...]]]) -> None:
    """Nobody could go faster without slowing down somebody no faster than himself."""
    capacities, paths = case
    _, rates = traffic([float(c) for c in capacities], paths)
    used = [sum(rates[f] for f, path in enumerate(paths) if wire in path) for wire in range(len(capacities))]
    for wire, capacity in enumerate(capacities):
        assert used[wire] <= capacity * (1 + 1e-9)
    for flow, path in enumerate(paths):
        assert any(
            used[wire] >= capacities[wire] * (1 - 1e-9)
            and all(rates[other] <= rates[flow] * (1 + 1e-9) for other, p in enumerate(paths) if wire in p)
            for wire in path
        )


def test_a_cable_that_carries_one_direction_at_a_time_is_shared_by_both() -> None:
    program = generate("2bw", num_stages=2, num_microbatches=4, num_batches=10)
    costs = Costs.per_stage(2, forward_s=1, backward_s=1, message_bytes=3)

    def batch_s(*, full_duplex: bool) -> float:
        return simulate(program, costs, Links(1.0, full_duplex=full_duplex).network(program)).steady_batch_s

    assert batch_s(full_duplex=False) > batch_s(full_duplex=True)
    bytes_limit_s = 2 * 4 * 3
    assert batch_s(full_duplex=False) >= bytes_limit_s


def test_ranks_of_one_server_share_its_card() -> None:
    """Interleaved stages cross between two servers on two pairs of ranks, which meet on the cards."""
    program = generate("interleaved", num_stages=8, num_microbatches=8, num_batches=4)
    costs = Costs.per_stage(8, forward_s=1, backward_s=1, message_bytes=1)
    apart = simulate(program, costs, Links(1.0).network(program))
    together = simulate(program, costs, Links(1.0, ranks_per_server=2).network(program))
    network = Links(1.0, ranks_per_server=2).network(program)
    assert network.is_shared()
    crossing = [t for t in together.transfers if t.source // 2 != t.destination // 2]
    longest = max(end - start for t in crossing for start, end in zip(t.start_s, t.end_s, strict=True))
    assert longest > 1.0
    assert together.makespan_s != apart.makespan_s


@pytest.mark.parametrize(("ranks_per_server", "trip_s"), [(None, 0.5), (2, 0.5), (8, 0.0)])
def test_ranks_agree_in_a_trip_between_servers(ranks_per_server: int | None, trip_s: float) -> None:
    program = generate("1f1b", num_stages=8, num_microbatches=8, num_batches=1)
    assert Links(1.0, 0.25, ranks_per_server=ranks_per_server).network(program).agree_s == trip_s


@pytest.mark.parametrize("ranks_per_server", [None, 1, 2, 4])
def test_no_wire_ever_carries_more_than_it_can(ranks_per_server: int | None) -> None:
    program = generate("zbv", num_stages=8, num_microbatches=8, num_batches=3)
    costs = Costs.per_stage(8, forward_s=1, backward_s=2, message_bytes=5)
    network = Links(4.0, full_duplex=False, ranks_per_server=ranks_per_server).network(program)
    timeline = simulate(program, costs, network)
    for wire, link in enumerate(network.wires):
        moved = sum(
            sum(transfers.num_bytes)
            for transfers in timeline.transfers
            if not transfers.is_sync and wire in network.paths[transfers.source, transfers.destination].wires
        )
        assert moved <= link.bytes_per_s * timeline.makespan_s * (1 + 1e-9)


def test_a_gradient_sync_meets_messages_on_the_card_it_shares() -> None:
    program = generate("2bw", num_stages=2, num_microbatches=4, num_batches=8)
    card = (Wire("card", 1.0),)
    paths = {pair: Path((0,)) for pair in pairs_that_talk(program)}
    network = Network(card, paths, sync_paths={0: Path((0,)), 1: Path((0,))})
    light = Costs.per_stage(2, forward_s=1, backward_s=1, message_bytes=0.5)
    heavy = Costs.per_stage(2, forward_s=1, backward_s=1, message_bytes=0.5, reduce_bytes=4)
    assert simulate(program, heavy, network).makespan_s > simulate(program, light, network).makespan_s


@pytest.mark.parametrize(("bytes_per_s", "ends_s"), [(1.0, 2 + 6 + 2), (4.0, 5 + 0.5)])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_part_of_a_sum_crosses_while_the_last_backward_makes_the_rest(
    bytes_per_s: float, ends_s: float, *, is_shared: bool
) -> None:
    program = generate("sequential", num_stages=1, num_microbatches=1)
    costs = Costs.per_stage(1, forward_s=1, backward_s=4, reduce_bytes=8)
    paths = {(0, 1): Path((0,))} if is_shared else {}
    network = Network((Wire("card", bytes_per_s),), paths, sync_paths={0: Path((0,))})
    early = replace(costs, early_share=(0.75,))
    assert simulate(program, early, network, agree=True).makespan_s == ends_s
    assert simulate(program, costs, network, agree=True).makespan_s == 5 + 8 / bytes_per_s
    split = generate("zb-h1", num_stages=1, num_microbatches=1)  # its gradients come all at once
    makespans = [simulate(split, one, network).makespan_s for one in (early, costs)]
    assert makespans[0] == makespans[1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"bytes_per_s": 0.0}, "link_bytes_per_s is 0.0; it must be 0.001 or more"),
        ({"bytes_per_s": math.nan}, "link_bytes_per_s is nan"),
        ({"latency_s": -1.0}, "link_latency_s is -1.0; it must be 0 to"),
        ({"ranks_per_server": 0}, "ranks_per_server is 0; a server has at least one rank"),
    ],
)
def test_links_that_cannot_be_are_refused(options: dict[str, float], sentence: str) -> None:
    with pytest.raises(BiremeError, match=sentence):
        Links(**options)  # type: ignore[arg-type]
