"""Shared weights on a clock."""

import math
from dataclasses import replace

import pytest

from bireme.cluster.device import EngineCost
from bireme.schedule.catalogue import generate
from bireme.schedule.gathering import gathered
from bireme.simulate.copies import TierLinks
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network, Path, Wire
from bireme.simulate.simulator import simulate


def test_a_gather_and_a_sum_of_parts_each_take_half_of_the_hops_of_a_sum() -> None:
    plain = generate("1f1b", num_stages=1, num_microbatches=1)
    costs = Costs.per_stage(1, forward_s=1.0, backward_s=2.0, weight_bytes=8.0)
    late = Network((), {}, {0: Path((), latency_s=0.6)})
    own, shared = (simulate(one, costs, late).makespan_s for one in (plain, gathered(plain, 4, 1)))
    assert own == pytest.approx(3.0 + 0.6)
    assert shared == pytest.approx(own + 2 * 0.3)


COPIES = EngineCost(reduce_s_per_byte=0.125, gather_s_per_byte=0.5, scatter_s_per_byte=0.25)
"""Of 8 bytes two replicas exchange 4: a gather takes 2 s, a sum of parts 1 s."""


@pytest.mark.parametrize("core_share", [0.0, 0.5, 1.0])
def test_work_beside_an_exchange_of_processes_loses_their_share_of_a_core(core_share: float) -> None:
    """The first gather and the last sum are waited for; one of each runs beside work."""
    plain = generate("1f1b", num_stages=2, num_microbatches=1, num_batches=1, stages_per_rank=2)
    costs = Costs.per_stage(2, forward_s=10.0, backward_s=20.0, weight_bytes=8.0, engine=COPIES)
    timeline = simulate(gathered(plain, 2, 2), costs, tier_links=TierLinks(core_share=core_share))
    assert timeline.makespan_s == pytest.approx(60.0 + (2.0 + 1.0) * (1.0 + core_share))


def test_work_beside_an_exchange_loses_nothing_to_the_network() -> None:
    """All of the time on a slow network was taken from work, although processes copy for a part of it."""
    plain = generate("1f1b", num_stages=2, num_microbatches=1, num_batches=1, stages_per_rank=2)
    network = Network((Wire("to the replicas", 1.0),), {}, {0: Path((0,))})
    costs = Costs.per_stage(2, forward_s=10.0, backward_s=20.0, weight_bytes=8.0, engine=COPIES)
    timeline = simulate(gathered(plain, 2, 2), costs, network, tier_links=TierLinks(core_share=1.0))
    waited_s, copied_s = 4.0 + 4.0, 2.0 + 1.0
    assert timeline.makespan_s == pytest.approx(60.0 + waited_s + copied_s)


@pytest.mark.parametrize(("bytes_per_s", "exchanged_s"), [(math.inf, 2.0), (4.0, 4.0)])
def test_what_replicas_exchange_takes_as_long_as_the_slower_of_network_and_processes(
    bytes_per_s: float, exchanged_s: float
) -> None:
    plain = generate("1f1b", num_stages=1, num_microbatches=1, num_batches=1)
    engine = replace(COPIES, gather_s_per_byte=0.125, scatter_s_per_byte=0.125)
    network = Network((Wire("to the replicas", bytes_per_s),), {}, {0: Path((0,))})
    costs = Costs.per_stage(1, forward_s=10.0, backward_s=20.0, weight_bytes=16.0, engine=engine)
    shared = simulate(gathered(plain, 2, 1), costs, network)
    assert shared.makespan_s == pytest.approx(30.0 + exchanged_s)
    summed = simulate(plain, replace(costs, reduce_bytes=(16.0,)), network)
    assert summed.makespan_s == pytest.approx(30.0 + exchanged_s)
