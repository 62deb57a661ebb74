"""Replicas that average weights through codecs: plain loops with the same codec get the same numbers."""

import pytest
import torch

from bireme.plan.plan import Plan
from bireme.runtime.exchange.averages import DilocoSettings
from tests.runtime.test_averaging import assert_as_expected, patient
from tests.runtime.test_coded_sums import WIDTH, layers, tolerance_of
from tests.support.averaging_oracle import expected_of_groups, expected_of_outer_steps
from tests.support.averaging_threads import AveragingReplicas
from tests.support.engine_parity import Setting, plan_for
from tests.support.small_models import Batch, Model, real_batches, token_batches
from tests.support.tiny_text import tiny_text

__all__ = ["patient"]

BATCH = 16
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle knows no bundles."""
    monkeypatch.setattr("bireme.sync.coded_messages.MOST_BUNDLED", 0)


def run_of(
    codec: str,
    schedule: str = "1f1b",
    *,
    num: int = 2,
    marks: tuple[int, ...] = (7,),
    diloco: DilocoSettings | None = None,
    model: Model | None = None,
    setting: Setting | None = None,
    data: Batch | None = None,
    **more: object,
) -> AveragingReplicas:
    plan = Plan((1,), 4, schedule, updates_early=False)
    setting = setting or Setting(plan, optimizer="sgd")
    data = data or real_batches(BATCH * marks[-1], 1, WIDTH)[0]
    model = model or layers()
    return AveragingReplicas(
        model,
        setting,
        num,
        data,
        marks,
        BATCH,
        diloco=diloco,
        codec=codec,
        **more,  # type: ignore[arg-type]
    )


def assert_alike(run: AveragingReplicas) -> None:
    """All replicas that are there at the end, and all ranks that hold a weight, have the same of it."""
    held: dict[str, torch.Tensor] = {}
    for told in run.told.values():
        for name, tensor in told.weights[-1].items() if told.weights else ():
            assert torch.equal(tensor, held.setdefault(name, tensor)), name


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("schedule", "codec"),
    [
        ("1f1b", "int4"),
        ("2bw", "int8"),
        ("1f1b", "threshold:0.05:3"),
        ("2bw", "threshold:0.05:3"),
        ("1f1b", "lowrank:2:1"),
    ],
)
def test_diloco_through_a_codec_is_plain_loops_with_the_same_codec(schedule: str, codec: str) -> None:
    """The last two batches are after the last round, so a mean of all ends the window."""
    settings = DilocoSettings(2)
    run = run_of(codec, schedule, marks=(7,), diloco=settings, lag=1, in_step=True)
    run.run()

    assert_as_expected(run, expected_of_outer_steps(run, settings), tolerance=tolerance_of(codec))
    dense = run_of("none", schedule, marks=(7,), diloco=settings, lag=1, in_step=True)
    dense.run()
    for rank, told in run.told.items():
        assert told.sent_bytes < dense.told[rank].sent_bytes


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_groups_through_a_codec_are_plain_loops_with_the_same_codec(schedule: str) -> None:
    run = run_of("threshold:0.05:3", schedule, marks=(3, 6), in_step=True)
    run.run()

    assert {len(group) for told in run.told.values() for group in told.groups.values()} == {2}
    assert_as_expected(run, expected_of_groups(run), tolerance=1e-12)


@pytest.mark.few(6)
@pytest.mark.parametrize("codec", ["int4", "lowrank:2:0", "threshold:0.1:3"])
@pytest.mark.parametrize("num", [2, 3])
def test_groups_through_a_codec_meet_at_the_same_weights(codec: str, num: int) -> None:
    run = run_of(codec, num=num, marks=(4, 8))
    run.run()

    assert_alike(run)


@pytest.mark.few(8)
@pytest.mark.parametrize("codec", ["int4", "lowrank:2:0", "threshold:0.1:3"])
@pytest.mark.parametrize(("schedule", "mode"), [("1f1b", "diloco"), ("zbv", "diloco"), ("1f1b", "groups")])
def test_tied_weights_stay_the_same_through_a_codec(codec: str, schedule: str, mode: str) -> None:
    settings = DilocoSettings(2, fragments=3) if mode == "diloco" else None
    run = run_of(
        codec,
        num=3,
        marks=(6,),
        diloco=settings,
        model=tiny_text(tied=True),
        setting=Setting(
            plan_for(schedule, 4 if schedule == "zbv" else 2, updates_early=False), optimizer="sgd"
        ),
        data=token_batches(BATCH * 6, 1)[0],
        of_replicas=mode == "groups",
    )
    run.run()

    assert_alike(run)
