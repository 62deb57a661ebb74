"""Sites of several replicas: inside a site they sum gradients and may share optimizers or weights, and sites
average weights. To the last bit what one process makes of each site, with the same averages between.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from bireme.runtime.exchange.averages import DilocoSettings
from bireme.runtime.exchange.rounds import Buffers, RoundSum
from bireme.sync.coordinator.messages import RankId
from tests.runtime.test_averaging import BATCH, MARKS, assert_as_expected, data_for
from tests.runtime.test_averaging import patient as patient
from tests.support.averaging_oracle import expected_of_groups, expected_of_outer_steps
from tests.support.averaging_threads import AveragingReplicas
from tests.support.engine_parity import Setting
from tests.support.regression import regression, regression_plan, tied_regression

pytestmark = pytest.mark.slow


def setting_of(schedule: str, shard: str, optimizer: str = "adamw") -> Setting:
    """Sites of two replicas of two stages."""
    plan = regression_plan(schedule, 2, width=2, updates_early=False)
    return Setting(plan, optimizer, shard=shard)


@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("schedule", "shard"),
    [(schedule, shard) for schedule in ("1f1b", "2bw") for shard in ("none", "optimizer", "weights")]
    + [("2bw-fresh", "none"), ("2bw-fresh", "optimizer")],
)
def test_outer_steps_between_sites_are_those_of_plain_loops_to_the_last_bit(
    schedule: str, shard: str
) -> None:
    settings = DilocoSettings(2)
    setting = setting_of(schedule, shard)
    run = AveragingReplicas(
        regression(), setting, 2, data_for(MARKS[-1]), MARKS, BATCH, diloco=settings, lag=1, in_step=True
    )
    run.run()

    assert_as_expected(run, expected_of_outer_steps(run, settings))
    assert_parts_are_sent(run, shard)


def assert_parts_are_sent(run: AveragingReplicas, shard: str) -> None:
    """Between sites each rank sends its part of the weights in each round."""
    weights = {rank: sum(one.nbytes for one in told.weights[-1].values()) for rank, told in run.told.items()}
    for site in range(2):
        of_site = {rank: told for rank, told in run.told.items() if rank.replica == site}
        for stage in range(2):
            own = [told.averaged_bytes for rank, told in of_site.items() if rank.stage % 2 == stage]
            num_rounds = sum(own) / weights[RankId(site, 0, stage)]
            assert num_rounds == int(num_rounds) > 0
            assert max(own) < 0.9 * sum(own), shard


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("schedule", "shard"), [("1f1b", "none"), ("2bw", "optimizer"), ("1f1b", "weights")])
def test_groups_of_sites_are_plain_loops_with_the_same_averages(schedule: str, shard: str) -> None:
    run = AveragingReplicas(
        regression(),
        setting_of(schedule, shard),
        2,
        data_for(5),
        (5,),
        BATCH,
        averages_optimizer=shard != "weights",
        in_step=True,
        of_replicas=True,
    )
    run.run()

    assert {len(group) for told in run.told.values() for group in told.groups.values()} == {2}
    expected = expected_of_groups(run)
    run.averages_optimizer = False  # its state is in pieces
    assert_as_expected(run, expected)


@pytest.mark.parametrize("shard", ["none", "optimizer", "weights"])
def test_sites_keep_tied_weights_the_same_on_all_ranks_with_muon_and_uneven_fragments(shard: str) -> None:
    run = AveragingReplicas(
        tied_regression(),
        setting_of("2bw", shard, "muon"),
        2,
        data_for(MARKS[-1]),
        MARKS,
        BATCH,
        diloco=DilocoSettings(2, fragments=2),
        lag=1,
        in_step=True,
    )
    run.run()

    for window in range(len(MARKS)):
        held: dict[str, Tensor] = {}
        for rank, told in run.told.items():
            for name, tensor in told.weights[window].items():
                assert torch.equal(tensor, held.setdefault(name, tensor)), f"{name} of {rank}"


def test_ranks_keep_means_of_rounds_and_windows_of_their_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As plans count them; beside these a rank keeps the start, the momentum and a drift."""
    sizes, make = list[int](), Buffers.take

    def noted(buffers: Buffers, like: Sequence[Tensor]) -> RoundSum:
        is_new = not buffers.free
        result = make(buffers, like)
        sizes.append(result.num_bytes if is_new else 0)
        return result

    monkeypatch.setattr(Buffers, "take", noted)
    run = AveragingReplicas(
        regression(),
        setting_of("1f1b", "none"),
        2,
        data_for(MARKS[-1]),
        MARKS,
        BATCH,
        diloco=DilocoSettings(2, fragments=2),
        lag=1,
        in_step=True,
    )
    run.run()
    of_sites: dict[tuple[int, str], int] = {}
    for rank, told in run.told.items():
        of_sites |= {(rank.replica, name): one.nbytes for name, one in told.weights[-1].items()}
    assert sum(sizes) == 2 * sum(of_sites.values())
