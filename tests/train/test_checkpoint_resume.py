"""Training that goes on from a checkpoint on disk is training that never stopped, under any plan."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bireme.runtime.snapshot import Snapshot
from bireme.train.checkpoint.checkpoint import newest_good
from tests.runtime.test_snapshot import TAKEN_BEHIND, Seen, all_weights, train
from tests.support.checkpoints import META, ranks
from tests.support.engine_parity import DELAYED, FLUSH, Setting, plan_for
from tests.support.small_models import gpt, token_batches

pytestmark = pytest.mark.slow


def through_the_disk(folder: Path, seen: Sequence[Seen]) -> Snapshot:
    """What the ranks took, written by writers of their own and found again."""
    with ranks(folder, len(seen)) as run:
        for writer, one in zip(run.writers, seen, strict=True):
            assert one.snapshot is not None
            writer.save(one.snapshot, META)
        run.wait()
        assert run.saved() == [TAKEN_BEHIND]
    found = newest_good(folder)
    assert found is not None
    return found.snapshot()


@pytest.mark.few(3)
@pytest.mark.parametrize("schedule", [FLUSH[2], *DELAYED])
@pytest.mark.parametrize("width", [1, 2])
def test_the_same_plan_goes_on_to_the_last_bit(schedule: str, width: int, tmp_path: Path) -> None:
    model = gpt("layers=3,dropout=0.3")
    setting = Setting(plan_for(schedule, width=width), clip_norm=0.5, optimizer="adam")
    data = token_batches(8 * width, 9)
    whole = train(model, setting, data)
    rest = train(model, setting, data[TAKEN_BEHIND:], through_the_disk(tmp_path, whole))
    assert rest[0].losses == whole[0].losses[TAKEN_BEHIND:]
    expected, found = all_weights(whole), all_weights(rest)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("num_stages", [1, 4])
def test_another_number_of_stages_goes_on_within_rounding(num_stages: int, tmp_path: Path) -> None:
    model, data = gpt("layers=3"), token_batches(8, 9)
    whole = train(model, Setting(plan_for("1f1b", 2)), data)
    saved = through_the_disk(tmp_path, whole)
    rest = train(model, Setting(plan_for("1f1b", num_stages)), data[TAKEN_BEHIND:], saved)
    assert rest[0].losses == pytest.approx(whole[0].losses[TAKEN_BEHIND:], rel=1e-12)
