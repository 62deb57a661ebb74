"""Shared weights on a clock."""

import pytest

from bireme.schedule.catalogue import generate
from bireme.schedule.gathering import gathered
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network, Path
from bireme.simulate.simulator import simulate


def test_a_gather_and_a_sum_of_parts_each_take_half_of_the_hops_of_a_sum() -> None:
    plain = generate("1f1b", num_stages=1, num_microbatches=1)
    costs = Costs.per_stage(1, forward_s=1.0, backward_s=2.0, weight_bytes=8.0)
    late = Network((), {}, {0: Path((), latency_s=0.6)})
    own, shared = (simulate(one, costs, late).makespan_s for one in (plain, gathered(plain, 4, 1)))
    assert own == pytest.approx(3.0 + 0.6)
    assert shared == pytest.approx(own + 2 * 0.3)
