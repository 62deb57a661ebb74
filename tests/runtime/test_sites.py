"""Sites of several replicas: inside a site they sum gradients and may share optimizers or weights, and between
sites they average weights. To the last bit what one process makes of each site, with the same averages between.
"""

from dataclasses import replace

import pytest

from bireme.plan.plan import Plan
from bireme.runtime.averaging.diloco import DilocoSettings
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

    assert_as_expected(run, expected_of_outer_steps(run, settings), tolerance=1e-12)
