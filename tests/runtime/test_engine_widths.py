"""Stages of unequal width compute what one process does: sums over the ranks of a stage, once each batch."""

import pytest

from bireme.plan.plan import Plan
from tests.support.engine_parity import Setting, assert_equal, oracle, train_on_threads
from tests.support.small_models import gpt, token_batches

ROUNDING = 1e-12


def wide(schedule: str, **more: object) -> Plan:
    asked = {"stage_widths": (2, 1, 3), "stage_shares": ((4, 2), (6,), (2, 3, 1))} | more
    return Plan((3, 5), 6, schedule, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "2bw"])
@pytest.mark.parametrize("rendezvous", [False, True])
def test_every_schedule_computes_what_one_process_does(schedule: str, *, rendezvous: bool) -> None:
    model = gpt("layers=3,tied=false")
    setting = Setting(wide(schedule), clip_norm=0.5, windows=(3, 2))
    data = token_batches(13, 5)
    found = train_on_threads(model, setting, data, rendezvous=rendezvous)
    assert_equal(found, oracle(model, setting, data), tolerance=ROUNDING)
